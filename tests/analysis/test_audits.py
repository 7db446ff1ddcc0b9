"""No audit cries wolf: honest logs of a busy machine pass, wherever the window is cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import pytest
from golden_runs import (
    POLICY_CLOCK_NS,
    START_NS,
    GoldenRun,
    jittered,
    ms,
    simulate,
    stages,
)
from judging import judged

from ppstream.analysis.audits import Audit, audit_all, by_note
from ppstream.analysis.period_model import PipelineForm
from ppstream.analysis.segments import JudgedSpan, Segment

SPLIT = PipelineForm("split")
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
    for audits in cut_everywhere(golden if policy_file else golden.lose(rank=1)):
        assert {n: a for n, a in audits.items() if a.ok is False} == {}
        assert audits["conservation"].value == pytest.approx(0, abs=0 if policy_file else 0.02)
        assert audits["little"].value == pytest.approx(0, abs=1e-9)


def test_window_cut_behind_a_stall_of_c_does_not_count_what_the_policy_did_before() -> None:
    form = PipelineForm("split", d_in=8, d_out=1)
    for audits in cut_everywhere(stalled(form, parts=("c",), every=115)):
        assert audits["outstanding"].ok, audits["outstanding"]


@pytest.mark.parametrize(("early_ms", "ok"), [(0, True), (4, False)])
def test_a_window_of_a_device_waits_for_the_result_that_permits_it(
    early_ms: float, ok: bool
) -> None:
    """Its own start may be rank 0's stamp of the receipt; the policy rank has one of its own."""
    golden = simulate(stages(a=3, b=10, c=5), SPLIT, n=150)
    for rank in golden.manifest["topology"]["ranks"]:
        rank |= {"stamp_source": "device", "boot_id": "here"}
    for line in golden.policy_lines:
        line |= {name: line[name] + START_NS - POLICY_CLOCK_NS for name in ("tB0", "tB1")}
    for giver, taker in zip(golden.lines, golden.lines[2:], strict=False):
        taker["tA0"] -= ms(early_ms)
        taker["tRx"] = min(taker["tRx"], taker["tA0"])
        giver["tRecv"] = min(giver["tRecv"], taker["tA0"])
    audits = judged(golden).audits
    assert (audits["credit"].ok, audits["order"].ok) == (ok, True)


def test_a_note_of_several_audits_is_said_once() -> None:
    notes = {"order": "no time passed", "cpu": "no times", "stamps": "no time passed"}
    assert by_note(notes) == "order, stamps: no time passed; cpu: no times"
    few = judged(simulate(n=1))
    assert sum(text.count("no time passed between") for text in few.statements) == 1
