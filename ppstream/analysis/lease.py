"""Lease of actions: what it must cover by chunks of bring-up or of service, and who holds. Pure.

A robot moves on with one chunk until the next one comes, but no longer than its lease: behind that
it holds. So a lease must cover the age of a chunk when it is made, and the time until the next. Of
a chunk that comes when all of its steps are past it executes none.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, pairwise
from typing import Final, NamedTuple

from ppstream.analysis.age_advice import Model, in_ms
from ppstream.analysis.json_values import mapping_of
from ppstream.analysis.places import stage_b_ns
from ppstream.analysis.records import Envelope, Json, RunLog
from ppstream.analysis.requests import (
    asked_limits_ms,
    is_on_request,
    serves_robots,
    window_period_ns,
)
from ppstream.analysis.run_statistics import Spoilt, judged, usual_stages_ns
from ppstream.analysis.scores import Primary, stage_a_ns, stage_c_ns
from ppstream.analysis.segments import JudgedSpan
from ppstream.core.errors import LogError
from ppstream.core.phases import BRING_UP
from ppstream.core.quantiles import Quantiles, nearest_rank, quantiles

HOLDS_MAX: Final = 0.05  # of the time, and of the chunks behind which a robot holds
SPARE: Final = 0.10  # of what a lease must cover: no two runs are alike
TIME_MAX_MS: Final = 1e12  # more is no time of a run
ASKS: Final = (
    "robots that ask for each chunk (RobotClient.ask) need no more than its age: give what they "
    "send max_request_hz in place of rate_hz"
)

Chunks = Iterable[tuple[int, int]]  # when each was made, in order, and when its stage A began


class ChunkSteps(NamedTuple):
    """The steps of a chunk: the first is due ``dt_ns`` behind the end of its window."""

    horizon: int
    dt_ns: int

    @property
    def last_ns(self) -> int:
        """All are past in an older chunk."""
        return (self.horizon + 1) * self.dt_ns

    def of_age(self, age_ns: float) -> int:
        """Returns the fewest steps of which one is still due at that age."""
        return max(1, math.ceil(round(age_ns / self.dt_ns, 6)) - 1)


class LeaseNeed(NamedTuple):
    """The time for which a robot has to move on with one chunk, and for which it may."""

    age_ns: int  # p95 of chunks that were made; where sensors set the pace as if one were alone
    gap_ns: int  # p50, to the next one; or the period of the sensors
    need_ns: int  # of a lease with which robots hold as seldom as they may
    longest_ns: int  # ... and never
    holds: int  # chunks behind which they hold with the lease as it is
    chunks: int
    held: float  # share of the time that they hold
    limits_ns: Mapping[str, int]  # by setting, of an action's age; one at least
    is_paced: bool = False  # the sensors set the pace: no envelope waits for another
    steps: ChunkSteps | None = None  # None: nobody says, or chunks begin when they come
    past: int = 0  # chunks whose steps were all past when they were made

    @property
    def lease_ns(self) -> int:
        """The lowest of the limits."""
        return min(self.limits_ns.values())

    @property
    def is_short(self) -> bool:
        """True where robots hold too often, or for too long in all, or have no step to execute."""
        return self._ends_early or self._comes_late

    @property
    def _ends_early(self) -> bool:
        return max(self.held, self.holds / self.chunks) > HOLDS_MAX

    @property
    def _comes_late(self) -> bool:
        return self.past / self.chunks > HOLDS_MAX

    @property
    def holds_text(self) -> str:
        """Share of the time and number of times that robots hold, for people."""
        late = f"for want of a step that is still due in {self.past} of {self.chunks} chunks"
        if self._comes_late and not self._ends_early:
            return f"{late} (limit {HOLDS_MAX:.0%})"
        return (
            f"{self.held:.1%} of the time, behind {self.holds} of {self.chunks} chunks "
            f"(limit {HOLDS_MAX:.0%} of each)" + f", and {late}" * self._comes_late
        )

    @property
    def text(self) -> str:
        """Need and lease in numbers, for people."""
        setting = min(self.limits_ns, key=self.limits_ns.__getitem__)
        gap = in_ms(self.gap_ns)
        later = (
            f"with the next sample, {gap} ms later" if self.is_paced else f"{gap} ms later (p50)"
        )
        later += ", some later still" if self.need_ns > self.age_ns + self.gap_ns else ""
        text = (
            f"actions are {in_ms(self.age_ns)} ms old when they are made (p95), and the next "
            f"ones come {later}: robots need {in_ms(self.need_ns)} ms, and {setting} is "
            f"{self.limits_ns[setting] / 1e6:g}"
        )
        if self.steps is None or not self._comes_late:
            return text
        return (
            f"{text}, and all steps of a chunk are past {in_ms(self.steps.last_ns)} ms behind its "
            f"window (actions.horizon {self.steps.horizon}, dt_ms {self.steps.dt_ns / 1e6:g})"
        )

    @property
    def note(self) -> str:
        """Cost of few late chunks, for people."""
        return (
            f"{self.holds_text}: the latest needs a lease of {in_ms(self.longest_ns)} ms; mend "
            f"what stalls the policy or the machine, or {self._longer(self.longest_ns, 0)}"
        )

    def remedy(self, model: Model | None, overlap_min: float) -> str:
        """Returns what to set, as an order.

        Args:
            model: names a shallower queue where robots would need less with it.
            overlap_min: S that the gate asks for, of it as well.
        """
        text = self._longer(self.need_ns, self.age_ns)
        less = None if model is None or self.is_paced else model.youngest
        is_sure = less is not None and less.cost < less.younger < self.age_ns  # the model fits
        if less is not None and is_sure and less.overlap >= overlap_min:
            fewer = less.cost / (self.gap_ns + less.cost)
            need_ns = self.need_ns - less.younger + less.cost
            beside = self._longer(need_ns, self.age_ns - less.younger, "")
            text += f", or pipeline.d_in to {less.d_in}{beside and f' and {beside}'}, for actions "
            text += f"{in_ms(less.younger)} ms younger and {fewer:.0%} fewer of them"
        return text

    def refusal(self, model: Model | None, overlap_min: float) -> str:
        """Returns why robots may not come, and what to do; arguments as ``remedy``."""
        remedy = self.remedy(model, overlap_min)
        return f"robots would hold {self.holds_text}: {self.text}; {remedy}; {ASKS}"

    def _longer(self, need_ns: float, age_ns: float, begin: str = "set ") -> str:
        """Returns what to lengthen for such a need and such chunks; empty: nothing."""
        short = [setting for setting, ns in self.limits_ns.items() if ns < need_ns]
        longer = [f"{' and '.join(short)} to {_spared_ms(need_ns)}"] if short else []
        if self.steps is not None and self._comes_late and age_ns > self.steps.last_ns:
            horizon = self.steps.of_age((1 + SPARE) * age_ns)
            longer.append(f"actions.horizon to {horizon}, steps that the policy must give")
        return f"{begin}{', '.join(longer)}, a tenth to spare" if longer else ""


def _spared_ms(need_ns: float) -> int:
    return math.ceil(round((1 + SPARE) * need_ns / 1e6, 3))


def lease_need(
    runs: Iterable[Chunks],
    limits_ns: Mapping[str, int],
    *,
    at_robot: Quantiles | None = None,
    paced_ns: float | None = None,
    steps: ChunkSteps | None = None,
) -> LeaseNeed | None:
    """Returns what chunks ask of a lease; None without two in a row, or without a limit.

    Args:
        runs: chunks in a row, without a pause of their robots.
        limits_ns: by setting, of an action's age.
        at_robot: ages of chunks as robots measured them; None: from A's start to the actions.
        paced_ns: period of the sensors, where they set the pace.
        steps: of each chunk; None: nobody says, or they begin when a chunk comes.
    """
    own_ns: list[int] = []  # from the begin of stage A until the chunk is made
    lasts_ns: list[int] = []  # ... and until the next one is
    for (ready, start), (later, _) in chain.from_iterable(map(pairwise, runs)):
        own_ns.append(ready - start)
        lasts_ns.append(later - start)
    gaps_ns = [last - own for own, last in zip(own_ns, lasts_ns, strict=True)]
    own, gap, span_ns = quantiles(own_ns), quantiles(gaps_ns), max(1, sum(gaps_ns))
    del gaps_ns
    if own is None or gap is None or not limits_ns:
        return None
    later_ns = 0 if at_robot is None else at_robot.p95_ns - own.p95_ns
    own_ns.sort()
    lasts_ns.sort()

    def held(lease_ns: int) -> float:
        """The share of the time in which the newest chunk is older: all of an older one's."""
        return (_beyond(lasts_ns, lease_ns) - _beyond(own_ns, lease_ns)) / span_ns

    often = nearest_rank(len(lasts_ns), round(100 * (1 - HOLDS_MAX)))
    enough = bisect_left(lasts_ns, -HOLDS_MAX, often, key=lambda ns: -held(ns))
    left_ns = min(limits_ns.values()) - later_ns  # of the lease when a chunk leaves rank 0
    return LeaseNeed(
        age_ns=own.p95_ns + later_ns,
        gap_ns=gap.p50_ns if paced_ns is None else round(paced_ns),
        need_ns=lasts_ns[enough] + later_ns,
        longest_ns=lasts_ns[-1] + later_ns,
        holds=len(lasts_ns) - bisect_right(lasts_ns, left_ns),
        chunks=len(lasts_ns),
        held=held(left_ns),
        limits_ns=limits_ns,
        is_paced=paced_ns is not None,
        steps=steps,
        past=0 if steps is None else len(own_ns) - bisect_right(own_ns, steps.last_ns - later_ns),
    )


