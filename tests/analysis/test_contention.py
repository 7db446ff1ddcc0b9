"""The score by the stages' times alone unmasks what waits inside a stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from golden_runs import GoldenRun, ms, simulate, stages
from judging import judged, overlap, sentence

from ppstream.analysis.period_model import PipelineForm, StageTimes
from ppstream.analysis.run_report import RunReport
from ppstream.analysis.verdict import Verdict

SPLIT = PipelineForm("split")


def alone(golden: GoldenRun, *times: float, after: Sequence[float] = ()) -> GoldenRun:
    """With these times of A, B and C alone in ms, before bring-up and behind it."""
    for name, values in (("standalone", times), ("standalone_after", after)):
        if values:
            pairs = zip("ABC", values, strict=True)
            golden.manifest[name] = {f"{stage}_ns": ms(value) for stage, value in pairs}
    return golden


def machine(golden: GoldenRun, cpus: float, threads: int, **more: Any) -> GoldenRun:
    fields = {"usable_cpus": cpus, "busy_threads": threads, "load_1min": 2.0, "steal_share": 0.0}
    golden.extra.append({"kind": "event", "name": "machine"} | fields | more)
    return golden


def one_by_one(golden: GoldenRun, cpu: Sequence[float], late: Sequence[float] = (0, 0, 0)) -> None:
    """The first envelopes went one by one: CPU time, and waits for one, of A, B and C in ms."""
    for line, policy in zip(golden.lines[:20], golden.policy_lines, strict=False):
        line |= {"mode": "alone", "phase": "warming"}
        line |= {f"cpu_{k}_ns": ms(cpu[i]) for i, k in ((0, "a"), (2, "c"))}
        line |= {f"delay_{k}_ns": ms(late[i]) for i, k in ((0, "a"), (2, "c"))}
        policy |= {"cpu_b_ns": ms(cpu[1]), "delay_b_ns": ms(late[1])}


def score(report: RunReport) -> float:
    assert report.alone is not None
    assert report.alone.s is not None
    return report.alone.s


@pytest.mark.parametrize(
    ("ran", "form", "times", "by_stamps", "by_times"),
    [
        # both ranks on one CPU: each stage takes its own and the other's time
        (stages(0.6, 37.5, 35), PipelineForm(), (0.6, 20.7, 16.4), 1.00, 0.01),
        # policy and decoder take one lock
        (stages(0.7, 21, 20), PipelineForm(), (0.7, 12.7, 10.4), 1.00, 0.22),
        # A and C on two threads of one interpreter, B beside them
        (stages(17, 5, 17), SPLIT, (8.6, 4.7, 9.0), 1.00, -0.86),
        # honest
        (stages(4, 10, 5), PipelineForm(), (4, 9.8, 5), 1.00, 0.98),
        (stages(10, 11, 9), SPLIT, (9.8, 11, 9), 1.00, 1.00),
    ],
)
def test_stretched_stages_overlap_by_their_stamps_and_not_by_their_times(
    ran: StageTimes, form: PipelineForm, times: Any, by_stamps: float, by_times: float
) -> None:
    report = judged(alone(simulate(ran, form), *times))
    assert overlap(report) == pytest.approx(by_stamps, abs=0.02)
    assert score(report) == pytest.approx(by_times, abs=0.02)
    if by_times > 0.3:
        assert report.verdict is Verdict.PASS
        return
    assert report.verdict is Verdict.FAIL
    assert report.reasons == ["CONTENDED"]
    assert report.alone is not None
    for stage, ratio in report.alone.stretch.items():
        assert f"{stage} {ratio:.2f}" in sentence(report, "CONTENDED")


def test_stages_that_run_in_turn_in_their_own_time_are_not_contended() -> None:
    assert judged(simulate(form=PipelineForm("serial", "decode_first"))).reasons == ["LOW_OVERLAP"]


def test_two_resources_that_wait_for_their_credit_do_not_claim_to_overlap() -> None:
    report = judged(simulate(form=PipelineForm("split", d_in=1)))  # A and B in turn, by D_in
    assert report.verdict is Verdict.PASS
    assert score(report) == pytest.approx(0.444, abs=0.001)


def test_a_and_c_of_one_device_are_its_own_affair() -> None:
    golden = alone(simulate(stages(18, 9.5, 18), SPLIT), 9, 9.5, 9)
    assert judged(golden).reasons == ["CONTENDED"]
    golden.manifest["topology"]["ranks"][0]["stamp_source"] = "device"
    assert judged(golden).verdict is Verdict.PASS


def test_measuring_slowly_buys_nothing() -> None:
    """Slow clocks, or a policy that knows when it is timed: no stage is slower alone."""
    honest = score(judged(alone(simulate(), 4, 10, 5)))
    assert score(judged(alone(simulate(), 40, 100, 50))) == pytest.approx(honest)
    contended = alone(simulate(stages(8, 20, 10)), 4, 10, 5)
    assert score(judged(contended)) < 0.0
    one_slow = alone(simulate(stages(8, 20, 10)), 4, 10, 5, after=(8, 20, 10))
    assert judged(one_slow).reasons == ["CONTENDED"]
    assert "B alone took 2.00 x as long" in sentence(judged(one_slow), "B alone")


def test_mean_of_before_and_behind_counts() -> None:
    report = judged(alone(simulate(), 4, 9, 5, after=(4, 10, 5)))
    assert report.alone is not None
    assert report.alone.times.b == ms(9.5)
    assert report.alone.strict == pytest.approx(10 / 9.5, rel=1e-3)


def test_period_below_the_slowest_stage_alone_warns_of_the_measurement() -> None:
    report = judged(alone(simulate(), 4, 10.5, 5))
    assert report.verdict is Verdict.PASS
    assert "0.952" in sentence(report, "the period is")
    assert not any(s.startswith("the period is") for s in judged(simulate()).statements)


def test_where_threads_share_a_cpu_waiting_for_it_is_no_work() -> None:
    """Other programs slow the stages down alone, too: the times alone are no witness there."""
    golden = simulate(stages(0, 20, 20))
    golden.bend(lambda line: line.update(delay_c_ns=ms(10), cpu_c_ns=ms(10)))
    for line in golden.policy_lines:
        line |= {"delay_b_ns": ms(10), "cpu_b_ns": ms(10)}
    assert judged(machine(golden, cpus=2, threads=2, others_cpus=1.0)).verdict is Verdict.PASS
    golden.extra.clear()
    report = judged(machine(golden, cpus=1, threads=2, others_cpus=1.0))
    assert report.reasons == ["CONTENDED"]
    assert score(report) == pytest.approx(0.0, abs=0.05)
    assert sentence(report, "this machine in bring-up").endswith(
        "on 1 usable CPU, 0% stolen, other programs take 1.0: 2 threads work at the same time and "
        "share them"
    )


def test_wait_for_a_cpu_that_others_used_counts_alone_as_well() -> None:
    """A busy machine: every stage waits 5 ms for a CPU, which was not so when it was alone."""
    golden = alone(simulate(stages(2, 15, 9)), 1, 10, 4)
    golden.bend(lambda line: line.update(delay_a_ns=ms(1), delay_c_ns=ms(5), cpu_c_ns=ms(4)))
    for line in golden.policy_lines:
        line |= {"delay_b_ns": ms(5), "cpu_b_ns": ms(10)}
    assert judged(machine(golden, cpus=2, threads=2)).reasons == ["CONTENDED"]  # nobody else ran
    golden.extra[0]["others_cpus"] = 0.7
    report = judged(golden)
    assert report.verdict is Verdict.PASS
    assert score(report) == pytest.approx(0.99, abs=0.02)
    golden.extra[0]["others_cpus"] = 0.07  # explains a tenth of the wait
    assert judged(golden).reasons == ["CONTENDED"]
    assert "other programs take 0.1" in sentence(judged(golden), "this machine")
    golden.extra[0]["others_cpus"] = 0.7
    for line in golden.policy_lines:
        line |= {"delay_b_ns": 0}  # it was a lock
    golden.bend(lambda line: line.update(delay_a_ns=0, delay_c_ns=0))
    assert judged(golden).reasons == ["CONTENDED"]


def test_threads_that_may_run_on_one_cpu_only_wait_for_each_other() -> None:
    """The machine has two CPUs, and other programs on them: they excuse nothing."""
    golden = simulate(stages(0, 20, 20))
    golden.bend(lambda line: line.update(delay_c_ns=ms(10), cpu_c_ns=ms(10)))
    for line in golden.policy_lines:
        line |= {"delay_b_ns": ms(10), "cpu_b_ns": ms(10)}
    machine(golden, 2, 2, others_cpus=1.0, thread_cpus={"r0": [0, 1], "mesh": [0]})
    assert judged(golden).verdict is Verdict.PASS
    golden.extra[0]["thread_cpus"] = {"r0": [0], "mesh": [0]}
    assert judged(golden).reasons == ["CONTENDED"]
    assert sentence(judged(golden), "this machine").endswith(
        "r0 and mesh may use CPU 0 only, and share it"
    )
    golden.extra[0]["thread_cpus"] = {"r0": "?", "mesh": []}  # what is no list says nothing
    assert judged(golden).verdict is Verdict.PASS


def test_time_alone_counts_by_its_parts_as_long_as_the_run_s_at_most() -> None:
    """A lock in the run, and alone as much work more, or as much wait for a CPU."""
    contended = stages(0.5, 21, 20)
    for cpu, late in (((0.5, 21, 20), (0, 0, 0)), ((0.5, 11, 10), (0, 10, 10))):
        golden = alone(simulate(contended, n=360), 0.5, 21, 20)
        golden.bend(lambda line: line.update(cpu_c_ns=ms(10)))
        for line in golden.policy_lines:
            line["cpu_b_ns"] = ms(11)
        one_by_one(golden, cpu, late)
        report = judged(golden)
        assert report.reasons == ["CONTENDED"]
        assert score(report) == pytest.approx(0.0, abs=0.05)
        slower = [text for text in report.statements if "worked or slept" in text]
        assert len(slower) == (2 if late == (0, 0, 0) else 0)


def test_waits_for_a_cpu_alone_do_not_count_beside_those_of_the_run() -> None:
    """A machine that was busier before, and a lock in the run: the wait for a CPU counts once."""
    golden = alone(simulate(stages(0.5, 30, 29), n=360), 0.5, 30, 29)
    golden.bend(lambda line: line.update(cpu_c_ns=ms(10), delay_c_ns=ms(4)))
    for line in golden.policy_lines:
        line |= {"cpu_b_ns": ms(11), "delay_b_ns": ms(4)}
    one_by_one(golden, (0.5, 11, 10), (0, 19, 19))
    report = judged(machine(golden, 2, 2, others_cpus=1.0))
    assert report.reasons == ["CONTENDED"]
    assert score(report) == pytest.approx(-0.04, abs=0.05)


def test_too_few_cpus_are_said_beside_a_pass() -> None:
    golden = simulate().bend(lambda line: line.update(cpu_a_ns=0, cpu_c_ns=0))
    for line in golden.policy_lines:
        line["cpu_b_ns"] = 0
    report = judged(machine(golden, cpus=1, threads=2))
    assert report.verdict is Verdict.PASS
    assert sentence(report, "this machine in bring-up")


def test_nothing_to_hide_alone_is_nothing_to_hide() -> None:
    report = judged(alone(simulate(stages(2, 20, 2)), 0.2, 20, 0.2))
    assert report.reasons == ["NOTHING_TO_HIDE"]


def test_envelopes_that_time_a_stage_alone_are_not_judged() -> None:
    golden = simulate(n=360)
    golden.extra.append(simulate(n=330).book())  # rank 0 wrote it before it timed B again
    golden.extra[0]["t"] = golden.lines[329]["tEmit"]
    for k, line in enumerate(golden.lines[330:]):
        line |= {"mode": "alone"} | {
            name: value + ms(100 + 30 * k)
            for name, value in line.items()
            if name[0] == "t" and name[1].isupper()
        }
    report = judged(golden)
    assert report.verdict is Verdict.PASS
    assert report.window.n == 319
    assert report.window.perturbed == 0


def test_b_that_takes_in_both_links_in_both_files_is_unmasked() -> None:
    """Long links, one credit: nothing is hidden, and no audit of stamps can tell the edit."""
    golden = simulate(stages(2, 5, 4, x=6), PipelineForm(d_in=1))
    assert judged(golden).reasons == ["LOW_OVERLAP"]
    for line, policy in zip(golden.lines, golden.policy_lines, strict=True):
        for one in (line, policy):
            one["residence_ns"] += ms(12)
            one["wait_input_ns"] -= ms(12)
            one["idle_ns"] = (one["idle_ns"] or ms(12)) - ms(12)
        line["B_ns"] += ms(12)
        policy["tB0"] -= ms(12)
    report = judged(golden)
    assert {name for name, audit in report.audits.items() if audit.ok is False} == set()
    assert overlap(report) > 0.3
    assert report.verdict is Verdict.FAIL
    assert report.reasons == ["CONTENDED"]


def test_run_without_times_alone_is_not_proven() -> None:
    golden = simulate()
    del golden.manifest["standalone"]
    report = judged(golden)
    assert report.reasons == ["NOT_AUDITED"]
    assert "alone: run.json has no stage times alone" in sentence(report, "NOT_AUDITED")
