from __future__ import annotations

import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from robot_rig import DT_NS, LEASE_NS, MS, make_chunk, wait_until

from ppstream.core.clock import NS_PER_S, ManualClock
from ppstream.core.errors import PpstreamError, ReceiverEndedError
from ppstream.core.realtime import PR_GET_TIMERSLACK, NotPermittedError, RealTime
from ppstream.robot import control_loop
from ppstream.robot.control_loop import ControlLoop, LoopFault
from ppstream.robot.timeline import ActionTimeline


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


def test_a_loop_that_executed_nothing_says_why_its_chunks_were_refused() -> None:
    robot = Robot()
    robot.tick()
    assert robot.loop.statistics().line().endswith("; no action executed")
    late_ns = robot.clock() - LEASE_NS
    assert robot.timeline.merge(make_chunk(0, end_ns=late_ns), robot.clock()) == "superseded"
    said = "no action executed; of 1 chunk refused: 1 superseded"
    assert robot.loop.statistics().line().endswith(said)
    robot.receive(1)
    robot.tick()
    assert "refused" not in robot.loop.statistics().line()


def test_an_expired_lease_is_a_fault_that_stays() -> None:
    robot = Robot()
    robot.receive(0)
    assert robot.tick() == "write"
    assert robot.tick(LEASE_NS - DT_NS) == "write"
    assert robot.tick(1) == "hold"
    assert robot.loop.fault == LoopFault("lease", LEASE_NS - DT_NS + 1, LEASE_NS - DT_NS)
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


def test_a_run_that_is_no_longer_ready_owes_nothing_to_a_new_episode() -> None:
    robot = Robot()
    robot.receive(0)
    assert robot.tick() == "write"
    robot.timeline.clear()
    robot.tick()
    robot.ready = False
    assert robot.tick() == "hold"
    assert robot.loop.fault is None


def test_a_client_that_is_closed_while_the_loop_ticks_is_a_fault() -> None:
    robot = Robot()
    robot.receive(0)
    assert robot.tick() == "write"
    robot.timeline.close()
    assert robot.tick() == "hold"
    assert robot.loop.fault is not None
    assert robot.loop.fault.reason == "client"


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
    statistics = robot.loop.statistics()
    assert (statistics.oldest_ns, statistics.max_age_ns) == (50 * MS, 50 * MS)
    assert statistics.oldest_text() == "oldest action executed: 50.0 ms of 50"
    assert statistics.line() == (
        "4 ticks, 0 missed; 2 executed, 2 held, faults: 1 (last: lease); "
        "oldest action executed: 50.0 ms of 50"
    )
    assert replace(statistics, ticks=1).line().startswith("1 tick, 0 missed; ")
    assert replace(statistics, fault="drive \x1b[2J\udcff").line().isprintable()


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


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("on_expiry", ["hold", "stop", "home"])
def test_a_stop_ramps_at_once_and_nothing_but_clear_fault_ends_it(
    on_expiry: str, resume: bool
) -> None:
    robot = Robot(on_expiry=on_expiry, hold_ms=10.0, ramp_ms=40.0, resume=resume)
    robot.receive(0)
    assert robot.tick() == "write"
    robot.loop.stop("operator")
    fault = robot.loop.fault
    assert fault == LoopFault("stop", robot.clock(), None, "operator")
    for seq in range(1, 7):
        robot.receive(seq)
        assert robot.tick(10 * MS) == "stop"
        robot.loop.stop("again")
        assert robot.loop.fault is fault
    np.testing.assert_allclose(robot.left, [0.75, 0.5, 0.25, 0.0, 0.0, 0.0])
    assert robot.loop.statistics().faults == 1
    robot.loop.clear_fault()
    assert robot.tick() == "write"
    assert robot.loop.fault is None


def test_a_stop_of_a_robot_without_a_ramp_holds() -> None:
    robot = Robot(stop=None, on_expiry="home")
    robot.receive(0)
    robot.tick()
    robot.loop.stop("operator")
    for _ in range(5):
        assert robot.tick(LEASE_NS) == "hold", "it went home"


def test_nothing_is_left_of_the_motion_of_a_robot_that_stops_at_rest() -> None:
    robot = Robot(ramp_ms=40.0)
    robot.loop.stop("before it ever moved")
    assert robot.tick() == "stop"
    assert robot.left == [0.0]
    robot.loop.clear_fault()
    robot.receive(0)
    robot.tick()
    assert robot.tick(LEASE_NS) == "hold"  # the lease is over: it holds already
    robot.loop.stop("operator")
    assert robot.tick() == "stop"
    assert robot.left == [0.0, 0.0]


