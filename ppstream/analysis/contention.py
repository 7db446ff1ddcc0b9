"""The score by the stages' times alone: what contention hides from stamps. Pure.

A stage that waits inside its bracket for a CPU, a lock, the interpreter or a device which another
stage holds looks busy, and two such stages look as if they ran beside each other. So the score is
made once more, S = (A + B + C - P) / (A + B + C - M), with what each stage takes while all else
idles, against the measured period P.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from operator import add, sub
from typing import Final, NamedTuple

from ppstream.analysis.period_model import StageTimes
from ppstream.analysis.places import StageBTimes, lines_of
from ppstream.analysis.records import Envelope, IsolatedTimes, PolicyLine, RunLog, Topology
from ppstream.analysis.scores import Primary, mean_times, resource_names, saved_share
from ppstream.analysis.segments import ALONE, JudgedSpan
from ppstream.core.cpus import Machine
from ppstream.core.phases import BRING_UP

SHORT_SHARE: Final = 0.05  # of the period: a shorter stage cannot be what overlap is about
MOVED_MAX: Final = 0.25  # of a stage alone, between both measurements
MOVED_NS: Final = 1_000_000  # and at least so much
PAIR_CLAIMED: Final = 0.5  # two resources whose stamps score this ran beside each other, they say
PAIR_COST_MIN: Final = 1.25  # of the period, if they ran in turn: else there is little to tell
PROVEN: Final = 1.05  # periods that work has to fill, in turn, before waits for a CPU count as well


@dataclass(frozen=True, slots=True)
class Alone:
    """The score of a window by its stages' times alone, in ns.

    ``s`` is the least of the whole and of every two host threads that ran beside each other by
    their stamps. No time alone counts for more than the run's own: measuring slowly buys nothing.
    """

    times: StageTimes  # as measured, of a, b of each policy rank, and c
    fair: StageTimes  # what the score is made from: no stage buys anything by being slow alone
    s: float | None
    slowest_ns: float  # M
    strict: float  # period over the slowest resource
    stretch: dict[str, float]  # of stages that count: the run's time over the time alone
    moved: dict[str, float]  # the time alone behind bring-up over the one before; {}: one was made
    slower: dict[str, float]  # CPU time and sleep alone over what of it counts
    ignores_waits: bool  # for a CPU: other programs may have caused them, but a lock may have, too

    @property
    def in_turn_ns(self) -> float:
        """The period of one rank that runs A, B and C in turn."""
        return sum(self.fair.stages.values())

    @property
    def ceiling(self) -> float:
        """Most that overlap could gain over it."""
        return self.in_turn_ns / self.slowest_ns

    def saved(self, period_ns: float) -> float:
        """Share that such a period saves of what can be saved over one rank."""
        return saved_share(self.in_turn_ns, period_ns, self.slowest_ns)


def alone(run: RunLog, window: JudgedSpan, score: Primary, machine: Machine | None) -> Alone | None:
    """The score by stage times alone; None where none were measured, or nothing could overlap.

    The mean of the measurements before and behind bring-up counts: the smaller would refuse a
    device that has grown warm. Where they are far apart the smaller one does: the larger would be
    bought by one slow measurement, as clocks that ramp up make it.
    """
    measured = [found for found in (run.standalone, run.standalone_after) if found is not None]
    topology, ran = run.topology, score.times
    if not measured or topology.world_size == 1:
        return None
    each = [times for one in measured if (times := _stages_alone(one, ran, topology)) is not None]
    if len(each) < len(measured):
        return None
    both = _both(each)
    parts = _parts(window.measured, topology, ran)
    found = [_parts(lines, topology, ran) for lines in _lines_alone(run, window) if lines]
    slow, own = _own(parts, [one for one in found if one is not None], both, ran)
    waiting = _each(min, ran, _each(add, own, _waits(parts, own, score, topology, machine)))
    worked = _resources(own, topology)
    ignores_waits = waiting != own and not _fills(worked, score.period_ns)
    fair = own if ignores_waits else waiting
    resources = _resources(fair, topology)
    return Alone(
        times=both,
        fair=fair,
        s=_overlap(resources, worked, _resources(ran, topology), score.period_ns, topology),
        slowest_ns=max(1.0, *resources),
        strict=score.period_ns / max(1.0, *_resources(both, topology)),
        stretch={
            k: ns / took
            for k, ns in ran.stages.items()
            if (took := both.stages[k]) > 0 and ns > SHORT_SHARE * score.period_ns
        },
        moved={k: each[-1].stages[k] / a for k, a in each[0].stages.items() if a}
        if len(each) > 1
        else {},
        slower={k: slow.stages[k] / most for k, most in own.stages.items() if most > 0},
        ignores_waits=ignores_waits,
    )


def _stages_alone(
    measured: IsolatedTimes, ran: StageTimes, topology: Topology
) -> StageTimes | None:
    """With the places that the run's own times have; None where the measurement lacks them."""
    places: Sequence[float] = measured.places_ns
    if not ran.behind:
        places = [measured.b_ns]
    if len(places) != len(ran.places):
        return None
    return StageTimes.of_chain(measured.a_ns, places, measured.c_ns)


