"""Diagnosis in sentences, for an engineer on call: what limits a run, and what to do. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ppstream.analysis.age_advice import SAME, Model, depth_advice, in_ms
from ppstream.analysis.audits import by_note
from ppstream.analysis.contention import MOVED_MAX, MOVED_NS
from ppstream.analysis.lease import lease_notes
from ppstream.analysis.place_table import BetterCut, PlaceRow, held_hop
from ppstream.analysis.replicas import pace_of, replica_sentences
from ppstream.analysis.requests import Requests, gateway_ends
from ppstream.analysis.run_ends import (
    end_sentences,
    failed_end,
    last_before_ready,
    more_envelopes,
)
from ppstream.analysis.run_statistics import (
    Spoilt,
    first_faults,
    judged,
    usual_stages_ns,
    wait_share,
)
from ppstream.analysis.scores import (
    CEILING_MIN,
    COMPAT_SCORE_MIN,
    STAGE_MIN_NS,
    Compat,
    Primary,
    missing_stages,
    resource_title,
)
from ppstream.analysis.verdict import (
    ACCEPTABLE,
    EFFICIENCY_MIN,
    MODEL_MAX,
    N_MIN,
    OVERLAP_MIN,
    UNNAMED_MAX,
    WAIT_MAX,
    Evidence,
    Gate,
    Verdict,
    faults_inside,
    is_accepted,
    places_lost,
    too_much_unnamed,
    unaudited,
)
from ppstream.core.errors import counted
from ppstream.core.phases import BRING_UP

STRICT_MIN: Final = 0.995  # a period below the slowest stage alone: that stage was not alone


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Everything the sentences are made from."""

    evidence: Evidence
    gate: Gate
    verdict: Verdict
    reasons: list[str]
    limited_by: str | None
    compat: Compat | None
    model: Model | None
    critical_path: dict[str, dict[str, float]]
    service: Mapping[str, str]  # reasons, each with its sentence
    requests: Requests | None
    contradictions: Sequence[str]  # sentences: where the folder says otherwise than its lines
    places: list[PlaceRow]  # every rank, rank 0 first
    better_cut: BetterCut | None


def statements(findings: Diagnosis) -> list[str]:
    """Sentences in the order a tired reader needs them."""
    advice = () if "BAD_INSTRUMENT" in findings.reasons else (_limit, _cut, _hop, _depth, _path)
    parts = (_served, _accepted, _headline, _reasons, _machine, _choice)
    parts = (*parts, *advice, _in_step, _holds, _alone, _published, _limits, _rules, _log)
    return [sentence for part in parts for sentence in part(findings)]


def _served(f: Diagnosis) -> Iterator[str]:
    """Bring-up beside a service that was not like it."""
    if f.service:
        of = "bring-up" if f.evidence.window.phases == {BRING_UP} else "the judged phase"
        yield f"{of} {f.verdict.name}, service: {'; '.join(f.service.values())}"


def _accepted(f: Diagnosis) -> Iterator[str]:
    if is_accepted(f.verdict, f.reasons, f.gate.accept):
        yield f"SERVING, overlap refused: {', '.join(f.reasons)} accepted; {_gain(f)}"


def _gain(f: Diagnosis) -> str:
    """The gain of a second rank over one that runs all stages in turn."""
    score, alone = f.evidence.primary, f.evidence.alone
    if score is None:
        return "no score is known"
    found = score if alone is None else alone
    in_turn_ns, ceiling = found.in_turn_ns, found.ceiling
    return (
        f"one rank would take {in_ms(in_turn_ns)} ms for A, B and C in turn, "
        f"{f.evidence.run.topology.world_size} take {in_ms(score.period_ns)} ms: "
        f"{in_turn_ns / score.period_ns:.2f} x of a possible {ceiling:.2f} x"
    )


def _choice(f: Diagnosis) -> Iterator[str]:
    """Speed is the user's to judge, where nothing else is wrong."""
    if not f.reasons or not set(f.reasons) <= set(ACCEPTABLE):
        return
    if not is_accepted(f.verdict, f.reasons, f.gate.accept):
        listed = ", ".join(f'"{reason}"' for reason in f.reasons)
        yield f"{_gain(f)}; run one rank, or serve anyway with bringup.accept = [{listed}]"


def _machine(f: Diagnosis) -> Iterator[str]:
    """In every refusal, and wherever CPUs are too few."""
    machine = f.evidence.machine
    if machine is not None and (f.verdict is not Verdict.PASS or machine.is_short):
        where = " in bring-up" if f.evidence.window.phases == {BRING_UP} else ""
        yield f"this machine{where}: {machine.text(resource_title)}"


