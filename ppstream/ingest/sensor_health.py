"""SensorState: how each stream of each robot is doing, judged once a second, told when it changes.

It only looks: samples are refused by ``ring.py`` and ``stamp_filter.py``, and what is missing in a
window is masked by ``window.py``, whether anybody looks here or not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from ppstream.core.clock import NS_PER_MS, NS_PER_S
from ppstream.ingest.sample_ledger import DUPLICATE, FUTURE, LATE, NON_FINITE, RATE, SHAPE, STALE
from ppstream.ingest.stamp_filter import NEVER_NS

if TYPE_CHECKING:
    from ppstream.config.schema import PipelineConfig, StreamConfig
    from ppstream.ingest.intake import Intake
    from ppstream.ingest.ring import RingBank, SensorRing
    from ppstream.ingest.rows import RowInput

#: ``silent``: nothing accepted for longer than the stream's ``max_age_ms``; ``refused``: more than
#: half of what came was; ``slow``: less than half the nominal rate; ``fast``: so much more than it
#: that the samples kept reach back less far than a window; ``unchanged``: the same values for a
#: second, which a resting robot's sensor also shows. A stream that comes on request is never silent
#: or slow. One that falls back within 10 s is well again once it was for several looks.
Condition = Literal["ok", "silent", "refused", "slow", "fast", "unchanged"]

SLOW: Final = 0.5  # of the nominal rate
FAST_AGAIN: Final = 0.6  # a slow stream is well from here on
REFUSED: Final = 0.5  # of what came
CALM_NS: Final = 10 * NS_PER_S  # after so long a stream has not fallen back: its change is new
LOOKS_MAX: Final = 4  # in a row in which it is well, before that is told
SAMPLES_MIN: Final = 10  # of a second: fewer show no rate, and no standstill
COMPARED: Final = 16  # about so many samples of a second tell whether a sensor stands still
RECENT_NS: Final = 2 * NS_PER_S  # the lead of a stream of which nothing came since is not known
#: Why samples are refused on arrival, and what helps.
REMEDIES: Final = {
    FUTURE: "stamp all streams by one clock",
    STALE: "stamp all streams by one clock, and send samples at once",
    LATE: "stamp and send a stream's samples in the order of their time",
    DUPLICATE: "give each sample a stamp of its own, in nanoseconds",
    NON_FINITE: "send values that float32 can hold",
    SHAPE: "send what the stream declares: its dim and dtype",
    RATE: "send fewer, or raise the stream's rate_hz (max_request_hz)",
}
#: What helps a stream of which nothing came, and one of which too little did; and of what run.
ASKED: Final = "a robot that asks (RobotClient.ask) wants max_request_hz in place of rate_hz"
HELPS: Final = (
    f"see that it is pushed; {ASKED}",
    f"see what slows it down, or set rate_hz to what it sends; {ASKED}",
)
HELPS_GATEWAY: Final = (
    "a gateway's clients send on request: set max_request_hz in place of rate_hz; of another robot "
    "see that it is pushed",
    "a gateway's clients send on request: set max_request_hz in place of rate_hz; of another robot "
    "see what slows it down",
)
UNREAD_NS: Final = NS_PER_S // 4  # of a second: rank 0 may be what a robot would be blamed for
#: Conditions in which a robot is told that the run is degraded.
DEGRADED: Final = frozenset({"silent", "refused", "slow", "fast"})


class SensorChange(NamedTuple):
    """A stream of a row is in another condition than a second ago."""

    row: int
    stream: str
    condition: Condition
    before: Condition
    why: str = ""  # of one that degrades: what was measured, the limit and the remedy


class _Seen(NamedTuple):
    """A stream's counts at the last look.

    ``heard_ns``: when the newest sample was accepted, at the latest; it outlives an emptied ring.
    """

    session: int
    at_ns: int
    received: int
    accepted: int
    heard_ns: int
    dropped: Mapping[str, int]  # by reason


class _Steadiness:
    """Says when a stream's change is told: the sooner it fell back, the longer it must be well."""

    def __init__(self) -> None:
        self._told_ns = NEVER_NS
        self._wanted = 1  # looks
        self._seen: tuple[Condition, int] = "ok", 0

    def is_steady(self, found: Condition, was: Condition, now_ns: int) -> bool:
        """True when ``found`` is to be told in the place of ``was``; call it at each look.

        What degrades a stream that was not is, at once.
        """
        before, looks = self._seen
        self._seen = found, looks + 1 if found == before else 1
        is_worse = was == "ok" or (found in DEGRADED and was not in DEGRADED)
        if found == was or (not is_worse and self._seen[1] < self._wanted):
            return False
        if is_worse:
            is_calm = now_ns - self._told_ns > CALM_NS
            self._wanted = 1 if is_calm else min(2 * self._wanted, LOOKS_MAX)
        self._told_ns = now_ns
        return True


