from __future__ import annotations

import io
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from plain_data import NUMBERS_AND_TEXTS, nested, same

from ppstream.core.errors import ProtocolError
from ppstream.wire.foreign_msgpack import ITEMS_MAX
from ppstream.wire.groot import decode, decode_reply, encode, modality_config

BLANKS = 128  # an .npy's head ends at a multiple of 64 bytes


def npy(head: bytes, data: bytes) -> bytes:
    """The map of an array as it travels; ``head`` is written as NumPy does."""
    start = b"\x93NUMPY\x01\x00\x76\x00" + head
    file = start.ljust(BLANKS - 1) + b"\n" + data
    return b"\x82\xb1__ndarray_class__\xc3\xa6as_npy\xc4" + bytes([len(file)]) + file


#: As msgpack 1.2.3 wrote them with the encoder of strands-robots 0.3.8.
GOLDEN: list[tuple[Any, bytes]] = [
    (
        {
            "endpoint": "get_action",
            "data": {
                "state.arm": np.arange(2, dtype=np.float64).reshape(1, 2),
                "video.cam": np.arange(12, dtype=np.uint8).reshape(1, 2, 2, 3),
                "annotation.human.task_description": ["pick"],
            },
        },
        b"\x82\xa8endpoint\xaaget_action\xa4data\x83\xa9state.arm"
        + npy(
            b"{'descr': '<f8', 'fortran_order': False, 'shape': (1, 2), }",
            bytes(14) + b"\xf0\x3f",
        )
        + b"\xa9video.cam"
        + npy(
            b"{'descr': '|u1', 'fortran_order': False, 'shape': (1, 2, 2, 3), }",
            bytes(range(12)),
        )
        + b"\xd9\x21annotation.human.task_description\x91\xa4pick",
    ),
    (
        {
            "endpoint": "get_action",
            "data": {
                "observation": {
                    "state": {"arm": np.full((1, 1, 2), 0.5, np.float32)},
                    "language": {"task": [["pick"]]},
                },
                "options": None,
            },
            "api_token": "secret",
        },
        b"\x83\xa8endpoint\xaaget_action\xa4data\x82\xabobservation\x82\xa5state\x81\xa3arm"
        + npy(
            b"{'descr': '<f4', 'fortran_order': False, 'shape': (1, 1, 2), }",
            b"\x00\x00\x00\x3f" * 2,
        )
        + b"\xa8language\x81\xa4task\x91\x91\xa4pick\xa7options\xc0\xa9api_token\xa6secret",
    ),
    (
        [
            {"arm": np.asfortranarray(np.arange(6, dtype=">f4").reshape(2, 3))},
            {"infer_ms": 1.5},
        ],
        b"\x92\x81\xa3arm"
        + npy(
            b"{'descr': '>f4', 'fortran_order': True, 'shape': (2, 3), }",
            bytes.fromhex("00000000404000003f800000408000004000000040a00000"),
        )
        + b"\x81\xa8infer_ms\xcb\x3f\xf8\x00\x00\x00\x00\x00\x00",
    ),
]

shapes = arrays.array_shapes(min_dims=0, min_side=0, max_dims=5, max_side=3)
every_array = NUMBERS_AND_TEXTS.flatmap(lambda dtype: arrays.arrays(dtype, shapes))
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False),
    st.text(max_size=20),
    st.binary(max_size=20),
    every_array,
    arrays.arrays(np.float32, shapes).map(np.asfortranarray),
)
values = nested(leaves)


def array(file: Any, **more: Any) -> bytes:
    return msgspec.msgpack.encode({"a": {"__ndarray_class__": True, "as_npy": file, **more}})


def file(head: str, data: bytes = b"", version: int = 1) -> bytes:
    width = 2 if version == 1 else 4
    written = head.encode()
    start = b"\x93NUMPY" + bytes([version, 0]) + len(written).to_bytes(width, "little")
    return start + written + data


def head(descr: str = "<f4", shape: str = "(2,)", order: str = "False") -> str:
    return f"{{'descr': '{descr}', 'fortran_order': {order}, 'shape': {shape}, }}\n"


@pytest.mark.parametrize(("message", "wanted"), GOLDEN)
def test_bytes_are_those_of_the_client_and_read_back(message: Any, wanted: bytes) -> None:
    assert encode(message) == wanted
    assert same(decode_reply(wanted), message)


def test_numbers_of_numpy_are_sent_as_plain_ones() -> None:
    given_ = {"a": np.float64(1.5), "b": np.float32(0.5), "c": np.int64(3), "d": np.bool_(True)}
    assert same(decode(encode(given_)), {"a": 1.5, "b": 0.5, "c": 3, "d": True})


