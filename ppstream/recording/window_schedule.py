"""When the windows of a recording end, and what has come until then: no clock decides it.

``Grid`` is a window every ``dt`` from when all streams have begun, ``AsCut`` repeats those of a run
that was recorded.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from ppstream.core.clock import NS_PER_MS
from ppstream.core.errors import ConfigError
from ppstream.recording.recording import RecordedStep, Recording

if TYPE_CHECKING:
    from pathlib import Path

    from ppstream.config.schema import PipelineConfig


class WindowSchedule(Protocol):
    """Windows in turn, from 0 to ``windows - 1``."""

    windows: int

    def end_ns(self, index: int) -> int:
        """Returns the end of a window, robot clock."""

    def before(self, index: int) -> Sequence[RecordedStep]:
        """Returns what happened since the window before this one, which is the last of them."""


class Grid:
    """Window k ends at ``t0 + k * dt``, with t0 the moment at which every stream has a sample."""

    def __init__(self, recording: Recording, reference: str, dt_ns: int) -> None:
        self._due_ns = {name: track.due_ns for name, track in recording.tracks.items()}
        self._t0_ns = max(int(due_ns[0]) for due_ns in self._due_ns.values())
        self._dt_ns = dt_ns
        self.windows = 1 + (int(self._due_ns[reference][-1]) - self._t0_ns) // dt_ns

    def end_ns(self, index: int) -> int:
        return self._t0_ns + index * self._dt_ns

    def before(self, index: int) -> Sequence[RecordedStep]:
        end_ns = self.end_ns(index)
        due = self._due_ns.items()
        counts = {name: int(due_ns.searchsorted(end_ns, "right")) for name, due_ns in due}
        return [RecordedStep(end_ns, "", counts)]


class AsCut:
    """The windows of a recorded run, each with what the run had received when it was cut."""

    def __init__(self, recording: Recording) -> None:
        self._steps = recording.steps
        self._ends_ns = array("q")
        self._behind = array("q", [0])  # places of the steps behind each window
        for place, step in enumerate(recording.steps):
            if step.end_ns is not None:
                self._ends_ns.append(step.end_ns)
                self._behind.append(place + 1)
        self.windows = len(self._ends_ns)

    def end_ns(self, index: int) -> int:
        return self._ends_ns[index]

    def before(self, index: int) -> Sequence[RecordedStep]:
        return self._steps[self._behind[index] : self._behind[index + 1]]


def schedule_of(path: str | Path, recording: Recording, config: PipelineConfig) -> WindowSchedule:
    """Returns the schedule of the windows of ``recording``.

    Raises:
        ConfigError: there is not one window in it, or samples that one needs were lost.
    """
    is_scheduled = config.pipeline.windows == "scheduled"
    if is_scheduled and (why := recording.unrepeatable):
        raise ConfigError(
            [
                f"{path}: {why.reason}, so its windows cannot be repeated, "
                f"want pipeline.windows = 'live', or {why.remedy}"
            ]
        )
    if is_scheduled and any(step.end_ns is not None for step in recording.steps):
        return AsCut(recording)
    grid = Grid(recording, config.reference.name, round(config.window.dt_ms * NS_PER_MS))
    if grid.windows < 1:
        raise ConfigError(
            [f"{path}: stream {config.reference.name!r} ends before another one begins"]
        )
    return grid
