"""Pickles as opcodes: what Python's own pickler writes is read, and what could harm is refused."""

from __future__ import annotations

import logging.handlers
import os
import pickle
import subprocess
from typing import Any

import numpy as np
import pytest
from fuzz.pickles import fuzz_pickles
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from plain_data import NUMBERS, same

from ppstream.core.errors import ProtocolError
from ppstream.wire import pickle_opcodes
from ppstream.wire.pickle_opcodes import Instance, decode

PROTOCOLS = list(pickle_opcodes.PROTOCOLS)
MODULE = __name__

shapes = arrays.array_shapes(min_dims=0, min_side=1, max_dims=3, max_side=4)
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.text(max_size=20),
    st.binary(min_size=1, max_size=20),
    NUMBERS.flatmap(lambda dtype: arrays.arrays(dtype, shapes)),
    NUMBERS.flatmap(lambda dtype: arrays.arrays(dtype, shapes)).map(np.asfortranarray),
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=5), inner)
    ),
    max_leaves=8,
)


class Robot:
    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


class Calls:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@given(values, st.sampled_from(PROTOCOLS))
def test_plain_data_is_read_as_pythons_own_pickler_wrote_it(value: Any, protocol: int) -> None:
    assert same(value, decode(pickle.dumps(value, protocol), ()))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_arrays_keep_dtype_order_of_bytes_and_order_of_axes(protocol: int) -> None:
    given_values = [
        np.arange(6, dtype=">f8").reshape(2, 3),
        np.asfortranarray(np.arange(24, dtype=np.int16).reshape(2, 3, 4)),
        np.arange(24, dtype=np.uint8).reshape(2, 3, 4)[:, ::-1],
        np.float32(0.1),
        np.zeros((2, 2), bool),
    ]
    assert same(given_values, decode(pickle.dumps(given_values, protocol), ()))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_object_of_a_named_class_is_its_name_and_fields(protocol: int) -> None:
    frame = np.zeros((2, 2), np.uint8)
    sent = pickle.dumps(Robot(step=3, frames=[frame, frame]), protocol)
    found = decode(sent, {f"{MODULE}.Robot"})
    assert isinstance(found, Instance)
    assert found.name == f"{MODULE}.Robot"
    assert same(found.fields, {"step": 3, "frames": [frame, frame]})
    with pytest.raises(ProtocolError, match="Robot' is not taken"):
        decode(sent, ())


def test_a_frame_of_a_camera_is_not_copied_and_cannot_be_written() -> None:
    frame = np.zeros((480, 640, 3), np.uint8)
    found = decode(pickle.dumps({"front": frame}, 4), ())["front"]
    assert not found.flags.writeable
    assert not found.flags.owndata


def test_names_of_numpy_before_version_2_are_known() -> None:
    sent = pickle.dumps(np.arange(3.0), 2).replace(b"numpy._core", b"numpy.core")
    assert decode(sent, ()).tolist() == [0, 1, 2]


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    ("attack", "named"),
    [
        (Calls(os.system, "touch hacked"), "posix.system"),
        (Calls(subprocess.Popen, ["true"]), ".Popen"),
        (Calls(eval, "1"), ".eval"),
        (Calls(getattr, "", "join"), ".getattr"),
        (Calls(logging.handlers.SocketHandler, "127.0.0.1", 1), "logging.handlers.SocketHandler"),
        ([Robot()], f"{MODULE}.Robot"),
        (np.load, "numpy.load"),
        (np.zeros(2, object), ""),
    ],
)
def test_what_runs_code_elsewhere_is_refused_by_name(
    attack: Any, named: str, protocol: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ProtocolError) as caught:
        decode(pickle.dumps(attack, protocol), ())
    if named and protocol >= PROTOCOLS[0]:
        assert "the global" in str(caught.value)
        assert named in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_the_name_of_a_global_cannot_break_a_line_of_a_log() -> None:
    name = "a\nppstream: all is well" + "x" * 5000
    text = b"X" + len(name).to_bytes(4, "little") + name.encode()
    with pytest.raises(ProtocolError, match="the global") as caught:
        decode(b"\x80\x04" + text + text + b"\x93.", ())
    assert len(str(caught.value)) < 200
    assert "\n" not in str(caught.value)


ARRAY = b"cnumpy._core.numeric\n_frombuffer\n"
DTYPE = b"cnumpy\ndtype\n"
F8 = DTYPE + b"X\x02\0\0\0f8\x89\x88\x87R"
DATA = b"C\x08" + bytes(8)