def _in_step(f: Diagnosis) -> Iterator[str]:
    if f.requests is not None and f.requests.text:
        yield f.requests.text
    yield from gateway_ends(f.evidence.run.events)


def _holds(f: Diagnosis) -> Iterator[str]:
    yield from lease_notes(f.evidence.lease, f.evidence.run.config)


def _alone(f: Diagnosis) -> Iterator[str]:
    """Warnings about the measurement of the stages alone."""
    alone = f.evidence.alone
    if alone is None:
        return
    if alone.strict < STRICT_MIN:
        yield (
            f"the period is {alone.strict:.3f} of the slowest isolated stage: the stages were "
            "measured slower in isolation than they run; clocks changed, or another program ran"
        )
    times = alone.times.stages
    for stage, ratio in alone.moved.items():
        off_ns = abs(ratio - 1) * times[stage]
        if abs(ratio - 1) > MOVED_MAX and off_ns > MOVED_NS:
            took = f"{ratio:.2f} x as long after bring-up as before it"
            yield f"{_stage(f, stage)} alone took {took}"
    for stage, ratio in alone.slower.items():
        if ratio > 1 + MOVED_MAX and (1 - 1 / ratio) * times[stage] > MOVED_NS:
            yield (
                f"{_stage(f, stage)} worked or slept {ratio:.2f} x as long in isolation as in the "
                "run: the excess does not count"
            )


def _limits(f: Diagnosis) -> Iterator[str]:
    if f.gate.overlap_min < OVERLAP_MIN:
        least = f"{f.gate.overlap_min:.2f}"
        yield f"bringup.overlap_min is {least}, below the usual {OVERLAP_MIN:.2f}"


def _headline(f: Diagnosis) -> Iterator[str]:
    score, topology = f.evidence.primary, f.evidence.run.topology
    if score is None:
        return
    busiest = score.max_ns / score.n
    times = f"{score.period_ns / busiest:.2f} x max(stage)" if busiest else "no stage time"
    period = f"period {in_ms(score.period_ns)} ms = {times}"
    if score.s is None:
        yield f"{period}, overlap undefined: no two stages ran at the same time"
    else:
        yield (
            f"{period}, overlap {_interval(score)} at D_in/D_out = {topology.d_in}/{topology.d_out}"
        )


def _reasons(f: Diagnosis) -> Iterator[str]:
    score = f.evidence.primary
    texts, need = _safety_texts(f) | _unknown_texts(f), f.evidence.lease
    if need is not None:
        texts |= {"SHORT_LEASE": need.refusal(f.model, f.gate.overlap_asked)}
    if score is not None:
        texts |= _score_texts(f, score)
    for reason in f.reasons:
        yield f"{reason}: {texts.get(reason, 'see the numbers below')}"


def _safety_texts(f: Diagnosis) -> dict[str, str]:
    counts, topology = f.evidence.safety, f.evidence.run.topology
    actions = {name: counted(n, "action") for name, n in counts.items()}
    return {
        "QUEUE_BOUND": f"a queue ran {counts.get('QUEUE_BOUND', 0)} over its bound "
        f"(D_in {topology.d_in}, D_out {topology.d_out}); credits are broken, do not run this",
        "STALE_EMIT": f"rank 0 emitted {actions.get('STALE_EMIT')} of an ended epoch after the "
        "cut; do not run this on a robot",
        "ORDER": f"rank 0 emitted {actions.get('ORDER')} out of order or twice; do not run this "
        "on a robot",
        "EXPIRED_EMIT": f"rank 0 emitted {actions.get('EXPIRED_EMIT')} whose lease was over; lower "
        "the latency or lengthen actions.lease_ms",
    }


