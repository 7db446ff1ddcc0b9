"""Run statistics beside the score: latency, age, critical path, drops, deadlines. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from statistics import median
from typing import Final, NamedTuple

from ppstream.analysis.age_advice import in_ms
from ppstream.analysis.places import stage_b_ns
from ppstream.analysis.records import ENVELOPES, TOTAL, Envelope, Ledger, RunLog, Topology
from ppstream.analysis.requests import is_on_request
from ppstream.analysis.scores import between, stage_a_ns, stage_c_ns
from ppstream.analysis.segments import ALONE, JudgedSpan, Segment
from ppstream.core.errors import counted, printable
from ppstream.core.quantiles import quantiles

FAULTS_MAX: Final = 16  # kinds that are shown
FAULT_CHARS: Final = 400
#: Drops that say nothing against a run: nobody was there, or what was asked for had changed.
HARMLESS: Final = frozenset({"absent", "answered", "not_ready", "session_reset", "stale"})
#: Drops for what the policy or the decoder gave, or did not; so many in a row end the run.
UNUSABLE: Final = frozenset(
    {
        "policy_error",
        "unwritten",
        "decoder_error",
        "non_finite",
        "limit",
        "velocity",
        "acceleration",
    }
)
SPOILT_SHARE: Final = 0.5  # of the envelopes: then the others are no picture of the run
LAST_EVENT_NS: Final = 50_000  # a wait shorter than this was no wait


def latencies_ns(window: JudgedSpan) -> list[int]:
    """Returns the times from A's start until the host has the actions, of emitted envelopes."""
    return [between(e.tA0, e.picked) for e in window.emitted if e.tA0 is not None]


def pick_ups_ns(window: JudgedSpan) -> list[int]:
    """Returns the times from C's end on a device until the host has the actions."""
    return [between(e.tEmit, e.tPick) for e in window.emitted if e.tPick is not None]


def wait_share(window: JudgedSpan, wait: str) -> float:
    """One of rank 0's named waits as a share of the window."""
    total_ns = sum(getattr(e, wait) or 0 for e in window.measured)
    return total_ns / window.span_ns if window.span_ns else 0.0


def critical_path(window: JudgedSpan) -> dict[str, dict[str, float]]:
    """For each stage's starts: the share whose last predecessor was which."""
    topology = window.topology
    chain = [f"B{place}" for place in topology.ranks] if topology.is_chain else []
    last: dict[str, Counter[str]] = {stage: Counter() for stage in ("A", *(chain or "B"), "C")}
    for segment in window.segments:
        for e in segment.measured:
            if not e.is_emitted:
                continue
            last["A"][_last_before_a(e, segment, topology)] += 1
            places = zip(chain, e.places, strict=True) if chain else (("B", e),)
            for stage, line in places:
                if line is not None and line.wait_input_ns is not None:
                    waited = line.wait_input_ns > LAST_EVENT_NS
                    last[stage]["envelope" if waited else "previous B"] += 1
            last["C"][_last_before_c(e, segment, topology)] += 1
    return {
        stage: {name: count / counter.total() for name, count in counter.most_common()}
        for stage, counter in last.items()
        if counter
    }


def _last_before_a(e: Envelope, segment: Segment, topology: Topology) -> str:
    waited = (e.w_input_ns or 0) > max(LAST_EVENT_NS, e.w_credit_ns or 0, e.w_slot_ns or 0)
    if waited and e.pacing != "saturated":  # saturated: samples are taken in, never waited for
        return "sensor"
    giver, before = segment.at(e.seq - topology.d_in), segment.at(e.seq - 1)
    on_thread = segment.at(e.seq - topology.lead - 1)
    ends = {
        "credit": giver.tRecv if giver and topology.credit == "before_window" else None,
        "previous A": before.tA1 if before else None,
        "C on the same thread": on_thread.tEmit
        if on_thread and topology.threads == "serial"
        else None,
    }
    return _latest(ends)


def _last_before_c(e: Envelope, segment: Segment, topology: Topology) -> str:
    before = segment.at(e.seq - 1)
    on_thread = segment.at(e.seq + topology.lead)
    serial = topology.threads == "serial"
    ends = {
        "result": e.tRecv,
        "previous C": before.tEmit if before else None,
        "A on the same thread": on_thread.tA1 if on_thread and serial else None,
    }
    return _latest({name: t for name, t in ends.items() if t is None or t <= (e.tDecode or t)})


def _latest(ends: dict[str, int | None]) -> str:
    known = {name: t for name, t in ends.items() if t is not None}
    return max(known, key=lambda name: known[name]) if known else "unknown"


