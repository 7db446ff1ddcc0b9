"""What the robot-side tests share: a small configuration, rows, and rank 0's loop on a thread."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np

from ppstream.config.rules import problems
from ppstream.config.schema import (
    ActionConfig,
    BatchConfig,
    PipelineConfig,
    PolicyConfig,
    ServiceConfig,
    StreamConfig,
    WindowConfig,
)
from ppstream.core.clock import now_ns
from ppstream.core.waiter import Waiter
from ppstream.ingest.ring import RingBank
from ppstream.ingest.rows import RowInput
from ppstream.robot.client import RobotClient
from ppstream.sessions.server import Sessions
from ppstream.wire.robot_messages import ActionChunk

MS = 1_000_000
STREAMS = (("joints", 3), ("imu", 2, "float64"))
ACTIONS = ("dx", "dy")
HORIZON, DT_NS, LEASE_NS = 4, 10 * MS, 200 * MS
ANY_PORT = "tcp://127.0.0.1:0"
LOOK_S, LOOK_MAX_S = 0.002, 0.05  # between two looks for what is waited for
default_endpoint = ANY_PORT  # of configurations; the fixture either_socket changes it


def make_config(
    endpoint: str | None = None, *, rows: int = 1, dt_ns: int = DT_NS, lease_ns: int = LEASE_NS
) -> PipelineConfig:
    return PipelineConfig(
        name="rig",
        streams=(
            StreamConfig(name="joints", dim=3, rate_hz=100.0),
            StreamConfig(name="imu", dim=2, rate_hz=50.0, dtype="float64"),
        ),
        window=WindowConfig(steps=4, dt_ms=10.0),
        actions=ActionConfig(
            names=ACTIONS,
            horizon=HORIZON,
            dt_ms=dt_ns / MS,
            low=(-1.0, -1.0),
            high=(1.0, 1.0),
            lease_ms=lease_ns / MS,
        ),
        policy=PolicyConfig(target="nobody:asks"),
        batch=BatchConfig(rows=rows),
        service=ServiceConfig(endpoint=endpoint or default_endpoint),
    )


def service_problems(endpoint: str, **fields: object) -> list[str]:
    """What is wrong with the service of a configuration with these fields."""
    config = make_config(endpoint)
    service = msgspec.structs.replace(config.service, **fields)
    lines = problems(msgspec.structs.replace(config, service=service))
    return [line for line in lines if line.startswith("service.")]


def make_rows(
    config: PipelineConfig, ring_samples: int = 1024, reference: str = "joints"
) -> list[RowInput]:
    banks = {s.name: RingBank(s, config.batch.rows, ring_samples) for s in config.streams}
    return [RowInput(banks, row, reference) for row in range(config.batch.rows)]


def make_chunk(
    seq: int = 0, *, session: int = 1, episode: int = 0, end_ns: int = 0, **changes: Any
) -> ActionChunk:
    """A chunk whose step i is ``[i, -i] + seq / 1000``, its first step one dt behind the window."""
    horizon = changes.get("horizon", HORIZON)
    steps = np.arange(horizon, dtype=np.float32)
    actions = np.stack([steps, -steps], axis=1) + np.float32(seq / 1000)
    fields: dict[str, Any] = {
        "session": session,
        "session_epoch": episode,
        "epoch": 0,
        "seq": seq,
        "window_end_ns": end_ns,
        "start_ns": end_ns + DT_NS,
        "dt_ns": DT_NS,
        "expires_ns": end_ns + LEASE_NS,
        "horizon": horizon,
        "actions": memoryview(actions.tobytes()),
    }
    return ActionChunk(**{**fields, **changes})


class Server:
    """Rank 0's ingest on a thread; answers each newest ``joints`` sample while ``answers``."""

    def __init__(
        self,
        config: PipelineConfig,
        *,
        phase: str = "ready",
        answers: bool = False,
        ring_samples: int = 1024,
        dt_ns: int | None = None,
        lease_ns: int | None = None,
    ) -> None:
        self.rows = make_rows(config, ring_samples)
        self.sessions = Sessions(config, self.rows)
        self.waiter = Waiter()
        self.waiter.register(self.sessions.fds[0])
        self.sessions.set_wake(self.waiter.wake)
        self.emitted = 0
        self._orders: list[Callable[[], None]] = [lambda: self.sessions.set_phase(phase)]
        self.answers = answers
        self._dt_ns = dt_ns or round(config.actions.dt_ms * MS)  # of its chunks
        self._lease_ns = lease_ns or round(config.actions.lease_ms * MS)
        self._answered_ns = [0] * len(self.rows)
        self._end = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def order(self, action: Callable[[], None]) -> None:
        """Have the owner's thread do something, and wait until it has."""
        done = threading.Event()

        def act() -> None:
            action()
            done.set()

        self._orders.append(act)
        self.waiter.wake()
        assert done.wait(60), self._failure

    def close(self) -> None:
        self._end = True
        self.waiter.wake()
        self._thread.join(10)
        self.sessions.close()
        self.waiter.close()
        if self._failure is not None:
            raise self._failure
        for row in self.rows:
            for ring in row.rings.values():
                ring.check()

    def _run(self) -> None:
        try:
            while not self._end:
                while self._orders:
                    self._orders.pop(0)()
                self.waiter.wait(50 * MS)
                self.sessions.drain(now_ns())
                if self.answers:
                    self._answer()
        except BaseException as error:
            self._failure = error
            raise

    def _answer(self) -> None:
        for index, row in enumerate(self.rows):
            end_ns = row.rings["joints"].newest_ns
            if row.present and end_ns > self._answered_ns[index]:
                self._answered_ns[index] = end_ns
                of = {"session": row.session, "episode": row.session_epoch, "end_ns": end_ns}
                times = {"dt_ns": self._dt_ns, "expires_ns": end_ns + self._lease_ns}
                self.sessions.emit(index, make_chunk(self.emitted, **of, **times))
                self.emitted += 1


@contextmanager
def serving(config: PipelineConfig | None = None, **options: Any) -> Iterator[Server]:
    server = Server(config or make_config(), **options)
    try:
        yield server
    finally:
        server.close()


def make_client(endpoint: str, **options: Any) -> RobotClient:
    defaults: dict[str, Any] = {"robot": "arm", "streams": STREAMS, "actions": ACTIONS}
    return RobotClient(endpoint, **{**defaults, **options})


def wait_until(
    condition: Callable[[], object],
    *,
    seconds: float = 60.0,
    found: Callable[[], object] = lambda: "",
) -> None:
    """Wait for what another thread or process does; fails after ``seconds``, and says ``found``.

    The longer it takes the more seldom it looks: that costs no more than a share of the time.
    """
    began_ns = now_ns()
    while not condition():
        waited_s = (now_ns() - began_ns) / 1e9
        assert waited_s < seconds, f"it did not happen in time {found()}"
        time.sleep(min(max(LOOK_S, waited_s / 16), LOOK_MAX_S))


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """No file of this process grows beyond ``size``: what a full disk does to a log."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
