"""The sentence and the seven figures that a user needs first, from a judged run. Pure.

The sentence says whether the pipeline may drive a robot, what limits its rate and what to do first.
``statements`` has the diagnosis behind it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ppstream.analysis.age_advice import in_ms
from ppstream.analysis.lease import ASKS, LeaseNeed
from ppstream.analysis.memory_use import GIB
from ppstream.analysis.reasons import CUT_SHORT, OF_SPEED, REASONS, SCORE, SERVICE, SLOWED, UNKNOWN
from ppstream.analysis.replicas import slow_replica
from ppstream.analysis.run_ends import more_envelopes
from ppstream.analysis.run_report import Figure, RunReport, ServiceReport
from ppstream.analysis.run_statistics import HARMLESS, UNUSABLE
from ppstream.analysis.scores import resource_title
from ppstream.analysis.unserved import TIME_MIN_NS
from ppstream.analysis.verdict import ACCEPTABLE
from ppstream.core.errors import counted
from ppstream.core.phases import BRING_UP

OTHERS_MIN: Final = 0.5  # CPUs that other programs take: a busy machine
OLDER_NS: Final = 10_000  # of actions: less is not worth a word
CLIPPED_MAX: Final = 0.10  # of the chunks: at rest at a limit, or a policy that asks for too much
IDLE_SHARE: Final = 0.9  # of the full rate: a service below it has time to spare


def sentence(report: RunReport) -> str:
    """May this pipeline drive a robot, what limits its rate, what to do first."""
    if report.reasons and not report.accepted:
        return _refusal(report)
    if report.failed_end and report.service is None:
        what = f"{_before_service(report)}{report.failed_end}"
        return f"{SERVICE}: {what}; first {REASONS['SERVICE_ENDED'][2]}."
    pace = f"{_pace(report)}; {_first_step(report)}."
    if report.accepted:
        _, why, _ = REASONS[report.accepted[0]]
        refused = f"{why[0].upper()}{why[1:]} ({', '.join(report.accepted)})"
        return f"{refused}. bringup.accept permits that, so it serves robots all the same: {pace}"
    return f"This pipeline may drive your robot: {pace}"


def _refusal(report: RunReport) -> str:
    refused = [reason for reason in report.reasons if reason not in report.gate.accept]
    code, more = _deciding(report, refused), len(refused) - 1
    begin, why, remedy = REASONS[code]
    codes = code + (f" and {more} more" if more else "")
    if report.failed_end and report.service is None and code in CUT_SHORT:
        return f"{UNKNOWN}: {report.failed_end} ({codes}); first {REASONS['SERVICE_ENDED'][2]}."
    if report.refused_alone and code == "INLINE" and report.service is None:
        return f"{SCORE}: {report.refused_alone}."
    if report.service is not None and code in report.service.reasons:
        begin, why = SERVICE, f"{_before_service(report)}{report.service.reasons[code]}"
    if (need := _short_lease(report, code)) is not None:
        why += f" {need.holds_text}" if code == "SHORT_LEASE" else ""
        why += "" if code == "SERVICE_HELD" else f", as {need.text}"  # which says it itself
        model = None if code == "SERVICE_HELD" else report.model  # it knows full speed alone
        remedy = need.remedy(model, report.gate.overlap_asked)
        remedy += f"; {ASKS}" if code == "SHORT_LEASE" else ""
    if code == "INPUT_LIMITED" and report.window.phases != {BRING_UP}:
        remedy = "judge its bring-up, which runs at full speed"
    if code == "TOO_FEW":
        remedy = more_envelopes(report.window, report.unready)
    if code in ("INLINE", "TOO_FEW") and not report.window.phases and report.service is None:
        why = "nothing was measured after its warm-up"
        remedy = "let it serve a robot" if code == "INLINE" else "let it run until it is ready"
    if code == "INLINE" and report.primary is not None:
        why += f" and give {_rate(report)} chunks/s"
    remedy = (_service_step(report) if code == "INLINE" else "") or remedy
    if set(report.reasons) <= set(ACCEPTABLE):
        enough = "it is" if report.primary is None else f"{_rate(report)} chunks/s are"
        remedy += f", or accept it with bringup.accept if {enough} enough for you"
    busy = _busy_machine(report) if code in SLOWED else ""
    return f"{begin}: {why} ({codes}); first {busy}{remedy}."


def _short_lease(report: RunReport, code: str) -> LeaseNeed | None:
    """Returns what the lease had to cover and does not, where that is the reason ``code``."""
    served = None if report.service is None else report.service.lease
    need = {"EXPIRED": report.lease, "SHORT_LEASE": report.lease, "SERVICE_HELD": served}.get(code)
    return None if need is None or not need.is_short else need


def _deciding(report: RunReport, refused: list[str]) -> str:
    """The first reason; one about the robots' service before one about the gain of overlap."""
    if refused[0] not in OF_SPEED or report.service is None:
        return refused[0]
    return next((code for code in refused if code in report.service.reasons), refused[0])