def _beyond(ordered_ns: Sequence[int], limit_ns: int) -> int:
    """Returns by how much all together are above the limit."""
    above = ordered_ns[bisect_right(ordered_ns, limit_ns) :]
    return sum(above) - limit_ns * len(above)


def lease_of_bring_up(
    run: RunLog, window: JudgedSpan, score: Primary | None, lost: Spoilt | None, enough: int
) -> LeaseNeed | None:
    """Returns what the lease must cover; at the rate of sensors that are slower than it all.

    Args:
        run: its records.
        window: judged.
        score: of it.
        lost: envelopes that were dropped, where they leave too few.
        enough: periods that a window needs.
    """
    if window.phases != {BRING_UP} or (window.n < enough and lost is None):
        return None
    limits_ns, paced_ns = age_limits_ns(run.config), window_period_ns(run.config)
    lines = window.measured if lost is None else judged(run, window)
    made = [*_made(lines, 0 if run.standalone is None else round(run.standalone.c_ns))]
    steps = steps_of(run.config)
    need = lease_need([made], limits_ns, steps=steps)
    if need is None or paced_ns <= (need.gap_ns if score is None else score.period_ns):
        return need
    alone_ns = [ready - start for ready, start in made]
    if score is not None:
        alone_ns = _ages_alone_ns(lines, score.times.through)
    paced = [_paced(alone_ns, paced_ns)]
    return lease_need(paced, limits_ns, paced_ns=paced_ns, steps=steps)


