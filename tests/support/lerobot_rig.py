"""Robots that speak LeRobot's asynchronous inference by raw bytes, without LeRobot or protobuf.

Their pickles are Python's own; replies are unpickled as a client would, with two names and no more.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np

from ppstream.wire.lerobot import HELPERS, INSTRUCTIONS, OBSERVATION, PIECE_BYTES, decode_fields

BEGIN, MIDDLE, END = 1, 2, 3
LIMIT_S = 20.0
#: The streams of the rig, number by number.
MAP = {"joints": ["j1.pos", "j2.pos", "j3.pos"], "imu": ["roll", "pitch"]}
FEATURES: dict[str, Any] = {
    "observation.state": {
        "dtype": "float32",
        "shape": (5,),
        "names": ["j1.pos", "j2.pos", "j3.pos", "roll", "pitch"],
    }
}


@dataclass
class TimedAction:
    timestamp: float
    timestep: int
    action: np.ndarray[Any, Any]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = {(HELPERS, "TimedAction"): TimedAction, ("torch", "tensor"): np.float32}
        return known[module, name]


def timed_actions(message: bytes) -> list[TimedAction]:
    """The actions of a reply; none of an empty one."""
    data = decode_fields(message).get(1, b"")
    assert isinstance(data, bytes)
    found: list[TimedAction] = _Unpickler(io.BytesIO(data)).load() if data else []
    return found


def instance(name: str, fields: dict[str, Any]) -> bytes:
    """The pickle of an object, written without its class."""
    module, _, cls = name.rpartition(".")
    state = pickle.dumps(fields, 2)[2:-1]
    return b"\x80\x02c" + f"{module}\n{cls}\n".encode() + b")\x81" + state + b"b."


def values(number: float = 0.5, **changes: Any) -> dict[str, Any]:
    """What the map wants; ``changes`` replace or, with None, take away."""
    found = dict.fromkeys(FEATURES["observation.state"]["names"], number) | {"task": "pick"}
    found |= {name.replace("_pos", ".pos"): one for name, one in changes.items()}
    return {key: one for key, one in found.items() if one is not None}


def observed(
    found: Any = None, *, timestep: int = 0, timestamp: float = 1.7e9, **more: Any
) -> bytes:
    fields = {
        "timestamp": timestamp,
        "timestep": timestep,
        "observation": values() if found is None else found,
        "must_go": True,
    }
    return instance(OBSERVATION, fields | more)


def instructed(**changes: Any) -> bytes:
    fields = {
        "policy_type": "act",
        "pretrained_name_or_path": "someone/act",
        "lerobot_features": FEATURES,
        "actions_per_chunk": 4,
        "device": "cpu",
        "rename_map": {},
    }
    return instance(INSTRUCTIONS, fields | changes)


def data_field(number: int, data: bytes) -> bytes:
    length, size = bytearray(), len(data)
    while size > 0x7F:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([number << 3 | 2, *length, size]) + data


def piece(state: int, data: bytes) -> bytes:
    return bytes([1 << 3, state]) + data_field(2, data)


def pieces(whole: bytes, most: int = PIECE_BYTES) -> list[bytes]:
    parts = [whole[at : at + most] for at in range(0, len(whole), most)]
    states = [BEGIN, *[MIDDLE] * (len(parts) - 2), END] if len(parts) > 1 else [END]
    return [piece(state, part) for state, part in zip(states, parts, strict=True)]


class Robot:
    """The four calls of a client, on one channel.

    ``shares``: the connection of others of this process, as LeRobot's clients do.
    """

    def __init__(self, address: str, *, shares: bool = False) -> None:
        options = () if shares else (("grpc.use_local_subchannel_pool", 1),)
        self.channel = grpc.insecure_channel(address, options=options)
        service = "/transport.AsyncInference/"
        self.ready_call = self.channel.unary_unary(service + "Ready")
        self.instructions_call = self.channel.unary_unary(service + "SendPolicyInstructions")
        self.observations_call = self.channel.stream_unary(service + "SendObservations")
        self.actions_call = self.channel.unary_unary(service + "GetActions")

    def start(self, **changes: Any) -> None:
        self.ready_call(b"", timeout=LIMIT_S)
        self.instruct(instructed(**changes))

    def instruct(self, pickled: bytes) -> None:
        self.instructions_call(data_field(1, pickled), timeout=LIMIT_S)

    def send(self, pickled: bytes | None = None, *, most: int = PIECE_BYTES, **more: Any) -> None:
        whole = observed(**more) if pickled is None else pickled
        self.observations_call(iter(pieces(whole, most)), timeout=LIMIT_S)

    def actions(self) -> list[TimedAction]:
        return timed_actions(self.actions_call(b""))

    def ask(self, **more: Any) -> list[TimedAction]:
        """Send an observation and wait for its actions."""
        self.send(**more)
        while not (found := self.actions()):
            pass
        return found


def refused(error: grpc.RpcError) -> tuple[str, str]:
    return error.code().name, error.details()


def rows_of(found: list[TimedAction]) -> np.ndarray[Any, Any]:
    return np.stack([one.action for one in found])


@contextmanager
def robot_at(address: str, *, shares: bool = False) -> Iterator[Robot]:
    robot = Robot(address, shares=shares)
    try:
        yield robot
    finally:
        robot.channel.close()