def _before_service(report: RunReport) -> str:
    """The begin of a sentence on a service that is refused; empty where the gate refused it."""
    judged = "bring-up" if report.window.phases == {BRING_UP} else "the judged phase"
    before = set(report.judged_reasons)
    if not before:
        return f"{judged} passed, then "
    return f"{judged} was accepted, then " if before <= set(report.gate.accept) else ""


def _busy_machine(report: RunReport) -> str:
    machine = report.machine
    if machine is None:
        return ""
    if not machine.is_short and (machine.others_cpus or 0.0) < OTHERS_MIN:
        return ""
    cpus = "1 CPU" if machine.usable_cpus == 1 else f"{machine.usable_cpus:g} CPUs"
    return f"free the machine (load {machine.load_1min:.1f} on {cpus}), then "


def _pace(report: RunReport) -> str:
    """The rate, and what sets it."""
    served = None if report.service is None else report.service.chunks_per_s
    if report.primary is None:
        return "its rate was not measured"
    full = f"it gives {_rate(report)} chunks/s"
    if _has_time_to_spare(report) and served is not None:
        return f"{full}, and in service its robots asked for {served:.1f}"
    busy = f"busy {_busiest(report):.0%} of the time"
    limits = {
        "output-limited": "whoever takes the actions sets that pace",
        "input-limited": "its sensors set that pace",
        "stage0-limited": f"rank 0 sets that pace ({busy})",
        "stage1-limited": f"{_policy_rank(report)} sets that pace ({busy})",
        "window-limited": "too few envelopes may be under way to be faster",
        "serialized": "its stages run in turn",
        "overhead-limited": "neither a stage nor a queue sets that pace",
    }
    return f"{full}, and {limits.get(report.limited_by or '', 'nothing limits it by name')}"


def _first_step(report: RunReport) -> str:
    """The remedy of the worst: a robot without actions, a shallow queue, then the limit."""
    model, cut = report.model, report.better_cut
    if step := _service_step(report):
        return f"first {step}"
    if _has_time_to_spare(report):
        return "there is nothing to do"
    if cut is not None:
        return f"for more, set placement.parts = {list(cut.placement)}"
    if model is not None and model.deeper is not None and model.deeper.is_worth:
        deep, more = model.deeper, model.deeper.gain / (model.period_ns - model.deeper.gain)
        price = f", for actions {in_ms(deep.older)} ms older" if deep.older >= OLDER_NS else ""
        return f"for {more:.0%} more, set pipeline.d_in to {deep.d_in}{price}"
    return {
        "output-limited": "for more, let that take the newest chunk alone",
        "stage0-limited": "for more, shorten A and C or move work of theirs into the policy",
        "stage1-limited": f"for more, make {_faster_policy(report)}",
        "window-limited": "for more, see in the report what A waits for",
        "overhead-limited": "for more, give it CPUs of its own",
        "serialized": "for more, see in the report what each stage waits for",
    }.get(report.limited_by or "", "there is nothing to do")


