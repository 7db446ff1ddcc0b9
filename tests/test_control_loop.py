from __future__ import annotations

import gc
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from robot_rig import DT_NS, LEASE_NS, MS, make_chunk

from ppstream.clock import ManualClock
from ppstream.control_loop import ControlLoop, Fault
from ppstream.realtime import NotPermittedError, RealTime
from ppstream.timeline import ActionTimeline


class Robot:
    """A client without a network, and a body that notes what it is told to do."""

    def __init__(self, *, ready: bool = True, **options: Any) -> None:
        self.clock = ManualClock(0)
        self.timeline = ActionTimeline(2)
        self.ready = ready
        self.pushed: list[tuple[str, int, Any]] = []
        self.did: list[str] = []
        self.left: list[float] = []  # what stop was told
        reactions: dict[str, Any] = {
            name: (lambda name=name: self.did.append(name)) for name in ("hold", "home")
        }
        reactions["stop"] = lambda left: (self.did.append("stop"), self.left.append(left))
        self.loop = ControlLoop(
            500.0,
            options.pop("read", None),
            lambda action: self.did.append("write"),
            self,
            **{**reactions, **options},
        )

    def push(self, stream: str, stamp_ns: int, values: Any) -> bool:
        self.pushed.append((stream, stamp_ns, values))
        return True

    def receive(self, seq: int) -> None:
        now = self.clock()
        assert self.timeline.merge(make_chunk(seq, end_ns=now - DT_NS), now) is None

    def tick(self, after_ns: int = 0) -> str:
        self.clock.advance(after_ns)
        self.loop.tick()
        return self.did[-1]


def test_it_holds_until_the_run_is_ready() -> None:
    robot = Robot(ready=False)
    robot.receive(0)
    assert robot.tick() == "hold"
    assert robot.loop.fault is None
    robot.ready = True
    assert robot.tick() == "write"
    assert robot.timeline.statistics().received == 1


def test_it_holds_without_a_fault_until_the_first_action() -> None:
    robot = Robot()
    for _ in range(1000):
        assert robot.tick(10 * MS) == "hold"
    assert robot.loop.fault is None


def test_an_expired_lease_is_a_fault_that_stays() -> None:
    robot = Robot()
    robot.receive(0)
    assert robot.tick() == "write"
    assert robot.tick(LEASE_NS - DT_NS) == "write"
    assert robot.tick(1) == "hold"
    assert robot.loop.fault == Fault("lease", LEASE_NS - DT_NS + 1, LEASE_NS - DT_NS)
    robot.receive(1)
    assert robot.tick() == "hold", "it resumed by itself"
    robot.loop.clear_fault()
    assert robot.tick() == "write"
    assert robot.loop.statistics().faults == 1


def test_told_to_resume_it_does_with_the_next_action() -> None:
    robot = Robot(resume=True)
    robot.receive(0)
    robot.tick()
    assert robot.tick(LEASE_NS) == "hold"
    assert robot.loop.fault is not None
    robot.receive(1)
    assert robot.tick() == "write"
    assert robot.loop.fault is None


def test_a_run_that_is_no_longer_ready_is_a_fault_while_moving() -> None:
    robot = Robot()
    robot.receive(0)
    robot.tick()
    robot.ready = False
    assert robot.tick() == "hold"
    assert robot.loop.fault is not None
    assert robot.loop.fault.reason == "phase"


def test_a_new_episode_is_no_fault() -> None:
    robot = Robot()
    robot.receive(0)
    robot.tick()
    robot.timeline.clear()
    assert robot.tick(10 * LEASE_NS) == "hold"
    assert robot.loop.fault is None


@pytest.mark.parametrize("reaction", ["stop", "home"])
def test_after_holding_comes_the_stated_reaction(reaction: str) -> None:
    robot = Robot(on_expiry=reaction, hold_ms=20.0)
    robot.receive(0)
    robot.tick()
    assert robot.tick(LEASE_NS) == "hold"
    assert robot.tick(20 * MS - 1) == "hold"
    assert robot.tick(1) == reaction
    assert robot.tick(LEASE_NS) == reaction