def drops(run: RunLog, envelopes: Iterable[Envelope]) -> dict[str, object]:
    """Envelopes and samples that went nowhere, by reason; B's wasted share; does the ledger add up.

    Samples and balance come from the newest ledger lines; None without any.
    """
    lines = list(envelopes)
    busy = sum(map(stage_b_ns, lines))
    wasted = sum(stage_b_ns(e) for e in lines if e.drop is not None)
    samples = _sample_ledgers(run.ledgers)
    reasons: Counter[str] = Counter()
    for ledger in samples:
        reasons.update(ledger.dropped)
    return {
        "emitted": sum(e.is_emitted for e in lines),
        "envelopes": dict(Counter(e.drop for e in lines if e.drop is not None)),
        "wasted_b_share": wasted / busy if busy else 0.0,
        "samples": {reason: n for reason, n in reasons.items() if n} if samples else None,
        "imbalance": {k.stream: k.imbalance for k in run.ledgers if k.imbalance}
        if run.ledgers
        else None,
        "samples_by_stream": {
            ledger.stream: lost
            for ledger in run.stream_ledgers
            if (lost := {k: n for k, n in ledger.dropped.items() if n})
        },
    }


class FaultSeen(NamedTuple):
    """The first failure of its kind in user code, or the first chunk that broke an action rule."""

    stage: str
    kind: str
    n: int | None  # of this kind; None: its drops are counted, not its events
    what: str
    place: str
    rank: int

    def __str__(self) -> str:
        times = "" if self.n is None else f", {self.n} in all"
        place = f" at {self.place}" if self.place else ""
        return f"{self.kind} in stage {self.stage} (rank {self.rank}{times}): {self.what}{place}"


def first_faults(run: RunLog) -> list[FaultSeen]:
    """The first of each kind, in the order in which they came."""
    found: dict[tuple[str, str], FaultSeen] = {}
    for event in run.events:
        fields, is_fault = event.fields, event.name == "fault"
        if not is_fault and event.name != "refused":
            continue
        stage, kind = (shown(fields.get(name)) for name in ("stage", "fault"))
        key = (stage or "B", kind or "exception") if is_fault else ("C", shown(fields.get("rule")))
        seen = found.get(key)
        if seen is not None:
            found[key] = seen._replace(n=None if seen.n is None else seen.n + 1)
        elif len(found) < FAULTS_MAX:
            text = str(fields.get("text") or "").strip().rpartition("\n")[2]  # of older logs
            what, place = shown(fields.get("what") or text), shown(fields.get("place"))
            rank = fields.get("rank")
            n = 1 if is_fault else None
            found[key] = FaultSeen(*key, n, what, place, rank if type(rank) is int else 0)
    return list(found.values())


def shown(value: object) -> str:
    """Returns a log's own words, which may be anything, as text that can be shown."""
    return "" if value is None else printable(str(value), FAULT_CHARS, " ")


def _sample_ledgers(ledgers: Iterable[Ledger]) -> list[Ledger]:
    """Each sample once: the total where it was written, else the streams."""
    samples = [ledger for ledger in ledgers if ledger.stream != ENVELOPES]
    return [ledger for ledger in samples if ledger.stream == TOTAL] or samples


class Spoilt(NamedTuple):
    """So many of the judged phase's envelopes were dropped that the rest cannot be judged."""

    reason: str  # the most frequent one
    dropped: int  # for this reason
    envelopes: int
    others: dict[str, int]  # further reasons


def spoilt(run: RunLog, window: JudgedSpan, enough: int) -> Spoilt | None:
    """Drops that leave too few envelopes of the judged phase, or less than half of them.

    Args:
        run: its records.
        window: what is left.
        enough: periods that a window needs.
    """
    lines = judged(run, window)
    counts = Counter(e.drop for e in lines if e.drop is not None and e.drop not in HARMLESS)
    lost = counts.total()
    emitted = sum(e.is_emitted for e in lines)
    is_short = window.n < enough <= window.n + lost
    if not lost or not (is_short or lost > SPOILT_SHARE * (emitted + lost)):
        return None
    (reason, dropped), *others = counts.most_common()
    return Spoilt(reason, dropped, len(lines), dict(others))


def judged(run: RunLog, window: JudgedSpan) -> list[Envelope]:
    """All envelopes of the judged phase, warm-up and drops included."""
    return [
        e
        for e in run.envelopes
        if e.generation == window.generation and e.phase in window.phases and e.mode != ALONE
    ]


def usual_stages_ns(envelopes: Iterable[Envelope]) -> dict[str, float]:
    """Medians of A, B and C, each over the envelopes that were through it; {}: none was."""
    lines = list(envelopes)
    found = {
        "A": (stage_a_ns(e) for e in lines if e.tA1 is not None),
        "B": (stage_b_ns(e) for e in lines if e.B_ns is not None or e.eB_ns is not None),
        "C": (stage_c_ns(e) for e in lines if e.is_emitted and e.tDecode is not None),
    }
    return {stage: median(values) for stage, each in found.items() if (values := [*each])}


