"""Mutated frames to Sessions over a real socket, beside a robot that behaves and must be served.

A part of ``fuzz/frames.py``, which is the command.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
from fuzz.mutations import HOSTILE, mutated

from ppstream.config.schema import (
    ActionConfig,
    BatchConfig,
    PipelineConfig,
    PolicyConfig,
    ServiceConfig,
    StreamConfig,
    WindowConfig,
)
from ppstream.core.clock import NS_PER_S
from ppstream.ingest.intake import build_intake
from ppstream.sessions.server import Sessions
from ppstream.wire import robot_messages as m
from ppstream.wire.fields import WIRE_MAJOR, WIRE_MINOR, encoder
from ppstream.wire.message_socket import MessageSocket
from ppstream.wire.transports import connect_client

BATCH: Final = 400  # frames sent before they are looked at
HANG_S: Final = 20.0
HOSTILE_SHARE: Final = 0.05
DIM: Final = 3


def fuzz_sessions(frames: int, seed: int) -> dict[str, int]:
    """Mutated frames beside a robot that behaves; every frame is counted, every sample of it taken.

    Raises:
        AssertionError: a frame was lost, or the robot was not served.
    """
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        config = fuzz_config(f"unix://{folder}/robots")
        intake = build_intake(config)
        sessions = Sessions(config, intake.rows)
        sessions.set_phase("ready")
        attacker, good = (connect_client(sessions.endpoint) for _ in range(2))
        try:
            return _attack(sessions, attacker, good, frames, rng)
        finally:
            for each in (attacker, good, sessions):
                each.close()
            for row in intake.rows:
                for ring in row.rings.values():
                    ring.check()


def _attack(
    sessions: Sessions,
    attacker: MessageSocket,
    good: MessageSocket,
    frames: int,
    rng: random.Random,
) -> dict[str, int]:
    now = 10 * NS_PER_S
    expected = sessions.statistics().frames_received

    def deliver(sender: MessageSocket, body: bytes) -> None:
        nonlocal expected
        body = body or b"\0"  # an empty packet is the end of a connection
        deadline = time.monotonic() + HANG_S
        while not sender.send(body):
            sessions.drain(now)
            assert time.monotonic() < deadline, "the socket takes nothing any more"
        expected += 1

    def settle() -> int:
        taken = 0
        deadline = time.monotonic() + HANG_S
        while sessions.statistics().frames_received < expected:
            taken += sessions.drain(now)
            assert time.monotonic() < deadline, "frames were lost"
        return taken

    deliver(good, encoder.encode(_hello("good")))
    settle()
    good_session = 0
    deadline = time.monotonic() + HANG_S
    while not good_session:
        good_session = _session_of(good)
        assert time.monotonic() < deadline, "a robot that behaves was not admitted"
    sent = accepted = session = 0
    while sent < frames:
        now += NS_PER_S  # budgets begin anew: nothing is dropped unread
        session = _session_of(attacker) or session
        seeds = _seeds(session)
        for _ in range(min(BATCH, frames - sent)):
            is_hostile = rng.random() < HOSTILE_SHARE
            deliver(
                attacker, rng.choice(HOSTILE) if is_hostile else mutated(rng, rng.choice(seeds))
            )
            sent += 1
        settle()
        deliver(good, _samples(good_session, now))
        accepted += settle()
        if rng.random() < 0.5:
            deliver(attacker, encoder.encode(_hello("attacker")))
            settle()
    batches = -(-frames // BATCH)
    assert accepted == batches, f"the robot was served {accepted} times of {batches}"
    statistics = sessions.statistics()
    return {
        "sent": sent,
        "handled": statistics.frames_handled,
        **{f"dropped {reason}": n for reason, n in statistics.frames_dropped.items()},
        "opened": statistics.opened,
    }


def _session_of(robot: MessageSocket) -> int:
    """The newest session that the server named, 0 when it said nothing new."""
    session = 0
    for frame in robot.drain():
        message = m.to_robot.decode(frame.body)
        if isinstance(message, m.Welcome):
            session = message.session
    return session


def _seeds(session: int) -> tuple[bytes, ...]:
    known = (
        _hello("attacker"),
        m.ChunkReport(session, 1, 2, 3, 4),
        m.RobotState(session, 1, 2, 3, "stop: fuzz", 4),
        m.ResetRequest(session),
        m.Ping(session),
        m.Instruct(session, 1, "go"),
        m.ClockReading(session, 1, 2),
        m.Describe(WIRE_MAJOR, WIRE_MINOR),
        m.Phase("ready"),
    )
    return (*map(encoder.encode, known), _samples(session, NS_PER_S))


def _hello(robot: str) -> m.Hello:
    streams = (m.StreamDeclaration("joints", DIM, "float32"),)
    return m.Hello(WIRE_MAJOR, WIRE_MINOR, robot, streams, ("a",))


def _samples(session: int, stamp_ns: int) -> bytes:
    stamps, values = np.array((stamp_ns,)), np.zeros((1, DIM), np.float32)
    return encoder.encode(m.Samples(session, 0, stamps.data, values.data))


def fuzz_config(endpoint: str) -> PipelineConfig:
    """Two robots with one stream each."""
    return PipelineConfig(
        name="fuzz",
        streams=(StreamConfig(name="joints", dim=DIM, rate_hz=1000.0),),
        window=WindowConfig(steps=4, dt_ms=10.0),
        actions=ActionConfig(
            names=("a",), horizon=1, dt_ms=10.0, low=(-1.0,), high=(1.0,), lease_ms=100.0
        ),
        policy=PolicyConfig(target="nobody:build", instructions=True),
        batch=BatchConfig(rows=2),
        service=ServiceConfig(endpoint=endpoint),
    )
