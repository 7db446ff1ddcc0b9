"""Which parts of a policy run on which rank: contiguous cuts of a chain, and what each would give.

Pure and free of units. Of all cuts the best one has the smallest largest place (linear partition);
a place's load is its parts, on rank 0 also stages A and C, and the hop that leaves it. Among equal
cuts the shortest hops decide, or the fewest bytes where hops are known by these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import nsmallest
from itertools import combinations, pairwise
from typing import Final

from ppstream.analysis.period_model import PipelineForm, StageTimes, period, settled_latency

#: So many cuts are looked at one by one; of more, only the best one is found.
TABLE_MAX: Final = 20_000
_EQUAL: Final = 1 + 1e-9

_Add = Callable[[float, float, int], float]  # cost so far, a place's load, its end


@dataclass(frozen=True, slots=True)
class Costs:
    """Times of everything that a cut puts somewhere, in one unit.

    ``hops[i]`` is the hop in front of part i if the policy is cut there: ``hops[0]`` carries the
    window, the last one, behind all parts, the result. ``hop_bytes`` are the same hops in bytes.
    """

    parts: tuple[float, ...]
    hops: tuple[float, ...]
    a: float = 0  # of rank 0, its front parts left out
    c: float = 0
    hop_bytes: tuple[int, ...] = ()  # empty: not known
    is_front_open: bool = True  # rank 0 may have parts

    def __post_init__(self) -> None:
        for hops in filter(None, (self.hops, self.hop_bytes)):
            if len(hops) != len(self.parts) + 1:
                raise ValueError(
                    f"{len(hops)} hops for {len(self.parts)} parts, expected one in front of each "
                    "part and one behind the last"
                )


@dataclass(frozen=True, slots=True)
class PolicyCut:
    """``starts[k - 1]`` is the first part of place k; the parts before the first are rank 0's."""

    starts: tuple[int, ...]
    costs: Costs

    @property
    def placement(self) -> tuple[int, ...]:
        """The place of each part, as ``placement.parts`` has it."""
        return tuple(sum(start <= i for start in self.starts) for i in range(len(self.costs.parts)))

    @property
    def places(self) -> tuple[float, ...]:
        """Time of the parts of each place, rank 0's first."""
        return tuple(sum(self.costs.parts[i:j]) for i, j in pairwise((0, *self._ends)))

    @property
    def hops(self) -> tuple[float, ...]:
        """The hop that leaves each place, rank 0's first."""
        return tuple(self.costs.hops[end] for end in self._ends)

    @property
    def hop_bytes(self) -> tuple[int, ...]:
        """The bytes of the same hops, which must be known."""
        return tuple(self.costs.hop_bytes[end] for end in self._ends)

    @property
    def _ends(self) -> tuple[int, ...]:
        return (*self.starts, len(self.costs.parts))

    @property
    def loads(self) -> tuple[float, ...]:
        """Time of each place for one envelope: its parts, rank 0's A and C, and its hop."""
        own = (self.costs.a + self.costs.c, *(0.0 for _ in self.starts))
        return tuple(map(sum, zip(own, self.places, self.hops, strict=True)))

    @property
    def times(self) -> StageTimes:
        """The stages of the chain that this cut makes."""
        front, *places = self.places
        return StageTimes.of_chain(self.costs.a + front, places, self.costs.c, self.hops)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Expectations of the model of one cut."""

    cut: PolicyCut
    period: float
    latency: float  # tA0 to tEmit of a saturated run, in the mean


def best_cut(costs: Costs, places: int) -> PolicyCut:
    """The cut with the smallest largest load; of equal ones the one with the smallest hops.

    Args:
        costs: of the policy and of rank 0.
        places: number of ranks, rank 0 among them. Each policy rank gets a part; rank 0 may stay
            without, and does where ``costs`` keeps it closed.

    Raises:
        ValueError: fewer parts than policy ranks.
    """
    _check(costs, places)
    hops = costs.hop_bytes or costs.hops
    worst = _cheapest(costs, places, math.inf, lambda cost, load, _end: max(cost, load))[0]
    return _cheapest(costs, places, worst * _EQUAL, lambda cost, _load, end: cost + hops[end])[1]


def _cheapest(costs: Costs, places: int, load_max: float, add: _Add) -> tuple[float, PolicyCut]:
    """By dynamic programming over places and their first parts, from the last place forwards."""
    parts = len(costs.parts)
    sums = [0.0]
    for part in costs.parts:
        sums.append(sums[-1] + part)
    # the cheapest way to have the parts from i on on the last places, and where these begin
    found: dict[int, tuple[float, tuple[int, ...]]] = {parts: (0.0, ())}
    for place in reversed(range(places)):
        before: dict[int, tuple[float, tuple[int, ...]]] = {}
        own = costs.a + costs.c if place == 0 else 0.0
        for i in range(parts + 1) if place else (0,):
            ways = [
                (add(cost, load, j), (j, *starts) if place < places - 1 else ())
                for j, (cost, starts) in found.items()
                if (j > i if place else costs.is_front_open or not j)
                and (load := own + sums[j] - sums[i] + costs.hops[j]) <= load_max
            ]
            if ways:
                before[i] = min(ways)
        found = before
    cost, starts = found[0]
    return cost, PolicyCut(starts, costs)


def all_cuts(costs: Costs, places: int) -> Iterator[PolicyCut]:
    """Every cut, in order of its starts; the arguments are those of ``best_cut``."""
    _check(costs, places)
    for starts in combinations(range(len(costs.parts)), places - 1):
        if costs.is_front_open or not starts[0]:
            yield PolicyCut(starts, costs)


def cut_table(costs: Costs, places: int, form: PipelineForm, rows: int) -> list[Prediction]:
    """The best cut first, then the next best by predicted period, ``rows`` in all.

    Where there are more than ``TABLE_MAX`` cuts only the best one is in it.
    """
    best = best_cut(costs, places)
    chosen = [best]
    if math.comb(len(costs.parts), places - 1) <= TABLE_MAX:
        others = (cut for cut in all_cuts(costs, places) if cut.starts != best.starts)
        chosen += nsmallest(rows - 1, others, key=lambda cut: (period(cut.times, form), cut.loads))
    return [predict(cut, form) for cut in chosen]


def predict(cut: PolicyCut, form: PipelineForm) -> Prediction:
    """Of a saturated run of this form."""
    return Prediction(cut, period(cut.times, form), settled_latency(cut.times, form))


def _check(costs: Costs, places: int) -> None:
    if not 2 <= places <= len(costs.parts) + 1:
        raise ValueError(
            f"{len(costs.parts)} parts on {places} ranks: rank 0 and 1 to {len(costs.parts)} "
            "policy ranks can have them"
        )