def _unknown_texts(f: Diagnosis) -> dict[str, str]:
    window, run = f.evidence.window, f.evidence.run
    failed = [
        f"{name}{f' ({resource_title(audit.note)})' if audit.note else ''}"
        for name, audit in f.evidence.audits.items()
        if audit.ok is False
    ]
    lacking = sorted({field for a in f.evidence.audits.values() for field in a.missing})
    input_share = wait_share(window, "w_input_ns")
    ceiling = f.evidence.primary.ceiling if f.evidence.primary else 0.0
    threads = [
        f"{resource_title(name)} {found.share:.0%}, {found.delay or 0:.0%} of it for want of a CPU"
        for name in too_much_unnamed(f.evidence)
        if (found := f.evidence.unnamed[name])
    ]
    return _spoilt_texts(f, f.evidence.spoilt) | {
        "CONTRADICTED": f"{'; '.join(f.contradictions)}: this folder was changed, or judged by "
        "other rules",
        "NOT_AUDITED": f"not audited: {by_note(unaudited(f.evidence))}; an unaudited score proves "
        "nothing",
        "UNNAMED_TIME": f"time outside stages and named waits: {'; '.join(threads)} (limit "
        f"{UNNAMED_MAX:.0%}): a source, a hook or a callback blocks there",
        "INLINE": "one process runs all stages in turn: no overlap to judge; start two ranks",
        "MISSING_LOGS": f"the log lacks {_lacking(f, lacking)}: overlap cannot be proven",
        "BAD_INSTRUMENT": f"the log contradicts itself in {', '.join(failed)}: "
        "correct the stamps before you trust a score",
        "PERTURBED": f"{_disturbance(f)}; measure again without it",
        "TOO_FEW": f"{counted(window.n, 'envelope')} after warm-up, {N_MIN} needed"
        + ("" if failed_end(run) else f"; {more_envelopes(window, last_before_ready(run))}"),
        "NOT_WARM": "the period never became steady; look for compiles, allocation, throttling",
        "INPUT_LIMITED": f"{input_share:.0%} of the time went into waiting for input (limit "
        f"{WAIT_MAX:.0%}); measure saturated, or accept that the sensors set the pace",
        "OUTPUT_LIMITED": f"{wait_share(window, 'w_emit_ns'):.0%} of the time went into waiting "
        f"for the consumer (limit {WAIT_MAX:.0%}); let it take the latest action instead",
        "NOTHING_TO_HIDE": f"perfect overlap would gain {ceiling:.2f}x (needs {CEILING_MIN:.2f}x): "
        f"one stage does nearly all the work of {run.topology.world_size} ranks",
    }


def _disturbance(f: Diagnosis) -> str:
    run = f.evidence.run
    if not (n := faults_inside(f.evidence)):
        return "a profiler was on"
    first = next(iter(first_faults(run)), "")
    return f"{counted(n, 'fault')} in the judged time; the first of the run: {first}"


def _score_texts(f: Diagnosis, score: Primary) -> dict[str, str]:
    latency = f.evidence.latency
    tail = "?" if latency is None else in_ms(latency.reported_p99_ns or latency.max_ns)
    expected = "?" if f.model is None else in_ms(f.model.period_ns)
    return {
        "LOW_OVERLAP": f"overlap {_interval(score)}, its lower end must reach "
        f"{f.gate.overlap_min:.2f}",
        "CONTENDED": _contended(f),
        "LOW_EFFICIENCY": f"the busiest resource works {score.efficiency:.0%} of the time, "
        f"a release needs {EFFICIENCY_MIN:.0%}",
        "OVER_MODEL": f"period {in_ms(score.period_ns)} ms, the model allows {MODEL_MAX:.2f} x "
        f"{expected} ms: time is lost outside the stages",
        "PERIOD_BUDGET": f"period {in_ms(score.period_ns)} ms, budget "
        f"{in_ms(f.gate.period_budget_ns or 0)} ms",
        "LATENCY_BUDGET": f"latency tail {tail} ms, "
        f"budget {in_ms(f.gate.latency_budget_ns or 0)} ms",
    }


def _stage(f: Diagnosis, name: str) -> str:
    """A stage for people: in a chain B with its place."""
    place = name.removeprefix("B")
    return f"{name} of {f.evidence.run.topology.title(int(place))}" if place.isdecimal() else name


def _contended(f: Diagnosis) -> str:
    alone = f.evidence.alone
    if alone is None:
        return ""
    stretch = ", ".join(f"{_stage(f, k)} {ratio:.2f}" for k, ratio in alone.stretch.items())
    score = "undefined" if alone.s is None else f"{alone.s:.2f}"
    unproven = (
        "; their work alone fits into the period in turn, so that waits for a CPU prove nothing: "
        "end other programs, or give the run CPUs of its own"
    )
    return (
        f"overlap from the isolated stage times is {score}, limit {f.gate.overlap_min:.2f}: "
        f"in the run {stretch} x their isolated time; a stretched stage waits inside for a CPU, a "
        "lock, the interpreter or a device that another thread uses"
        + unproven
        * alone.ignores_waits
    )


