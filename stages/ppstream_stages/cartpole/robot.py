"""The demo's robot: ``python -m ppstream_stages.cartpole.robot --endpoint E``. No torch.

A cart-pole simulated at 1 kHz in real time that knows the pipeline only through ``RobotClient``:
samples in its own clock out, action chunks in. A fixture holds it until the run is ready; then it
is kicked, and falls unless what comes back is good and in time. At the end it says how it went.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
from collections import deque
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from ppstream import ClientStatistics, PpstreamError, RobotClient
from ppstream.core.clock import NS_PER_MS, NS_PER_S, now_ns
from ppstream.core.durations import Durations
from ppstream.core.interpreter import set_switch_interval
from ppstream_stages.cartpole.layout import ACTION, STREAMS
from ppstream_stages.cartpole.physics import CartPole, Reading

PERIOD_NS: Final = 2 * NS_PER_MS  # of wake-ups: one action, two steps of physics, one message
BEHIND_NS: Final = 100 * NS_PER_MS  # further behind than this, simulated time is let go
CONNECT_S: Final = 60.0
LONELY_NS: Final = 3 * NS_PER_S  # without a session for this long, the run is over
RELEASE_AFTER_NS: Final = NS_PER_S // 2  # after ready: rank 0 has to fill its first window
OVER: Final = frozenset({"draining", "stopped"})


class Ages(msgspec.Struct, frozen=True):
    """Observation to action in the robot's clock, over chunks of which an action was executed."""

    count: int
    p50_ms: float
    p99_ms: float
    max_ms: float


class Story(msgspec.Struct, frozen=True):
    """Summary that the robot prints at the end (``--report``)."""

    released: bool
    stood_s: float
    fell: bool
    fell_after_s: float | None
    extra_delay_ms: float
    age: Ages
    chunks: int
    chunks_executed: int
    chunks_refused: dict[str, int]
    idle_share: float  # of the steps since release: nothing could be executed
    late_p99_ms: float  # of wake-ups, which are due every 2 ms
    stalls: int  # simulated time let go because the process was not run
    cpu_share: float  # of one core

    def line(self) -> str:
        """One line for people."""
        if not self.released:
            return "robot: never released, the run did not become ready"
        end = f"FELL after {self.fell_after_s:.2f} s" if self.fell else "still standing"
        age = self.age
        ages = f"p50 {age.p50_ms:.1f}  p99 {age.p99_ms:.1f}  max {age.max_ms:.1f} ms"
        if not age.count:
            refused = (
                ", ".join(f"{n} {why}" for why, n in self.chunks_refused.items()) or "none came"
            )
            ages = f"no action was executed ({refused})"
        extra = f", {self.extra_delay_ms:g} ms of it added" if self.extra_delay_ms else ""
        return (
            f"robot: pole stood {self.stood_s:.1f} s, {end}; observation to action{extra}: {ages}"
        )


