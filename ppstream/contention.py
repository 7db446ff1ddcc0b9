"""The score by the stages' times alone: what contention hides from stamps. Pure.

A stage that waits inside its bracket for a CPU, a lock, the interpreter or a device which another
stage holds looks busy, and two such stages look as if they ran beside each other. So the score is
made once more, S = (A + B + C - P) / (A + B + C - M), with what each stage takes while all else
idles, against the measured period P.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from operator import sub
from statistics import fmean
from typing import Final

from ppstream.cpus import Machine
from ppstream.model import StageTimes
from ppstream.records import RunLog, Topology
from ppstream.scores import Primary
from ppstream.segments import Window

SHORT_SHARE: Final = 0.05  # of the period: a shorter stage cannot be what overlap is about
PAIR_CLAIMED: Final = 0.5  # two resources whose stamps score this ran beside each other, they say
PAIR_COST_MIN: Final = 1.25  # of the period, if they ran in turn: else there is little to tell


@dataclass(frozen=True, slots=True)
class Alone:
    """The score of a window by its stages' times alone, in ns.

    ``s`` is the least of the whole and of every two host threads that ran beside each other by
    their stamps. No time alone counts for more than the run's own: measuring slowly buys nothing.
    """

    times: StageTimes  # means of both measurements, of a, b and c
    fair: StageTimes  # what the score is made from
    s: float | None
    ceiling: float  # Sigma / M
    strict: float  # period over the slowest resource
    stretch: dict[str, float]  # of stages that count: the run's time over the time alone
    moved: dict[str, float]  # the time alone behind bring-up over the one before; {}: one was made

    @property
    def in_turn_ns(self) -> float:
        """The period of one rank that runs A, B and C in turn."""
        return self.fair.a + self.fair.b + self.fair.c


def alone(run: RunLog, window: Window, score: Primary, machine: Machine | None) -> Alone | None:
    """The score by stage times alone; None where none were measured, or nothing could overlap.

    The mean of the measurements before and behind bring-up counts. The larger one would be bought
    by one slow measurement, as clocks that ramp up make it; the smaller would refuse a device that
    has grown warm.
    """
    measured = [found for found in (run.standalone, run.standalone_after) if found is not None]
    topology, ran = run.topology, score.times
    if not measured or topology.world_size == 1:
        return None
    a_ns, b_ns, c_ns = (fmean(column) for column in zip(*measured, strict=True))
    times = StageTimes(a_ns, b_ns / topology.replicas, c_ns)
    fair = _fair(window, score, times, machine)
    resources = _resources(fair, topology)
    return Alone(
        times=times,
        fair=fair,
        s=_overlap(resources, _resources(ran, topology), score.period_ns, topology),
        ceiling=sum(resources) / max(resources) if max(resources) else 1.0,
        strict=score.period_ns / max(1.0, *_resources(times, topology)),
        stretch={
            k.upper(): getattr(ran, k) / own
            for k in "abc"
            if (own := getattr(times, k)) > 0 and getattr(ran, k) > SHORT_SHARE * score.period_ns
        },
        moved={k: b / a for k, a, b in zip("ABC", measured[0], measured[-1], strict=True) if a}
        if len(measured) > 1
        else {},
    )


def _fair(window: Window, score: Primary, alone: StageTimes, machine: Machine | None) -> StageTimes:
    """Times alone as they would be in the run, with nothing beside them but what others do.

    None is more than the run's own. Where the stages themselves want more CPUs than there are,
    their wait for one is no work, and they fall to their CPU time. Where they would find CPUs
    enough, others make them wait, alone as in the run: what these used is added to the times alone.
    """
    ran = score.times
    if machine is None:
        return _each(min, alone, ran)
    cpu, delay = _per_envelope(window, ran)
    work = _each(min, ran, _each(max, cpu, _each(sub, ran, delay)))
    pairs = zip(_resources(cpu, window.topology), _resources(work, window.topology), strict=True)
    wanted = sum(cpu_ns / work_ns for cpu_ns, work_ns in pairs if work_ns > 0)
    if wanted > machine.usable_cpus:
        return _each(min, alone, work)
    waited = delay.a + delay.b + delay.c
    taken = (machine.others_cpus or 0.0) * score.period_ns
    share = min(1.0, taken / waited) if waited > 0 else 0.0
    return _each(min, ran, _each(lambda own, late: own + share * late, alone, delay))


def _each(of: Callable[[float, float], float], one: StageTimes, other: StageTimes) -> StageTimes:
    return StageTimes(of(one.a, other.a), of(one.b, other.b), of(one.c, other.c))


def _per_envelope(window: Window, ran: StageTimes) -> tuple[StageTimes, StageTimes]:
    """CPU time of the stages, and what their threads were runnable without a CPU."""
    lines, n = window.measured, window.n
    policy = [e.stage1 for e in lines if e.stage1 is not None]
    cpu_a, cpu_b, cpu_c, delay_a, delay_b, delay_c = (
        sum(ns or 0 for ns in values) / n
        for values in (
            (e.cpu_a_ns for e in lines),
            (line.cpu_b_ns for line in policy),
            (e.cpu_c_ns for e in lines if e.is_emitted),
            (e.run_delay_ns for e in lines),
            (line.run_delay_ns for line in policy),
            (e.run_delay_c_ns for e in lines),
        )
    )
    if window.topology.threads == "serial":  # one thread waits in both, as long as each lasts
        whole = (ran.a + ran.c) or 1.0
        delay_a, delay_c = delay_a * ran.a / whole, delay_a * ran.c / whole
    return StageTimes(cpu_a, cpu_b, cpu_c), StageTimes(delay_a, delay_b, delay_c)


def _resources(times: StageTimes, topology: Topology) -> tuple[float, ...]:
    """Time of every serial resource for one envelope."""
    if topology.threads == "split":
        return times.a, times.c, times.b
    return times.a + times.c, times.b


def _overlap(
    own: tuple[float, ...], ran: tuple[float, ...], period_ns: float, topology: Topology
) -> float | None:
    """Of the whole, or of two resources whose stamps claim more than their times alone give."""
    found = [_turns_overlap(own, own, period_ns)]
    if len(own) > 2 and not topology.device_stamped:  # there A and C share what ``gpu0`` stands for
        for one, other in combinations(range(len(own)), 2):
            claimed = _turns_overlap(ran, (ran[one], ran[other]), period_ns)
            if claimed is not None and claimed >= PAIR_CLAIMED:
                found.append(_turns_overlap(own, (own[one], own[other]), period_ns))
    return min((s for s in found if s is not None), default=None)


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
