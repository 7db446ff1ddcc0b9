"""SensorState: how each stream of each robot is doing, judged once a second, told when it changes.

It only looks: samples are refused by ``ring.py`` and ``stamp_filter.py``, and what is missing in a
window is masked by ``window.py``, whether anybody looks here or not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from ppstream.core.clock import NS_PER_MS, NS_PER_S

if TYPE_CHECKING:
    from ppstream.config.schema import PipelineConfig, StreamConfig
    from ppstream.ingest.intake import Intake
    from ppstream.ingest.ring import RingBank, SensorRing
    from ppstream.ingest.rows import RowInput

#: ``silent``: nothing accepted for longer than the stream's ``max_age_ms``; ``refused``: more than
#: half of what came was; ``slow``: less than half the nominal rate; ``unchanged``: the same values
#: for a second, which a resting robot's sensor also shows. A stream that comes on request is never
#: silent or slow.
Condition = Literal["ok", "silent", "refused", "slow", "unchanged"]

SLOW: Final = 0.5  # of the nominal rate
REFUSED: Final = 0.5  # of what came
SAMPLES_MIN: Final = 10  # of a second: fewer show no rate, and no standstill
COMPARED: Final = 16  # about so many samples of a second tell whether a sensor stands still
#: Conditions in which a robot is told that the run is degraded.
DEGRADED: Final = frozenset({"silent", "refused", "slow"})


class SensorChange(NamedTuple):
    """A stream of a row is in another condition than a second ago."""

    row: int
    stream: str
    condition: Condition
    before: Condition


class _Seen(NamedTuple):
    """A stream's counts at the last look.

    ``heard_ns``: when the newest sample was accepted, at the latest; it outlives an emptied ring.
    """

    session: int
    at_ns: int
    received: int
    accepted: int
    heard_ns: int


class SensorState:
    """Call ``look`` about once a second, from the thread that owns the rows.

    Args:
        tell: called with each change.
        tell_degraded: called with whether any stream is in one of ``DEGRADED``, when that changes.
    """

    def __init__(
        self,
        config: PipelineConfig,
        intake: Intake,
        tell: Callable[[SensorChange], None],
        tell_degraded: Callable[[bool], None],
    ) -> None:
        self._streams = config.streams
        self._intake = intake
        self._tell = tell
        self._on_degraded = tell_degraded
        self._seen: dict[tuple[int, str], _Seen] = {}
        self.conditions: dict[tuple[int, str], Condition] = {}  # of streams of present robots
        self._is_degraded = False

    def check(self, now_ns: int) -> None:
        """Judge what came since the last look."""
        for row, place in enumerate(self._intake.rows):
            for stream in self._streams:
                self._check_stream(row, place, stream, now_ns)
        is_degraded = not DEGRADED.isdisjoint(self.conditions.values())
        if is_degraded != self._is_degraded:
            self._is_degraded = is_degraded
            self._on_degraded(is_degraded)

    def _check_stream(self, row: int, place: RowInput, stream: StreamConfig, now_ns: int) -> None:
        key, ring = (row, stream.name), place.rings[stream.name]
        before = self._seen.get(key)
        heard_ns = now_ns  # as far as is known
        if ring.count:
            heard_ns = ring.newest_rx_ns
        elif before and (before.session, before.accepted) == (place.session, ring.accepted):
            heard_ns = before.heard_ns
        seen = _Seen(place.session, now_ns, ring.ledger.received, ring.accepted, heard_ns)
        self._seen[key] = seen
        if place.session == 0 or before is None or before.session != place.session:
            self.conditions.pop(key, None)
            return
        found, was = _condition(stream, before, seen), self.conditions.get(key, "ok")
        if found == "ok" and place.lacks(stream.name):  # of a stream that comes on request, too
            found = "silent"
        taken = seen.accepted - before.accepted
        if found == "ok" and stream.image is None and taken >= SAMPLES_MIN:
            bank = self._intake.banks[stream.name]
            found = "unchanged" if _is_unchanged(bank, row, ring, taken) else "ok"
        self.conditions[key] = found
        if found != was:
            self._tell(SensorChange(row, stream.name, found, was))


def _condition(stream: StreamConfig, before: _Seen, now: _Seen) -> Condition:
    seconds = (now.at_ns - before.at_ns) / NS_PER_S
    came, taken = now.received - before.received, now.accepted - before.accepted
    if came and came - taken > REFUSED * came:
        return "refused"
    if stream.is_on_request:
        return "ok"
    if now.at_ns - now.heard_ns > max(stream.max_age_ms * NS_PER_MS, NS_PER_S):
        return "silent"
    wanted = stream.most_hz * seconds
    if wanted >= SAMPLES_MIN and taken < SLOW * wanted:
        return "slow"
    return "ok"


def _is_unchanged(bank: RingBank, row: int, ring: SensorRing, samples: int) -> bool:
    """True when some of the newest ``samples``, evenly spread, all have the same values.

    A ring that was emptied meanwhile and holds few since shows no standstill.
    """
    held = min(samples, ring.count)
    if held < min(SAMPLES_MIN, bank.capacity):
        return False
    some = range(ring.accepted - held, ring.accepted, max(1, held // COMPARED))
    values = bank.values[row].numpy()[[number % bank.capacity for number in some]]
    return bool((values == values[:1]).all())