def test_a_stop_during_a_ramp_lets_it_go_on() -> None:
    robot = Robot(on_expiry="stop", ramp_ms=40.0)
    robot.receive(0)
    robot.tick()
    robot.tick(LEASE_NS)
    robot.tick(10 * MS)
    robot.loop.stop("operator")
    robot.tick(10 * MS)
    robot.tick(10 * MS)
    np.testing.assert_allclose(robot.left, [1.0, 0.75, 0.5, 0.25])


def test_a_stop_on_the_way_home_ramps_from_the_motion_that_home_made() -> None:
    robot = Robot(on_expiry="home", ramp_ms=40.0)
    robot.receive(0)
    robot.tick()
    assert robot.tick(LEASE_NS) == "home"
    robot.loop.stop("operator")
    for _ in range(5):
        assert robot.tick(10 * MS) == "stop"
    np.testing.assert_allclose(robot.left, [0.75, 0.5, 0.25, 0.0, 0.0])


def test_nothing_is_left_of_the_motion_of_a_robot_that_stops_at_home() -> None:
    at_home = iter([False, True])
    robot = Robot(on_expiry="home", ramp_ms=40.0, home=lambda: next(at_home))
    robot.receive(0)
    robot.tick()
    robot.tick(LEASE_NS)
    robot.tick(10 * MS)
    robot.loop.stop("operator")
    for _ in range(2):
        assert robot.tick(10 * MS) == "stop"
    assert robot.left == [0.0, 0.0]


def test_a_second_fault_tells_nothing_more_of_a_motion_that_is_at_rest() -> None:
    robot = Robot(on_expiry="stop", ramp_ms=50.0)
    robot.receive(0)
    robot.tick()
    robot.tick(LEASE_NS)
    for _ in range(8):
        robot.tick(10 * MS)
    assert robot.left[-1] == 0.0
    robot.timeline.fail("it ended", "client: it ended")
    robot.loop.clear_fault()
    for _ in range(4):
        assert robot.tick(10 * MS) == "stop"
    assert robot.left[-4:] == [0.0] * 4


def test_a_stop_on_the_way_home_ramps_also_when_a_stop_before_it_had_ended() -> None:
    robot = Robot(on_expiry="home", ramp_ms=40.0)
    robot.receive(0)
    robot.tick()
    robot.loop.stop("operator")
    robot.tick(LEASE_NS)
    assert robot.left == [0.0]
    robot.timeline.fail("it ended", "client: it ended")
    robot.loop.clear_fault()
    assert robot.tick() == "home"
    robot.loop.stop("operator")
    assert robot.tick(10 * MS) == "stop"
    assert robot.left == [0.0, 0.75]