class SensorState:
    """Call ``look`` about once a second, from the thread that owns the rows.

    Args:
        tell: called with each change.
        tell_degraded: called with whether any stream is in one of ``DEGRADED``, when that changes.
        unread_ns: the longest time since the last look in which nothing was read of any robot.
    """

    def __init__(
        self,
        config: PipelineConfig,
        intake: Intake,
        tell: Callable[[SensorChange], None],
        tell_degraded: Callable[[bool], None],
        unread_ns: Callable[[], int] = int,
    ) -> None:
        self._unread_ns = unread_ns
        self._unread = ""  # says so, where that was long
        self._streams = config.streams
        self._helps = HELPS_GATEWAY if config.gateway else HELPS
        self._intake = intake
        self._span_ns = round(config.window_span_ms * NS_PER_MS)
        self._tell = tell
        self._on_degraded = tell_degraded
        self._seen: dict[tuple[int, str], _Seen] = {}
        self._steadiness: dict[tuple[int, str], _Steadiness] = {}
        self.conditions: dict[tuple[int, str], Condition] = {}  # of streams of present robots
        self._is_degraded = False

    def check(self, now_ns: int) -> None:
        """Judge what came since the last look."""
        unread_ns = self._unread_ns()
        self._unread = _why_unread(unread_ns) if unread_ns > UNREAD_NS else ""
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
        counts = ring.ledger
        seen = _Seen(
            place.session, now_ns, counts.received, ring.accepted, heard_ns, {**counts.dropped}
        )
        self._seen[key] = seen
        if place.session == 0 or before is None or before.session != place.session:
            self.conditions.pop(key, None)
            self._steadiness.pop(key, None)
            return
        was = self.conditions.get(key, "ok")
        helps = (self._unread, self._unread) if self._unread else self._helps
        found, why = _condition(stream, before, seen, was, helps)
        if found == "ok" and place.lacks(stream.name):  # of a stream that comes on request, too
            found, why = "silent", _why_lacking(stream, seen)
        taken = seen.accepted - before.accepted
        if found == "ok" and taken and stream.image is None:
            found, why = self._fits_window(stream, ring, taken, seen.at_ns - before.at_ns)
        if found == "ok" and stream.image is None and taken >= SAMPLES_MIN:
            bank = self._intake.banks[stream.name]
            if _is_unchanged(bank, row, ring, taken):
                found = "unchanged"
                why = f"{taken} samples with the same values; if the robot moves, see the sensor"
        steadiness = self._steadiness.setdefault(key, _Steadiness())
        if steadiness.is_steady(found, was, now_ns):
            self.conditions[key] = found
            if found == "refused":
                why = _why_refused(place, stream, before, seen, self._unread)
            self._tell(SensorChange(row, stream.name, found, was, why))
        else:
            self.conditions[key] = was

    def _fits_window(
        self, stream: StreamConfig, ring: SensorRing, taken: int, time_ns: int
    ) -> tuple[Condition, str]:
        """``fast`` where the samples kept reach back less far than a window; and why."""
        reach_ns = ring.reach_ns
        if reach_ns is None or reach_ns >= self._span_ns:
            return "ok", ""
        key = "max_request_hz" if stream.is_on_request else "rate_hz"
        return "fast", (
            f"{taken * NS_PER_S / time_ns:.1f} samples/s, {key} is {stream.most_hz:g}: the "
            f"{ring.count} kept reach back {_seconds(reach_ns)}, a window "
            f"{_seconds(self._span_ns)}; set {key} to what it sends"
        )


