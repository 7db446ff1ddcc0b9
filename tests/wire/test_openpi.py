from __future__ import annotations

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
from ppstream.wire import foreign_msgpack
from ppstream.wire.openpi import decode, encode

ARRAY_HEAD = "84c40b5f5f6e6461727261795f5fc3c40464617461"  # map of 4, "__ndarray__": true, "data"
#: As msgpack_numpy.Packer of openpi-client 0.1.2 wrote them.
GOLDEN = [
    (
        {
            "observation/joint_position": np.arange(7) / 4,
            "observation/gripper_position": np.float32(0.5),
            "prompt": "pick",
        },
        "83ba6f62736572766174696f6e2f6a6f696e745f706f736974696f6e" + ARRAY_HEAD + "c438"
        "0000000000000000000000000000d03f000000000000e03f000000000000e83f000000000000f03f"
        "000000000000f43f000000000000f83fc4056474797065a33c6638c40573686170659107"
        "bc6f62736572766174696f6e2f677269707065725f706f736974696f6e"
        "83c40d5f5f6e7067656e657269635f5fc3c40464617461cb3fe0000000000000"
        "c4056474797065a33c6634a670726f6d7074a47069636b",
    ),
    (
        {
            "images": {"cam_high": np.arange(12, dtype=np.uint8).reshape(3, 2, 2)},
            "n": np.int64(300),
            "f": np.float64(1.5),
            "s": np.str_("x"),
            "b": np.bool_(True),
            "t": (1, -1, 300, -300, 70000, 2**40),
            "u": np.array("hi"),
        },
        "87a6696d6167657381a863616d5f68696768" + ARRAY_HEAD + "c40c000102030405060708090a0b"
        "c4056474797065a37c7531c405736861706593030202"
        "a16e83c40d5f5f6e7067656e657269635f5fc3c40464617461cd012cc4056474797065a33c6938"
        "a166cb3ff8000000000000a173a178"
        "a16283c40d5f5f6e7067656e657269635f5fc3c40464617461c3c4056474797065a37c6231"
        "a1749601ffcd012cd1fed4ce00011170cf0000010000000000"
        "a175" + ARRAY_HEAD + "c4086800000069000000c4056474797065a33c5532c405736861706590",
    ),
    (
        {"actions": np.asfortranarray(np.arange(6, dtype=">f8").reshape(2, 3)), "none": None},
        "82a7616374696f6e73" + ARRAY_HEAD + "c43000000000000000003ff00000000000004000000000000000"
        "400800000000000040100000000000004014000000000000c4056474797065a33e6638"
        "c4057368617065920203a46e6f6e65c0",
    ),
]

shapes = arrays.array_shapes(min_dims=0, min_side=0, max_dims=3, max_side=4)
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(max_size=20),
    st.binary(max_size=20),
    NUMBERS_AND_TEXTS.flatmap(lambda dtype: arrays.arrays(dtype, shapes)),
)
values = nested(leaves)
messages = st.dictionaries(st.text(max_size=9), values, max_size=4)


def array(**changes: Any) -> bytes:
    table = {b"__ndarray__": True, b"data": bytes(8), b"dtype": "<f4", b"shape": [2]}
    table |= {key.encode(): value for key, value in changes.items()}
    return msgspec.msgpack.encode({"a": table})


@pytest.mark.parametrize(("message", "wanted"), GOLDEN)
def test_bytes_are_those_of_the_client(message: dict[str, Any], wanted: str) -> None:
    assert encode(message).hex() == wanted


@settings(max_examples=50)  # costly to draw
@given(messages)
def test_what_is_encoded_is_read_back_in_dtype_shape_and_bytes(message: dict[str, Any]) -> None:
    assert same(message, decode(encode(message)))


def test_scalars_keep_their_dtype() -> None:
    found = decode(bytes.fromhex(GOLDEN[0][1]))["observation/gripper_position"]
    assert type(found) is np.float32
    assert found == 0.5


