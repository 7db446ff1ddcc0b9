"""Promises that hold for every log: shifts, units, added waiting, honest jitter."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
from golden_runs import MS, Fields, chain, jittered, ms, simulate, stages
from hypothesis import given, settings
from hypothesis import strategies as st
from judging import broken, judged, overlap, period_ms, published

from ppstream.analysis.period_model import PipelineForm
from ppstream.analysis.verdict import Verdict

FORMS = st.builds(
    PipelineForm,
    threads=st.sampled_from(["serial", "split"]),
    order=st.just("send_first"),
    credit=st.sampled_from(["before_window", "after_window"]),
    d_in=st.integers(1, 3),
    d_out=st.integers(1, 3),
)
TIMES = st.builds(
    stages,
    a=st.floats(0.5, 12),
    b=st.floats(0.5, 12),
    c=st.floats(0.5, 12),
    x=st.floats(0.1, 1),
)
FEW = settings(max_examples=12, deadline=None, derandomize=True)


@FEW
@given(TIMES, FORMS, st.integers(0, 10**6), st.integers(-(10**12), 10**12), st.integers(0, 10**15))
def test_report_does_not_depend_on_where_either_clock_starts(
    times: Any, form: PipelineForm, seed: int, rank0_ns: int, policy_ns: int
) -> None:
    golden = simulate(jittered(times, 140, seed), form)
    shifted = deepcopy(golden)
    for line in shifted.lines:
        for stamp in ("tRx", "tA0", "tA1", "tSend", "tRecv", "tDecode", "tEmit"):
            line[stamp] += rank0_ns
    for line in shifted.policy_lines:
        line["tB0"] += policy_ns
        line["tB1"] += policy_ns
    assert judged(shifted).as_dict() == judged(golden).as_dict()


CHAINS = st.builds(
    lambda places, a, c, x: chain(*places, a=a, c=c, x=x),
    st.lists(st.floats(0.5, 12), min_size=2, max_size=4),
    a=st.floats(0.5, 12),
    c=st.floats(0.5, 12),
    x=st.floats(0.05, 1),
)


@FEW
@given(CHAINS, FORMS, st.integers(0, 10**6))
def test_an_honest_chain_contradicts_itself_nowhere_and_is_as_the_model_says(
    times: Any, form: PipelineForm, seed: int
) -> None:
    report = judged(simulate(jittered(times, 140, seed), form))
    assert broken(report) == set()
    assert overlap(report) <= 1.02
    assert report.model is not None
    assert abs(report.model.gap) < 0.12  # jitter makes places wait for each other


@FEW
@given(CHAINS, FORMS, st.integers(0, 10**6), st.lists(st.integers(0, 10**15), min_size=4))
def test_report_of_a_chain_on_several_hosts_does_not_depend_on_their_clocks(
    times: Any, form: PipelineForm, seed: int, clocks_ns: list[int]
) -> None:
    golden = simulate(jittered(times, 140, seed), form)
    for rank, table in enumerate(golden.manifest["topology"]["ranks"]):
        table["boot_id"] = f"host {rank}"
    shifted = deepcopy(golden)
    for lines, by_ns in zip(shifted.policies, clocks_ns, strict=False):
        for line in lines:
            line["tB0"] += by_ns
            line["tB1"] += by_ns
    assert judged(shifted).as_dict() == judged(golden).as_dict()


@FEW
@given(TIMES, FORMS, st.integers(0, 10**6), st.integers(2, 50))
def test_scores_do_not_depend_on_the_unit(
    times: Any, form: PipelineForm, seed: int, factor: int
) -> None:
    golden = simulate(jittered(times, 140, seed), form)
    scaled = deepcopy(golden)
    for line in scaled.lines + scaled.policy_lines:
        for name, value in line.items():
            if type(value) is int and (name.endswith(("_ns", "_total")) or name.startswith("t")):
                line[name] = value * factor
    before, after = judged(golden), judged(scaled)
    assert before.primary is not None
    assert after.primary is not None
    assert after.primary.s == before.primary.s
    assert after.primary.s_low == before.primary.s_low
    assert after.primary.efficiency == before.primary.efficiency
    assert published(after) == pytest.approx(published(before))
    assert period_ms(after) == pytest.approx(factor * period_ms(before))


@FEW
@given(
    TIMES,
    FORMS,
    st.floats(0.05, 5),
    st.sampled_from(["before A", "on the link", "before the consumer"]),
)
def test_real_waiting_never_improves_the_score(
    times: Any, form: PipelineForm, wait_ms: float, where: str
) -> None:
    before = judged(simulate(times, form, n=140))
    if where == "before A":
        slower = simulate(with_input(times, period_ms(before) + wait_ms), form, n=140)
    elif where == "on the link":
        slower = simulate(with_link(times, wait_ms), form, n=140)
    else:
        slower = simulate(times, form, n=140, emit_block_ms=wait_ms)
    after = judged(slower)
    # a cycle of several envelopes may be cut anywhere: one period in 130
    assert overlap(after) <= overlap(before) + 0.02
    assert after.verdict is not Verdict.PASS or before.verdict is Verdict.PASS


def with_input(times: Any, t_in_ms: float) -> Any:
    return stages(times.a / MS, times.b / MS, times.c / MS, times.x_in / MS, t_in_ms)


def with_link(times: Any, wait_ms: float) -> Any:
    return stages(times.a / MS, times.b / MS, times.c / MS, times.x_in / MS + wait_ms)


def stretch_a_back(line: Fields, by_ns: int) -> None:
    line["tA0"] -= by_ns


def stretch_a_on(line: Fields, by_ns: int) -> None:
    line["tA1"] += by_ns


def stretch_b(line: Fields, by_ns: int) -> None:
    line["B_ns"] += by_ns


def stretch_c_back(line: Fields, by_ns: int) -> None:
    line["tDecode"] -= by_ns


def stretch_c_on(line: Fields, by_ns: int) -> None:
    line["tEmit"] += by_ns


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    TIMES,
    FORMS,
    st.sampled_from([stretch_a_back, stretch_a_on, stretch_b, stretch_c_back, stretch_c_on]),
    st.floats(0.06, 0.5),
)
def test_waiting_stamped_into_a_stage_never_turns_into_a_pass(
    times: Any, form: PipelineForm, stretch: Callable[[Fields, int], None], share: float
) -> None:
    golden = simulate(times, form, n=140)
    by_ns = max(ms(0.15), round(share * period_ms(judged(golden)) * MS))
    golden.bend(lambda line: stretch(line, by_ns))
    report = judged(golden)
    assert "BAD_INSTRUMENT" in report.reasons
    assert report.verdict is not Verdict.PASS


@pytest.mark.parametrize("seed", range(12))
def test_no_audit_cries_wolf_on_a_jittered_run(seed: int) -> None:
    form = PipelineForm(
        ("serial", "split")[seed % 2],
        credit=("before_window", "after_window")[seed // 2 % 2],
        d_in=1 + seed % 3,
        d_out=1 + seed // 3 % 3,
    )
    report = judged(simulate(jittered(stages(c=5 + seed), 330, seed, spread=0.6), form))
    assert broken(report) == set()
    assert set(report.reasons) <= {"LOW_OVERLAP"}
    assert report.audits["little"].ok