ORDERS = st.lists(
    st.tuples(
        st.sampled_from(["receive", "stop", "clear", "unready", "ready", "fail", "reset", "wait"]),
        st.sampled_from([0, MS, 7 * MS, 30 * MS, LEASE_NS]),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(
    orders=ORDERS,
    on_expiry=st.sampled_from(["hold", "stop", "home"]),
    resume=st.booleans(),
    hold_ms=st.sampled_from([0.0, 20.0]),
)
def test_a_fault_executes_nothing_and_what_is_left_of_a_motion_never_grows(
    orders: list[tuple[str, int]], on_expiry: str, resume: bool, hold_ms: float
) -> None:
    robot = Robot(on_expiry=on_expiry, resume=resume, hold_ms=hold_ms, ramp_ms=50.0)
    for seq, (order, after_ns) in enumerate(orders):
        was_stopped = robot.loop.fault is not None and robot.loop.fault.reason == "stop"
        if order == "receive":
            robot.receive(seq)
        elif order == "stop":
            robot.loop.stop("somebody")
            was_stopped = True
        elif order == "clear":
            robot.loop.clear_fault()
            was_stopped = False
        elif order in ("ready", "unready"):
            robot.ready = order == "ready"
        elif order == "fail":
            robot.timeline.fail("it ended", "client: it ended")
        elif order == "reset":
            robot.timeline.clear()
        before = len(robot.left)
        did = robot.tick(after_ns)
        assert did != "write" or robot.loop.fault is None
        if was_stopped:  # it holds while the fault before still has it hold
            assert did in ("stop", "hold")
            assert robot.loop.fault is not None
        if did in ("write", "home"):
            robot.left.clear()  # it moves: a ramp may begin anew
            assert did == "home" or robot.timeline.failure is None
        elif before and len(robot.left) > before:
            assert robot.left[-1] <= robot.left[-2]


def test_a_dead_receiving_thread_is_a_fault_that_cannot_be_cleared() -> None:
    for resume in (False, True):
        robot = Robot(read=lambda stamp_ns: {"joints": [0]}, resume=resume)
        robot.receive(0)
        assert robot.tick() == "write"
        robot.timeline.fail("the receiving thread ended: KeyError", "client: ended")
        for _ in range(3):
            assert robot.tick() == "hold"
        fault = robot.loop.fault
        assert fault is not None
        assert (fault.reason, fault.text) == ("client", "the receiving thread ended: KeyError")
        robot.loop.clear_fault()
        assert robot.tick() == "hold"
        assert robot.loop.fault is not None
        assert robot.loop.statistics().faults == 2


def test_a_client_that_fails_between_read_and_push_is_latched_and_not_raised() -> None:
    robot = Robot(read=lambda stamp_ns: {"joints": [0]})

    def push(*_: Any) -> bool:
        robot.timeline.fail("ended", "client: ended")
        raise ReceiverEndedError("ended")

    robot.push = push  # type: ignore[method-assign]
    assert robot.tick() == "hold"
    assert robot.loop.fault is not None
    assert robot.loop.fault.reason == "client"


def test_a_stop_from_a_signal_handler_ends_a_running_motion() -> None:
    def read(stamp_ns: int) -> dict[str, Any]:
        robot.receive(len(robot.did))
        if len(robot.did) == 5:
            os.kill(os.getpid(), signal.SIGUSR2)
        if len(robot.did) == 15:
            robot.loop.end()
        return {}

    robot = Robot(read=read, ramp_ms=0.0)
    before = signal.signal(signal.SIGUSR2, lambda *_: robot.loop.stop("signal"))
    try:
        robot.loop.run(30.0)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert robot.did == ["write"] * 5 + ["stop"] * 11 + ["hold"]
    assert str(robot.loop.fault) == "stop: signal"


def test_a_stop_from_another_thread_ends_a_running_motion() -> None:
    robot = Robot(read=lambda stamp_ns: (robot.receive(len(robot.did)), {})[1])
    thread = threading.Thread(target=robot.loop.run)
    thread.start()
    wait_until(lambda: robot.loop.statistics().executed > 3)
    robot.loop.stop("button")
    wait_until(lambda: robot.left)  # a tick under way may still have executed its action
    executed = robot.loop.statistics().executed
    held = robot.loop.statistics().held
    wait_until(lambda: robot.loop.statistics().held > held + 5)
    assert robot.loop.statistics().executed == executed
    robot.loop.clear_fault()
    wait_until(lambda: robot.loop.statistics().executed > executed)
    robot.loop.end()
    thread.join(10)
    assert not thread.is_alive()


def test_a_loop_that_was_ended_does_not_pretend_to_run() -> None:
    robot = Robot()
    robot.loop.run(0.01)
    robot.loop.run(0.01)  # its time was over: it may go on
    robot.loop.end()
    robot.receive(0)
    with pytest.raises(PpstreamError, match=r"has ended.*stop\(reason\), and clear_fault\(\)"):
        robot.loop.run(1.0)
    assert "write" not in robot.did


def test_what_a_tick_raises_is_a_fault_that_others_see() -> None:
    robot = Robot(read=lambda stamp_ns: {}["nothing"])
    robot.receive(0)
    with pytest.raises(KeyError):
        robot.loop.run(1.0)
    assert str(robot.loop.fault) == "loop: KeyError: 'nothing'"
    assert robot.timeline.holds(robot.clock()).fault == "loop: KeyError: 'nothing'"
    assert robot.loop.statistics().faults == 1


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


def test_a_tick_that_takes_long_misses_those_that_were_due_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def read(stamp_ns: int) -> dict[str, Any]:
        if stamp_ns == 3 * period_ns:
            robot.clock.advance(7 * period_ns // 2)
        return {}

    robot = Robot(read=read)
    period_ns = robot.loop.period_ns
    sleep = lambda seconds: robot.clock.advance(round(seconds * NS_PER_S))  # noqa: E731
    monkeypatch.setattr(control_loop, "now_ns", robot.clock)
    monkeypatch.setattr(control_loop, "time", SimpleNamespace(sleep=sleep))
    statistics = robot.loop.run(10 * period_ns / NS_PER_S)
    assert (statistics.ticks, statistics.missed_ticks) == (8, 2)  # the 4th is late, not missed


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


def test_its_sleeps_end_on_time_while_it_runs() -> None:
    def slack_ns() -> int:
        return ctypes.CDLL(None).prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0)

    before_ns, seen = slack_ns(), []
    robot = Robot(read=lambda stamp_ns: (seen.append(slack_ns()), {})[1])
    robot.loop.run(0.02)
    assert set(seen) == {1}
    assert slack_ns() == before_ns


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
        "import sys, ppstream.robot.async_client, ppstream.robot.control_loop;"
        "bad = {'torch', 'ppstream.config.schema', 'ppstream.sessions.server'} & set(sys.modules);"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
