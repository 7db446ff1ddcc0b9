"""Every audit catches the lie it is there for, and says so; healthy logs pass all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final

import pytest
from golden_runs import Fields, GoldenRun, jittered, ms, simulate, stages

from ppstream.analysis.audits import Audit, audit_all
from ppstream.analysis.period_model import PipelineForm
from ppstream.analysis.segments import JudgedSpan, Segment, select_window

SPLIT = PipelineForm("split")
JUST_IN_TIME = PipelineForm("split", d_in=1)


def verdicts(golden: GoldenRun) -> dict[str, bool | None]:
    run = golden.parse()
    return {name: audit.ok for name, audit in audit_all(run, select_window(run)).items()}


def worst(golden: GoldenRun, audit: str) -> str:
    run = golden.parse()
    return audit_all(run, select_window(run))[audit].note


def with_rank0_only(golden: GoldenRun) -> GoldenRun:
    golden.policy_lines.clear()
    return golden


@pytest.mark.parametrize("form", [PipelineForm(), SPLIT, JUST_IN_TIME])
def test_healthy_log_passes_every_audit(form: PipelineForm) -> None:
    assert set(verdicts(simulate(form=form)).values()) == {True}


@pytest.mark.parametrize(
    ("wait", "thread", "form"),
    [
        ("w_credit_ns", "r0A", JUST_IN_TIME),
        ("w_result_ns", "r0C", SPLIT),
        ("w_credit_ns", "r0", PipelineForm(d_in=1)),
    ],
)
def test_conservation_misses_a_wait_left_out(wait: str, thread: str, form: PipelineForm) -> None:
    golden = simulate(form=form).bend(lambda line: line.update({wait: 0}))
    assert verdicts(golden)["conservation"] is False
    assert worst(golden, "conservation") == thread


def test_conservation_counts_time_in_link_calls_of_both_ranks() -> None:
    golden = simulate(form=JUST_IN_TIME)
    for line, policy in zip(golden.lines, golden.policy_lines, strict=True):
        line["w_credit_ns"] -= ms(1)
        line["busy_link_ns"] = ms(1)
        line["wait_input_ns"] -= ms(2)
        policy["wait_input_ns"] = line["wait_input_ns"]
        policy["busy_link_ns"] = ms(2)
    assert verdicts(golden)["conservation"] is True
    golden.bend(lambda line: line.update(busy_link_ns=0))
    assert verdicts(golden)["conservation"] is False


def test_conservation_counts_what_the_thread_of_c_does_besides() -> None:
    golden = simulate(form=SPLIT)
    change = {"w_result_ns": ms(-1), "busy_link_c_ns": ms(1)}
    golden.bend(lambda line: line.update({k: line.get(k, 0) + v for k, v in change.items()}))
    assert verdicts(golden)["conservation"] is True
    golden.bend(lambda line: line.update(busy_link_c_ns=0))
    assert worst(golden, "conservation") == "r0C"


def test_conservation_of_the_mesh_without_its_file_uses_the_whole_gap() -> None:
    golden = with_rank0_only(simulate(form=JUST_IN_TIME))
    golden.bend(lambda line: line.update(wait_input_ns=line["wait_input_ns"] - ms(2)))
    assert verdicts(golden)["conservation"] is True  # 2 ms of link calls inside the gap
    golden.bend(lambda line: line.update(idle_ns=(line["idle_ns"] or 0) - ms(2)))
    assert verdicts(golden)["conservation"] is False
    assert worst(golden, "conservation") == "mesh"


def test_conservation_does_not_run_without_any_wait_of_a_thread() -> None:
    golden = simulate(form=SPLIT)
    golden.bend(lambda line: [line.pop(name) for name in ("w_result_ns", "w_emit_ns")])
    run = golden.parse()
    audit = audit_all(run, select_window(run))["conservation"]
    assert audit.ok is None
    assert audit.missing == ("w_result_ns",)


@pytest.mark.parametrize(
    ("total", "queue", "decode_ms"),
    [("outstanding_ns_total", "outstanding", 5), ("q_decode_ns_total", "q_decode", 20)],
)
def test_little_finds_a_counter_that_disagrees_with_the_stamps(
    total: str, queue: str, decode_ms: float
) -> None:
    golden = simulate(stages(c=decode_ms), SPLIT)
    golden.bend(lambda line: line.update({total: round(line[total] * 0.9)}))
    assert verdicts(golden)["little"] is False
    assert worst(golden, "little") == queue


def test_little_needs_no_more_envelopes_than_the_gate() -> None:
    golden = simulate(form=PipelineForm("split", d_in=8, d_out=8), n=130)
    assert verdicts(golden)["little"] is True
    golden.bend(lambda line: line.update(outstanding_ns_total=round(line["tEmit"] * 7)))
    assert verdicts(golden)["little"] is False


def test_bounds_refuse_a_resource_busier_than_its_time() -> None:
    golden = with_rank0_only(simulate(form=SPLIT))
    golden.bend(lambda line: line.update(B_ns=round(line["B_ns"] * 1.05)))
    assert verdicts(golden)["bounds"] is False
    assert worst(golden, "bounds") == "mesh"


def test_bounds_refuse_a_device_region_longer_than_its_b() -> None:
    golden = simulate(form=SPLIT).bend(lambda line: line.update(eB_ns=line["B_ns"] + ms(1)))
    assert verdicts(golden)["bounds"] is False


@pytest.mark.parametrize(
    "lie",
    [
        lambda line: line.update(B_ns=line["residence_ns"] + ms(1)),
        lambda line: line.update(residence_ns=line["tRecv"] - line["tSend"] + ms(1)),
    ],
)
def test_residence_lies_between_b_and_the_round_trip(lie: Callable[[Fields], None]) -> None:
    assert verdicts(simulate(form=JUST_IN_TIME).bend(lie))["residence"] is False


def test_outstanding_refuses_a_mesh_busy_while_nothing_is_outstanding() -> None:
    golden = simulate(form=PipelineForm("serial", "decode_first"))
    golden.bend(lambda line: line.update(B_ns=line["B_ns"] + line["wait_input_ns"]))
    assert verdicts(golden)["outstanding"] is False


def test_outstanding_sampled_at_emit_must_match_the_stamps() -> None:
    golden = simulate()
    golden.bend(lambda line: line.update(outstanding=line["outstanding"] - 1))
    assert verdicts(golden)["outstanding"] is False
    assert "sampled" in worst(golden, "outstanding")


def test_receipt_that_its_thread_counts_late_is_no_lie() -> None:
    """On a busy machine a thread may lose its CPU between the stamp and the counter."""
    golden = simulate(form=SPLIT, n=130)
    for line in golden.lines[10::4]:  # at these emits one receipt was not counted yet
        line["outstanding"] += 1
        line["outstanding_ns_total"] += ms(300)
    assert set(verdicts(golden).values()) == {True}


def early_commit(line: Fields) -> None:
    line["tSend"] -= ms(1)
    line["tA1"] -= ms(1)
    line["tA0"] -= ms(1)
    line["tRx"] -= ms(1)


@pytest.mark.parametrize(
    "lie",
    [
        early_commit,
        lambda line: line.update(tA0=line["tA0"] - line["w_credit_ns"]),
        lambda line: line.update(tDecode=line["tRecv"] - ms(1)),
        lambda line: line.update(tEmit=line["tEmit"] + ms(11)),
    ],
    ids=["commit before its credit", "A before its credit", "decode before receipt", "C over C"],
)
def test_credit_refuses_what_starts_before_its_permission(lie: Callable[[Fields], None]) -> None:
    assert verdicts(simulate(form=JUST_IN_TIME).bend(lie))["credit"] is False


def test_credit_refuses_a_prebuilt_envelope_committed_without_one() -> None:
    form = PipelineForm("split", credit="after_window", d_in=1)
    golden = simulate(form=form).bend(lambda line: line.update(tSend=line["tSend"] - ms(1)))
    assert verdicts(golden)["credit"] is False


def test_credit_refuses_a_receipt_without_a_decode_slot() -> None:
    golden = simulate(stages(c=20), SPLIT)
    golden.bend(lambda line: line.update(tRecv=line["tRecv"] - ms(2)))
    assert verdicts(golden)["credit"] is False


def test_prebuilt_window_may_start_before_its_credit() -> None:
    form = PipelineForm("split", credit="after_window", d_in=1)
    assert verdicts(simulate(form=form))["credit"] is True
    golden = simulate(form=form)
    golden.manifest["topology"]["credit"] = "before_window"
    assert verdicts(golden)["credit"] is False


def test_one_thread_cannot_run_a_and_c_at_once() -> None:
    golden = simulate(form=SPLIT)
    assert verdicts(golden)["credit"] is True
    golden.manifest["topology"]["threads"] = "serial"
    assert verdicts(golden)["credit"] is False


def test_order_refuses_stamps_that_run_backwards() -> None:
    golden = simulate()
    golden.lines[100]["tA1"] = golden.lines[100]["tA0"] - 1
    assert verdicts(golden)["order"] is False


def test_order_refuses_an_a_that_begins_before_its_input_came() -> None:
    golden = simulate(stages(t_in=40), SPLIT)
    golden.bend(lambda line: line.update(tA0=line["tA0"] - line["w_input_ns"], w_input_ns=0))
    assert verdicts(golden)["order"] is False
    assert "newest sample" in worst(golden, "order")


def test_order_forgives_a_sample_that_slips_in_while_the_window_is_cut() -> None:
    golden = simulate()
    for line in golden.lines[::10]:
        line["tRx"] = line["tA0"] + ms(0.2)
    assert verdicts(golden)["order"] is True


def test_order_of_mapped_device_stamps_has_a_slack() -> None:
    golden = simulate(form=SPLIT).bend(lambda line: line.update(tA1=line["tSend"] + 20_000))
    assert verdicts(golden)["order"] is False
    golden.manifest["topology"]["ranks"][0]["stamp_source"] = "device"
    assert verdicts(golden)["order"] is True


def test_stamps_refuse_a_b_that_is_not_the_policy_rank_s() -> None:
    golden = simulate(form=SPLIT)
    golden.bend(lambda line: line.update(B_ns=line["B_ns"] - ms(1)))
    assert verdicts(golden)["stamps"] is False


def test_stamps_miss_lines_of_the_policy_rank_but_not_the_newest() -> None:
    golden = simulate(n=130)
    del golden.policy_lines[-5:]  # written a moment later than rank 0's
    assert verdicts(golden)["stamps"] is True
    del golden.policy_lines[100:110]
    assert verdicts(golden)["stamps"] is False
    assert "policy rank missing" in worst(golden, "stamps")


def booked(golden: GoldenRun) -> GoldenRun:
    golden.extra.append(golden.book())
    return golden


def test_ledger_sees_that_lines_were_taken_out() -> None:
    golden = booked(simulate())
    del golden.lines[100:110]  # the slow ones, say
    assert verdicts(golden)["ledger"] is False
    assert worst(golden, "ledger") == "10 lines of envelopes are missing"
    for k, line in enumerate(golden.lines):
        line["seq"] = k  # nor does it help to number them anew
    for k, line in enumerate(golden.policy_lines):
        line["seq"] = k
    assert verdicts(golden)["ledger"] is False


def test_ledger_of_the_judged_phase_does_not_ask_for_lines_of_service() -> None:
    golden = booked(simulate())
    end_ns = golden.lines[-1]["tEmit"]
    later = {"received": 900, "used": 900, "dropped": {}, "in_flight": 0}  # a full disk: no lines
    phases = [("bring-up", 0), ("ready", end_ns + 1)]
    golden.extra += [{"kind": "event", "name": "phase", "phase": p, "t": t} for p, t in phases]
    golden.extra.append({"kind": "ledger", "t": end_ns + ms(999), "envelopes": later})
    assert verdicts(golden)["ledger"] is True


def test_ledger_that_does_not_balance_is_refused() -> None:
    golden = booked(simulate())
    golden.extra[0]["envelopes"]["used"] -= 1
    assert verdicts(golden)["ledger"] is False
    assert worst(golden, "ledger") == "envelopes do not balance by +1"


@pytest.mark.parametrize("stage", ["cpu_a_ns", "cpu_c_ns"])
def test_cpu_refuses_a_stage_that_took_more_cpu_time_than_time(stage: str) -> None:
    golden = simulate().bend(lambda line: line.update({stage: line[stage] + ms(1)}))
    assert verdicts(golden)["cpu"] is False


def test_cpu_refuses_more_work_than_the_cpus_can_do() -> None:
    golden = simulate()  # 19 ms of CPU time in 10 ms
    fields = {"busy_threads": 2, "load_1min": 1.0, "steal_share": 0.0}
    golden.extra.append({"kind": "event", "name": "machine", "usable_cpus": 2} | fields)
    assert verdicts(golden)["cpu"] is True
    golden.extra[-1]["usable_cpus"] = 1.5
    assert verdicts(golden)["cpu"] is False
    assert worst(golden, "cpu") == "all over 1.5 CPUs"


def test_equal_stamps_are_no_time_to_audit() -> None:
    golden = simulate()
    golden.bend(lambda line: line.update({k: 7 for k in line if k[0] == "t" and k[1].isupper()}))
    assert set(verdicts(golden).values()) == {None}


# ---- no audit cries wolf -------------------------------------------------------------------------

CUT: Final = 100  # periods: the fewest that are judged
STALLED: Final = ("a", "x_in", "b", "x_out", "c")


def stalled(form: PipelineForm, parts: Sequence[str] = STALLED, every: int = 18) -> GoldenRun:
    """Honest, on a busy machine: now and then one stage or link stands for 100 ms."""
    times = jittered(stages(a=3, b=10, c=5), 230, seed=form.d_in)
    for k in range(0, len(times), every):
        part = parts[k // every % len(parts)]
        times[k] = replace(times[k], **{part: getattr(times[k], part) + ms(100)})
    return simulate(times, form)


def cut_everywhere(golden: GoldenRun) -> Iterator[dict[str, Audit]]:
    run = golden.parse()
    for start in range(len(run.envelopes) - CUT):
        part = Segment(run.envelopes[start : start + CUT + 1])
        window = JudgedSpan(run.topology, frozenset({"bring-up"}), 0, (part,), 0, True, 0)
        yield audit_all(run, window)


@pytest.mark.parametrize("policy_file", [True, False])
@pytest.mark.parametrize(
    "form",
    [
        PipelineForm(),
        PipelineForm(d_in=1),
        SPLIT,
        PipelineForm("split", credit="after_window", d_in=3),
        PipelineForm("serial", "decode_first"),
    ],
)
def test_window_cut_anywhere_between_stalls_passes_every_audit(
    form: PipelineForm, *, policy_file: bool
) -> None:
    golden = stalled(form)
    for audits in cut_everywhere(golden if policy_file else with_rank0_only(golden)):
        assert {n: a for n, a in audits.items() if a.ok is False} == {}
        assert audits["conservation"].value == pytest.approx(0, abs=0 if policy_file else 0.02)
        assert audits["little"].value == pytest.approx(0, abs=1e-9)


def test_window_cut_behind_a_stall_of_c_does_not_count_what_the_policy_did_before() -> None:
    form = PipelineForm("split", d_in=8, d_out=1)
    for audits in cut_everywhere(stalled(form, parts=("c",), every=115)):
        assert audits["outstanding"].ok, audits["outstanding"]
