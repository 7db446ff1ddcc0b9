"""The drill's robot, a process of its own: RobotClient and ControlLoop, nothing simulated.

Prints one line per control tick: the time, ``moved`` or ``held``, the age that the action claims,
and its true age: each sample of the joints carries a count, the policy copies the newest one's into
its actions, and only this robot knows when it was sent. Orders come as lines on standard input,
``NAME VALUE``: they change how its sensors lie, press its stop button or break its callback.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # behind an installation, if there is one

import numpy as np

from ppstream.core.clock import NS_PER_MS, NS_PER_S, now_ns
from ppstream.robot.client import RobotClient
from ppstream.robot.control_loop import ControlLoop

STREAMS: Final = (("joints", 3), ("imu", 2))
ACTIONS: Final = ("a", "b", "count")
KEPT: Final = 6000  # samples whose time is known: a minute
IMU_EVERY: Final = 2  # ticks
CONNECT_S: Final = 60.0


class DrillRobot:
    """Sensors that can be told to lie, and a body that notes each tick."""

    def __init__(self, endpoint: str, rate_hz: float) -> None:
        self.orders: dict[str, float] = {}
        self._tick = 0
        self._thread = threading.get_ident()  # that ticks
        self._now_ns = 0  # as of its newest look at the clock
        self._sent_ns: dict[int, int] = {}  # by count
        self._before: dict[str, np.ndarray[Any, Any]] = {}
        self.client = RobotClient(
            endpoint, robot="drill", streams=STREAMS, actions=ACTIONS, clock=self.clock
        )
        self.loop = ControlLoop(
            rate_hz, self.read, self.move, self.client, hold=self.hold, resume=True
        )

    def clock(self) -> int:
        """The robot's clock, which can be set; the loop asks it before it reads and decides."""
        now = now_ns()
        if threading.get_ident() == self._thread:
            self._now_ns = now
        return now + round(self.orders.get("clock_s", 0.0) * NS_PER_S)

    def read(self, stamp_ns: int) -> Mapping[str, Any]:
        """New samples; ``silent_joints`` and so on take them away or change them."""
        self._tick += 1
        every = round(self.orders.get("every", 1))
        samples: dict[str, Any] = {}
        for name, dim in STREAMS:
            is_due = self._tick % (every * (IMU_EVERY if name == "imu" else 1)) == 0
            if is_due and not self.orders.get(f"silent_{name}"):
                samples[name] = self._values(name, dim)
        self._sent_ns[self._tick] = self._now_ns
        self._sent_ns.pop(self._tick - KEPT, None)
        if self.orders.get("twice"):
            self._push_twice(stamp_ns, samples)
        return samples

    def move(self, action: Any) -> None:
        executing = self.client.timeline.executing
        age_ms = executing.age_ns / NS_PER_MS if executing is not None else 0.0
        sent_ns = self._sent_ns.get(round(float(action[-1])))
        true_ms = math.inf if sent_ns is None else (self._now_ns - sent_ns) / NS_PER_MS
        print(f"{now_ns()} moved {age_ms:.3f} {true_ms:.3f}")

    def hold(self) -> None:
        print(f"{now_ns()} held")

    def obey(self) -> None:
        """Take orders until standard input ends; then this robot ends, too."""
        at_once = {
            "stop": lambda: self.loop.stop("drill"),
            "clear": self.loop.clear_fault,
            "raise": lambda: setattr(self.client, "on_chunk", _raise),
        }
        for line in sys.stdin:
            name, value = line.split()
            if name in at_once:
                at_once[name]()
            self.orders[name] = float(value)
        self.loop.end()

    def _values(self, name: str, dim: int) -> np.ndarray[Any, Any]:
        if self.orders.get(f"stuck_{name}") and name in self._before:
            return self._before[name]
        values: np.ndarray[Any, Any] = np.sin(np.arange(dim, dtype=np.float32) + self._tick / 50)
        if name == "joints":
            values[0] = self._tick
        if self.orders.get(f"nan_{name}"):
            values[0] = np.nan
        self._before[name] = values
        return values

    def _push_twice(self, stamp_ns: int, samples: Mapping[str, Any]) -> None:
        """Push each sample once before its time, and one that is older behind it."""
        for name, values in samples.items():
            self.client.push(name, stamp_ns, values)  # the loop pushes it again
            self.client.push(name, stamp_ns - 5 * NS_PER_MS, values)


def _raise(_chunk: Any) -> None:
    raise RuntimeError("the drill breaks on_chunk")


def main() -> int:
    """Connect to the endpoint given, and tick at the rate given until standard input ends."""
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    robot = DrillRobot(sys.argv[1], float(sys.argv[2]))
    threading.Thread(target=robot.obey, daemon=True).start()
    with robot.client:
        robot.client.connect(CONNECT_S)
        robot.loop.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