def _condition(
    stream: StreamConfig, before: _Seen, now: _Seen, was: Condition, helps: tuple[str, str]
) -> tuple[Condition, str]:
    """The condition of a second; why, where that is known from the counts.

    ``helps``: a stream of which none came, and one of which some did.
    """
    seconds = (now.at_ns - before.at_ns) / NS_PER_S
    came, taken = now.received - before.received, now.accepted - before.accepted
    if came and came - taken > REFUSED * came:
        return "refused", ""
    if stream.is_on_request:
        return "ok", ""
    age_ns = now.at_ns - now.heard_ns
    limit_ns = max(round(stream.max_age_ms * NS_PER_MS), NS_PER_S)
    if age_ns > limit_ns:
        limit = f"limit {_seconds(limit_ns)}"
        return "silent", f"no sample for {_seconds(age_ns)}; {limit}; {helps[0]}"
    wanted = stream.most_hz * seconds
    share = FAST_AGAIN if was == "slow" else SLOW
    if wanted >= SAMPLES_MIN and taken < share * wanted:
        return "slow", (
            f"{taken / seconds:.1f} samples/s; limit {SLOW * stream.most_hz:g}, half its rate_hz; "
            f"{helps[taken > 0]}"
        )
    return "ok", ""


def _why_lacking(stream: StreamConfig, now: _Seen) -> str:
    """Words for a stream for want of whose samples no window is cut."""
    age_ns = now.at_ns - now.heard_ns
    newest = f"the newest came {_seconds(age_ns)} ago" if age_ns else "none came yet"
    return (
        f"no window is cut without samples of its last {stream.max_age_ms:g} ms; {newest}; "
        "push it more often, or raise its max_age_ms"
    )


def _why_unread(unread_ns: int) -> str:
    return (
        f"rank 0 read nothing for {_seconds(unread_ns)}, the robot may be well; see what held it "
        "up; one rank whose policy holds Python's interpreter (its GIL) wants --nproc 2"
    )


def _why_refused(
    place: RowInput, stream: StreamConfig, before: _Seen, now: _Seen, unread: str
) -> str:
    """Words for why most samples that came of a stream were refused; ``unread``: rank 0 may be."""
    refused = {
        reason: now.dropped.get(reason, 0) - before.dropped.get(reason, 0) for reason in REMEDIES
    }
    reason = max(REMEDIES, key=refused.__getitem__)
    text = f"{refused[reason] / (now.received - before.received):.0%} of samples {reason}"
    if unread and reason == STALE:
        return f"{text}; {unread}"
    ring = place.rings[stream.name]
    measured = ""
    if reason == LATE and NEVER_NS not in (ring.newest_ns, ring.refused_ns):
        behind_ns = ring.newest_ns - ring.newest_rx_ns - (ring.refused_ns - ring.refused_rx_ns)
        measured = f", {_seconds(behind_ns)} behind the newest"
    elif reason in (FUTURE, STALE):
        limit_ns = place.clock.future_ns if reason == FUTURE else place.clock.stale_ns or 0
        measured = _compare_clocks(place, stream.name, now.at_ns, limit_ns)
    return f"{text}{measured}; {REMEDIES[reason]}"


def _compare_clocks(place: RowInput, name: str, now_ns: int, limit_ns: int) -> str:
    """Words for how far a stream is from those that are taken, and which one stands alone, if any.

    A stream's *lead* is that of its newest sample, taken or refused (``stamp_filter.py``).
    """
    leads: dict[str, int] = {}
    taken: list[str] = []
    for other, ring in place.rings.items():
        is_taken = ring.newest_rx_ns >= ring.refused_rx_ns
        rx_ns = max(ring.newest_rx_ns, ring.refused_rx_ns)
        if now_ns - rx_ns <= RECENT_NS:
            leads[other] = (ring.newest_ns if is_taken else ring.refused_ns) - rx_ns
            if is_taken and other != name:
                taken.append(other)
    if name not in leads or not taken:
        return ""
    first = max(taken, key=leads.__getitem__)  # by which samples are judged: it has the most lead
    ahead_ns = leads[name] - leads[first]
    if abs(ahead_ns) <= limit_ns:  # it was so; by now its clock, or theirs, is another one
        return ""
    where = "ahead of" if ahead_ns > 0 else "behind"
    middle_ns = leads[first] + ahead_ns // 2
    sides: tuple[list[str], list[str]] = ([], [])
    for other, lead_ns in leads.items():
        sides[lead_ns > middle_ns].append(other)
    few, many = sorted(sides, key=len)
    if len(few) == 1 < len(many):
        whose = f"{few[0]} is alone against {', '.join(many)}"
    else:
        stamps = (f"{other} {lead_ns / NS_PER_S:+.2f} s" for other, lead_ns in leads.items())
        whose = f"whose stamps are off is not known (from rank 0's clock: {', '.join(stamps)})"
    return f", {_seconds(abs(ahead_ns))} {where} {first}; limit {_seconds(limit_ns)}; {whose}"


def _seconds(duration_ns: int) -> str:
    return f"{duration_ns / NS_PER_S:.2f} s"


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