def _service_step(report: RunReport) -> str:
    """Advice to look for robots without actions, faults of the policy, clipped chunks or a leak.

    Empty: none is there.
    """
    service = report.service
    if service is None:
        return ""
    if trouble := _trouble(service):
        return f"{_busy_machine(report)}find out why {trouble}"
    if failed := _failed_calls(service):
        return f"find out why {failed}"
    if clipped := _clipped(service):
        why = "a robot rests at a limit, or the policy asks for too much"
        return f"find out why {clipped} were clipped: {why}"
    grown = max(report.memory, key=lambda use: use.resident_grown_bytes, default=None)
    if grown is not None and grown.leaks:
        more = f"{grown.resident_grown_bytes / GIB:.2f} GiB"
        return f"find out why the memory of rank {grown.rank} grew by {more} in service"
    return ""


def _failed_calls(service: ServiceReport) -> str:
    """Chunks that the policy or the decoder failed to give; empty: none."""
    found = service.drops["envelopes"]
    failed = {k: n for k, n in found.items() if k in UNUSABLE} if isinstance(found, Mapping) else {}
    if not failed:
        return ""
    reasons = ", ".join(f"{n} {reason}" for reason, n in failed.items())
    return f"chunks could not be used ({reasons}): see first faults in the report"


def _trouble(service: ServiceReport) -> str:
    """Of a robot that had no actions for longer than a lease, once or in all."""
    gaps, held_ns = service.gaps, _held_ns(service)
    if gaps is None:
        return ""
    # a robot that had no need of chunks held for none; one that waits for its first does not hold
    starved_ns, robot = (0, "") if _never_held(service) else (gaps.later_ns, gaps.later_robot)
    # a row fills its first window for a while, unless its robot asks and begins with a whole one
    is_long = service.requests is not None or gaps.first_ns >= TIME_MIN_NS
    if is_long and gaps.first_ns > starved_ns:
        starved_ns, robot = gaps.first_ns, gaps.first_robot
    if starved_ns > gaps.limit_ns:
        lease = f"the lease of {in_ms(gaps.limit_ns)} ms"
        who = f"robot {robot}" if robot else "a robot"
        once = f"{who} once had no new chunk for {in_ms(starved_ns)} ms, longer than {lease}"
        return once + _silent_stream(service)
    if held_ns > gaps.limit_ns:
        holds = sum(state.holds or 0 for state in service.robots)
        held = f"robots held {counted(holds, 'time')}, {in_ms(held_ns)} ms in all"
        return f"{held}, for want of young actions"
    for state in service.robots:
        if state.faults and state.fault == "lease":
            return f"robot {state.name} latched {counted(state.faults, 'fault')}, the newest: lease"
    return ""


def _clipped(service: ServiceReport | None) -> str:
    """The share of chunks that were cut to the limits; empty: few, or nobody counted."""
    rules = None if service is None else service.rule_counts
    if rules is None or not CLIPPED_MAX * rules.chunks < rules.clipped_chunks <= rules.chunks:
        return ""
    return f"{rules.clipped_chunks / rules.chunks:.0%} of the chunks"


def _held_ns(service: ServiceReport) -> int:
    return sum(robot.held_ns or 0 for robot in service.robots)


def _never_held(service: ServiceReport) -> bool:
    """True where all robots say so."""
    holds = [robot.holds for robot in service.robots]
    return bool(holds) and not any(n is None or n > 0 for n in holds)


def _silent_stream(service: ServiceReport) -> str:
    """The stream with the longest hole, where there is one."""
    holed = [ledger for ledger in service.streams if ledger.holes and not ledger.is_on_request]
    if not holed:
        return ""
    worst = max(holed, key=lambda ledger: ledger.longest_hole_ns or 0)
    return f" ({worst.stream} was silent for up to {in_ms(worst.longest_hole_ns or 0)} ms)"