class CartPoleRobot:
    """The body in real time, and its client.

    Args:
        endpoint: of rank 0.
        extra_delay_ms: its samples leave this much later, so its actions are that much older.
        seed: of kicks and noise.
    """

    def __init__(self, endpoint: str, extra_delay_ms: float, seed: int) -> None:
        self.extra_delay_ms = extra_delay_ms
        self.body = CartPole(seed)
        # An origin of its own: whoever compares its stamps with another clock gets nonsense.
        self._origin_ns = random.Random(seed).randrange(10**15, 10**18) - now_ns()
        self.client = RobotClient(
            endpoint,
            robot=f"cartpole-{os.getpid()}",
            streams=[(stream.name, len(stream.fields)) for stream in STREAMS],
            actions=[ACTION],
            clock=self.clock,
        )
        self.is_stopping = False
        self._start_ns = 0  # robot time of the body's step 0
        self._leaving: deque[tuple[int, list[Reading]]] = deque()  # when each batch may leave
        self._alone_since_ns = 0
        self._ready_since_ns = 0
        self._is_idle = False
        self._idle_steps = 0
        self._stalls = 0
        self._late = Durations()

    def clock(self) -> int:
        """The robot's own time."""
        return now_ns() + self._origin_ns

    def run(self) -> Story:
        """Live until the run is over or a signal comes.

        Raises:
            PpstreamError: no session could be opened, or the client failed.
        """
        self.client.connect(CONNECT_S)
        began_ns, began_cpu_s = now_ns(), time.process_time()
        self._start_ns = self.clock()
        due_ns = self._start_ns
        try:
            while not self._is_over():
                due_ns = self._sleep_until(due_ns + PERIOD_NS)
                self._live(due_ns)
        finally:
            self.client.close()
        cpu_share = (time.process_time() - began_cpu_s) / max(
            (now_ns() - began_ns) / NS_PER_S, 1e-9
        )
        return self._story(cpu_share)

    def _is_over(self) -> bool:
        if self.is_stopping or self.client.phase in OVER:
            return True
        if self.client.connected:
            self._alone_since_ns = 0
            return False
        self._alone_since_ns = self._alone_since_ns or now_ns()
        return now_ns() - self._alone_since_ns > LONELY_NS

    def _sleep_until(self, due_ns: int) -> int:
        """Wait for ``due_ns``; returns it, or the present when that lies hopelessly behind."""
        remaining_ns = due_ns - self.clock()
        if remaining_ns > 0:
            time.sleep(remaining_ns * 1e-9)
        late_ns = self.clock() - due_ns
        self._late.add(late_ns)
        if late_ns <= BEHIND_NS:
            return due_ns
        self._stalls += 1
        self._start_ns += late_ns  # a body has no past to catch up with: its time stood still
        return due_ns + late_ns

    def _live(self, until_ns: int) -> None:
        """All steps due before ``until_ns``, and off with their samples."""
        self._release_when_due()
        force = self._force(self.clock())  # of the present: an age counts the lateness, too
        samples: list[Reading] = []
        while self._start_ns + self.body.now_ns < until_ns:
            samples += self.body.step(force)
            self._idle_steps += self._is_idle
        self._leaving.append((until_ns + round(self.extra_delay_ms * NS_PER_MS), samples))
        while self._leaving and self._leaving[0][0] <= until_ns:
            self._send(self._leaving.popleft()[1])

    def _release_when_due(self) -> None:
        if self.body.released_step is not None or not self.client.ready:
            return
        self._ready_since_ns = self._ready_since_ns or now_ns()
        if now_ns() - self._ready_since_ns >= RELEASE_AFTER_NS:
            self.body.release()

    def _force(self, present_ns: int) -> float:
        """Returns the force that is due, or none: a cart-pole holds still by doing nothing."""
        action = self.client.timeline.action_at(present_ns)
        is_usable = action is not None and self.client.ready
        self._is_idle = self.body.released_step is not None and not is_usable
        return float(action[0]) if action is not None and is_usable else 0.0

    def _send(self, samples: list[Reading]) -> None:
        # The encoder leaves last: its arrival starts a window, which should hold the others, too.
        for index, stream in reversed(list(enumerate(STREAMS))):
            batch = [sample for sample in samples if sample.stream == index]
            if batch:
                stamps = np.array([sample.stamp_ns for sample in batch]) + self._start_ns
                self.client.push(stream.name, stamps, np.stack([s.values for s in batch]))

    def _story(self, cpu_share: float) -> Story:
        body, statistics = self.body, self.client.statistics()
        lived = body.steps - (body.released_step or 0)
        return Story(
            released=body.released_step is not None,
            stood_s=body.stood_ns / NS_PER_S,
            fell=body.fell_step is not None,
            fell_after_s=body.stood_ns / NS_PER_S if body.fell_step is not None else None,
            extra_delay_ms=self.extra_delay_ms,
            age=_ages(statistics),
            chunks=statistics.timeline.received,
            chunks_executed=statistics.timeline.executed,
            chunks_refused=statistics.timeline.refused,
            idle_share=self._idle_steps / max(lived, 1),
            late_p99_ms=self._late.quantiles().p99_ns / NS_PER_MS,
            stalls=self._stalls,
            cpu_share=cpu_share,
        )


def _ages(statistics: ClientStatistics) -> Ages:
    age = statistics.age
    quantiles = (age.p50_ns, age.p99_ns, age.max_ns)
    return Ages(age.count, *(nanoseconds / NS_PER_MS for nanoseconds in quantiles))


def main() -> int:
    """Run the robot; its last line of output is the summary."""
    parser = argparse.ArgumentParser(description="The cart-pole robot of the demo.")
    parser.add_argument("--endpoint", required=True, help="where rank 0 listens")
    parser.add_argument("--extra-delay-ms", type=float, default=0.0, help="samples leave later")
    parser.add_argument("--seed", type=int, default=0, help="of kicks and noise")
    parser.add_argument("--report", type=Path, help="JSON file for the summary")
    chosen = parser.parse_args()
    robot = CartPoleRobot(chosen.endpoint, chosen.extra_delay_ms, chosen.seed)

    def stop(number: int, frame: object) -> None:
        robot.is_stopping = True
        if not robot.client.connected:  # it waits for a session, and moves nothing
            raise SystemExit

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    set_switch_interval()
    try:
        story = robot.run()
    except PpstreamError as error:
        print(f"robot: {error}", file=sys.stderr)
        return int(error.exit_code)
    if chosen.report is not None:
        partial = chosen.report.with_suffix(".partial")
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(story), indent=2))
        partial.rename(chosen.report)
    print(story.line(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
