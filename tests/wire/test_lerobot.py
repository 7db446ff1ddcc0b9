"""LeRobot's messages: those that its client wrote, and replies as Python unpickles them there."""

from __future__ import annotations

import pickle
import sys
import types
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lerobot_rig import BEGIN, END, MIDDLE, data_field, instance, piece

from ppstream.core.errors import ProtocolError
from ppstream.wire import lerobot
from ppstream.wire.lerobot import (
    Assembly,
    decode_fields,
    decode_instructions,
    decode_observation,
    encode_actions,
)

GOLDEN = Path(__file__).parents[1] / "golden"  # as the client of LeRobot 0.4.4 wrote them
MOTORS = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")
NAMES = tuple(f"{motor}.pos" for motor in MOTORS)


@dataclass
class TimedAction:
    timestamp: float
    timestep: int
    action: torch.Tensor


def golden(name: str, protocol: int) -> bytes:
    return (GOLDEN / f"lerobot-{name}-p{protocol}.bin").read_bytes()


def unpickled(message: bytes, monkeypatch: pytest.MonkeyPatch) -> list[TimedAction]:
    """What a client makes of a reply: its own unpickler, classes where it looks for them."""
    helpers = types.ModuleType(lerobot.HELPERS)
    helpers.TimedAction = TimedAction  # type: ignore[attr-defined]
    for name in ("lerobot", "lerobot.async_inference"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, lerobot.HELPERS, helpers)
    data = decode_fields(message)[1]
    assert isinstance(data, bytes)
    found: list[TimedAction] = pickle.loads(data)
    return found


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_observations_of_the_client_are_read(protocol: int) -> None:
    found = decode_observation(golden("observation", protocol))
    assert (found.timestamp, found.timestep) == (1700000000.25, 41)
    assert found.must_go is (protocol % 2 == 0)
    values = found.observation
    assert [values[name] for name in NAMES] == [0.0, 0.125, 0.25, 0.375, 0.5, np.float32(0.625)]
    assert values["task"] == "pick up the cube"
    assert (values["front"] == np.arange(144, dtype=np.uint8).reshape(8, 6, 3)).all()
    assert (values["wrist"] == values["front"][:, ::-1]).all()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_instructions_of_the_client_are_read(protocol: int) -> None:
    found = decode_instructions(data_field(1, golden("instructions", protocol)))
    assert (found.policy_type, found.pretrained_name_or_path) == ("act", "someone/act_so101")
    assert (found.actions_per_chunk, found.device, found.rename_map) == (50, "cpu", {})
    state = found.lerobot_features["observation.state"]
    assert (state.dtype, state.shape, state.names) == ("float32", (6,), NAMES)
    assert found.lerobot_features["observation.images.front"].shape == (8, 6, 3)


def test_a_reply_is_a_list_of_timed_actions_with_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    actions = np.array([[0.1, -2.5e-30], [3.0, 4.0], [np.pi, -0.0]], np.float32)
    sent = encode_actions(actions, timestep=2**40, timestamp=1700000000.5, dt_s=0.05)
    found = unpickled(sent, monkeypatch)
    assert all(type(one) is TimedAction for one in found)
    assert [one.timestep for one in found] == [2**40, 2**40 + 1, 2**40 + 2]
    assert [one.timestamp for one in found] == [1700000000.5 + k * 0.05 for k in range(3)]
    for one, row in zip(found, actions, strict=True):
        assert one.action.dtype == torch.float32
        assert one.action.numpy().tobytes() == row.tobytes()