def lease_of_service(run: RunLog, window: JudgedSpan) -> LeaseNeed | None:
    """Returns what the lease had to cover, by the robots' clocks."""
    at_robot = quantiles([*run.ages_ns, *chain.from_iterable(run.unexecuted_ages_ns.values())])
    runs = (_made(segment.envelopes) for segment in window.segments)
    limits_ns, steps = age_limits_ns(run.config), steps_of(run.config)
    return lease_need(runs, limits_ns, at_robot=at_robot, steps=steps)


def lease_of_one_rank(stages_ns: Iterable[Sequence[int]], config: Json) -> LeaseNeed | None:
    """Returns what a lease must cover where one process runs all stages in turn.

    Args:
        stages_ns: durations of each stage, of the same envelopes.
        config: of the run.
    """
    ages_ns = [sum(stages) for stages in zip(*stages_ns, strict=False)]
    paced_ns, each = round(window_period_ns(config)), quantiles(ages_ns)
    starts_ns = accumulate((max(age, paced_ns) for age in ages_ns), initial=0)
    made = [(start + age, start) for start, age in zip(starts_ns, ages_ns, strict=False)]
    is_paced = each is not None and paced_ns > each.p50_ns
    limits_ns, paced = age_limits_ns(config), paced_ns if is_paced else None
    return lease_need([made], limits_ns, paced_ns=paced, steps=steps_of(config))


def lease_notes(need: LeaseNeed | None, config: Json) -> Iterator[str]:
    """Yields, for people, how long robots would hold, and which limits end too soon."""
    yield from filter(None, (_hold_note(need, config), _wait_note(need, config)))


def _hold_note(need: LeaseNeed | None, config: Json) -> str:
    """Returns how long robots would hold though the gate let them come; empty: they would not."""
    if need is None or not need.holds or not serves_robots(config):
        return ""
    if not is_on_request(config):
        return "" if need.is_short else f"by bring-up's chunks robots would hold {need.note}"
    return need.is_short * (
        "whether the lease suffices was not judged, since the reference stream comes on request "
        f"(max_request_hz): a robot that streams would hold {need.holds_text}"
    )