@settings(max_examples=50)  # costly to draw
@given(st.dictionaries(st.text(max_size=9), values, max_size=4))
def test_what_is_encoded_is_read_back_in_dtype_shape_and_bytes(message: dict[str, Any]) -> None:
    assert same(message, decode(encode(message)))


@given(
    every_array,
    st.sampled_from([1, 2, 3]),
)
def test_an_npy_of_any_version_is_read_as_numpy_reads_it(given_: Any, version: int) -> None:
    out = io.BytesIO()
    np.lib.format.write_array(out, given_, (version, 0), allow_pickle=False)
    wanted = np.load(io.BytesIO(out.getvalue()), allow_pickle=False)
    assert same(decode(array(out.getvalue()))["a"], wanted)


@given(st.binary(max_size=200))
def test_random_bytes_are_refused_or_read_and_nothing_else(frame: bytes) -> None:
    with suppress(ProtocolError):
        assert isinstance(decode(frame), dict)


@given(st.sampled_from(GOLDEN), st.data())
def test_damaged_messages_are_refused_or_read(golden: tuple[Any, bytes], data: Any) -> None:
    frame = bytearray(golden[1])
    for _ in range(data.draw(st.integers(1, 3))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(frame[: data.draw(st.integers(0, len(frame)))])
    with suppress(ProtocolError):
        decode_reply(cut)


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (b"", "ends too early"),
        (b"\xc0", "want a map with text keys"),
        (b"\x80\x04\x95\x0c\x00", "it is pickled, and nothing is unpickled here"),
        (b"PK\x03\x04" + bytes(20), "it is pickled"),
        (b"\x81\xa1a\xd4\x01\x00", "extension"),
        (b"\x81\xa1a" + b"\x91" * 100 + b"\xc0", "nested deeper"),
        (b"\xdf\xff\xff\xff\xff", "items"),
        (array(7), "and bytes"),
        (array(file(head(), bytes(8)), more=1), "needs the keys"),
        (array(b"PK\x03\x04"), "not an .npy file"),
        (array(b"\x93NUMPY\x04\x00"), "not an .npy file"),
        (array(b"\x93NUMPY\x01\x00"), "does not write"),
        (array(file("", version=2)), "does not write"),
        (array(file(head()[:-2])), "does not write"),
        (array(file("__import__('os').system('true')\n")), "does not write"),
        (array(file(head(shape="(" * 500 + ")" * 500))), "does not write"),
        (array(file(head() + " " * 2000 + "\n")), "does not write"),
        (array(file(head(descr="|O"), bytes(16))), "dtype '|O'"),
        (array(file(head(descr="<c8"), bytes(16))), "dtype '<c8'"),
        (array(file(head(descr="<M8[s]"), bytes(16))), "dtype"),
        (array(file(head(), bytes(4))), "has 4 bytes, want 8"),
        (array(file(head(), bytes(12))), "has 12 bytes, want 8"),
        (array(file(head(shape="(-1,)"))), "does not write"),
        (array(file(head(shape="(999999999999999, 999999999999999)"))), "bytes, want"),
        (array(file(head(shape="(0, 999999999999999, 999999999999999)"))), "not a message"),
        (array(file(head(shape="(1, 1, 1, 1, 1, 1, 1, 1, 1)"), bytes(4))), "shape"),
    ],
)
def test_hostile_messages_are_refused_with_the_reason(frame: bytes, why: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        decode(frame)
    assert why in str(caught.value)


@pytest.mark.parametrize("value", [np.zeros(2, object), object(), 2**70, {1: object}])
def test_what_a_client_cannot_read_is_not_sent(value: object) -> None:
    with pytest.raises(ProtocolError):
        encode({"a": value})


def test_an_array_shares_no_memory_that_can_be_written() -> None:
    assert not decode(encode({"a": np.zeros(3)}))["a"].flags.writeable


def test_a_message_at_the_bound_is_read() -> None:
    many = ITEMS_MAX - 3
    assert len(decode(msgspec.msgpack.encode({"a": [None] * many}))["a"]) == many
    with pytest.raises(ProtocolError):
        decode(msgspec.msgpack.encode({"a": [None] * (many + 1)}))


def test_a_modality_is_json_in_a_text_until_n15() -> None:
    table = {"delta_indices": [0, 1], "modality_keys": ["arm"]}
    newer, older = (modality_config(range(2), ["arm"], as_text=text) for text in (False, True))
    assert newer == {"__ModalityConfig_class__": True, "as_json": table}
    assert msgspec.json.decode(older["as_json"]) == table
