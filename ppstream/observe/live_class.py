"""Live bottleneck: the report's own functions on the newest envelopes.

The answer is recomputed every 5 s at most, for all callers. The 300 envelopes are read in pieces of
about 100 µs; each step of judging is a piece by itself, of up to 5 ms. The counters must have
counted them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ppstream.analysis.log_parser import LogLine, parse_run
from ppstream.analysis.scores import primary
from ppstream.analysis.segments import select_window
from ppstream.analysis.verdict import N_MIN, classify
from ppstream.core.clock import NS_PER_S, now_ns
from ppstream.core.errors import LogError
from ppstream.core.interpreter import InterpreterPauses

if TYPE_CHECKING:
    from ppstream.core.clock import Clock
    from ppstream.observe.live_counters import Rank0Counters
    from ppstream.observe.log_writer import EnvelopeRecord

CLASSES: Final = (
    "output-limited",
    "input-limited",
    "stage0-limited",
    "stage1-limited",
    "window-limited",
    "serialized",
    "overhead-limited",
)
REFRESH_NS: Final = 5 * NS_PER_S


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """The class of ``verdict.classify``, None while unknown, and each resource's busy share."""

    name: str | None = None
    utilisation: Mapping[str, float] = field(default_factory=dict)


class LiveBottleneck:
    """Judges once it is asked.

    Args:
        manifest: gives run.json as it stands, or raises LogError: then the class is unknown, as
            somebody may have deleted the folder of a run that goes on.
        clock: for tests.
    """

    def __init__(self, manifest: Callable[[], Mapping[str, Any]], clock: Clock = now_ns) -> None:
        self._manifest = manifest
        self._clock = clock
        self._found = Bottleneck()
        self._due_ns = 0

    def now(self, counters: Rank0Counters) -> Bottleneck:
        """Of the phase that the newest envelope belongs to."""
        now = self._clock()
        if now >= self._due_ns:
            self._due_ns = now + REFRESH_NS
            self._found = Bottleneck()
            with suppress(LogError):
                self._found = self._judge(counters)
        return self._found

    def _judge(self, counters: Rank0Counters) -> Bottleneck:
        records = list(counters.newest)
        if not records:
            return Bottleneck()
        pieces = InterpreterPauses()
        run = parse_run(dict(self._manifest()), _lines(records, pieces))
        pieces.pause()
        window = select_window(run, records[-1].phase)
        if window.n < N_MIN:  # so few say nothing yet
            return Bottleneck()
        pieces.pause()
        score = primary(window, resampled=False)
        pieces.pause()
        return Bottleneck(classify(window, score), {} if score is None else score.utilisation)


def _lines(records: Iterable[EnvelopeRecord], pieces: InterpreterPauses) -> Iterator[LogLine]:
    """As they are asked for: reading one takes some 50 µs."""
    for record in records:
        pieces.pause()
        yield LogLine(0, record.generation, "live", msgspec.to_builtins(record))
