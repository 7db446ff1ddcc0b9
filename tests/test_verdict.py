"""Which reason decides, and which part of a run is judged."""

from __future__ import annotations

import pytest
from golden_runs import GoldenRun, ms, simulate, stages
from judging import all_audits_pass, judged, period_ms

from ppstream.log_lines import parse_run
from ppstream.model import PipelineForm
from ppstream.overlap import judge
from ppstream.verdict import Verdict

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


def test_missing_policy_file_is_no_obstacle_when_rank0_has_the_durations() -> None:
    golden = simulate()
    golden.policy_lines.clear()
    report = judged(golden)
    assert report.verdict is Verdict.PASS
    assert report.audits["conservation"].ok


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
    first.policy_lines.clear()
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