class ChunkGaps(NamedTuple):
    """Times without a new chunk in service: of each session, else those between rank 0's emits.

    Of robots that ask for their chunks only the waits for their first ones: they pause as they
    like.
    """

    longest_ns: int
    above: int  # so many were longer than the limit leaves, or so many sessions had one that was
    limit_ns: int
    first_ns: int = 0  # the longest wait of a robot for its first one
    is_by_session: bool = False  # robots tell of their longest one alone
    robot: str = ""  # whose the longest was; empty: not known
    first_robot: str = ""  # who waited ``first_ns``
    later_ns: int = 0  # the longest behind a first one
    later_robot: str = ""  # whose that was; empty: not known
    age_ns: int = 0  # of a chunk when it comes, by which its lease is shorter

    @property
    def left_ns(self) -> int:
        """Rest of a lease when its chunk comes."""
        return max(0, self.limit_ns - self.age_ns)

    @property
    def above_text(self) -> str:
        """For people."""
        limit = f"the lease of {in_ms(self.limit_ns)} ms"
        if self.age_ns:
            limit = f"{in_ms(self.left_ns)} ms (lease less age)"
        above = f"in {counted(self.above, 'session')}" if self.is_by_session else self.above
        return f"{above} above {limit}"


def chunk_gaps(
    run: RunLog, served: Iterable[Envelope], limit_ns: int, age_ns: int = 0
) -> ChunkGaps | None:
    """Gaps of each session, the longest, where a robot tells its own, else of all emits.

    Beside robots that tell, rank 0 knows the gap of one that does not. A robot tells of times
    between chunks; how long it waited for its first one, rank 0 knows.

    Args:
        run: its records.
        served: envelopes of service.
        limit_ns: of an action's age.
        age_ns: of a chunk when it comes, usually.
    """
    age_ns = 0 if is_on_request(run.config) else age_ns
    waits = run.first_waits_ns
    names = {state.session: state.robot or "" for state in run.robot_states}
    last = max(waits, key=lambda session: waits[session], default=0)  # to get a first one
    first_ns, first_robot = waits.get(last, 0), names.get(last, "")
    told = {one.session: one.chunk_gap_ns for one in run.robot_states if one.chunk_gap_ns}
    is_by_session = bool(told) and not is_on_request(run.config)
    if is_by_session:
        later = {**run.session_gaps_ns, **told}
        longest = later | {k: max(ns, later.get(k, 0)) for k, ns in waits.items()}
        gaps, later_ns = [*longest.values()], max(later.values())
        robot, later_robot = (names.get(max(of, key=of.__getitem__), "") for of in (longest, later))
    else:
        emits = sorted(e.tEmit for e in served if e.is_emitted and e.tEmit is not None)
        between = [] if is_on_request(run.config) else [b - a for a, b in pairwise(emits)]
        gaps, later_ns, later_robot = [*between, *waits.values()], max(between, default=0), ""
        robot = first_robot if max(gaps, default=0) == first_ns else ""
    if not gaps:
        return None
    above = sum(gap > limit_ns - age_ns for gap in gaps)
    first = (first_ns, is_by_session, robot, first_robot)
    return ChunkGaps(max(gaps), above, limit_ns, *first, later_ns, later_robot, age_ns)


def deadlines(envelopes: Iterable[Envelope]) -> dict[str, object] | None:
    """Counts actions that were certainly too old on leaving rank 0; None without leases.

    The age is the one since arrival at rank 0, so true misses are at least as many.
    """
    misses: list[bool] = []
    over_ns: list[int] = []  # negative: slack, so that p95 is the slack that 95 % have at least
    for e in envelopes:
        if e.lease_ns is not None and e.age_rank0_ns is not None:
            over_ns.append(e.age_rank0_ns - e.lease_ns)
            misses.append(over_ns[-1] > 0 or e.drop == "expired")
        elif e.drop == "expired":
            misses.append(True)
    if not misses:
        return None
    late = quantiles(over_ns)
    slack_ms = late and {"p50": -late.p50_ns / 1e6, "p95": -late.p95_ns / 1e6}
    return {
        "n": len(misses),
        "misses": sum(misses),
        "miss_rate": sum(misses) / len(misses),
        "longest_run": _longest_run(misses),
        "slack_ms": slack_ms,
    }


def _longest_run(misses: list[bool]) -> int:
    longest = run = 0
    for missed in misses:
        run = run + 1 if missed else 0
        longest = max(longest, run)
    return longest
