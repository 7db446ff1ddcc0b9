"""Samples that rings would refuse, found by feeding rings, as a scheduled replay does.

For recordings with late, repeated or unusable samples: each makes its ring decide, and fifty late
ones in a row empty all rings. Slower than index arithmetic, and never of another opinion.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from ppstream.core.clock import NS_PER_MS
from ppstream.data.sample_column import SampleColumn
from ppstream.ingest.intake import build_intake
from ppstream.ingest.sources import RecordedSource
from ppstream.recording.recording import RecordedFrames, Recording

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from ppstream.config.schema import PipelineConfig
    from ppstream.ingest.ring import SensorRing

logger = logging.getLogger("ppstream")


class _Taken:
    """Samples that one ring took, and what it held at each window."""

    def __init__(self, ring: SensorRing) -> None:
        self._ring = ring
        self._copied = 0  # of those accepted
        self._first: list[int] = []  # number of each part's first sample
        self._stamps: list[NDArray[np.int64]] = [np.zeros(0, np.int64)]
        self._values = [np.zeros((0, 0 if ring.bank.is_image else ring.stream.dim), np.float32)]
        self._bounds: list[tuple[int, int]] = []
        self._kept = 0

    def copy(self) -> None:
        """Copies what came since, as far as the ring still holds it."""
        ring, bank = self._ring, self._ring.bank
        new = min(ring.accepted - self._copied, ring.count)
        order = np.arange(ring.accepted - new, ring.accepted) % bank.capacity
        self._stamps.append(bank.stamps_ns[ring.row].numpy()[order])
        if not bank.is_image:
            self._values.append(bank.values[ring.row].numpy()[order])
        self._copied = ring.accepted
        self._kept += new

    def mark(self) -> None:
        """Notes what a window that is cut now would see."""
        self._bounds.append((self._kept - min(self._ring.count, self._kept), self._kept))

    def column(self, recorded_ns: NDArray[np.int64] | None) -> SampleColumn:
        """Of a camera ``recorded_ns`` are the stamps of its track."""
        stamps_ns = np.concatenate(self._stamps)
        begin, end = np.array(self._bounds, np.int64).T.copy()
        if recorded_ns is None:
            values = np.concatenate(self._values)
            return SampleColumn(stamps_ns, values, begin, end, np.zeros(0, np.int64))
        numbers, number = np.zeros(len(stamps_ns), np.int64), 0
        for index, stamp_ns in enumerate(stamps_ns):
            number += int(np.argmax(recorded_ns[number:] == stamp_ns))
            numbers[index] = number
            number += 1
        return SampleColumn(
            stamps_ns, np.zeros((len(stamps_ns), 0), np.float32), begin, end, numbers
        )


def seen_through_rings(
    path: Path, recording: Recording, config: PipelineConfig
) -> dict[str, SampleColumn]:
    """By stream the samples that rings took, with what they held at each window, and the rest."""
    intake = build_intake(config)
    (row,) = intake.rows
    blind = Recording(
        {
            name: track._replace(values=_blank(track.values))
            if isinstance(track.values, RecordedFrames)
            else track
            for name, track in recording.tracks.items()
        },
        recording.steps,
        robot=recording.robot,
    )
    source = RecordedSource(path, config, intake.rows, None, recording=blind)
    taken = {name: _Taken(ring) for name, ring in row.rings.items()}
    for window in range(source.windows):
        source.window_ends_ns(window)
        for one in taken.values():
            one.copy()
            one.mark()
    dt_ns = round(config.window.dt_ms * NS_PER_MS)
    for until_ns in range(blind.first_ns, blind.last_ns + dt_ns, dt_ns):
        source.feed(until_ns, 0)  # the rest, for windows that know what comes behind them
        for one in taken.values():
            one.copy()
    for name, ring in row.rings.items():
        count = len(recording.tracks[name].stamps_ns)
        if refused := count - ring.accepted:
            logger.warning(
                "%s: stream %r: %d of %d samples are refused, as a live run refuses them: "
                "late, repeated or not finite",
                *(path, name, refused, count),
            )
    return {
        name: one.column(
            recording.tracks[name].stamps_ns if row.rings[name].bank.is_image else None
        )
        for name, one in taken.items()
    }


def _blank(frames: RecordedFrames) -> RecordedFrames:
    blank = np.zeros(frames.size[0] * frames.size[1] * 3, np.uint8)
    return RecordedFrames(len(frames), frames.size, lambda _: blank)