def _wait_note(need: LeaseNeed | None, config: Json) -> str:
    """Returns which limits end before a robot has its turn that asks a gateway; empty: none does.

    Of robots that share envelopes one asks just behind the begin of a window: it waits for the
    next one, then for its actions. With pacing ``rows`` they share windows, and none waits long.
    """
    pipeline, batch = mapping_of(config.get("pipeline")), mapping_of(config.get("batch"))
    is_shared = batch.get("rows") not in (None, 1) and pipeline.get("pacing") != "rows"
    limits_ms = asked_limits_ms(config)
    if need is None or not is_shared or not is_on_request(config) or not limits_ms:
        return ""
    wait_ns = need.gap_ns + need.age_ns
    limits_ns = {name: 1e6 * ms for name, ms in limits_ms.items()} | age_limits_ns(config)
    if (steps := _steps_stated(config)) is not None:
        limits_ns["actions.horizon x dt_ms"] = steps.horizon * steps.dt_ns
    short = {name: ns for name, ns in limits_ns.items() if ns < wait_ns}
    if not short:
        return ""
    found = " and ".join(f"{name} is {ns / 1e6:g}" for name, ns in short.items())
    return (
        f"robots that ask a gateway wait up to {in_ms(wait_ns)} ms here, {in_ms(need.gap_ns)} for "
        f"a window and {in_ms(need.age_ns)} for its actions, and {found}: raise "
        f"{'each' if len(short) > 1 else 'it'} to {_spared_ms(wait_ns)}, a tenth to spare, or have "
        'them share windows with pipeline.pacing = "rows"'
    )


def _made(envelopes: Iterable[Envelope], c_ns: int = 0) -> Iterator[tuple[int, int]]:
    """Chunks of one phase; those past their lease, too: a longer one would have let them go.

    Args:
        envelopes: of the phase.
        c_ns: of stage C, where no chunk came through it in time.
    """
    lines = [e for e in envelopes if e.is_emitted or (e.drop == "expired" and e.tDecode)]
    c_ns = round(usual_stages_ns(lines).get("C", c_ns))

    def ready_ns(e: Envelope) -> int:
        return e.picked or (e.tDecode or 0) + c_ns

    lines.sort(key=lambda e: e.tA0 or 0)
    lines.sort(key=ready_ns)  # of equal ones the order before is kept
    return ((ready_ns(e), e.tA0 or 0) for e in lines)


def _ages_alone_ns(envelopes: Iterable[Envelope], through_ns: float) -> list[int]:
    """Returns the times from A's start to the actions, of envelopes that wait for no other.

    Args:
        envelopes: of one phase.
        through_ns: the mean, links and all.
    """
    each = [stage_a_ns(e) + stage_b_ns(e) + stage_c_ns(e) for e in envelopes if e.is_emitted]
    links_ns = round(through_ns - sum(each) / max(1, len(each)))
    return [ns + links_ns for ns in each]


def _paced(ages_ns: Iterable[int], period_ns: float) -> Chunks:
    """Chunks of windows that begin with each sample."""
    starts = ((round(k * period_ns), age) for k, age in enumerate(ages_ns))
    return sorted((start + age, start) for start, age in starts)


def age_limits_ns(config: Json) -> dict[str, int]:
    """Limits of an action's age, by setting."""
    found = {f"actions.{name}": actions_ns(config, name) for name in ("lease_ms", "max_age_ms")}
    return {name: ns for name, ns in found.items() if ns is not None}


def steps_of(config: Json) -> ChunkSteps | None:
    """Steps of a chunk; None: nobody says, or robots ask, whose chunks may begin at the answer."""
    return None if is_on_request(config) else _steps_stated(config)


def _steps_stated(config: Json) -> ChunkSteps | None:
    dt_ns, horizon = actions_ns(config, "dt_ms"), mapping_of(config.get("actions")).get("horizon")
    if not dt_ns or not isinstance(horizon, int) or horizon < 1:
        return None
    return ChunkSteps(horizon, dt_ns)


def actions_ns(config: Json, name: str) -> int | None:
    """A time of [actions]; None: it has none.

    Raises:
        LogError: the value is no time.
    """
    value = mapping_of(config.get("actions")).get(name)
    if not isinstance(value, int | float):
        return None
    if 0 <= value <= TIME_MAX_MS:
        return round(value * 1e6)
    raise LogError(
        f"run.json: config.actions.{name} is {value!r:.40}, expected 0 to {TIME_MAX_MS:g}"
    )