def _has_time_to_spare(report: RunReport) -> bool:
    """A service whose input sets the pace, below what bring-up reached."""
    service, score = report.service, report.primary
    if service is None or score is None or service.chunks_per_s is None:
        return False
    in_bringup = report.window.phases == {BRING_UP}
    slower = service.chunks_per_s < IDLE_SHARE * 1e9 / score.period_ns
    return in_bringup and slower and service.limited_by == "input-limited"


def limiting(report: RunReport) -> str:
    """The rank, place or thing that sets the period, in few words."""
    score = report.primary
    if score is not None and report.limited_by == "stage1-limited":
        if report.window.topology.has_replicas:
            slow = slow_replica(report.window)
            return "replicas" if slow is None else f"replica {slow.rank}"
        return resource_title(max(score.places, key=lambda name: score.places[name]))
    return {
        "output-limited": "who takes the actions",
        "input-limited": "the sensors",
        "stage0-limited": "rank 0",
        "window-limited": f"D_in = {report.window.topology.d_in}",
        "serialized": "stages in turn",
        "overhead-limited": "none by name",
    }.get(report.limited_by or "", "not known")


def _policy_rank(report: RunReport) -> str:
    """The slowest one: in a chain with its parts and its device."""
    if (place := _slowest_place(report)) is not None:
        return report.window.topology.title(place)
    name = limiting(report)
    return {"replicas": "each replica"}.get(name, f"the {name}")


def _slowest_place(report: RunReport) -> int | None:
    """In a chain, where a policy rank sets the pace."""
    place = limiting(report).removeprefix("place ")
    return int(place) if place.isdecimal() else None


def _faster_policy(report: RunReport) -> str:
    """Returns what would help where policy ranks set the pace: no cut shortens one part."""
    if limiting(report) == "replicas":
        return "the policy faster or add a replica"
    place = _slowest_place(report)
    parts = () if place is None else report.window.topology.parts_of(place)
    if len(parts) == 1:
        return f"{parts[0]} faster or split it into parts"
    return "the policy faster or cut it over more ranks"


def figures(report: RunReport) -> tuple[Figure, ...]:
    """Seven, in the order of a user's questions; what was not measured says so."""
    return (
        _rate_figure(report),
        _age_figure(report),
        _gap_figure(report.service),
        *_score_figures(report),
        _limit_figure(report),
        _lost_figure(report),
    )


def _rate_figure(report: RunReport) -> Figure:
    score, service = report.primary, report.service
    if score is None:
        return Figure("rate", "unknown", "too little was measured")
    note = f"one every {in_ms(score.period_ns)} ms (period P)"
    if report.window.phases == {BRING_UP}:
        note += " at full speed"
        if service is not None and service.chunks_per_s is not None:
            note += f"; {service.chunks_per_s:.1f} in service"
    return Figure("rate", f"{_rate(report)} chunks/s", note)


def _age_figure(report: RunReport) -> Figure:
    """By the robots' clocks where they measure it, else rank 0's part of it."""
    service, chunks = report.service, report.chunks
    found = report.age
    where = "at the robot"
    late = None if chunks is None else chunks.late
    if found is None and late is not None:
        found, where = late, "at the robot's receipt"
    elif found is None:
        found = report.latency if service is None or service.latency is None else service.latency
        where = "from window to actions on rank 0 (latency)"
    if chunks is None:
        where += "; no robot measured its own"
    elif late is not None or report.age is None:
        where += f"; {chunks}"
    if found is None:
        return Figure("age", "unknown", "no chunk came through")
    p99_ns = found.reported_p99_ns
    tail, name = (found.max_ns, "max") if p99_ns is None else (p99_ns, "p99")
    note = f"p50 and {name} {where}"
    oldest, is_bad = report.oldest, "SERVICE_LATE" in report.reasons
    if report.age is not None and oldest is not None:
        limit = "" if oldest.limit_ns is None else f" of {in_ms(oldest.limit_ns)} allowed"
        note += f"; oldest executed {in_ms(oldest.age_ns)}{limit}"
        is_bad |= oldest.is_too_old
    return Figure("age", f"{in_ms(found.p50_ns)} / {in_ms(tail)} ms", note, is_bad)


