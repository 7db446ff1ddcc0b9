"""Audits that make a score trustworthy: does the log agree with itself?

Pure functions of a window. Each says how far the stamps disagree (``value``), how far they may
(``limit``), and is None where it could not run. They bound wrong stamps by independent witnesses:
waits measured around the blocking call, queue counters, the other rank's durations, rank 0's own
order of events.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import attrgetter
from statistics import median
from typing import Final

from ppstream.analysis.place_checks import (
    device_excess_ns,
    missing_lines,
    out_of_order,
    slot_excess_ns,
    slowest_b_ns,
    stay_excess_ns,
    unpermitted_ns,
)
from ppstream.analysis.places import is_elsewhere
from ppstream.analysis.records import Envelope, EnvelopeLedger, RunLog
from ppstream.analysis.scores import between
from ppstream.analysis.segments import JudgedSpan
from ppstream.analysis.thread_time import Threads, stage_cpu, unlogged_waits

EPS: Final = 0.02  # of the window
SMALL_NS: Final = 50_000  # per envelope: what threads lose between two stamps
LITTLE_EPS: Final = 0.05
LITTLE_ENDS: Final = 9  # emits at either end
DEVICE_SLACK_NS: Final = 50_000  # order of stamps that were mapped from device events


@dataclass(frozen=True, slots=True)
class Audit:
    """``ok`` is None where the audit did not run; ``missing`` names the fields it lacked.

    One that did not run is held against the run, unless it ``may_lack`` what it needs.
    """

    ok: bool | None
    value: float | None = None
    limit: float | None = None
    note: str = ""
    missing: tuple[str, ...] = ()
    may_lack: bool = False


def audit_all(run: RunLog, window: JudgedSpan) -> dict[str, Audit]:
    """Every audit by its name in the report."""
    checks: dict[str, Callable[[], Audit]] = {
        "conservation": lambda: conservation(run, window),
        "order": lambda: order(run, window),
        "little": lambda: little(run, window),
        "bounds": lambda: bounds(run, window),
        "residence": lambda: residence(window),
        "outstanding": lambda: outstanding(run, window),
        "credit": lambda: credit(run, window),
        "stamps": lambda: stamps(run, window),
        "ledger": lambda: ledger(run, window),
        "cpu": lambda: cpu(run, window),
    }
    if window.span_ns <= 0:
        return dict.fromkeys(checks, Audit(None, note="no time passed between two emits"))
    if window.topology.world_size == 1:
        none = Audit(None, note="nothing is handed over at world size 1")
        return {name: check() if name == "order" else none for name, check in checks.items()}
    return {name: check() for name, check in checks.items()}


def by_note(notes: Mapping[str, str]) -> str:
    """Names beside what is said of them, which is said once."""
    names: dict[str, list[str]] = {}
    for name, note in notes.items():
        names.setdefault(note, []).append(name)
    return "; ".join(f"{', '.join(same)}: {note}" for note, same in names.items())


def conservation(run: RunLog, window: JudgedSpan) -> Audit:
    """Busy + named waits (+ link calls) of each serial thread make up the whole of its time.

    ``value`` is the worst residual as a share of the window: positive, time nobody claims;
    negative, time claimed twice.
    """
    lacking = unlogged_waits(window)
    if lacking:
        return Audit(None, note="waits not logged", missing=lacking)
    residuals = Threads(run, window).residuals_ns()
    worst = max(residuals, key=lambda name: abs(residuals[name]))
    limit_ns = max(EPS * window.span_ns, SMALL_NS * window.n)
    return Audit(
        ok=abs(residuals[worst]) <= limit_ns,
        value=residuals[worst] / window.span_ns,
        limit=limit_ns / window.span_ns,
        note=worst,
    )


def little(run: RunLog, window: JudgedSpan) -> Audit:
    """The logged integral of each queue counter equals the sum of sojourns from the stamps.

    Both are taken between two emits; of an envelope that was under way at one of them, the part of
    its sojourn between them. Another thread may move an envelope and be late to tell the counter,
    so each end is the middle of a few. ``value`` is the worst difference, relative to the larger of
    both and at least 5 % of a slot.
    """
    queues = {
        "outstanding": ("outstanding_ns_total", "tSend", "tRecv"),
        "q_decode": ("q_decode_ns_total", "tRecv", "tDecode"),
    }
    lines = [e for e in run.envelopes if e.generation == window.generation]
    ends = _counted_ends(lines, window)
    if not ends:
        return Audit(
            None, note="the log has no two emits with every envelope in flight between them"
        )
    used = [e for first, last in ends for e in (*first, *last)]
    lacking = [t for t, _, _ in queues.values() if any(getattr(e, t) is None for e in used)]
    if lacking:
        return Audit(None, note=f"{', '.join(lacking)} not logged")
    # of an almost empty queue
    floor = LITTLE_EPS * sum(between(first[0].tEmit, last[-1].tEmit) for first, last in ends)
    over_ns = max(e.tEmit or 0 for e in used)
    differences = {}
    for name, (total, start, end) in queues.items():
        stamped_at = ((getattr(e, start), getattr(e, end)) for e in lines)
        stays = [(s, t) for s, t in stamped_at if s is not None and t is not None and s < over_ns]
        gone_ns = _gone_by_emit(stays)
        off = passed = 0.0
        for first, last in ends:
            before, behind = (
                median(getattr(e, total) - gone_ns(e) for e in part) for part in (first, last)
            )
            off += behind - before
            passed += gone_ns(last[-1]) - gone_ns(first[0])
        differences[name] = abs(off) / max(passed, passed + off, floor)
    worst = max(differences, key=lambda name: differences[name])
    return Audit(differences[worst] <= LITTLE_EPS, differences[worst], LITTLE_EPS, worst)


def _gone_by_emit(stays: Sequence[tuple[int, int]]) -> Callable[[Envelope], int]:
    """Time (ns) of all ``stays`` (start and end) that had passed when an envelope was emitted."""
    starts, ends = sorted(s for s, _ in stays), sorted(max(s, t) for s, t in stays)
    started, ended = (list(accumulate(instants, initial=0)) for instants in (starts, ends))

    def gone_ns(e: Envelope) -> int:
        now = e.tEmit or 0
        begun, over = bisect_left(starts, now), bisect_left(ends, now)
        return (begun - over) * now - started[begun] + ended[over]

    return gone_ns


def bounds(run: RunLog, window: JudgedSpan) -> Audit:
    """No serial resource is busy for longer than its window, and no device region outlasts its B.

    ``value`` is the worst excess as a share of the window.
    """
    span = window.span_ns
    excess = Threads(run, window).excess_ns()
    excess["eB_ns over B_ns"] = sum(
        max(0, e.eB_ns - e.B_ns)
        for e in window.measured
        if e.eB_ns is not None and e.B_ns is not None
    )
    excess |= device_excess_ns(window)
    worst = max(excess, key=lambda name: excess[name])
    return Audit(excess[worst] <= EPS * span, max(0.0, excess[worst]) / span, EPS, worst)


def residence(window: JudgedSpan) -> Audit:
    """``B_ns <= residence_ns <= tRecv - tSend``: a B that began before its envelope came is caught.

    In a chain B lies within its stay on each place, and ``residence_ns`` is the sum of the stays.
    ``value`` is the sum of all violations as a share of the window.
    """
    if any(e.residence_ns is None for e in window.emitted):
        return Audit(None, note="residence_ns not logged", missing=("residence_ns",))
    broken_ns = sum(
        max(0, (e.B_ns or 0) - e.residence_ns) + max(0, e.residence_ns - between(e.tSend, e.tRecv))
        for e in window.measured
        if e.residence_ns is not None
    )
    return _small_sum(broken_ns + stay_excess_ns(window), window)


def outstanding(run: RunLog, window: JudgedSpan) -> Audit:
    """A policy rank is only busy while rank 0 has something outstanding (rank 0's stamps alone).

    Also, with one thread on rank 0: the counter sampled at each emit equals the count from the
    stamps; with two, Little's law asks its integral. ``value`` is the busy share of the mesh (of a
    chain: of its busiest place) minus the outstanding share. An envelope sent before the first
    receipt may have been worked on before it, and counts from there.
    """
    span = covered = 0
    times = [0] * window.topology.places  # busy, of each policy rank
    for segment in window.segments:
        received = [e for e in segment.envelopes if e.tSend is not None and e.tRecv is not None]
        start = previous = received[0].tRecv or 0 if received else 0
        for e in received[1:]:
            here, sent = e.tRecv or 0, e.tSend or 0
            covered += max(0, here - max(sent, previous))
            span += here - previous
            before = max(0, start - sent)
            for k, b_ns in enumerate(_b_by_place_ns(e, window)):
                times[k] += max(0, b_ns - before) // window.topology.replicas
            previous = here
    if span <= 0:
        return Audit(None, note="no tSend and tRecv", missing=("tSend", "tRecv"))
    difference = (max(times) - covered) / span
    if difference > EPS:
        return Audit(
            ok=False, value=difference, limit=EPS, note="policy rank busy, nothing outstanding"
        )
    # of one thread alone: another's move is counted a moment behind its stamp
    wrong = _wrong_samples(run, window) if window.topology.threads == "serial" else 0.0
    return Audit(
        ok=wrong <= LITTLE_EPS,
        value=difference,
        limit=EPS,
        note=f"{wrong:.0%} of the sampled counters differ from the stamps" if wrong else "",
    )


def _b_by_place_ns(e: Envelope, window: JudgedSpan) -> list[int]:
    if not window.topology.is_chain:
        return [e.B_ns or 0]
    return [0 if line is None else line.B_ns or 0 for line in e.places]


def credit(run: RunLog, window: JudgedSpan) -> Audit:
    """Nothing starts before the permission or the thread that it needs.

    Commit and (credit before window) A after the receipt D_in earlier; decode after its result and
    the emit before it; receipt after the decode D_out earlier; A and C of one thread disjoint. On
    a place of a chain, its slot after the envelope D_in earlier has left it. Of devices, too: a
    window after the policy rank sent the result D_in earlier.
    ``value`` is the sum of all violations as a share of the window.
    """
    starts: list[Envelope] = window.measured
    lanes: dict[tuple[int, int], dict[int, Envelope]] = {(e.lane, e.epoch): {} for e in starts}
    for e in run.envelopes:
        if e.generation == window.generation and (e.lane, e.epoch) in lanes:
            lanes[e.lane, e.epoch][e.seq] = e
    broken_ns = sum(sum(_too_early_ns(e, lanes[e.lane, e.epoch], window)) for e in starts)
    if window.topology.threads == "serial":
        broken_ns += _same_thread_ns(window)
    broken_ns += slot_excess_ns(window) + unpermitted_ns(run, window, DEVICE_SLACK_NS)
    return _small_sum(broken_ns, window)


def order(run: RunLog, window: JudgedSpan) -> Audit:
    """Stamps of one envelope never run backwards; ``value`` counts the envelopes where they do.

    A place of a chain works on one envelope at a time, in their order, and on one clock no envelope
    is there before it was sent. Further, A does not begin before the newest sample it used had come
    (summed, since a sample may slip in while the window is cut): a tA0 stamped before the wait for
    input is caught.
    """
    slack_ns = DEVICE_SLACK_NS if window.topology.device_stamped else 0
    backwards = 0
    for e in window.measured:
        stamps = [t for t in (e.tA0, e.tA1, e.tSend, e.tRecv, e.tDecode, e.tEmit) if t is not None]
        backwards += any(b < a - slack_ns for a, b in pairwise(stamps))
    future_ns = sum(max(0, between(e.tA0, e.tRx)) for e in window.measured)
    if backwards == 0 and future_ns > EPS * window.span_ns:
        share = future_ns / window.span_ns
        return Audit(ok=False, value=share, limit=EPS, note="A begins before its newest sample")
    on_places, where = out_of_order(run, window, DEVICE_SLACK_NS)
    note = "stamps run backwards" if backwards else where
    return Audit(backwards + on_places == 0, backwards + on_places, 0, note)


def stamps(run: RunLog, window: JudgedSpan) -> Audit:
    """Rank 0's ``B_ns`` is ``tB1 - tB0`` of the policy rank's own line, which is not missing.

    In a chain it is that of the slowest place, and every place has its lines. ``value`` is the sum
    of all differences as a share of the window, or the share of lines missing.
    """
    measured, topology = window.measured, window.topology
    if not any(line is not None for e in measured for line in e.places):
        elsewhere = is_elsewhere(run.manifest)
        where = "are on another host" if elsewhere else "are missing"
        of = "ranks'" if topology.is_chain else "rank's"
        return Audit(None, note=f"the policy {of} lines {where}", may_lack=elsewhere)
    newest = set(map(id, run.envelopes[-topology.in_system :]))  # may not be written yet
    missing, where = missing_lines(window, newest)
    if missing > EPS:
        note = f"lines of {where if topology.is_chain else 'the policy rank'} missing"
        return Audit(ok=False, value=missing, limit=EPS, note=note)
    pairs = ((e.B_ns, slowest_b_ns(e)) for e in measured)
    broken_ns = sum(
        abs(b_ns - own_ns) for b_ns, own_ns in pairs if b_ns is not None and own_ns is not None
    )
    return _small_sum(broken_ns, window)


def ledger(run: RunLog, window: JudgedSpan) -> Audit:
    """The log has a line of every envelope that rank 0's last ledger of the judged phase counts.

    Its counts balance, too. ``value`` is the share of lines missing, by the ledger or by gaps of
    ``seq`` within the judged phase.
    """
    lines = [e for e in run.envelopes if e.generation == window.generation]
    judged = [e for e in lines if e.phase in window.phases]
    end_ns = _phase_end_ns(run, window)
    books = [
        book
        for book in run.envelope_ledgers
        if book.generation == window.generation and (end_ns is None or (book.t or 0) <= end_ns)
    ]
    if not judged or not books:
        return Audit(None, note="no ledger of envelopes")
    last = books[-1]
    if last.imbalance:
        note = f"envelopes do not balance by {last.imbalance:+d}"
        return Audit(ok=False, value=abs(last.imbalance), limit=0, note=note)
    missing, share = lines_lost(lines, judged, last)
    note = f"{missing} lines of envelopes are missing" if missing else ""
    return Audit(share <= EPS, share, EPS, note)


def lines_lost(
    lines: Iterable[Envelope], judged: Sequence[Envelope], book: EnvelopeLedger, unwritten: int = 0
) -> tuple[int, float]:
    """Lines that a log lacks, by a ledger or by gaps of ``seq``, and as a share of ``judged``.

    Args:
        lines: of the generation.
        judged: those among them that gaps are looked for in.
        book: the ledger.
        unwritten: envelopes that it may count before the log has their lines.
    """
    logged = sum(book.t is None or _ended_ns(e) <= book.t for e in lines)
    gaps = sum(
        b.seq - a.seq - 1 for a, b in pairwise(judged) if (a.lane, a.epoch) == (b.lane, b.epoch)
    )
    missing = max(0, gaps, book.finished - logged - unwritten)
    return missing, missing / max(1, len(judged) + missing)


def _ended_ns(e: Envelope) -> int:
    """The last stamp that an envelope has; a dropped one was over soon behind it."""
    stamps = (getattr(e, name) for name in ("tEmit", "tDecode", "tRecv", "tSend", "tA1"))
    return next((t for t in stamps if t is not None), 0)


def cpu(run: RunLog, window: JudgedSpan) -> Audit:
    """No stage took more CPU time than time, and all together no more than the CPUs have.

    ``value`` is the worst excess as a share of the window.
    """
    found = stage_cpu(window)
    if not found:
        return Audit(None, note="no CPU times in the log", may_lack=True)
    excess: dict[str, float] = {
        f"{stage} over its time": times.cpu_ns - times.stage_ns for stage, times in found.items()
    }
    usable = noted_cpus(run, window.generation)
    if usable is not None and not is_elsewhere(run.manifest):
        total = sum(times.cpu_ns for times in found.values())
        excess[f"all over {usable:g} CPUs"] = total - usable * window.span_ns
    worst = max(excess, key=lambda name: excess[name])
    limit_ns = max(EPS * window.span_ns, SMALL_NS * window.n)
    value = max(0.0, excess[worst]) / window.span_ns
    note = worst if excess[worst] > limit_ns else ""
    return Audit(excess[worst] <= limit_ns, value, limit_ns / window.span_ns, note)


def noted_cpus(run: RunLog, generation: int) -> float | None:
    """As rank 0 found them at the start of bring-up; None: it did not say."""
    for event in run.events:
        if event.name == "machine" and event.generation == generation:
            value = event.fields.get("usable_cpus")
            return float(value) if isinstance(value, int | float) and value > 0 else None
    return None


def _phase_end_ns(run: RunLog, window: JudgedSpan) -> int | None:
    """When rank 0 left the judged phase for the last time; None: it has not, or nobody knows."""
    changes = [
        (event.t, event.phase)
        for event in run.events
        if event.name == "phase" and (event.rank, event.generation) == (0, window.generation)
    ]
    ends = [
        after[0]
        for before, after in pairwise(changes)
        if before[1] in window.phases and after[1] not in window.phases
    ]
    return ends[-1] if ends else None


def _wrong_samples(run: RunLog, window: JudgedSpan) -> float:
    """Share of emits whose ``outstanding`` lies outside the count from stamps.

    Events at the very instant of an emit may count either way. The last emits are left out: what
    was sent behind them is not logged yet.
    """
    sampled = [e for e in window.emitted if e.outstanding is not None]
    over_ns = max((e.tEmit or 0 for e in sampled), default=0)
    lines = [e for e in run.envelopes if e.generation == window.generation and e.tSend is not None]
    wrong = checked = 0
    for lane in {e.lane for e in sampled}:
        sent, came = (
            sorted(t for e in lines if e.lane == lane and (t := at(e)) is not None and t <= over_ns)
            for at in (attrgetter("tSend"), attrgetter("tRecv"))
        )
        mine = [e for e in sampled if e.lane == lane][: -window.topology.in_system]
        for e, (least, most) in zip(mine, _counts(mine, sent, came), strict=True):
            checked += 1
            wrong += not least <= (e.outstanding or 0) <= most
    return wrong / checked if checked else 0.0


def _counts(at: Iterable[Envelope], sent: list[int], came: list[int]) -> Iterator[tuple[int, int]]:
    """Fewest and most outstanding envelopes at each emit, by bisection of both lists."""
    for e in at:
        t = e.tEmit or 0
        yield (
            bisect_left(sent, t) - bisect_right(came, t),
            bisect_right(sent, t) - bisect_left(came, t),
        )


def _too_early_ns(e: Envelope, lane: dict[int, Envelope], window: JudgedSpan) -> Iterator[int]:
    """Returns by how much each step of one envelope was too early."""
    topology = window.topology
    giver, before, freed = (
        lane.get(e.seq - topology.d_in),
        lane.get(e.seq - 1),
        lane.get(e.seq - topology.d_out),
    )
    if giver is not None:
        yield max(0, between(e.tSend, giver.tRecv))
        if topology.credit == "before_window":
            yield max(0, between(e.tA0, giver.tRecv))
    if before is not None and before.is_emitted:
        yield max(0, between(e.tDecode, before.tEmit))
    if freed is not None:
        yield max(0, between(e.tRecv, freed.tDecode))
    yield max(0, between(e.tDecode, e.tRecv))


def _same_thread_ns(window: JudgedSpan) -> int:
    """Time that A and C of the one thread claim together, with any two of their intervals."""
    shared = 0
    for segment in window.segments:
        pairs = [(e.tA0, e.tA1) for e in segment.envelopes]
        pairs += [(e.tDecode, e.tEmit) for e in segment.envelopes]
        intervals = sorted((a, b) for a, b in pairs if a is not None and b is not None)
        end = intervals[0][0] if intervals else 0
        for a, b in intervals:
            shared += max(0, min(end, b) - a)
            end = max(end, b)
    return shared


def _small_sum(broken_ns: int, window: JudgedSpan) -> Audit:
    return Audit(broken_ns <= EPS * window.span_ns, broken_ns / window.span_ns, EPS)


def _counted_ends(
    lines: Sequence[Envelope], window: JudgedSpan
) -> list[tuple[list[Envelope], list[Envelope]]]:
    """The first and the last emits of every segment between which no envelope is missing.

    Behind the newest lines some may be under way that are not logged yet.
    """
    held = {(e.lane, e.epoch, e.seq) for e in lines[-window.topology.in_system :]}
    ends = []
    for segment in window.segments:
        whole = [e for e in segment.emitted if (e.lane, e.epoch, e.seq) not in held]
        if len(whole) >= 2:
            few = min(LITTLE_ENDS, len(whole) // 2)
            ends.append((whole[:few], whole[-few:]))
    return ends
