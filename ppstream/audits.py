"""Audits that make a score trustworthy: does the log agree with itself?

Pure functions of a window. Each says how far the stamps disagree (``value``), how far they may
(``limit``), and is None where it could not run. They bound wrong stamps by independent witnesses:
waits measured around the blocking call, queue counters, the other rank's durations, rank 0's own
order of events.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from ppstream.records import Envelope, RunLog
from ppstream.scores import between
from ppstream.segments import Window
from ppstream.thread_time import excess_ns, residuals_ns, unlogged_waits

EPS: Final = 0.02  # of the window
SMALL_NS: Final = 50_000  # per envelope: what threads lose between two stamps
LITTLE_EPS: Final = 0.05
LITTLE_N: Final = 50  # envelopes per slot of both queues before Little's law is tested
DEVICE_SLACK_NS: Final = 50_000  # order of stamps that were mapped from device events


@dataclass(frozen=True, slots=True)
class Audit:
    """``ok`` is None where the audit did not run; ``missing`` names the fields it lacked."""

    ok: bool | None
    value: float | None = None
    limit: float | None = None
    note: str = ""
    missing: tuple[str, ...] = ()


def audit_all(run: RunLog, window: Window) -> dict[str, Audit]:
    """Every audit by its name in the report."""
    inline = window.topology.world_size == 1
    handed_over: dict[str, Callable[[], Audit]] = {
        "little": lambda: little(run, window),
        "bounds": lambda: bounds(window),
        "residence": lambda: residence(window),
        "outstanding": lambda: outstanding(run, window),
        "credit": lambda: credit(run, window),
    }
    none = Audit(None, note="nothing is handed over at world size 1")
    audits = {"conservation": none if inline else conservation(window), "order": order(window)}
    audits |= {name: none if inline else check() for name, check in handed_over.items()}
    return audits


def conservation(window: Window) -> Audit:
    """Busy + named waits (+ link calls) of each serial thread make up the whole of its time.

    ``value`` is the worst residual as a share of the window: positive, time nobody claims;
    negative, time claimed twice.
    """
    if window.n == 0:
        return Audit(None, note="no envelopes")
    lacking = unlogged_waits(window)
    if lacking:
        return Audit(None, note="waits not logged", missing=lacking)
    residuals = residuals_ns(window)
    worst = max(residuals, key=lambda name: abs(residuals[name]))
    limit_ns = max(EPS * window.span_ns, SMALL_NS * window.n)
    return Audit(
        ok=abs(residuals[worst]) <= limit_ns,
        value=residuals[worst] / window.span_ns,
        limit=limit_ns / window.span_ns,
        note=worst,
    )


def little(run: RunLog, window: Window) -> Audit:
    """The logged integral of each queue counter equals the sum of sojourns from the stamps.

    ``value`` is the worst difference, relative to the larger of both and at least 5 % of a slot.
    """
    topology = window.topology
    least = LITTLE_N * (topology.d_in + topology.d_out)
    if window.n < least:
        return Audit(None, note=f"needs {least} envelopes, has {window.n}")
    queues = {
        "outstanding": ("outstanding_ns_total", "tSend", "tRecv"),
        "q_decode": ("q_decode_ns_total", "tRecv", "tDecode"),
    }
    totals = [total for total, _, _ in queues.values()]
    lacking = tuple(t for t in totals if any(getattr(e, t) is None for e in _ends(window)))
    if lacking:
        return Audit(None, note=f"{', '.join(lacking)} not logged")
    differences = {}
    for name, (total, start, end) in queues.items():
        counted = sum(getattr(s.last, total) - getattr(s.first, total) for s in window.segments)
        stamped = sum(between(getattr(e, start), getattr(e, end)) for e in window.measured)
        floor = LITTLE_EPS * window.span_ns  # an almost empty queue has no relative error
        differences[name] = abs(counted - stamped) / max(counted, stamped, floor)
    worst = max(differences, key=lambda name: differences[name])
    return Audit(differences[worst] <= LITTLE_EPS, differences[worst], LITTLE_EPS, worst)


def bounds(window: Window) -> Audit:
    """No serial resource is busy for longer than its window, and no device region outlasts its B.

    ``value`` is the worst excess as a share of the window.
    """
    if window.n == 0:
        return Audit(None, note="no envelopes")
    span = window.span_ns
    excess = excess_ns(window)
    excess["eB_ns over B_ns"] = sum(
        max(0, e.eB_ns - e.B_ns)
        for e in window.measured
        if e.eB_ns is not None and e.B_ns is not None
    )
    worst = max(excess, key=lambda name: excess[name])
    return Audit(excess[worst] <= EPS * span, max(0.0, excess[worst]) / span, EPS, worst)


def residence(window: Window) -> Audit:
    """``B_ns <= residence_ns <= tRecv - tSend``: a B that began before its envelope came is caught.

    ``value`` is the sum of all violations as a share of the window.
    """
    if not window.n or any(e.residence_ns is None for e in window.emitted):
        return Audit(None, note="residence_ns not logged", missing=("residence_ns",))
    broken_ns = sum(
        max(0, (e.B_ns or 0) - e.residence_ns) + max(0, e.residence_ns - between(e.tSend, e.tRecv))
        for e in window.measured
        if e.residence_ns is not None
    )
    return _small_sum(broken_ns, window)


def outstanding(run: RunLog, window: Window) -> Audit:
    """The mesh is only busy while rank 0 has something outstanding (rank 0's stamps alone).

    Also: the counter sampled at each emit equals the count from the stamps. ``value`` is the busy
    share of the mesh minus the outstanding share.
    """
    span = covered = busy = 0
    for segment in window.segments:
        received = [e for e in segment.envelopes if e.tSend is not None and e.tRecv is not None]
        previous = received[0].tRecv or 0 if received else 0
        for e in received[1:]:
            here = e.tRecv or 0
            covered += max(0, here - max(e.tSend or 0, previous))
            span += here - previous
            busy += (e.B_ns or 0) // window.topology.replicas
            previous = here
    if span <= 0:
        return Audit(None, note="no tSend and tRecv", missing=("tSend", "tRecv"))
    difference = (busy - covered) / span
    if difference > EPS:
        return Audit(ok=False, value=difference, limit=EPS, note="mesh busy, nothing outstanding")
    wrong = _wrong_samples(run, window)
    return Audit(
        ok=wrong <= LITTLE_EPS,
        value=difference,
        limit=EPS,
        note=f"{wrong:.0%} of the sampled counters differ from the stamps" if wrong else "",
    )


def credit(run: RunLog, window: Window) -> Audit:
    """Nothing starts before the permission or the thread that it needs.

    Commit and (credit before window) A after the receipt D_in earlier; decode after its result and
    the emit before it; receipt after the decode D_out earlier; A and C of one thread disjoint.
    ``value`` is the sum of all violations as a share of the window.
    """
    lanes: dict[tuple[int, int], dict[int, Envelope]] = {}
    for e in run.envelopes:
        if e.generation == window.generation:
            lanes.setdefault((e.lane, e.epoch), {})[e.seq] = e
    starts: list[Envelope] = window.measured
    broken_ns = sum(sum(_too_early_ns(e, lanes[e.lane, e.epoch], window)) for e in starts)
    if window.topology.threads == "serial":
        broken_ns += _same_thread_ns(window)
    return _small_sum(broken_ns, window)


def order(window: Window) -> Audit:
    """Stamps of one envelope never run backwards; ``value`` counts the envelopes where they do.

    Further, A does not begin before the newest sample it used had come (summed, since a sample may
    slip in while the window is cut): a tA0 stamped before the wait for input is caught.
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
    return Audit(backwards == 0, backwards, 0, "stamps run backwards" if backwards else "")


def _wrong_samples(run: RunLog, window: Window) -> float:
    """Share of emits whose ``outstanding`` lies outside the count from stamps.

    Events at the very instant of an emit may count either way. The last emits are left out: what
    was sent behind them is not logged yet.
    """
    lines = [e for e in run.envelopes if e.generation == window.generation and e.tSend is not None]
    sampled = [e for e in window.emitted if e.outstanding is not None]
    wrong = checked = 0
    for lane in {e.lane for e in sampled}:
        sent = sorted(e.tSend or 0 for e in lines if e.lane == lane)
        came = sorted(e.tRecv for e in lines if e.lane == lane and e.tRecv is not None)
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


def _too_early_ns(e: Envelope, lane: dict[int, Envelope], window: Window) -> Iterator[int]:
    """How much too early each step of one envelope was."""
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


def _same_thread_ns(window: Window) -> int:
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


def _small_sum(broken_ns: int, window: Window) -> Audit:
    if window.n == 0:
        return Audit(None, note="no envelopes")
    return Audit(broken_ns <= EPS * window.span_ns, broken_ns / window.span_ns, EPS)


def _ends(window: Window) -> list[Envelope]:
    return [e for segment in window.segments for e in (segment.first, segment.last)]
