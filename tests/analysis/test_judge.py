"""The golden cases: where the published score lies, and what the primary one says there."""

from __future__ import annotations

import pytest
from golden_runs import Fields, ms, period_17, simulate, stages
from judging import all_audits_pass, broken, judged, overlap, period_ms, published
from live_pipeline import run_live

from ppstream.analysis.period_model import PipelineForm
from ppstream.analysis.verdict import Verdict
from ppstream.report.series import latency_parts

SPLIT = PipelineForm("split")
UNPIPELINED = PipelineForm("serial", "decode_first")


@pytest.mark.parametrize("credit", ["before_window", "after_window"])
@pytest.mark.parametrize("threads", ["serial", "split"])
def test_healthy_mesh_bound_run_passes_with_every_audit(threads: str, credit: str) -> None:
    report = judged(simulate(form=PipelineForm(threads, credit=credit)), profile="release")
    assert report.verdict is Verdict.PASS
    assert report.reasons == []
    assert all_audits_pass(report)
    assert overlap(report) == pytest.approx(1.0, abs=0.001)
    assert report.compat is not None
    assert report.compat.gate
    assert report.limited_by == "stage1-limited"


def test_fully_serial_run_scores_zero_in_both_and_fails() -> None:
    report = judged(simulate(form=UNPIPELINED))
    assert period_ms(report) == 20.0
    assert published(report) == 0.0
    assert report.primary is not None
    assert report.primary.s_all == 0.0
    assert report.verdict is Verdict.FAIL
    assert report.reasons == ["LOW_OVERLAP"]
    assert report.limited_by == "serialized"
    assert all_audits_pass(report)


def test_serial_run_with_tb0_before_the_receive_scores_one_and_is_not_believed() -> None:
    golden = simulate(form=UNPIPELINED)

    def wait_in_b(line: Fields) -> None:
        line["B_ns"] += line["wait_input_ns"]
        line["residence_ns"] = line["B_ns"]  # the lie is told consistently
        line["wait_input_ns"] = line["idle_ns"] = 0

    golden.bend(wait_in_b).policy_lines.clear()
    report = judged(golden)
    assert published(report) == pytest.approx(1.0)
    assert report.reasons[0] == "BAD_INSTRUMENT"
    assert report.verdict is Verdict.INCONCLUSIVE
    assert "outstanding" in broken(report)
    assert report.audits["outstanding"].value == pytest.approx(1.0 - 0.55, abs=0.01)


def test_slow_input_on_one_thread_scores_high_and_is_input_limited() -> None:
    report = judged(simulate(stages(t_in=40)))
    assert period_ms(report) == pytest.approx(40, abs=0.01)
    assert published(report) == pytest.approx(0.80)
    assert report.reasons[0] == "INPUT_LIMITED"
    assert report.verdict is Verdict.INCONCLUSIVE
    assert report.limited_by == "input-limited"
    assert all_audits_pass(report)


def test_just_in_time_a_on_one_credit_overlaps_by_less_than_published() -> None:
    report = judged(simulate(form=PipelineForm(d_in=1)))
    assert period_ms(report) == 15.0
    assert published(report) == pytest.approx(0.80)
    assert overlap(report) == pytest.approx(0.444, abs=0.001)
    assert report.verdict is Verdict.PASS
    assert report.limited_by == "window-limited"
    assert report.model is not None
    assert report.model.w_star == 2
    assert all_audits_pass(report)


def test_latency_ends_where_the_host_has_the_actions() -> None:
    """A device's stage C ends before: an action that nobody has taken up is no action yet."""
    at_once, later = (
        simulate(),
        simulate().bend(lambda line: line.update(tPick=line["tEmit"] + ms(3))),
    )
    without, report = judged(at_once), judged(later)
    assert without.latency is not None
    assert report.latency is not None
    assert report.latency.p50_ns == without.latency.p50_ns + ms(3)
    assert without.pick_up is None
    assert report.pick_up is not None
    assert (report.pick_up.p50_ns, report.pick_up.max_ns) == (ms(3), ms(3))
    assert latency_parts(report.window)["pick-up"] == ms(3)
    assert "pick-up" not in latency_parts(without.window)
    assert report.primary == without.primary  # the device's stamps alone score