def _spoilt_texts(f: Diagnosis, found: Spoilt | None) -> dict[str, str]:
    """Sentences on the envelopes that are not there to be judged."""
    if found is None:
        return {}
    run = f.evidence.run
    others = "".join(f", {count} {reason}" for reason, count in found.others.items())
    of = f"{found.dropped} of {found.envelopes}"
    if found.reason != "expired":
        counts = f"{found.dropped} {found.reason}{others}"
        lost = found.dropped + sum(found.others.values())
        return {"DROPPED": f"{lost} of {found.envelopes} envelopes were dropped: {counts}"}
    times = usual_stages_ns(judged(run, f.evidence.window))
    before = run.standalone
    took = ""
    if before is not None and times:
        own = {"A": before.a_ns, "B": before.b_ns, "C": before.c_ns}
        stage = max(times, key=lambda name: times[name] - own[name])
        took = f" ({stage} took {in_ms(times[stage])} ms, {in_ms(own[stage])} alone)"
    leases = [e.lease_ns for e in judged(run, f.evidence.window) if e.lease_ns is not None]
    lease = f" of {in_ms(min(leases))} ms" if leases else ""
    need, step = f.evidence.lease, "lengthen actions.lease_ms"
    needs = "" if need is None else f"; {need.text}"
    if need is not None and need.is_paced:
        needs = f"; bring-up repeats a window until the next sample of its sensors comes{needs}"
    step = step if need is None else need.remedy(f.model, f.gate.overlap_asked)
    return {
        "EXPIRED": f"{of} were older than the lease{lease} when they were ready{took}{others}"
        f"{needs}; free the machine, or {step}"
    }


def _limit(f: Diagnosis) -> Iterator[str]:
    yield from replica_sentences(f.evidence.run, f.evidence.window)
    score = f.evidence.primary
    if score is None or f.limited_by is None:
        return
    busy, topology = score.rank0, f.evidence.run.topology
    rank0, slowest = (max(shares, key=shares.__getitem__) for shares in (busy, score.places))
    policy, shorter, share = "the policy", "B", score.places[slowest]
    if slowest != "mesh":
        policy, shorter = topology.title(topology.policy_names.index(slowest) + 1), "place"
    if topology.has_replicas:
        policy, shorter, share = pace_of(f.evidence.window, share)
    what = {"r0": "A + C", "r0A": "A", "r0C": "C", "gpu0": "A and C on one device"}[rank0]
    credit = wait_share(f.evidence.window, "w_credit_ns")
    yield {
        "output-limited": "the consumer sets the period, not the pipeline",
        "input-limited": "the input sets the period: the pipeline has time to spare",
        "stage0-limited": f"rank 0 sets the period: {what} is busy {busy[rank0]:.0%} of it; "
        "make it shorter or move work to the policy rank",
        "stage1-limited": f"{policy} sets the period: it is busy {share:.0%} of "
        f"it; only a faster {shorter} helps",
        "window-limited": f"credits set the period: A waits {credit:.0%} of it for a credit",
        "serialized": "the stages run in turn: check that the next envelope is sent before this "
        "result is decoded, and that A does not need what C computes",
        "overhead-limited": "no stage and no queue sets the period: look for the GIL, "
        "collections, a busy host",
    }[f.limited_by]


def _cut(f: Diagnosis) -> Iterator[str]:
    """Another cut of the policy that would be quicker."""
    found = f.better_cut
    if found is None:
        return
    limiting = f.evidence.run.topology.title(found.limiting) if found.limiting else "rank 0"
    moves = " and ".join(
        f"{', '.join(f'`{part}`' for part in parts)} to {f'place {to}' if to else 'rank 0'}"
        for to, parts in found.moved.items()
    )
    yield (
        f"{limiting} limits; moving {moves} would give {in_ms(found.period_ns)} ms: "
        f"placement.parts = {list(found.placement)}"
    )


def _hop(f: Diagnosis) -> Iterator[str]:
    score, topology = f.evidence.primary, f.evidence.run.topology
    held = None if score is None else held_hop(f.places, score.period_ns)
    if held is None or not topology.is_chain:
        return
    took = f"{in_ms(held.hop_ns or 0)} ms an envelope"
    if held.rank == topology.places and topology.threads == "serial":
        yield (
            f"results wait {took} for rank 0, whose one thread runs A meanwhile; with "
            'pipeline.threads = "split" rank 0 receives them at once'
        )
        return
    names = ["rank 0", *map(topology.title, topology.ranks), "rank 0"]
    yield (
        f"the hop from {names[held.rank]} to {names[held.rank + 1]} takes {took}, far more than "
        "the other hops: results are held up there"
    )


