"""Messages of LeRobot's asynchronous inference: protobuf fields, and pickles inside of them.

Bytes to plain data and back, without a socket. ``pickle_opcodes.py`` reads the pickles of clients;
the reply is written here, opcode by opcode, so that a client unpickles ``list[TimedAction]`` with
torch tensors, and neither torch nor LeRobot is needed. Nothing is ever unpickled.
"""

from __future__ import annotations

import math
import struct
from typing import Annotated, Any, Final, NamedTuple, TypeAlias, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from ppstream.core.errors import ProtocolError
from ppstream.wire import pickle_opcodes

Array: TypeAlias = np.ndarray[Any, Any]
T = TypeVar("T")

HELPERS: Final = "lerobot.async_inference.helpers"
OBSERVATION: Final = f"{HELPERS}.TimedObservation"
INSTRUCTIONS: Final = f"{HELPERS}.RemotePolicyConfig"
FEATURES_MAX: Final = 256
FIELDS_MAX: Final = 16  # of one protobuf message, unknown ones included
VARINT_BYTES_MAX: Final = 10
PIECE_BYTES: Final = 2 << 20  # of an observation, as clients cut it
PIECE_MESSAGE_BYTES: Final = 4 << 20  # the largest message of a client

#: Kinds of a protobuf field.
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED: Final = {_FIXED64: 8, _FIXED32: 4}
#: States of a piece of an observation.
_BEGIN, _MIDDLE, _END = 1, 2, 3

ShortText = Annotated[str, Meta(max_length=1024)]


class TimedObservation(msgspec.Struct, frozen=True):
    """Readings of a robot at one step: numbers by motor, frames by camera, and its task."""

    timestamp: float  # of the client's clock, seconds
    timestep: Annotated[int, Meta(ge=0, le=2**53)]  # of the action that it executed last
    observation: dict[str, Any]
    must_go: bool = False

    def __post_init__(self) -> None:
        if not math.isfinite(self.timestamp):  # times of a client's clock are compared
            raise ValueError(f"timestamp: got {self.timestamp}, want seconds")


class Feature(msgspec.Struct, frozen=True):
    """Form of one value: names of the motors for numbers, height, width and 3 for a camera."""

    dtype: ShortText
    shape: Annotated[tuple[int, ...], Meta(max_length=8)]
    names: Annotated[tuple[ShortText, ...], Meta(max_length=1024)] | None = None


class RemotePolicyConfig(msgspec.Struct, frozen=True):
    """Policy that a client wishes for, and the form of its observations."""

    policy_type: ShortText
    pretrained_name_or_path: ShortText
    lerobot_features: Annotated[dict[ShortText, Feature], Meta(max_length=FEATURES_MAX)]
    actions_per_chunk: Annotated[int, Meta(ge=1, le=2**31)]
    device: ShortText = "cpu"
    rename_map: dict[ShortText, ShortText] = {}


def decode_observation(pickled: bytes) -> TimedObservation:
    """A client's message at each step.

    Raises:
        ProtocolError: it is none, or exceeds a bound; the text says which.
    """
    return _instance(pickled, OBSERVATION, TimedObservation)


def decode_instructions(message: bytes) -> RemotePolicyConfig:
    """A client's message at its start, in field 1.

    Raises:
        ProtocolError: as ``decode_observation``.
    """
    pickled = decode_fields(message).get(1, b"")
    if not isinstance(pickled, bytes):
        raise ProtocolError("a PolicySetup has no data")
    return _instance(pickled, INSTRUCTIONS, RemotePolicyConfig)


def _instance(pickled: bytes, name: str, kind: type[T]) -> T:
    found = pickle_opcodes.decode(pickled, {name})
    if not isinstance(found, pickle_opcodes.Instance):
        raise ProtocolError(f"got a {type(found).__name__}, want a {name}")
    try:
        return msgspec.convert(found.fields, kind)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"a {kind.__name__} that is none: {error}") from error
    except AttributeError as error:  # msgspec's
        reason = "an array in the place of a map"
        raise ProtocolError(f"a {kind.__name__} that is none: {reason}") from error


