"""Spans for pictures: disjoint per track, waits only where nothing else was, clocks bounded."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from golden_runs import POLICY_CLOCK_NS, START_NS, GoldenRun, chain, jittered, ms, simulate, stages

from ppstream.analysis.period_model import PipelineForm
from ppstream.report.clock_alignment import policy_clock, policy_clocks
from ppstream.report.spans import WAIT, Span, Spans, spans_of, track_names

SPLIT = PipelineForm("split")


def laid(golden: GoldenRun, *, in_flight: bool = False) -> Spans:
    run = golden.parse()
    clocks = policy_clocks(run, run.envelopes)
    return spans_of(run.envelopes, run.topology, clocks, in_flight=in_flight)


def lying() -> GoldenRun:
    return simulate(n=50).bend(lambda line: line.update(tA0=line["tA0"] - ms(6)))


RUNS: dict[str, Callable[[], GoldenRun]] = {
    "serial": lambda: simulate(n=50),
    "split": lambda: simulate(n=50, form=SPLIT),
    "decode-bound": lambda: simulate(stages(c=20), SPLIT, n=50),
    "slow input": lambda: simulate(stages(t_in=40), n=50),
    "jitter": lambda: simulate(jittered(stages(), 100, 5), SPLIT),
    "one credit": lambda: simulate(form=PipelineForm("split", d_in=1), n=50),
    "lying": lying,
    "chain": lambda: simulate(chain(8, 10, 6), PipelineForm("split", d_in=4), n=50),
    "chain, two credits": lambda: simulate(chain(8, 10), n=50),
}


@pytest.mark.parametrize("name", RUNS)
def test_spans_of_a_track_are_in_order_and_never_overlap(name: str) -> None:
    found = laid(RUNS[name](), in_flight=True)
    for spans in found.tracks.values():
        assert all(a.end_ns <= b.start_ns for a, b in pairwise(spans))
        assert all(span.start_ns <= span.end_ns for span in spans)


@pytest.mark.parametrize("name", [n for n in RUNS if n != "lying"])
def test_busy_time_of_honest_logs_is_drawn_whole(name: str) -> None:
    golden = RUNS[name]()
    found = laid(golden)
    assert found.cut_short == 0
    drawn = dict.fromkeys("ABC", 0)
    for spans in found.tracks.values():
        for span in spans:
            if span.kind in drawn:
                drawn[span.kind] += span.end_ns - span.start_ns
    assert drawn["A"] == sum(line["tA1"] - line["tA0"] for line in golden.lines)
    policies = [line for lines in golden.policies for line in lines]
    assert drawn["B"] == sum(line["tB1"] - line["tB0"] for line in policies)
    assert drawn["C"] == sum(line["tEmit"] - line["tDecode"] for line in golden.lines)


def test_contradicting_stamps_are_cut_and_counted() -> None:
    assert laid(lying()).cut_short > 40


def waits(found: Spans, track: str) -> list[Span]:
    return [span for span in found.tracks[track] if span.kind == WAIT]


def test_waits_are_named_and_fill_the_gap_in_front_of_what_waited() -> None:
    slow = laid(RUNS["slow input"]())
    assert {span.note for span in waits(slow, "A + C")} == {"input"}
    one = laid(RUNS["one credit"]())
    credit = [span for span in waits(one, "A") if span.note == "a credit"]
    assert {span.end_ns - span.start_ns for span in credit[5:]} == {ms(11)}
    assert {span.note for span in waits(one, "B")} == {"an envelope"}


def test_in_flight_tracks_are_one_per_credit() -> None:
    found = laid(simulate(n=50), in_flight=True)
    assert [name for name in found.tracks if name.startswith("credit")] == ["credit 0", "credit 1"]
    assert sum(len(found.tracks[f"credit {k}"]) for k in (0, 1)) == 50


def test_without_the_policy_ranks_lines_b_stands_within_its_round_trip() -> None:
    golden = simulate(n=50)
    golden.policy_lines.clear()
    assert policy_clock(golden.parse(), golden.parse().envelopes) is None
    for span, line in zip(
        [s for s in laid(golden).tracks["B"] if s.kind == "B"], golden.lines, strict=True
    ):
        assert line["tSend"] <= span.start_ns < span.end_ns <= line["tRecv"]


def test_a_chain_has_a_track_for_each_place_and_each_hop() -> None:
    found = laid(RUNS["chain"]())
    names = ["A", "C", "link in", "B1", "link 1", "B2", "link 2", "B3", "link out"]
    assert list(found.tracks) == names
    for name in ("link in", "link 1", "link 2", "link out"):
        hops = found.tracks[name]
        assert len(hops) == 50
        assert min(hop.end_ns - hop.start_ns for hop in hops) == ms(0.2)
    waiting = [s.end_ns - s.start_ns for s in waits(found, "B3")]
    assert set(waiting[5:]) == {ms(4)}  # place 2 is the slowest one


def test_a_place_without_a_log_has_an_empty_track_and_no_hops() -> None:
    found = laid(RUNS["chain"]().lose(rank=2))
    assert {name: len(found.tracks[name]) > 0 for name in ("B1", "link 1", "B2", "link 2")} == {
        "B1": True,
        "link 1": False,
        "B2": False,
        "link 2": False,
    }


def test_the_clock_of_each_place_of_a_chain_is_bounded_by_itself() -> None:
    golden = RUNS["chain"]()
    for rank, table in enumerate(golden.manifest["topology"]["ranks"]):
        table["boot_id"] = f"host {rank}"
        for line in golden.stamped[rank] if rank else ():
            line |= {name: line[name] + ms(1000 * rank) for name in ("tB0", "tB1")}
    run = golden.parse()
    for place, clock in enumerate(policy_clocks(run, run.envelopes), start=1):
        assert clock is not None
        assert abs(clock.offset_ns - ms(1000 * place)) <= clock.uncertainty_ns
        assert not clock.shared


def test_inline_runs_have_one_track() -> None:
    golden = simulate(form=PipelineForm("serial", "decode_first"), n=20)
    golden.manifest["topology"]["world_size"] = 1
    assert list(laid(golden).tracks) == track_names(golden.parse().topology) == ["A + B + C"]


# ---- the other rank's clock ----------------------------------------------------------------------


def test_offset_is_bounded_by_causality_and_holds_the_truth() -> None:
    run = RUNS["jitter"]().parse()
    clock = policy_clock(run, run.envelopes)
    assert clock is not None
    assert clock.consistent
    assert not clock.shared
    truth = POLICY_CLOCK_NS - START_NS
    assert abs(clock.offset_ns - truth) <= clock.uncertainty_ns <= ms(0.5)


def test_a_drifting_clock_is_said_to_fit_no_single_offset() -> None:
    golden = simulate(n=50)
    for k, line in enumerate(golden.policy_lines):
        line |= {name: line[name] + k * ms(1) for name in ("tB0", "tB1")}
    clock = policy_clock(golden.parse(), golden.parse().envelopes)
    assert clock is not None
    assert not clock.consistent
    assert "no single offset" in clock.text


@pytest.mark.parametrize(
    ("boots", "shared"), [(("x", "x"), True), (("x", "y"), False), (("", ""), False)]
)
def test_one_boot_of_one_host_is_one_clock(boots: tuple[str, str], shared: bool) -> None:
    golden = simulate(n=20)
    golden.manifest["topology"]["ranks"] = [
        {"rank": rank, "boot_id": boot} for rank, boot in enumerate(boots)
    ]
    clock = policy_clock(golden.parse(), golden.parse().envelopes)
    assert clock is not None
    assert clock.shared is shared
