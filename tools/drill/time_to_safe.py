"""Time that a robot needs to be safe, for each way in which the other side can fail it.

Used by ``bench/robots.py``. A control loop at 500 Hz executes what two real ranks send; then one of
them is killed or frozen by a real signal, or the client's receiving thread is blocked or ended.
Safe is the first tick at which the loop holds. All instants are this host's one clock.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from bench.latency import NAMES, STATE_DIM, rank_settings, wait_ready
from real_runs import RankPair

from ppstream.core.clock import NS_PER_S, now_ns
from ppstream.robot.client import RobotClient
from ppstream.robot.control_loop import ControlLoop
from ppstream.wire.robot_messages import ActionChunk

RATE_HZ: Final = 500.0
LEASE_MS: Final = 200.0  # of rank_settings
LIMIT_S: Final = 10.0
MOVING: Final = 50  # executed ticks before a fault, and after it was cleared
POLL_S: Final = 0.002
RUN_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class SafeTime:
    """From the fault, in ms: to the last action executed, and to the first tick that held."""

    fault: str
    last_action_ms: float
    safe_ms: float
    oldest_ms: float  # of all actions executed until then
    resumed: bool  # by itself, once actions came again


class Body:
    """A robot that notes when it moved and when it held, on a control loop of its own thread."""

    def __init__(self, endpoint: str, robot: str) -> None:
        streams = [("state", STATE_DIM)]
        self._state = np.linspace(-0.5, 0.5, STATE_DIM, dtype=np.float32)
        self.on_chunk: Callable[[], None] = lambda: None
        self.client = RobotClient(
            endpoint, robot=robot, streams=streams, actions=NAMES, on_chunk=self._arrived
        )
        self.loop = ControlLoop(
            RATE_HZ, lambda at_ns: {"state": self._state}, self._write, self.client, hold=self._hold
        )
        self.moved_ns = 0
        self.held_ns = 0  # the first time since it moved last
        self._thread = threading.Thread(target=self.loop.run)

    @contextmanager
    def living(self, ranks: RankPair) -> Iterator[Body]:
        """Connected and moving inside."""
        with self.client:
            wait_ready(self.client, ranks)
            self._thread.start()
            try:
                self.until_moving()
                yield self
            finally:
                self.loop.end()
                self._thread.join(LIMIT_S)

    def until_moving(self) -> None:
        executed = self.loop.statistics().executed
        wait_for(lambda: self.loop.statistics().executed > executed + MOVING, "it does not move")

    def safe_after(self, fault: str, cause: Callable[[], None]) -> SafeTime:
        """Cause a fault, and measure."""
        time.sleep(random.uniform(0, 0.02))  # any moment of a tick and of an envelope
        self.held_ns = 0
        fault_ns = now_ns()
        cause()
        wait_for(lambda: self.loop.fault is not None and self.held_ns, f"{fault}: no fault")
        time.sleep(0.1)  # would it move again?
        oldest_ns = self.client.timeline.statistics().oldest_ns
        last_ns, safe_ns = self.moved_ns - fault_ns, self.held_ns - fault_ns
        return SafeTime(fault, last_ns / 1e6, safe_ns / 1e6, oldest_ns / 1e6, resumed=False)

    def resumes(self) -> bool:
        """True when it moves by itself once chunks come again."""
        received = self.client.timeline.statistics().received
        wait_for(
            lambda: self.client.timeline.statistics().received > received + MOVING, "no chunk came"
        )
        executed = self.loop.statistics().executed
        time.sleep(0.2)
        return self.loop.statistics().executed > executed

    def _write(self, action: Any) -> None:
        self.moved_ns, self.held_ns = now_ns(), 0

    def _hold(self) -> None:
        self.held_ns = self.held_ns or now_ns()

    def _arrived(self, chunk: ActionChunk) -> None:
        self.on_chunk()


def measure_faults(folder: Path) -> tuple[list[SafeTime], dict[str, float]]:
    """Every fault once, and how long after the end of some the robot moved again, in ms."""
    found: list[SafeTime] = []
    recovery_ms: dict[str, float] = {}
    with _pair(folder / "a") as (ranks, endpoint):
        for fault in ("receiving thread blocked", "receiving thread ended"):
            body = Body(endpoint, fault.replace(" ", "-"))
            with body.living(ranks):
                found.append(_lose_thread(body, fault))
        body = Body(endpoint, "arm")
        with body.living(ranks):
            for rank, name in enumerate(("rank 0", "policy rank")):
                pid = ranks.processes[rank].pid
                safe, ms = _freeze(body, f"{name} frozen", pid)
                found.append(safe)
                recovery_ms[f"{name} thawed, to the next action"] = ms
            found.append(body.safe_after("policy rank killed", ranks.processes[1].kill))
    with _pair(folder / "b") as (ranks, endpoint):
        body = Body(endpoint, "arm")
        with body.living(ranks):
            found.append(body.safe_after("rank 0 killed", ranks.processes[0].kill))
            ranks.processes[1].kill()
            recovery_ms |= _restart(body, folder / "c", endpoint)
    return found, recovery_ms


def _lose_thread(body: Body, fault: str) -> SafeTime:
    release = threading.Event()

    def block() -> None:
        release.wait(LIMIT_S)

    def end() -> None:
        raise RuntimeError("the callback failed, as it was told to")

    def cause() -> None:
        body.on_chunk = block if "blocked" in fault else end

    safe = body.safe_after(fault, cause)
    release.set()
    return safe


def _freeze(body: Body, fault: str, pid: int) -> tuple[SafeTime, float]:
    safe = body.safe_after(fault, lambda: os.kill(pid, signal.SIGSTOP))
    thawed_ns = now_ns()
    os.kill(pid, signal.SIGCONT)
    received = body.client.timeline.statistics().received
    wait_for(lambda: body.client.timeline.statistics().received > received, "nothing came back")
    recovered_ms = (now_ns() - thawed_ns) / 1e6
    resumed = body.resumes()
    body.loop.clear_fault()
    body.until_moving()
    return SafeTime(fault, safe.last_action_ms, safe.safe_ms, safe.oldest_ms, resumed), recovered_ms


def _restart(body: Body, folder: Path, endpoint: str) -> dict[str, float]:
    """New ranks at the same endpoint: from their bind to the session, as the robot saw it."""
    path = Path(endpoint.removeprefix("unix://"))
    path.unlink(missing_ok=True)
    folder.mkdir()
    with RankPair(folder, "bench", _settings(endpoint)):
        wait_for(path.exists, "rank 0 does not bind", limit_s=60.0)
        bound_ns = now_ns()
        wait_for(lambda: body.client.connected, "no session", limit_s=60.0)
        opened_ms = (now_ns() - bound_ns) / 1e6
    return {"server back, to the new session": opened_ms}


@contextmanager
def _pair(folder: Path) -> Iterator[tuple[RankPair, str]]:
    folder.mkdir(0o700)
    endpoint = f"unix://{folder}/robots"
    with RankPair(folder, "bench", _settings(endpoint)) as ranks:
        yield ranks, endpoint


def _settings(endpoint: str) -> list[str]:
    return rank_settings(endpoint, "serial", RATE_HZ, RUN_S)


def wait_for(condition: Callable[[], object], why: str, limit_s: float = LIMIT_S) -> None:
    """Poll for what another thread or process does; exits when it does not come."""
    deadline_ns = now_ns() + round(limit_s * NS_PER_S)
    while not condition():
        if now_ns() > deadline_ns:
            raise SystemExit(f"{why} within {limit_s:g} s")
        time.sleep(POLL_S)
