"""Sources of samples: the Source protocol, and RecordedSource, which plays a recording.

A source writes into the rings of the rows it was given, on the thread that asks it to. Robots are
``sessions/server.py``'s, invented samples ``synthetic.py``'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from ppstream.core.clock import NS_PER_S
from ppstream.ingest.sample_ledger import CLOCK_JUMP, OVERWRITTEN
from ppstream.recording.load import load_recording
from ppstream.recording.recording import RecordedFrames
from ppstream.recording.window_schedule import schedule_of

if TYPE_CHECKING:
    from pathlib import Path

    from ppstream.config.schema import PipelineConfig
    from ppstream.ingest.rows import RowInput
    from ppstream.recording.recording import Recording

#: The session of rows that no robot owns; robots' sessions are positive.
OWN_SESSION: Final = -1


class Source(Protocol):
    """Samples for the thread that runs stage A, which polls and drains it."""

    @property
    def fds(self) -> tuple[int, ...]:
        """Readable: there may be something to drain."""

    @property
    def exhausted(self) -> bool:
        """Nothing will ever come any more: no further window is wanted."""

    def drain(self, now_ns: int) -> int:
        """Write what has arrived by now into the rings; returns how many samples."""

    def next_due_ns(self) -> int | None:
        """When the next sample falls due; None: only ``fds`` tell."""


def served_recording(config: PipelineConfig) -> Recording | None:
    """Reads what is served in the place of robots, if anything, and sees that it can be.

    Raises:
        ConfigError: as ``RecordedSource``.
    """
    path = config.service.recording
    if path is None:
        return None
    recording = load_recording(path, config.streams, config.record.robot).select(config.streams)
    schedule_of(path, recording, config)
    return recording


class RecordedSource:
    """Plays a recording into rows, each of them the same, in the recording's own time.

    Live windows: samples appear as they came, ``speed`` times as fast. Scheduled windows: of a
    recorded run they are cut again as they were; of another recording window k ends at
    ``t0 + k * dt``, with t0 the first moment at which every stream has a sample. Each holds exactly
    what was recorded by then, so it does not depend on how fast anything ran.

    Args:
        path: see ``recording.py``.
        config: streams, window, and whether windows are scheduled.
        rows: free places; opened here, given back by ``close``.
        speed: times real time; None: as fast as asked, for scheduled windows alone.
        repeat: live windows alone: begin again behind the end, with stamps that go on.
        recording: the file's streams, where they are read already.

    Raises:
        ConfigError: the file is unusable, lacks a stream, or is shorter than one window.
    """

    fds: tuple[int, ...] = ()

    def __init__(
        self,
        path: str | Path,
        config: PipelineConfig,
        rows: Sequence[RowInput],
        speed: float | None,
        *,
        repeat: bool = False,
        recording: Recording | None = None,
    ) -> None:
        self.scheduled = config.pipeline.windows == "scheduled"
        if speed is None and not self.scheduled:
            raise ValueError("live windows need a speed: the speed defines when a sample is")
        if recording is None:
            recording = load_recording(path, config.streams, config.record.robot)
        recording = recording.select(config.streams)
        self._tracks = [(name, track, track.due_ns) for name, track in recording.tracks.items()]
        self._fed = dict.fromkeys(recording.tracks, 0)
        self._rows = rows
        self._speed = speed
        self._first_ns = recording.first_ns
        self._last_ns = recording.last_ns
        self._started_ns: int | None = None  # host time at which first_ns was played
        self._drained_ns = 0
        self._reached_ns = self._first_ns - 1  # recording time that may be used
        self._next_ns = self._first_ns  # live windows: before it there is nothing to play
        self._schedule = schedule_of(path, recording, config)
        self.windows = self._schedule.windows
        self._taken = 0
        self._repeat = repeat
        self._lap_ns = self._last_ns - self._first_ns + round(NS_PER_S / config.reference.most_hz)
        self._shift_ns = 0  # added to stamps, and to the times at which they are due
        for row in rows:
            row.robot = recording.robot  # whose limits are its own
            row.open(OWN_SESSION, is_real_time=speed == 1.0 and not self.scheduled)

    @property
    def exhausted(self) -> bool:
        """Live: every sample was played. Scheduled: every window was taken."""
        if self.scheduled:
            return self._taken >= self.windows
        return not self._repeat and self._reached_ns >= self._last_ns

    def drain(self, now_ns: int) -> int:
        """Play up to now. Scheduled windows fetch their samples themselves: 0."""
        self._drained_ns = now_ns
        if self._started_ns is None:
            self._started_ns = now_ns
        if self._speed is not None:
            played_ns = int((now_ns - self._started_ns) * self._speed)
            self._reached_ns = self._first_ns + played_ns
        if self.scheduled or self._reached_ns < self._next_ns:
            return 0
        samples = self.feed(self._reached_ns, now_ns)
        while self._repeat and self._reached_ns >= self._first_ns + self._shift_ns + self._lap_ns:
            self._shift_ns += self._lap_ns
            self._fed = dict.fromkeys(self._fed, 0)
            samples += self.feed(self._reached_ns, now_ns)
        left_ns = [
            int(due_ns[self._fed[name]])
            for name, _, due_ns in self._tracks
            if self._fed[name] < len(due_ns)
        ]
        self._next_ns = self._shift_ns + min(left_ns, default=self._first_ns + self._lap_ns)
        return samples

    def next_due_ns(self) -> int | None:
        if self._speed is None or self._started_ns is None or self.exhausted:
            return None
        due_ns = self._schedule.end_ns(self._taken) if self.scheduled else self._next_ns
        return self._started_ns + int((due_ns - self._first_ns) / self._speed) + 1

    def feed(self, until_ns: int, now_ns: int) -> int:
        """Append exactly what was recorded up to ``until_ns`` to every row; returns the samples."""
        before_ns = until_ns - self._shift_ns
        counts = {
            name: int(due_ns.searchsorted(before_ns, "right")) for name, _, due_ns in self._tracks
        }
        return self._feed(counts, now_ns)

    def _feed(self, counts: Mapping[str, int], now_ns: int) -> int:
        """Append each stream's samples below its count; returns how many."""
        samples = 0
        for name, track, _ in self._tracks:
            begin, end = self._fed[name], counts.get(name, 0)
            if end > begin:
                samples += (end - begin) * len(self._rows)
                self._fed[name] = end
                rings = [row.rings[name] for row in self._rows]
                if isinstance(track.values, RecordedFrames):  # what no ring keeps is not read
                    newest = max(begin, end - rings[0].bank.capacity)
                    for ring in rings if newest > begin else ():
                        ring.refuse(OVERWRITTEN, newest - begin)
                    begin = newest
                stamps_ns, values = (
                    track.stamps_ns[begin:end] + self._shift_ns,
                    track.values[begin:end],
                )
                for ring in rings:
                    ring.append(stamps_ns, values, now_ns)
        return samples

    def window_ready(self, index: int) -> bool:
        """True when the recording's time has passed window ``index``, and there is one."""
        if index >= self.windows:
            return False
        return self._speed is None or self._schedule.end_ns(index) <= self._reached_ns

    def window_ends_ns(self, index: int) -> Sequence[int]:
        """Bring the rings to where window ``index`` ends; returns that moment, for each row.

        Windows are taken in turn: none twice, none skipped.
        """
        assert index == self._taken, f"window {index} asked for, {self._taken} is next"
        self._taken += 1
        for step in self._schedule.before(index):
            self._feed(step.samples, self._drained_ns)
            if step.end_ns is None:
                self._empty(step.reason)
        return [self._schedule.end_ns(index)] * len(self._rows)

    def _empty(self, reason: str) -> None:
        for row in self._rows:
            if reason == CLOCK_JUMP:  # the episode went on
                for ring in row.rings.values():
                    ring.clear(reason)
            else:
                row.new_episode()

    def close(self) -> None:
        """Give the rows back, empty."""
        for row in self._rows:
            row.close()