def _both(measured: Sequence[StageTimes]) -> StageTimes:
    """Of the measurement before bring-up and the one behind it."""

    def both(one: float, other: float) -> float:
        return min(one, other) if is_apart(one, other) else (one + other) / 2

    return _each(both, measured[0], measured[-1])


def is_apart(one_ns: float, other_ns: float) -> bool:
    """Two times that ought to be one time."""
    return abs(one_ns - other_ns) > max(MOVED_NS, MOVED_MAX * min(one_ns, other_ns))


class _Parts(NamedTuple):
    """Mean parts of a stage's time; host threads only."""

    cpu: StageTimes
    delay: StageTimes  # runnable without a CPU
    rest: StageTimes  # asleep, or waiting for anything else


def _own(
    ran: _Parts | None, alone: Sequence[_Parts], times: StageTimes, whole: StageTimes
) -> tuple[StageTimes, StageTimes]:
    """Returns what the stages take with the machine to themselves, and what of that counts.

    Waits for a CPU do not.
    CPU time and the rest of it count as long as they lasted alone, or in the run where that was
    less: a stage that works or sleeps longer alone than in the run gains nothing.
    """
    if ran is None:
        return times, _each(min, times, whole)
    if not alone:  # its lines are not there
        return times, _each(min, times, _each(add, ran.cpu, ran.rest))
    cpu, rest = (_both([getattr(one, name) for one in alone]) for name in ("cpu", "rest"))
    counts = _each(add, _each(min, cpu, ran.cpu), _each(min, rest, ran.rest))
    return _each(add, cpu, rest), counts


def _lines_alone(run: RunLog, window: JudgedSpan) -> tuple[list[Envelope], list[Envelope]]:
    """Envelopes that went one by one, before bring-up and behind it."""
    lines = [e for e in run.envelopes if e.mode == ALONE and e.generation == window.generation]
    sent = [e for e in lines if e.is_emitted]
    return [e for e in sent if e.phase != BRING_UP], [e for e in sent if e.phase == BRING_UP]


def _waits(
    ran: _Parts | None, own: StageTimes, score: Primary, topology: Topology, machine: Machine | None
) -> StageTimes:
    """Of the waits for a CPU in the run, what others can have caused.

    Where the run's own threads would find CPUs enough, wherever each of them may run, that is as
    much as other programs used of these CPUs: a busy machine is no contention. Else it is nothing:
    the threads wait for each other. Threads that take turns by a lock wait for a CPU, too: a thread
    that gives the lock away may lose its CPU to the one it wakes. So these waits count only where
    the work alone, ``PROVEN``, does not fit into the period in turn.
    """
    if ran is None or machine is None:
        return _scaled(own, 0.0)
    pairs = zip(_resources(ran.cpu, topology), _resources(own, topology), strict=True)
    wanted = [min(1.0, cpu_ns / own_ns) if own_ns > 0 else 0.0 for cpu_ns, own_ns in pairs]
    late = ran.delay
    waited = sum(late.stages.values())
    threads = dict(zip(resource_names(topology), wanted, strict=False))  # the last is a device
    threads |= {f"replica{rank}": threads["mesh"] for rank in topology.replica_ranks}
    if topology.has_replicas:
        del threads["mesh"]
    if waited <= 0 or not machine.holds(threads):
        return _scaled(own, 0.0)
    share = min(1.0, (machine.others_cpus or 0.0) * score.period_ns / waited)
    return _scaled(late, share)


