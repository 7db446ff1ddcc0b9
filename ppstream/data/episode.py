"""RecordedEpisode: the samples of one recording as columns, and which of them each window may see.

Live, samples go through rings, which refuse some, keep the newest, and are emptied by resets. Here
the same is index arithmetic over the whole recording; what rings would refuse is found by rings.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import msgspec
import numpy as np

from ppstream.config.schema import BatchConfig
from ppstream.core.clock import NS_PER_MS
from ppstream.core.errors import ConfigError
from ppstream.data.sample_column import SampleColumn, column_of
from ppstream.recording.recording import RecordedFrames, Recording, Track
from ppstream.recording.window_schedule import Grid, WindowSchedule, schedule_of

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from ppstream.config.schema import PipelineConfig

#: replay: the windows of a scheduled replay. grid: a window every dt_ms, and resets end an episode.
#: whole: as grid, but each window knows all samples of its episode, also those behind its end.
Cut = Literal["replay", "grid", "whole"]
CUTS: Final[tuple[Cut, ...]] = ("replay", "grid", "whole")

logger = logging.getLogger("ppstream")

FLOAT32_MAX: Final = float(np.finfo(np.float32).max)
STAMP_MAX: Final = 1 << 62


class RecordedEpisode(NamedTuple):
    """Windows that may be cut together."""

    ends_ns: NDArray[np.int64]  # [W]
    columns: dict[str, SampleColumn]  # by stream
    frames: dict[str, RecordedFrames]  # by camera whose frames can be read, as its track has them

    @property
    def windows(self) -> int:
        return len(self.ends_ns)


class Episodes(NamedTuple):
    """Episodes of one recording."""

    episodes: list[RecordedEpisode]
    too_short: int  # stretches between two resets without a window


def episodes_of(
    path: Path, recording: Recording, config: PipelineConfig, cut: Cut, steps: int | None = None
) -> Episodes:
    """All episodes of a recording, whose streams are ``config``'s.

    Args:
        path: of the file, for messages.
        recording: its declared streams.
        config: of the run.
        cut: see ``Cut``.
        steps: targets of a window, if not ``window.steps``.

    Raises:
        ConfigError: there is not one window in it, or the recorder lost samples of a replay.
    """
    pipeline = msgspec.structs.replace(config.pipeline, windows="scheduled")
    config = msgspec.structs.replace(config, pipeline=pipeline, batch=BatchConfig(rows=1))
    steps = steps or config.window.steps
    if cut == "replay":
        if why := recording.unrepeatable:
            raise ConfigError(
                [
                    f"{path}: {why.reason}, so windows cannot be cut as the run's; want --content "
                    f"episodes, --format lerobot-v3 or another cut, or {why.remedy}"
                ]
            )
        return Episodes([_episode(path, recording, config, cut, steps)], 0)
    dt_ns = round(config.window.dt_ms * NS_PER_MS)
    if recording.lost:
        text = "%s: the recorder lost samples (%s), a gap like any other"
        logger.warning(text, path, recording.lost_text)
    pieces = [piece.recording for piece in recording.between_resets()]
    whole = [
        one
        for one in pieces
        if all(len(track.stamps_ns) for track in one.tracks.values())
        and Grid(one, config.reference.name, dt_ns).windows > 0
    ]
    if not whole:
        raise ConfigError(
            [f"{path}: stream {config.reference.name!r} ends before another one begins"]
        )
    found = [_episode(path, one, config, cut, steps) for one in whole]
    return Episodes(found, len(pieces) - len(whole))


def _episode(
    path: Path, recording: Recording, config: PipelineConfig, cut: Cut, steps: int
) -> RecordedEpisode:
    schedule = schedule_of(path, recording, config)
    ends_ns = np.array([schedule.end_ns(k) for k in range(schedule.windows)], np.int64)
    if all(map(_is_taken_whole, recording.tracks.values())):
        seen = _seen_of_all(recording, config, schedule)
    else:
        from ppstream.data.ring_feed import seen_through_rings

        seen = seen_through_rings(path, recording, config)
    span_ns = (steps - 1) * round(config.window.dt_ms * NS_PER_MS)
    cubics = {stream.name for stream in config.streams if stream.interpolation == "cubic"}
    columns = {}
    for name, one in seen.items():
        begin, end = one.begin, one.end
        if cut == "whole":
            begin, end = np.zeros_like(begin), np.full_like(end, len(one.stamps_ns))
        if not len(one.numbers):  # a camera's older frames count, whatever the span
            needed = _needed(one.stamps_ns, begin, end, ends_ns - span_ns, ends_ns)
            begin, end = _widened(needed, begin, end, by=int(name in cubics))
        columns[name] = one._replace(begin=begin, end=end)
    frames = {
        name: track.values
        for name, track in recording.tracks.items()
        if isinstance(track.values, RecordedFrames) and track.values.is_readable
    }
    return RecordedEpisode(ends_ns, columns, frames)


def _is_taken_whole(track: Track) -> bool:
    """True when a ring that is fed a recording refuses none of the samples."""
    stamps_ns, values = track.stamps_ns, track.values
    if not (np.diff(stamps_ns) > 0).all() or np.abs(stamps_ns[[0, -1]]).max() >= STAMP_MAX:
        return False
    return isinstance(values, RecordedFrames) or bool((np.abs(values) <= FLOAT32_MAX).all())


def _seen_of_all(
    recording: Recording, config: PipelineConfig, schedule: WindowSchedule
) -> dict[str, SampleColumn]:
    """By stream what the rings hold at each window: the newest since the last reset."""
    names = list(recording.tracks)
    begun, fed = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
    bounds = np.empty((schedule.windows, len(names), 2), np.int64)
    for window in range(schedule.windows):
        for step in schedule.before(window):
            for name in names:
                fed[name] = max(fed[name], step.samples.get(name, 0))
            if step.end_ns is None:
                begun = dict(fed)
        bounds[window] = [(begun[name], fed[name]) for name in names]
    seen = {}
    for stream in config.streams:
        track = recording.tracks[stream.name]
        begin, end = bounds[:, names.index(stream.name)].T.copy()
        np.maximum(begin, end - config.ring_samples(stream), out=begin)
        seen[stream.name] = column_of(track, begin, end)
    return seen


def _needed(
    stamps_ns: NDArray[np.int64],
    begin: NDArray[np.int64],
    end: NDArray[np.int64],
    first_ns: NDArray[np.int64],
    last_ns: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of what each window sees the samples around its targets: the rest changes no bit of it."""
    if (np.diff(stamps_ns) > 0).all():
        first = stamps_ns.searchsorted(first_ns, "right") - 1
        behind = stamps_ns.searchsorted(last_ns, "right") + 1
    else:  # emptied in between, by a clock that began anew
        first, behind = np.empty_like(begin), np.empty_like(end)
        for window, part in enumerate(zip(begin, end, strict=True)):
            seen = stamps_ns[slice(*part)]
            first[window] = part[0] + seen.searchsorted(first_ns[window], "right") - 1
            behind[window] = part[0] + seen.searchsorted(last_ns[window], "right") + 1
    needed = np.maximum(begin, np.minimum(first, end - 1))
    return needed, np.minimum(end, np.maximum(behind, needed + 1))


def _widened(
    needed: tuple[NDArray[np.int64], NDArray[np.int64]],
    begin: NDArray[np.int64],
    end: NDArray[np.int64],
    *,
    by: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Samples more on either side, as far as they were seen: a cubic reads one beyond the pair."""
    first, behind = needed
    return np.maximum(begin, first - by), np.minimum(end, behind + by)


def total_windows(episodes: Sequence[RecordedEpisode]) -> int:
    return sum(one.windows for one in episodes)