def filled(
    data: bytes = DATA, dtype: bytes = F8, shape: bytes = b"K\x01\x85", order: bytes = b"C"
) -> bytes:
    return b"\x80\x04" + ARRAY + b"(" + data + dtype + shape + b"X\x01\0\0\0" + order + b"tR."


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"", "it ends too early"),
        (b"\x80\x04", "it ends too early"),
        (b"\x80\x04N", "it ends too early"),
        (b"\x80\x09N.", "protocol 9"),
        (b"\x80\x04.", "exactly one value"),
        (b"\x80\x04NN.", "exactly one value"),
        (b"\x80\x04N.N", "exactly one value"),
        (b"\x80\x04N(.", "exactly one value"),
        (b"\x80\x04a.", "not a pickle"),
        (b"\x80\x04Ne.", "needs a mark"),
        (b"\x80\x04NNa.", "not a list"),
        (b"\x80\x04}NNs.", "keys that are not text"),
        (b"\x80\x04}(Nu.", "keys that are not text"),
        (b"\x80\x04h\x05.", "no value is stored under 5"),
        (b"\x80\x04\x8f.", "opcode 0x8f at byte 2"),
        (b"\x80\x04Vtext\n.", "opcode 0x56"),
        (b"\x80\x04\x82\x01.", "opcode 0x82"),
        (b"\x80\x04Qid\n.", "opcode 0x51"),
        (b"\x80\x05\x97.", "opcode 0x97"),
        (b"\x80\x04\x8a\x09" + bytes(9) + b".", "an integer of 9 bytes"),
        (b"\x80\x04X\xff\xff\xff\xff.", "it ends too early"),
        (b"\x80\x04\x8c\x01\xff.", "utf-8"),
        (b"\x80\x04X" + (70_000).to_bytes(4, "little") + b"\xc4\x80" * 35_000 + b".", "a text of"),
        (b"\x80\x04NN\x93.", "not text"),
        (b"\x80\x04cbad name\n.", "not a line of text"),
        (b"\x80\x04cnumpy\ndtype\n.", "in place of data"),
        (b"\x80\x04" + F8 + b".", "in place of data"),
        (b"\x80\x04" + DTYPE + b"X\x02\0\0\0O8\x89\x88\x87R.", "dtype 'O8'"),
        (b"\x80\x04" + DTYPE + b"X\x02\0\0\0V8\x89\x88\x87R.", "dtype 'V8'"),
        (b"\x80\x04" + DTYPE + b"N\x89\x88\x87R.", "dtype's name is not text"),
        (b"\x80\x04" + DTYPE + b"NR.", "not a function"),
        (b"\x80\x04" + DTYPE + b")R.", "not a pickle"),
        (b"\x80\x04" + F8 + b"(K\x03X\x01\0\0\0<N)Ntb.", "fields or an inner shape"),
        (b"\x80\x04" + F8 + b"(K\x03X\x01\0\0\0!NNNtb.", "byte order"),
        (b"\x80\x04" + F8 + b")b.", "five values"),
        (b"\x80\x04N)R.", "not a function"),
        (b"\x80\x04N)\x81.", "not a class"),
        (b"\x80\x04N}b.", "a state for an object that has none"),
        (filled(shape=b"K\x02\x85"), "has 8 bytes, want 16"),
        (filled(shape=b"N"), "shape"),
        (filled(shape=b"J\xff\xff\xff\xff\x85"), "integers of 0 or more"),
        (filled(shape=b"\x88\x85"), "integers of 0 or more"),
        (filled(shape=b"(" + b"K\x01" * 9 + b"t"), "up to 8"),
        (filled(data=b"N"), "needs bytes"),
        (filled(dtype=b"N"), "and a dtype"),
        (filled(order=b"A"), "order"),
    ],
)
def test_hostile_pickles_are_refused_with_the_reason(sent: bytes, why: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        decode(sent, ())
    assert why in str(caught.value)


def test_a_list_of_itself_and_one_that_doubles_fifteen_times_are_refused() -> None:
    with pytest.raises(ProtocolError, match="nested deeper than 16"):
        decode(b"\x80\x02]q\0h\0a.", ())
    doubled: Any = None
    for _ in range(15):
        doubled = [doubled, doubled]
    with pytest.raises(ProtocolError, match="more than 16384 items"):
        decode(pickle.dumps(doubled, 4), ())


def test_a_pickle_at_each_bound_is_read_and_one_beyond_is_not() -> None:
    most = pickle_opcodes.ITEMS_MAX - 1
    assert len(decode(pickle.dumps([None] * most, 4), ())) == most
    with pytest.raises(ProtocolError, match="items"):
        decode(pickle.dumps([None] * (most + 1), 4), ())
    count = pickle_opcodes.OPCODES_MAX
    with pytest.raises(ProtocolError, match="opcodes"):
        decode(b"\x80\x04" + b"N" * count + b".", ())


def test_bytes_of_one_text_are_not_made_again_and_again() -> None:
    text = b"X" + (1000).to_bytes(4, "little") + b"x" * 1000 + b"q\0"
    again = b"c_codecs\nencode\nh\0X\x06\0\0\0latin1\x86R"
    assert len(decode(b"\x80\x02(" + text + again + b"t.", ())[1]) == 1000
    with pytest.raises(ProtocolError, match="repeatedly"):
        decode(b"\x80\x02(" + text + again * 100 + b"t.", ())


def test_a_thousand_mutated_pickles_cause_no_import_call_or_hang() -> None:
    counts = fuzz_pickles(1000, seed=0)  # raises when one does
    assert counts["sent"] == 1000
    assert counts["read"] > 100
    assert counts["refused"] > 300
    assert counts["global"] > 15