def test_a_stop_follows_the_stated_ramp() -> None:
    robot = Robot(on_expiry="stop", hold_ms=10.0, ramp_ms=40.0)
    robot.receive(0)
    robot.tick()
    assert robot.tick(LEASE_NS) == "hold"
    for _ in range(6):
        assert robot.tick(10 * MS) == "stop"
    np.testing.assert_allclose(robot.left, [1.0, 0.75, 0.5, 0.25, 0.0, 0.0])
    robot.receive(1)
    assert robot.tick() == "stop", "a ramp is not left by itself"


def test_an_action_beyond_the_maximum_age_is_held_and_a_fault_only_when_the_lease_ends() -> None:
    robot = Robot()
    robot.timeline.adopt(discrete=(), max_age_ns=50 * MS)
    robot.receive(0)
    assert robot.tick(50 * MS - DT_NS) == "write"
    assert robot.tick(1) == "hold"
    assert robot.loop.fault is None
    robot.receive(1)
    assert robot.tick() == "write"
    assert robot.tick(LEASE_NS) == "hold"
    assert robot.loop.fault is not None
    assert robot.loop.statistics().oldest == "oldest action executed: 50.0 ms of 50"


def test_a_read_that_takes_longer_than_the_lease_executes_nothing() -> None:
    def read(stamp_ns: int) -> dict[str, Any]:
        robot.clock.advance(slow_ns)
        return {"joints": [stamp_ns]}

    slow_ns = 0
    robot = Robot(read=read)
    robot.receive(0)
    assert robot.tick() == "write"
    slow_ns = LEASE_NS
    assert robot.tick(5) == "hold"
    assert robot.pushed == [("joints", 0, [0]), ("joints", 5, [5])]


def test_a_reaction_that_was_not_given_is_refused() -> None:
    with pytest.raises(ValueError, match="needs home="):
        Robot(on_expiry="home", home=None)
    with pytest.raises(ValueError, match="above 0"):
        ControlLoop(0.0, None, lambda action: None, Robot(), hold=lambda: None)


def test_deadlines_are_absolute_and_missed_ticks_are_counted() -> None:
    robot = Robot()
    statistics = robot.loop.run(0.2)
    assert statistics.ticks + statistics.missed_ticks in (99, 100, 101)
    assert statistics.lateness.count == statistics.ticks
    assert sum(found.n for found in statistics.histogram) == statistics.ticks
    assert robot.did[-1] == "hold"


def test_it_holds_when_it_is_ended_by_an_exception() -> None:
    interval_s = sys.getswitchinterval()
    robot = Robot(read=lambda stamp_ns: {}["nothing"])
    with pytest.raises(KeyError):
        robot.loop.run(1.0)
    assert robot.did == ["hold"]
    assert sys.getswitchinterval() == interval_s


def test_it_does_not_run_without_what_it_requires_and_tells_what_it_was_refused() -> None:
    nowhere = frozenset({999})
    strict = Robot(realtime=RealTime(cpus=nowhere, required=True))
    with pytest.raises(NotPermittedError, match="999"):
        strict.loop.run(1.0)
    assert strict.did == ["hold"]
    lenient = Robot(realtime=RealTime(cpus=nowhere))
    (line,) = lenient.loop.run(0.02).refused
    assert "[999] were refused" in line


def test_garbage_is_collected_by_nobody_else_while_it_runs() -> None:
    seen: list[bool] = []
    robot = Robot(read=lambda stamp_ns: (seen.append(gc.isenabled()), {})[1])
    robot.loop.run(0.02)
    assert seen
    assert not any(seen)
    assert gc.isenabled()


def test_an_action_is_what_the_policy_said() -> None:
    robot = Robot()
    written: list[Any] = []
    loop = ControlLoop(500.0, None, written.append, robot, hold=lambda: None)
    robot.receive(0)
    loop.tick()
    robot.clock.advance(DT_NS // 2)
    loop.tick()
    np.testing.assert_array_equal(written, np.array([[0, 0], [0.5, -0.5]], np.float32))


def test_the_robots_side_never_imports_torch() -> None:
    code = (
        "import sys, ppstream.robot_async, ppstream.control_loop;"
        "bad = {'torch', 'ppstream.config', 'ppstream.sessions'} & set(sys.modules);"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