def _depth(f: Diagnosis) -> Iterator[str]:
    model, outside = f.model, f.limited_by in ("input-limited", "output-limited")
    if model is None or outside or f.evidence.window.n < N_MIN:
        return
    share = f"{abs(model.gap):.0%} {'more' if model.gap >= 0 else 'less'}"
    found = "as measured" if abs(model.gap) < SAME else f"measured {share}"
    yield f"the model expects {in_ms(model.period_ns)} ms ({model.formula}), {found}"
    yield depth_advice(model, f.evidence.run.topology, f.gate.overlap_min)


def _path(f: Diagnosis) -> Iterator[str]:
    waited = {"envelope": "the envelope", "result": "the result", "credit": "a credit"}
    waited |= {"sensor": "input", "previous A": "the A before", "previous C": "the decode before"}
    waited |= {"previous B": "the B before", "C on the same thread": "C on their thread"}
    waited |= {"A on the same thread": "A on their thread"}
    parts = []
    for stage, shares in f.critical_path.items():
        name = max(shares, key=lambda n: shares[n])
        parts.append(f"{shares[name]:.0%} of {stage} starts waited for {waited.get(name, name)}")
    if parts:
        yield "; ".join(parts)


def _published(f: Diagnosis) -> Iterator[str]:
    if f.compat is None or f.evidence.primary is None:
        return
    passed = f.verdict is Verdict.PASS
    if f.compat.gate and not passed:
        yield (
            f"the published score {_score(f.compat)} would have passed: it ignores waits "
            "and audits, and does not decide"
        )
    elif passed and not f.compat.gate:
        yield f"the published gate would have refused: {_published_reason(f.compat)}"


def _log(f: Diagnosis) -> Iterator[str]:
    run, window = f.evidence.run, f.evidence.window
    if run.torn_lines:
        so = "a writer died, its disk was full, or a number is too long"
        yield f"{run.torn_lines} torn log line(s) left out: {so}"
    if any(run.missing_ranks):
        ranks = ", ".join(str(rank) for rank in run.missing_ranks if rank)
        so = "its durations are those in rank 0's lines"
        if run.topology.is_chain:
            so = "rank 0's lines have the slowest place alone"
        yield f"no log file of rank {ranks}; {so}"
    yield from end_sentences(run, window)
    if window.perturbed and window.n:
        yield f"{counted(window.perturbed, 'envelope')} under a profiler or fault hook left out"
    unchecked = {n: a.note for n, a in f.evidence.audits.items() if a.ok is None and a.note}
    if unchecked and not {"INLINE", "NOT_AUDITED"} & set(f.reasons):
        yield f"not audited: {by_note(unchecked)}"
    if run.unbelievable:
        yield f"{run.unbelievable} robot reports left out: their ages or counts are impossible"
    lost = {k.stream: k.imbalance for k in run.ledgers if k.imbalance}
    if lost:
        where = ", ".join(f"{stream} {count:+d}" for stream, count in lost.items())
        yield f"the ledger does not balance ({where}): items vanished or were counted twice"


def _rules(f: Diagnosis) -> Iterator[str]:
    found = f.evidence.run.rule_counts
    if found is None or not (found.clipped_chunks or found.refused):
        return
    steps = []
    if found.clipped_chunks or set(found.refused) - {"non_finite"}:
        steps.append("check its scaling before you widen the limits")
    if "non_finite" in found.refused:
        steps.append("find what makes them NaN or infinite: what a decoder does not write is NaN")
    yield f"the rules of [actions] changed the policy's actions: {found.text}; {'; '.join(steps)}"


def _lacking(f: Diagnosis, fields: list[str]) -> str:
    if 0 in f.evidence.run.missing_ranks:
        return "rank 0's file"
    missing = missing_stages(f.evidence.window) + fields
    titles = map(f.evidence.run.topology.title, places_lost(f.evidence))
    missing += [f"the lines of {title}" for title in titles]
    return ", ".join(dict.fromkeys(missing)) or "envelopes of the phase to be judged"


def _interval(score: Primary) -> str:
    if score.s is None or score.s_low is None or score.s_high is None:
        return "undefined"
    return f"{score.s:.2f} [{score.s_low:.2f}, {score.s_high:.2f}]"


def _published_reason(score: Compat) -> str:
    if score.score is None:
        return f"its ratio is undefined for stages below {STAGE_MIN_NS / 1e6:.2f} ms"
    if score.score < COMPAT_SCORE_MIN:
        return f"its score is {score.score:.2f} of {COMPAT_SCORE_MIN:.2f}"
    return (
        f"its score is {score.score:.2f}, but the median period {in_ms(score.period_ns)} ms lies "
        "nearer the sum of both stages than the longer one"
    )


def _score(score: Compat) -> str:
    return "NA" if score.score is None else f"{score.score:.2f}"