def _gap_figure(service: ServiceReport | None) -> Figure:
    gaps = None if service is None else service.gaps
    on_request = service is not None and service.requests is not None
    if service is None or gaps is None:
        why = "robots ask for their chunks" if on_request else "no robot was served"
        return Figure("longest gap", "unknown", why)
    note = "before a robot's first chunk" if on_request else "without a new chunk in service"
    note += f"; {gaps.above_text}"
    if gaps.robot and gaps.longest_ns > gaps.left_ns:
        is_first = gaps.longest_ns == gaps.first_ns and not on_request
        note += f"; robot {gaps.robot}" + " before its first one" * is_first
    if held_ns := _held_ns(service):
        note += f"; robots held for {in_ms(held_ns)} ms"
    return Figure("longest gap", f"{in_ms(gaps.longest_ns)} ms", note, bool(_trouble(service)))


def _score_figures(report: RunReport) -> tuple[Figure, Figure]:
    """The overlap, and what it gains."""
    score, least = report.primary, report.gate.overlap_min
    if score is None or score.s is None or score.s_low is None or score.s_high is None:
        why = "too little was measured" if score is None else "no two stages ran at the same time"
        return Figure("overlap", "unknown", why), Figure("gain", "unknown", why)
    wants = f"the gate wants {least:.2f}"
    if score.is_beyond_s:
        wants += f" of what replicas save over one rank, which is {score.saved:.2f}"
    overlap = Figure(
        "overlap",
        f"{score.s:.2f}",
        f"share of what overlap can save (S [{score.s_low:.2f}, {score.s_high:.2f}]); {wants}",
        (score.saved if score.is_beyond_s else score.s_low) < least,
    )
    note = f"the speed of one rank (G); {score.ceiling:.2f} x is possible"
    return overlap, Figure("gain", f"{score.gain:.2f} x", note)


def _limit_figure(report: RunReport) -> Figure:
    score = report.primary
    if score is None or report.limited_by is None:
        why = "too little was measured" if score is None else "one process runs all stages in turn"
        return Figure("limit", "unknown", why)
    note = f"busiest rank {_busiest(report):.0%} (E); {report.limited_by}"
    if report.service is not None and report.service.limited_by is not None:
        note += f"; in service {report.service.limited_by}"
    return Figure("limit", limiting(report), note)


def _lost_figure(report: RunReport) -> Figure:
    """Envelopes of service, or of the whole run where nothing was served; chunks that were cut."""
    found = report.drops if report.service is None else report.service.drops
    where = "" if report.service is None else " in service"
    reasons, emitted = found["envelopes"], found["emitted"]
    if not isinstance(reasons, Mapping) or not isinstance(emitted, int):
        return Figure("lost", "unknown", "the log counts no envelopes")
    lost = {reason: n for reason, n in reasons.items() if reason not in HARMLESS}
    total = emitted + sum(lost.values())
    note = f"envelopes dropped{where}" + "".join(f", {n} {reason}" for reason, n in lost.items())
    if report.drops["imbalance"]:
        note += "; the ledger does not balance"
    lacks = report.service is not None and "MISSING_LOGS" in report.service.reasons
    if lacks:
        note += "; the log lacks lines of others"
    clipped = _clipped(report.service)
    if clipped:
        note += f"; {clipped} clipped"
    is_bad = lacks or bool(clipped) or bool(report.drops["imbalance"])
    return Figure("lost", f"{sum(lost.values())} of {total}", note, is_bad)


def _rate(report: RunReport) -> str:
    return "?" if report.primary is None else f"{1e9 / report.primary.period_ns:.1f}"


def _busiest(report: RunReport) -> float:
    return 0.0 if report.primary is None else report.primary.efficiency