@pytest.mark.parametrize(("depth", "score", "latency_ms"), [(2, 5.35, 99.5), (4, 9.35, 179.5)])
def test_decode_bound_split_threads_score_far_above_one(
    depth: int, score: float, latency_ms: float
) -> None:
    form = PipelineForm("split", d_in=depth, d_out=depth)
    report = judged(simulate(stages(c=20), form, n=450))
    assert period_ms(report) == 20.0
    assert published(report) == pytest.approx(score)
    assert overlap(report) == pytest.approx(1.0)
    assert report.primary is not None
    assert report.primary.efficiency == pytest.approx(1.0)
    assert report.latency is not None
    assert report.latency.p50_ns == ms(latency_ms)
    assert report.verdict is Verdict.PASS
    assert report.limited_by == "stage0-limited"
    assert all_audits_pass(report)


def test_decode_bound_score_stays_above_one_with_receipt_stamped_at_decode() -> None:
    golden = simulate(stages(c=20), SPLIT)
    report = judged(golden.bend(lambda line: line.update(tRecv=line["tDecode"])))
    assert published(report) == pytest.approx(1.40)
    assert overlap(report) == pytest.approx(1.0)
    assert "BAD_INSTRUMENT" in report.reasons  # the credits betray the stamp


def test_tiny_rank0_work_has_nothing_to_hide() -> None:
    report = judged(simulate(stages(a=0.05, c=0.05), SPLIT))
    assert period_ms(report) == pytest.approx(10.0)
    assert published(report) == pytest.approx(1.00)
    assert report.primary is not None
    assert report.primary.ceiling == pytest.approx(1.01)
    assert report.verdict is Verdict.INCONCLUSIVE
    assert report.reasons == ["NOTHING_TO_HIDE"]
    assert all_audits_pass(report)


def test_stages_below_the_published_floor_have_no_published_score() -> None:
    report = judged(simulate(stages(a=0.02, c=0.02), SPLIT))
    assert report.compat is not None
    assert report.compat.score is None
    assert not report.compat.gate


def test_tb1_when_python_returns_scores_zero_and_the_device_time_contradicts_it() -> None:
    golden = simulate(form=SPLIT)
    golden.policy_lines.clear()
    report = judged(golden.bend(lambda line: line.update(eB_ns=line["B_ns"], B_ns=ms(0.2))))
    assert published(report) == 0.0
    assert "bounds" in broken(report)
    assert report.audits["bounds"].note == "eB_ns over B_ns"
    assert report.reasons[0] == "BAD_INSTRUMENT"


def test_period_between_max_and_sum_passes_bringup_and_fails_release_by_efficiency() -> None:
    golden = period_17()
    report = judged(golden)
    assert period_ms(report) == 17.0
    assert published(report) == pytest.approx(0.30)
    assert report.verdict is Verdict.PASS
    assert all_audits_pass(report)
    assert report.compat is not None
    assert not report.compat.gate  # 17 lies nearer the sum 20 than the largest stage 10
    release = judged(golden, profile="release")
    assert release.verdict is Verdict.FAIL
    assert release.reasons == ["LOW_EFFICIENCY"]
    assert release.primary is not None
    assert release.primary.efficiency == pytest.approx(0.588, abs=0.001)


def test_ta0_before_the_credit_wait_scores_one_and_a_half_and_is_not_believed() -> None:
    form = PipelineForm("split", d_in=1)
    golden = simulate(form=form)
    true = judged(golden)
    assert overlap(true) == pytest.approx(0.444, abs=0.001)
    for line in golden.lines:
        line["tA0"] -= line["w_credit_ns"]
        line["tRx"] -= line["w_credit_ns"]
        line["w_credit_ns"] = 0
    report = judged(golden)
    assert period_ms(report) == 15.0
    assert published(report) == pytest.approx(1.50)
    assert overlap(report) == pytest.approx(1.0)
    assert broken(report) == {"credit"}  # every other audit is passed by this lie
    assert report.reasons[0] == "BAD_INSTRUMENT"


def test_live_threads_and_sockets_overlap_fully_where_the_published_score_explodes() -> None:
    report = judged(run_live(a_ms=3, b_ms=8, c_ms=25, depth=2, n=115))
    assert published(report) > 3
    assert overlap(report) >= 0.97
    assert broken(report) == set()
    assert report.verdict is Verdict.PASS
