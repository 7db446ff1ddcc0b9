"""What a rank's log has seen, counted for whoever looks at the running pipeline. Pure.

The log's drain thread calls ``record`` and ``line`` for everything it writes; the loops never come
here. ``metrics.py`` shows the counts. One thread writes, any thread reads: a reader may see one
envelope half counted, never a torn number.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from ppstream.timestamps import EnvelopeRecord, Stage1Record

#: Upper ends in ms: from a GPU's stage to one that misses every deadline. Dense where stages and
#: ages lie, since a quantile is only as exact as the bucket it falls into.
BUCKETS_MS: Final = (
    *(0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.75, 1, 1.5, 2, 3, 5, 7.5),
    *(10, 15, 20, 30, 50, 75, 100, 150, 200, 300, 500, 1000),
)
BUCKETS_NS: Final = tuple(round(ms * 1e6) for ms in BUCKETS_MS)
RECENT: Final = 1000  # values behind a live quantile, and the p99 needs that many
JUDGED: Final = 300  # envelopes that the live class is made from
LABELS_MAX: Final = 64  # different values of one label; what comes later counts as OTHER
OTHER: Final = "other"
WAITS: Final = ("input", "credit", "slot", "result", "emit")
_waits_of: Final = attrgetter(*(f"w_{wait}_ns" for wait in WAITS))


class Histogram:
    """Counts by bucket, their sum in ns, and the newest ``RECENT`` values."""

    __slots__ = ("counts", "recent", "sum_ns")

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS_NS) + 1)  # the last one is above every bound
        self.sum_ns = 0
        self.recent: deque[int] = deque(maxlen=RECENT)

    def add(self, value_ns: int) -> None:
        self.counts[bisect_left(BUCKETS_NS, value_ns)] += 1
        self.sum_ns += value_ns
        self.recent.append(value_ns)

    def quantiles_ns(self, shares: Iterable[float]) -> list[int]:
        """Nearest-rank quantiles of the newest values; empty before the first."""
        ordered = sorted(self.recent.copy())
        return [
            ordered[max(0, -int(-share * len(ordered) // 1) - 1)] for share in shares if ordered
        ]


class Histograms(dict[str, Histogram]):
    """A histogram for each value of a label, ``LABELS_MAX`` at most."""

    def __missing__(self, label: str) -> Histogram:
        if len(self) >= LABELS_MAX and label != OTHER:
            return self[OTHER]
        return self.setdefault(label, Histogram())


class Tally:
    """What both kinds of rank count: phases, events, drops, robots and ledgers from lines."""

    def __init__(self, waits: Iterable[str]) -> None:
        self.phase = "starting"
        self.verdict: str | None = None  # of bring-up
        self.overlap: float | None = None  # the score that bring-up proved
        self.stages = Histograms()
        self.waits_ns = dict.fromkeys(waits, 0)
        self.link_ns = 0  # inside send and receive calls
        self.envelopes = 0
        self.drops: Counter[str] = Counter()
        self.events: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.ledger: Mapping[str, Any] = {}
        self.streams: Mapping[str, Any] = {}
        self.action_age = Histogram()
        self.executed = 0  # action chunks that robots used

    def line(self, line: Mapping[str, Any]) -> None:
        """One line that is no envelope."""
        kind = line["kind"]
        if kind == "event":
            self._event(line)
        elif kind == "ledger":
            self.streams, self.ledger = line["streams"], line["envelopes"]
        elif kind == "robot":
            self.executed += bool(line["executed"])
            if line["executed"]:  # a chunk that was superseded has no such age
                self.action_age.add(line["age_ns"])

    def _event(self, line: Mapping[str, Any]) -> None:
        name = str(line["name"])
        bump(self.events, name)
        if name == "phase":
            self.phase = str(line["phase"])
        elif name == "fault":
            bump(self.faults, str(line.get("fault", "unknown")))
        elif name == "verdict":
            self.verdict, self.overlap = str(line["verdict"]), line.get("overlap")

    def drop(self, reason: str | None) -> None:
        self.envelopes += 1
        if reason is not None:
            bump(self.drops, reason)


class Rank0Tally(Tally):
    """Rank 0: stages A, B and C, period, latency, queues, ages, deadlines."""

    def __init__(self) -> None:
        super().__init__(WAITS)
        self.period = Histogram()
        self.latency = Histogram()  # A's start to emit
        self.link = Histogram()  # both transfers of an envelope
        self.emit_age = Histogram()  # since the newest sample used came to rank 0
        self.queues = Histograms()
        self.observation_ages = Histograms()  # by stream, at the window's end
        self.misses = 0
        self.newest: deque[EnvelopeRecord] = deque(maxlen=JUDGED)
        self._emit_before: tuple[int, int] | None = None  # epoch, tEmit

    def record(self, record: EnvelopeRecord) -> None:
        """One envelope, emitted or dropped."""
        self.drop(record.drop)
        self.newest.append(record)
        for wait, waited_ns in zip(WAITS, _waits_of(record), strict=True):
            if waited_ns:
                self.waits_ns[wait] += waited_ns
        self.link_ns += record.busy_link_ns or 0
        a_ns = record.eA_ns or span_ns(record.tA0, record.tA1)
        b_ns = record.eB_ns or record.B_ns
        for stage, taken_ns in (("A", a_ns), ("B", b_ns)):
            if taken_ns is not None:
                self.stages[stage].add(taken_ns)
        self._queues(record)
        if is_missed(record):
            self.misses += 1
        for stream, age_ns in (record.input_age_ns or {}).items():
            if isinstance(age_ns := oldest(age_ns), int):
                self.observation_ages[stream].add(age_ns)
        if record.drop is None and record.tEmit is not None:
            self._emitted(record, record.tEmit)

    def _queues(self, record: EnvelopeRecord) -> None:
        if record.residence_ns is not None and record.B_ns is not None:
            self.queues["d_in"].add(max(0, record.residence_ns - record.B_ns))
            if (away_ns := span_ns(record.tSend, record.tRecv)) is not None:
                self.link.add(max(0, away_ns - record.residence_ns))
        if (waited_ns := span_ns(record.tRecv, record.tDecode)) is not None:
            self.queues["d_out"].add(waited_ns)

    def _emitted(self, record: EnvelopeRecord, emitted_ns: int) -> None:
        if self._emit_before is not None and self._emit_before[0] == record.epoch:
            self.period.add(emitted_ns - self._emit_before[1])
        self._emit_before = record.epoch, emitted_ns
        if (c_ns := record.eC_ns or span_ns(record.tDecode, emitted_ns)) is not None:
            self.stages["C"].add(c_ns)
        if (latency_ns := span_ns(record.tA0, emitted_ns)) is not None:
            self.latency.add(latency_ns)
        if record.age_rank0_ns is not None:
            self.emit_age.add(record.age_rank0_ns)


class PolicyTally(Tally):
    """A policy rank: stage B, its waits, and what it must not do once warm."""

    def __init__(self) -> None:
        super().__init__(("input", "output"))
        self.residence = Histogram()  # envelope complete to result committed
        self.idle_ns = 0
        self.recompiles = 0

    def record(self, record: Stage1Record) -> None:
        """One envelope that this rank answered."""
        self.drop(record.drop)
        b_ns = record.eB_ns or span_ns(record.tB0, record.tB1)
        if b_ns is not None:
            self.stages["B"].add(b_ns)
        if record.residence_ns is not None:
            self.residence.add(record.residence_ns)
        self.waits_ns["input"] += record.wait_input_ns or 0
        self.waits_ns["output"] += record.wait_output_ns or 0
        self.link_ns += record.busy_link_ns or 0
        self.idle_ns += record.idle_ns or 0
        self.recompiles += record.recompiles or 0


def bump(counter: Counter[str], label: str) -> None:
    """Count under ``label``, or under OTHER when there are too many labels already."""
    counter[label if label in counter or len(counter) < LABELS_MAX else OTHER] += 1


def span_ns(start: int | None, end: int | None) -> int | None:
    return None if start is None or end is None else end - start


def oldest(ages: Any) -> int | None:
    """Of one row, or of several; None where no row has any."""
    if isinstance(ages, list):
        return max((age for age in ages if age is not None), default=None)
    return ages if isinstance(ages, int) else None


def is_missed(record: EnvelopeRecord) -> bool:
    """Certainly too old on leaving rank 0: the age counts from arrival there."""
    if record.drop == "expired":
        return True
    expires, ends = record.expires_ns, record.window_end_ns
    if record.age_rank0_ns is None or expires is None or ends is None:
        return False
    if isinstance(expires, list) and isinstance(ends, list):
        leases = [e - w for e, w in zip(expires, ends, strict=True) if e]
        return bool(leases) and record.age_rank0_ns > min(leases)
    return (
        isinstance(expires, int) and isinstance(ends, int) and record.age_rank0_ns > expires - ends
    )