def test_a_reply_of_a_long_chunk_is_read_too(monkeypatch: pytest.MonkeyPatch) -> None:
    actions = np.random.default_rng(0).normal(size=(300, 32)).astype(np.float32)
    found = unpickled(encode_actions(actions, timestep=0, timestamp=0.0, dt_s=1.0), monkeypatch)
    assert (np.stack([one.action.numpy() for one in found]) == actions).all()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"timestamp": "now"}, "timestamp"),
        ({"timestamp": float("nan")}, "timestamp: got nan, want seconds"),
        ({"timestamp": float("-inf")}, "timestamp: got -inf, want seconds"),
        ({"timestep": -1}, "timestep"),
        ({"timestep": 2**60}, "timestep"),
        ({"observation": [1]}, "observation"),
        ({"must_go": 3}, "must_go"),
        ({"observation": None}, "observation"),
    ],
)
def test_an_observation_with_other_fields_is_refused(fields: dict[str, Any], said: str) -> None:
    whole = {"timestamp": 1.0, "timestep": 2, "observation": {"a": 1.0}} | fields
    with pytest.raises(ProtocolError) as caught:
        decode_observation(instance(lerobot.OBSERVATION, whole))
    assert said in str(caught.value)


def test_a_pickle_of_another_kind_is_refused_by_name() -> None:
    with pytest.raises(ProtocolError, match="RemotePolicyConfig' is not taken"):
        decode_observation(golden("instructions", 4))
    with pytest.raises(ProtocolError, match="got a dict, want a lerobot"):
        decode_observation(pickle.dumps({"timestamp": 1.0}, 4))
    with pytest.raises(ProtocolError, match="ends too early"):
        decode_instructions(b"")
    with pytest.raises(ProtocolError, match="no data"):
        decode_instructions(b"\x08\x01")


@pytest.mark.parametrize("cuts", [[], [10], [10, 20], [1, 2, 3]])
def test_an_observation_comes_in_pieces(cuts: list[int]) -> None:
    whole = bytes(range(100))
    ends = [0, *cuts, len(whole)]
    parts = [whole[begin:end] for begin, end in pairwise(ends)]
    states = [END] if not cuts else [BEGIN, *[MIDDLE] * (len(cuts) - 1), END]
    assembly = Assembly(100)
    for _ in range(2):
        *before, last = map(piece, states, parts)
        assert [assembly.add(one) for one in before] == [None] * len(before)
        assert assembly.add(last) == whole


def test_a_new_beginning_forgets_what_was_never_ended() -> None:
    assembly = Assembly(10)
    assembly.add(piece(BEGIN, b"x" * 8))
    assembly.add(piece(BEGIN, b"abc"))
    assert assembly.add(piece(END, b"d")) == b"abcd"


def test_pieces_are_bounded_together_and_need_a_state() -> None:
    assembly = Assembly(10)
    assembly.add(piece(BEGIN, b"x" * 8))
    with pytest.raises(ProtocolError, match="more than 10 bytes"):
        assembly.add(piece(MIDDLE, b"x" * 3))
    for broken in (piece(0, b"x"), piece(4, b"x"), data_field(2, b"x"), b"\x08\x03\x10\x05"):
        with pytest.raises(ProtocolError, match="no state"):
            assembly.add(broken)


def test_fields_that_nobody_knows_are_passed_over() -> None:
    more = b"\x19" + bytes(8) + b"\x25" + bytes(4) + data_field(6, b"new")
    assert Assembly(10).add(more + piece(END, b"x") + more) == b"x"


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (b"\x0a\x05abc", "ends too early"),
        (b"\x0a", "a number ends too early"),
        (b"\x0b", "kind 3"),
        (b"\x02\x00", "kind 2"),
        (b"\x08" + b"\xff" * 10, "a number ends too early"),
        (b"\x0a" + b"\xff" * 9 + b"\x01", "ends too early"),
        (b"\x08\x01" * 17, "more than 16 fields"),
    ],
)
def test_what_is_no_protobuf_message_is_refused(message: bytes, why: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        decode_fields(message)
    assert why in str(caught.value)


@given(st.binary(max_size=60))
def test_random_bytes_are_refused_or_read_and_nothing_else(message: bytes) -> None:
    with suppress(ProtocolError):
        decode_fields(message)
    with suppress(ProtocolError):
        decode_instructions(message)
    with suppress(ProtocolError):
        decode_observation(message)