def _scaled(times: StageTimes, by: float) -> StageTimes:
    return StageTimes.of_chain(by * times.a, [by * b for b in times.places], by * times.c)


def _each(of: Callable[[float, float], float], one: StageTimes, other: StageTimes) -> StageTimes:
    places = [of(b, others) for b, others in zip(one.places, other.places, strict=True)]
    return StageTimes.of_chain(of(one.a, other.a), places, of(one.c, other.c))


def _parts(lines: Sequence[Envelope], topology: Topology, ran: StageTimes) -> _Parts | None:
    """Of these lines; None where the CPU time of a stage is not known."""
    n = sum(e.is_emitted for e in lines)
    places = [lines_of(lines, k) for k in topology.ranks]
    cpus_b = [_mean(mine, "cpu_b_ns") for mine in places]
    cpu_a = _mean(lines, "cpu_a_ns")
    known = [ns for ns in cpus_b if ns is not None]
    if not n or cpu_a is None or len(known) != len(ran.places) or len(cpus_b) != len(known):
        return None
    whole = mean_times(lines, n, StageBTimes(lines, topology))
    # those that were emitted pay for all
    share_a, share_c = len(lines) / n, sum(e.tDecode is not None for e in lines) / n
    cpu_c, late_a, late_c = (
        (_mean(lines, name) or 0) for name in ("cpu_c_ns", "delay_a_ns", "delay_c_ns")
    )
    late_b = [_mean(mine, "delay_b_ns") or 0 for mine in places]
    cpu = _each(min, whole, StageTimes.of_chain(share_a * cpu_a, known, share_c * cpu_c))
    most = _each(sub, whole, cpu)
    delay = _each(min, most, StageTimes.of_chain(share_a * late_a, late_b, share_c * late_c))
    return _Parts(cpu, delay, _each(sub, most, delay))


def _mean(lines: Sequence[Envelope | PolicyLine], name: str) -> float | None:
    """Of the lines that tell: what a short stage costs is not measured each time."""
    known = [ns for line in lines if (ns := getattr(line, name)) is not None]
    return sum(known) / len(known) if known else None


def _resources(times: StageTimes, topology: Topology) -> tuple[float, ...]:
    """Time of every serial resource for one envelope; of replicas the share of each."""
    places = [b / topology.replicas for b in times.places]
    if topology.threads == "split":
        return times.a, times.c, *places
    return times.a + times.c, *places


def _overlap(
    fair: tuple[float, ...],
    worked: tuple[float, ...],
    ran: tuple[float, ...],
    period_ns: float,
    topology: Topology,
) -> float | None:
    """Of the whole, or of two resources whose stamps claim more than their times alone give."""
    found = [_turns_overlap(fair, fair, period_ns)]
    if len(fair) > 2:
        for one, other in combinations(range(len(fair)), 2):
            if topology.device_stamped and one < len(fair) - topology.places:
                continue  # A and C share what ``gpu0`` stands for
            claimed = _turns_overlap(ran, (ran[one], ran[other]), period_ns)
            if claimed is not None and claimed >= PAIR_CLAIMED:
                is_proven = _fills((worked[one], worked[other]), period_ns)
                own = fair if is_proven else worked
                found.append(_turns_overlap(own, (own[one], own[other]), period_ns))
    return min((s for s in found if s is not None), default=None)


def _fills(worked: tuple[float, ...], period_ns: float) -> bool:
    """True where that work does not fit into the period in turn."""
    return sum(worked) >= PROVEN * period_ns


def _turns_overlap(
    resources: tuple[float, ...], turns: tuple[float, ...], period_ns: float
) -> float | None:
    """0 where the resources of ``turns`` run in turn; None where that would cost next to nothing.

    The whole has a score wherever there is anything to hide.
    """
    in_turn_ns, most_ns = max(sum(turns), *resources), max(resources)
    least_ns = most_ns if len(turns) == len(resources) else PAIR_COST_MIN * most_ns
    if in_turn_ns <= least_ns:
        return None
    return (in_turn_ns - period_ns) / (in_turn_ns - most_ns)
