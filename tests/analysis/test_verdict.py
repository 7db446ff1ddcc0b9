"""Which reason decides, and which part of a run is judged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from golden_runs import Fields, GoldenRun, ms, simulate, stages
from judging import all_audits_pass, judged, period_ms, sentence

from ppstream.analysis.judge import judge
from ppstream.analysis.log_parser import parse_run
from ppstream.analysis.period_model import PipelineForm, StageTimes
from ppstream.analysis.verdict import Verdict
from ppstream.core.errors import LogError

SPLIT = PipelineForm("split")
UNPIPELINED = PipelineForm("serial", "decode_first")


def test_safety_comes_before_every_other_reason() -> None:
    golden = simulate(stages(t_in=40), n=60)
    golden.lines[30]["outstanding_max"] = 3
    report = judged(golden)
    assert report.verdict is Verdict.FAIL
    assert report.reasons[0] == "QUEUE_BOUND"
    assert "TOO_FEW" in report.reasons
    assert "INPUT_LIMITED" in report.reasons


def test_fewer_than_a_hundred_periods_are_too_few() -> None:
    assert "TOO_FEW" in judged(simulate(n=110)).reasons  # 10 skipped, the next one opens
    assert judged(simulate(n=111)).verdict is Verdict.PASS


def test_blocked_consumer_is_output_limited() -> None:
    report = judged(simulate(form=SPLIT, emit_block_ms=8))
    assert report.reasons == ["OUTPUT_LIMITED"]
    assert report.limited_by == "output-limited"
    assert all_audits_pass(report)


def test_profiled_run_is_perturbed() -> None:
    assert "PERTURBED" in judged(simulate(mode="attribution")).reasons


def test_fault_inside_the_window_is_perturbed() -> None:
    golden = simulate()
    golden.extra.append({"kind": "event", "name": "fault", "t": golden.lines[200]["tEmit"]})
    assert judged(golden).reasons == ["PERTURBED"]


def test_drifting_start_is_skipped_and_a_run_that_never_settles_is_not_warm() -> None:
    warming = [stages(b=10 * 1.02 ** (60 - k) if k < 60 else 10) for k in range(340)]
    report = judged(simulate(warming, SPLIT))
    assert report.window.skipped > 20
    assert report.verdict is Verdict.PASS
    unsettled = [stages(a=1, b=4 * 1.05 ** (k % 60), c=1) for k in range(340)]
    assert "NOT_WARM" in judged(simulate(unsettled, SPLIT)).reasons


def test_recompiles_put_off_the_end_of_warm_up() -> None:
    golden = simulate()
    golden.policy_lines[25]["recompiles"] = 1
    assert judged(golden).window.skipped == 26


def test_world_size_one_is_inline_without_a_score() -> None:
    golden = simulate(form=UNPIPELINED)
    golden.manifest["topology"]["world_size"] = 1
    report = judged(golden)
    assert report.reasons == ["INLINE"]
    assert report.verdict is Verdict.INCONCLUSIVE
    assert report.primary is not None
    assert report.primary.s is None
    assert report.compat is None


def test_missing_policy_durations_leave_period_and_latency() -> None:
    golden = simulate()
    golden.policy_lines.clear()
    report = judged(golden.bend(lambda line: line.update(B_ns=None)))
    assert report.reasons[0] == "MISSING_LOGS"
    assert report.primary is None
    assert report.latency is not None


def test_policy_rank_lines_fill_what_rank0_lacks() -> None:
    golden = simulate()
    whole = judged(golden)
    golden.bend(lambda line: line.update(B_ns=None, residence_ns=None, wait_input_ns=None))
    assert judged(golden).as_dict() == whole.as_dict()


def test_missing_policy_file_leaves_what_rank0_says_of_it_unaudited() -> None:
    golden = simulate()
    golden.policy_lines.clear()
    report = judged(golden)
    assert report.reasons == ["NOT_AUDITED"]
    assert "stamps: the policy rank's lines are missing" in sentence(report, "NOT_AUDITED")
    assert report.audits["conservation"].ok


def test_policy_rank_on_another_host_keeps_its_file_there() -> None:
    golden = simulate()
    golden.policy_lines.clear()
    golden.manifest["topology"]["ranks"][0]["boot_id"] = "here"
    golden.manifest["policy_rank"] = {"boot_id": "there"}
    report = judged(golden)
    assert report.verdict is Verdict.PASS
    assert "on another host" in sentence(report, "not audited")
    golden.manifest["policy_rank"] = {"boot_id": "here"}
    assert judged(golden).reasons == ["NOT_AUDITED"]


def test_log_without_waits_cannot_prove_anything() -> None:
    golden = simulate()
    golden.bend(lambda line: [line.pop(name) for name in list(line) if name.startswith("w_")])
    report = judged(golden)
    assert report.reasons == ["MISSING_LOGS"]
    assert report.audits["conservation"].ok is None


def test_bring_up_lines_are_judged_when_there_are_any() -> None:
    golden = simulate(n=400)
    for line in golden.lines[200:]:
        line["phase"] = "ready"
        line["w_input_ns"] += ms(5)
    report = judged(golden)
    assert report.window.n == 189
    assert "INPUT_LIMITED" not in report.reasons
    assert report.service is not None
    assert report.service.limited_by == "input-limited"
    assert "INPUT_LIMITED" in judged(golden, phase="ready").reasons


@pytest.mark.parametrize("seq_from", [0, 200], ids=["seq restarts", "seq runs on"])
def test_epoch_cut_ends_the_segment_and_the_refill_is_left_out(seq_from: int) -> None:
    first, second = simulate(n=200), simulate(n=200, epoch=1)
    gap_ns = ms(900) + first.lines[-1]["tEmit"]
    for line in second.lines:
        line["seq"] += seq_from
        for name in line:
            if name.startswith("t"):
                line[name] += gap_ns
    cut = {"kind": "event", "name": "epoch_cut", "epoch": 1, "t": first.lines[-1]["tEmit"]}
    first.lines += second.lines
    first.extra.append(cut)
    for policy, line in zip(second.policy_lines, second.lines, strict=True):
        policy |= {"seq": line["seq"]}
    first.policy_lines += second.policy_lines
    report = judged(first)
    assert report.verdict is Verdict.PASS
    assert len(report.window.segments) == 2
    assert report.window.skipped == 10 + 4
    assert period_ms(report) == pytest.approx(10.0)


def test_no_difference_crosses_a_generation() -> None:
    old, new = simulate(n=200), simulate(n=200)
    lines = [*old.tagged()]
    for tagged in new.tagged():
        tagged.fields["generation"] = 1  # type: ignore[index]
        lines.append(tagged._replace(generation=1))
    report = judge(parse_run(old.manifest, lines))
    assert report.window.generation == 1
    assert report.window.n == 189
    assert period_ms(report) == 10.0
    assert any("2 generations" in sentence for sentence in report.statements)


def test_dropped_envelope_keeps_its_stage_time_and_has_no_latency() -> None:
    golden = simulate()
    golden.lines[100] |= {"drop": "stale"}
    report = judged(golden)
    assert report.window.n == 318
    assert len(report.window.segments) == 1
    assert report.drops["envelopes"] == {"stale": 1}
    assert report.primary is not None
    assert report.primary.busy_ns["mesh"] == 319 * ms(10)
    assert report.verdict is Verdict.PASS


def test_lost_line_starts_a_new_segment() -> None:
    golden = simulate()
    del golden.lines[150]
    report = judged(golden)
    assert len(report.window.segments) == 2
    assert period_ms(report) == pytest.approx(10.0)


def test_pause_of_an_idle_robot_closes_the_window_but_a_stall_does_not() -> None:
    def paused(wait: str) -> GoldenRun:
        golden = simulate(form=SPLIT, phase="ready", pacing="sample")
        for line in golden.lines[200:]:
            for name in line:
                if name.startswith("t"):
                    line[name] += ms(500)
        golden.lines[200][wait] += ms(500)
        return golden

    assert len(judged(paused("w_input_ns")).window.segments) == 2
    stalled = judged(paused("w_credit_ns"))
    assert len(stalled.window.segments) == 1
    assert period_ms(stalled) > 11


def test_run_may_be_judged_while_it_goes_on() -> None:
    golden = simulate(n=400)
    golden.manifest["finished_utc"] = None
    golden.lines = golden.lines[:300]
    golden.policy_lines = golden.policy_lines[:297]  # the other file is a little behind
    assert judged(golden).verdict is Verdict.PASS


def test_overlap_limit_of_the_run_itself_counts() -> None:
    golden = simulate(form=PipelineForm(d_in=1))
    golden.manifest["config"] = {"bringup": {"overlap_min": 0.6}}
    assert judged(golden).reasons == ["LOW_OVERLAP"]


def test_device_stamps_add_the_union_of_a_and_c_as_a_resource() -> None:
    golden = simulate(stages(a=6, b=10, c=6), SPLIT)
    golden.manifest["topology"]["ranks"][0]["stamp_source"] = "device"
    report = judged(golden)
    assert report.primary is not None
    busy = report.primary.busy_ns
    assert busy["gpu0"] < busy["r0A"] + busy["r0C"]
    assert report.primary.sigma_ns == busy["r0A"] + busy["r0C"] + busy["mesh"]


def test_budgets_fail_a_release_that_misses_them() -> None:
    golden = simulate()
    report = judged(golden, profile="release", period_budget_ns=ms(9), latency_budget_ns=ms(19))
    assert report.reasons == ["PERIOD_BUDGET", "LATENCY_BUDGET"]


# ---- the folder must not say otherwise than its lines --------------------------------------------


def verdict_event(verdict: str, *reasons: str, overlap: float | None = 1.0) -> Fields:
    said = {"verdict": verdict, "reasons": list(reasons), "overlap": overlap}
    return {"kind": "event", "name": "verdict", "generation": 0, "t": 1} | said


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (verdict_event("FAIL", "LOW_OVERLAP", overlap=-0.14), "verdict was FAIL LOW_OVERLAP"),
        (verdict_event("INCONCLUSIVE", "TOO_FEW"), "verdict was INCONCLUSIVE TOO_FEW"),
        (verdict_event("FAIL"), "verdict was FAIL"),
        (verdict_event("PASS", overlap=-0.14), "had overlap -0.14, its lines have 1.00"),
        (verdict_event("PASS", "CONTENDED"), "verdict was PASS CONTENDED"),
    ],
)
def test_lines_that_are_better_than_the_logged_verdict_are_not_believed(
    event: Fields, text: str
) -> None:
    golden = simulate()
    golden.extra.append(event)
    report = judged(golden)
    assert report.verdict is Verdict.INCONCLUSIVE
    assert report.reasons == ["CONTRADICTED"]
    assert text in sentence(report, "CONTRADICTED")


def test_logged_verdict_that_agrees_or_is_another_generation_s_is_no_contradiction() -> None:
    golden = simulate()
    golden.extra.append(verdict_event("PASS"))
    golden.extra.append(verdict_event("FAIL", "LOW_OVERLAP", overlap=0.1) | {"generation": 7})
    golden.generation = 0
    run = golden.parse()
    events = tuple(e._replace(generation=e.fields.get("generation", 0)) for e in run.events)
    assert judge(replace(run, events=events)).verdict is Verdict.PASS


def test_later_safety_count_contradicts_no_earlier_pass() -> None:
    golden = simulate()
    golden.extra.append(verdict_event("PASS"))
    golden.lines[200]["outstanding_max"] = 3
    assert judged(golden).reasons == ["QUEUE_BOUND"]


@pytest.mark.parametrize(
    ("code", "generation", "verdict"),
    [
        (30, 0, Verdict.INCONCLUSIVE),
        (31, 0, Verdict.INCONCLUSIVE),
        (0, 0, Verdict.PASS),
        (20, 0, Verdict.PASS),
        (30, 1, Verdict.PASS),  # of another generation
    ],
)
def test_exit_code_of_a_refused_gate_contradicts_a_pass(
    code: int, generation: int, verdict: Verdict
) -> None:
    run = simulate().parse()
    ends = {"0": {"code": code, "generation": generation}}
    report = judge(replace(run, exits=ends))
    assert report.verdict is verdict
    assert ("CONTRADICTED" in report.reasons) is (verdict is Verdict.INCONCLUSIVE)


def test_file_of_another_run_is_named_and_its_lines_are_left_out() -> None:
    golden = simulate()
    for line in golden.policy_lines:
        line["run_id"] = "another"
    report = judged(golden)
    assert report.reasons == ["CONTRADICTED", "NOT_AUDITED"]
    assert "rank1 has lines of another run" in sentence(report, "CONTRADICTED")


@pytest.mark.parametrize("least", [-5, -0.01, 1.01, float("nan"), "0.3", None])
def test_limit_that_is_none_is_bad_input(least: object) -> None:
    golden = simulate()
    golden.manifest["config"] = {"bringup": {"overlap_min": least}}
    with pytest.raises(LogError, match=r"overlap_min is .*, expected 0 to 1"):
        judged(golden)


def test_limit_below_the_usual_one_is_said() -> None:
    golden = simulate()
    golden.manifest["config"] = {"bringup": {"overlap_min": 0.05}}
    assert "asks for 0.05" in sentence(judged(golden), "bringup.overlap_min")
    assert judged(golden).as_dict()["limits"] == {"overlap_min": 0.05, "accept": []}


# ---- reasons are true ----------------------------------------------------------------------------


def with_drops(golden: GoldenRun, every: int, *reasons: str) -> GoldenRun:
    """All but each ``every``-th envelope is dropped, for these reasons in turn."""
    for k, line in enumerate(golden.lines):
        if k % every:
            line |= {"drop": reasons[k % len(reasons)], "tEmit": None, "age_rank0_ns": None}
    return golden


def test_expired_envelopes_are_named_before_fields_and_counts() -> None:
    golden = with_drops(simulate(stages(b=66)), 100, "expired")
    golden.manifest["standalone"]["B_ns"] = ms(14)
    golden.bend(lambda line: line.update(window_end_ns=ms(1), expires_ns=ms(91)))
    fields = {"usable_cpus": 2, "busy_threads": 2, "load_1min": 8.6, "steal_share": 0.1}
    golden.extra.append({"kind": "event", "name": "machine"} | fields)
    report = judged(golden)
    assert report.verdict is Verdict.INCONCLUSIVE
    assert report.reasons == ["EXPIRED"]
    assert sentence(report, "EXPIRED").startswith(
        "EXPIRED: 326 of 330 were older than the lease of 90.0 ms when they were ready "
        "(B took 66.0 ms, 14.0 alone); free the machine"
    )
    assert sentence(report, "this machine").endswith("load 8.6 on 2 usable CPUs, 10% stolen")


def test_other_drops_are_named_with_their_counts() -> None:
    report = judged(with_drops(simulate(), 100, "policy_error", "non_finite", "policy_error"))
    assert report.reasons == ["DROPPED"]
    assert sentence(report, "DROPPED") == (
        "DROPPED: 326 of 330 envelopes were dropped: 217 policy_error, 109 non_finite"
    )


def test_half_a_run_that_is_dropped_is_not_judged_by_the_other_half() -> None:
    golden = simulate(n=400)
    for line in golden.lines[:210]:
        line["drop"] = "expired"
    assert "EXPIRED" in judged(golden).reasons
    for line in golden.lines[:30]:
        line["drop"] = None
    assert judged(golden).verdict is Verdict.PASS


@pytest.mark.parametrize("drop", ["stale", "absent", "answered", "session_reset"])
def test_drops_that_are_nobodys_fault_spoil_nothing(drop: str) -> None:
    report = judged(with_drops(simulate(n=900), 3, drop))
    assert {"EXPIRED", "DROPPED"} & set(report.reasons) == set()


def renamed(golden: GoldenRun, wait: str, share: float) -> GoldenRun:
    """A writer that calls its waits link calls."""

    def rename(line: Fields) -> None:
        moved = round(share * line[wait])
        line |= {wait: line[wait] - moved, "busy_link_ns": line["busy_link_ns"] + moved}

    return golden.bend(rename)


def test_waits_without_a_name_are_inconclusive() -> None:
    golden = renamed(simulate(stages(t_in=13), SPLIT), "w_input_ns", 1)  # 69 % of A's thread
    report = judged(golden)
    assert report.reasons == ["UNNAMED_TIME"]
    assert "r0A 69%" in sentence(report, "UNNAMED_TIME")
    assert all_audits_pass(report)


@pytest.mark.parametrize(
    ("change", "times"),
    [
        ({"run_delay_ns": ms(8)}, stages(t_in=13)),  # it waited for a CPU
        ({"run_delay_ns": None}, stages(t_in=13)),  # nobody knows
        ({}, stages(a=0.4, b=0.9, c=0.4, x=0.01, t_in=1.3)),  # what lies around them is as long
    ],
)
def test_time_around_stages_is_not_held_against_a_run_that_could_not_help_it(
    change: Fields, times: StageTimes
) -> None:
    golden = renamed(simulate(times, SPLIT), "w_input_ns", 1).bend(lambda line: line.update(change))
    assert "UNNAMED_TIME" not in judged(golden).reasons


# ---- service beside bring-up ---------------------------------------------------------------------


def served(times: StageTimes, n: int = 120, **ids: Any) -> GoldenRun:
    """Bring-up, and behind it a service with these stages."""
    golden, ready = simulate(), simulate(times, n=n, phase="ready", epoch=1, **ids)
    for line in ready.lines + ready.policy_lines:
        line |= {k: v + ms(10_000) for k, v in line.items() if k[0] == "t" and k[1].isupper()}
    golden.lines += ready.lines
    golden.policy_lines += ready.policy_lines
    return golden


def robot_state(**fields: Any) -> Fields:
    counts = {"holds": 3, "held_ns": 0, "faults": 0, "fault": "", "chunk_gap_ns": ms(30)}
    return {"kind": "robot_state", "session": 5, "t": 1} | counts | fields


def test_service_as_quick_as_bring_up_passes() -> None:
    golden = served(stages(t_in=40))
    golden.extra.append(robot_state(held_ns=ms(100)))
    report = judged(golden)
    assert report.verdict is Verdict.PASS
    assert report.service is not None
    assert report.service.verdict is Verdict.PASS


def test_headline_is_the_worse_of_bring_up_and_service() -> None:
    golden = served(stages(b=65))
    report = judged(golden)
    assert report.verdict is Verdict.INCONCLUSIVE
    assert report.reasons == ["SERVICE_SLOWER"]
    assert report.statements[0] == (
        "bring-up PASS, service: B took 6.5 x bring-up's 10.0 ms (65.0 ms)"
    )
    golden.extra.append(robot_state(held_ns=ms(5200), faults=145, fault="lease"))
    report = judged(golden)
    assert report.verdict is Verdict.FAIL  # two witnesses
    assert report.reasons == ["SERVICE_SLOWER", "SERVICE_HELD"]
    assert "held 67% of the time, 145 faults, the newest: lease" in report.statements[0]


def test_service_of_few_slow_envelopes_is_compared_too() -> None:
    assert judged(served(stages(b=800), n=6)).reasons == ["SERVICE_SLOWER"]
    assert judged(served(stages(b=19), n=120)).verdict is Verdict.PASS
    short = simulate(stages(0.2, 0.4, 0.2, 0.01))
    slow = served(stages(0.4, 1.2, 0.4, 0.01))
    short.lines += slow.lines[330:]
    short.policy_lines += slow.policy_lines[330:]
    assert "SERVICE_SLOWER" not in judged(short).reasons  # three times of next to nothing


def test_service_whose_envelopes_are_dropped_is_no_pass() -> None:
    golden = served(stages())
    for line in golden.lines[330::5]:
        line["drop"] = "expired"
    report = judged(golden)
    assert report.reasons == ["SERVICE_DROPPED"]
    assert "24 of 120 envelopes dropped: 24 expired" in report.statements[0]


def test_failed_bring_up_stays_worse_than_any_service() -> None:
    golden = served(stages())
    golden.lines[30]["outstanding_max"] = 3
    golden.extra.append(robot_state(held_ns=ms(1000)))
    report = judged(golden)
    assert report.verdict is Verdict.FAIL
    assert report.reasons == ["QUEUE_BOUND", "SERVICE_HELD"]