@given(st.binary(max_size=200))
def test_random_bytes_are_refused_or_read_and_nothing_else(frame: bytes) -> None:
    with suppress(ProtocolError):
        assert isinstance(decode(frame), dict)


@given(st.sampled_from(GOLDEN), st.data())
def test_damaged_messages_are_refused_or_read(golden: tuple[Any, str], data: Any) -> None:
    frame = bytearray.fromhex(golden[1])
    for _ in range(data.draw(st.integers(1, 3))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(frame[: data.draw(st.integers(0, len(frame)))])
    with suppress(ProtocolError):
        assert isinstance(decode(cut), dict)


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (b"", "ends too early"),
        (b"\xc0", "NoneType"),
        (b"\x81\x01\x02", "text keys"),
        (b"\x81\xa1a\xc1", "0xc1"),
        (b"\x81\xa1a\xd4\x01\x00", "extension"),
        (b"\x81\xa1a\xd6\xff\0\0\0\0", "extension"),
        (b"\x81\xa1a" + b"\x91" * 100 + b"\xc0", "nested deeper"),
        (b"\x81\xa1a" + b"\x91" * 10_000 + b"\xc0", "not a message"),
        (b"\xdf\xff\xff\xff\xff", "items"),
        (b"\x81\xa1a\xdd\x00\x01\x00\x00" + b"\x90" * 65536, "items"),
        (b"\x81\xa1a\xc0\xc0", "trailing"),
        (array(dtype="O"), "dtype 'O'"),
        (array(dtype="|O"), "dtype '|O'"),
        (array(dtype="c8"), "dtype"),
        (array(dtype="V8"), "dtype"),
        (array(dtype="<M8[s]"), "dtype"),
        (array(dtype="i4,i4"), "dtype"),
        (array(dtype=7), "dtype"),
        (array(shape=[3]), "8 bytes, want 12"),
        (array(shape=[1]), "8 bytes, want 4"),
        (array(shape=[-1]), "shape"),
        (array(shape=[True, 2]), "shape"),
        (array(shape=[2**40, 2**40]), "bytes, want"),
        (array(shape=[0, 2**62, 2**62], data=b""), "not a message"),
        (array(shape=[1] * 9), "shape"),
        (array(shape=2), "a list as shape"),
        (array(data="text"), "needs bytes"),
        (array(more=1), "keys"),
    ],
)
def test_hostile_messages_are_refused_with_the_reason(frame: bytes, why: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        decode(frame)
    assert why in str(caught.value)


def test_a_number_out_of_its_dtype_is_refused() -> None:
    table = {b"__npgeneric__": True, b"data": 300, b"dtype": "|u1"}
    with pytest.raises(ProtocolError):
        decode(msgspec.msgpack.encode({"a": table}))


@pytest.mark.parametrize("dtype", ["S1", "|S9", "<U1"])
@pytest.mark.parametrize("data", [4 * 10**12, 3, True, 1.5])
def test_a_text_made_of_a_number_is_refused(data: Any, dtype: str) -> None:
    """NumPy's own would take that many bytes."""
    table = {b"__npgeneric__": True, b"data": data, b"dtype": dtype}
    with pytest.raises(ProtocolError, match="a text's data are"):
        decode(msgspec.msgpack.encode({"a": table}))


@pytest.mark.parametrize("value", [np.zeros(2, object), np.zeros(2, complex), object(), 2**70])
def test_what_a_client_cannot_read_is_not_sent(value: object) -> None:
    with pytest.raises(ProtocolError):
        encode({"a": value})


def test_an_array_shares_no_memory_that_can_be_written() -> None:
    found = decode(encode({"a": np.zeros(3)}))["a"]
    assert not found.flags.writeable


def test_a_message_at_the_bound_is_read() -> None:
    many = foreign_msgpack.ITEMS_MAX - 3
    assert len(decode(msgspec.msgpack.encode({"a": [None] * many}))["a"]) == many
    with pytest.raises(ProtocolError):
        decode(msgspec.msgpack.encode({"a": [None] * (many + 1)}))