class Assembly:
    """Observation in pieces: BEGIN, any MIDDLE, END; a short one is END alone."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._parts = bytearray()

    def add(self, message: bytes) -> bytes | None:
        """The whole after its last piece; None before.

        Raises:
            ProtocolError: no such piece, or more than ``bytes_max`` together.
        """
        fields = decode_fields(message)
        state, data = fields.get(1, 0), fields.get(2, b"")
        if state not in (_BEGIN, _MIDDLE, _END) or not isinstance(data, bytes):
            raise ProtocolError("a piece of an observation has no state, want BEGIN, MIDDLE or END")
        if state == _BEGIN:
            self._parts.clear()
        if len(self._parts) + len(data) > self._bytes_max:
            raise ProtocolError(f"an observation of more than {self._bytes_max} bytes")
        self._parts += data
        if state != _END:
            return None
        whole = bytes(self._parts)
        self._parts.clear()
        return whole


def decode_fields(message: bytes) -> dict[int, int | bytes]:
    """Fields of a protobuf message by number, the last of each.

    Raises:
        ProtocolError: it is none, or has more than ``FIELDS_MAX``.
    """
    found: dict[int, int | bytes] = {}
    at = 0
    for _ in range(FIELDS_MAX):
        if at == len(message):
            return found
        key, at = _varint(message, at)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            found[number], at = _varint(message, at)
            continue
        size = _FIXED.get(kind)
        if kind == _BYTES:
            size, at = _varint(message, at)
        if size is None or not number:
            raise ProtocolError(f"not a protobuf message: a field of kind {kind}")
        if at + size > len(message):
            raise ProtocolError("not a protobuf message: it ends too early")
        found[number], at = message[at : at + size], at + size
    if at < len(message):
        raise ProtocolError(f"a protobuf message of more than {FIELDS_MAX} fields")
    return found


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for index, byte in enumerate(message[at : at + VARINT_BYTES_MAX]):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, at + index + 1
    raise ProtocolError("not a protobuf message: a number ends too early")


def encode_actions(actions: Array, *, timestep: int, timestamp: float, dt_s: float) -> bytes:
    """A reply: the pickle of ``list[TimedAction]`` in field 1.

    Args:
        actions: float32 ``[horizon, dim]``; each row becomes a tensor.
        timestep: of the first row; the others follow one by one.
        timestamp: of the first row, of the client's clock; the others follow ``dt_s`` apart.
        dt_s: seconds between two rows.
    """
    pickled = _timed_actions(actions, timestep, timestamp, dt_s)
    return b"\x0a" + _as_varint(len(pickled)) + pickled


def _as_varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


class _Words(NamedTuple):
    """Opcodes that name a class, a function and three fields: at first whole, then remembered."""

    timed_action: bytes
    timestamp: bytes
    timestep: bytes
    action: bytes
    tensor: bytes


def _text(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()  # SHORT_BINUNICODE


_NAMED: Final = (
    f"c{HELPERS}\nTimedAction\n".encode(),  # GLOBAL
    _text("timestamp"),
    _text("timestep"),
    _text("action"),
    b"ctorch\ntensor\n",
)
_FIRST: Final = _Words(*(word + b"q" + bytes([index]) for index, word in enumerate(_NAMED)))
_AGAIN: Final = _Words(*(b"h" + bytes([index]) for index in range(len(_NAMED))))  # BINGET


def _timed_actions(actions: Array, timestep: int, timestamp: float, dt_s: float) -> bytes:
    floats = np.empty(actions.shape, dtype=[("opcode", "S1"), ("value", ">f8")])
    floats["opcode"], floats["value"] = b"G", actions
    parts = [b"\x80\x04]("]  # PROTO 4, EMPTY_LIST, MARK
    for index, row in enumerate(floats):
        words = _AGAIN if index else _FIRST
        parts += (
            words.timed_action + b")\x81}(",  # EMPTY_TUPLE, NEWOBJ, EMPTY_DICT, MARK
            words.timestamp + b"G" + struct.pack(">d", timestamp + index * dt_s),
            words.timestep + b"\x8a\x08" + struct.pack("<q", timestep + index),  # LONG1
            words.action + words.tensor + b"](" + row.tobytes() + b"e\x85R",  # TUPLE1, REDUCE
            b"ub",  # SETITEMS, BUILD
        )
    return b"".join([*parts, b"e."])  # APPENDS, STOP
