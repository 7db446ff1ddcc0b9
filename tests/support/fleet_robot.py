"""A fleet's run, and a robot of it that samples and acts, and notes every action it executes."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import numpy as np

from ppstream.core.clock import now_ns
from ppstream.robot.client import RobotClient
from ppstream.robot.fleet_directory import FleetDirectory

TICK_S = 0.02
LEASE_MS = 600
ROBOTS = 4
#: One credit and no stage C: nothing overlaps, however busy the machine is, and that is accepted.
RUN = f"""
name = "arm"

[[streams]]
name = "joints"
dim = 3
rate_hz = 50
reference = true

[window]
steps = 2
dt_ms = 20

[batch]
rows = {ROBOTS}

[actions]
names = ["a", "b"]
horizon = 50
dt_ms = 20
low = [-1.0, -1.0]
high = [1.0, 1.0]
lease_ms = {LEASE_MS}

[policy]
target = "ppstream_stages.simulated:build"
options = {{ b_ms = 6.0, horizon = 50, action_dim = 2 }}

[simulate]
a_ms = 5.0
c_ms = 0.0

[pipeline]
d_in = 1

[bringup]
envelopes = 200  # on a busy machine half of them are warm-up
standalone = 5
warmup_max = 60
accept = ["NOTHING_TO_HIDE", "LOW_OVERLAP", "CONTENDED"]
"""


class Act(NamedTuple):
    at_ns: int
    age_ns: int
    session: int


class FleetRobot:
    """Plays from construction until ``close``."""

    def __init__(self, url: str, name: str, **directory: Any) -> None:
        self.directory = FleetDirectory(url, name, **directory)
        self.client = RobotClient.from_fleet(self.directory, find_s=60)
        self.client.connect(60)
        self.acts: list[Act] = []
        self.pushed = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._play, daemon=True)
        self._thread.start()

    def acts_since(self, at_ns: int) -> list[Act]:
        return [act for act in [*self.acts] if act.at_ns > at_ns]

    def serves_again_at(self, fault_ns: int, session: int) -> int | None:
        """The first action of another session than the one of the fault."""
        later = (a.at_ns for a in self.acts_since(fault_ns) if a.session != session)
        return next(later, None)

    def close(self) -> None:
        self._end.set()
        self._thread.join()
        self.client.close()

    def _play(self) -> None:
        values = np.zeros(3, dtype=np.float32)
        while not self._end.wait(TICK_S):
            now = now_ns()
            self.client.push("joints", now, values)
            self.pushed += 1
            timeline = self.client.timeline
            if timeline.action_at(now_ns()) is not None and timeline.executing is not None:
                doing = timeline.executing
                self.acts.append(Act(doing.at_ns, doing.age_ns, doing.chunk.session))
