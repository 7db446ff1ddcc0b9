"""Judging what the golden table does not hold: a live run, generations, exits, bad limits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from faulty_runs import event, full_disk, served
from golden_runs import chain, ms, simulate, stages
from judging import broken, judged, overlap, period_ms, published
from live_pipeline import run_live

from ppstream.analysis.judge import judge
from ppstream.analysis.log_parser import parse_run
from ppstream.analysis.period_model import PipelineForm
from ppstream.analysis.verdict import Verdict
from ppstream.core.errors import ExitCode, LogError
from ppstream.report.series import latency_parts


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


@pytest.mark.alone
def test_live_threads_and_sockets_overlap_fully_where_the_published_score_explodes() -> None:
    report = judged(run_live(a_ms=3, b_ms=8, c_ms=25, depth=2, n=115))
    assert published(report) > 3
    assert overlap(report) >= 0.97
    assert broken(report) == set()
    assert report.verdict is Verdict.PASS


def test_a_disturbed_measurement_names_the_first_fault() -> None:
    raised = {"stage": "B", "rank": 1, "fault": "exception", "what": "RuntimeError: no memory"}
    run = simulate().tell(event("fault", **raised | {"t": 2_500_000_000}))
    (said,) = (line for line in judged(run).statements if line.startswith("PERTURBED"))
    assert "1 fault in the judged time" in said
    assert "exception in stage B (rank 1, 1 in all): RuntimeError: no memory" in said
    (said,) = (
        line
        for line in judged(simulate(mode="attribution")).statements
        if line.startswith("PERTURBED")
    )
    assert said == "PERTURBED: a profiler was on; measure again without it"


def test_policy_rank_lines_fill_what_rank0_lacks() -> None:
    golden = simulate()
    whole = judged(golden)
    golden.bend(lambda line: line.update(B_ns=None, residence_ns=None, wait_input_ns=None))
    assert judged(golden).as_dict() == whole.as_dict()


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


def ended(code: int, reason: str, generation: int = 0) -> dict[str, Any]:
    return {"code": code, "name": ExitCode(code).name, "reason": reason, "generation": generation}


TOLD = ended(20, "the other rank left with 20 PEER_LOST: rank 1 was silent")
DRAINED, LOST = ended(0, "asked to stop"), ended(20, "rank 1 was silent")
STUCK, LEFT = ended(21, "thread A stands still"), ended(1, "the other rank left with 21 WATCHDOG")


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ({"0": DRAINED, "1": DRAINED}, None),
        ({"0": DRAINED, "1": ended(30, "the gate refused")}, None),
        ({"0": LOST}, "rank 0 ended with 20 PEER_LOST: rank 1 was silent"),
        ({"0": LOST, "1": STUCK}, "rank 1 ended with 21 WATCHDOG: thread A stands still"),
        ({"2": TOLD, "0": LOST}, "rank 0 ended with 20 PEER_LOST: rank 1 was silent"),
        ({"0": LEFT, "1": STUCK}, "rank 1 ended with 21 WATCHDOG: thread A stands still"),
        ({"0": ended(0, "", 1), "1": STUCK}, None),  # the start behind it has drained
        ({"0": ended(11, "no weights", 1), "1": STUCK}, "rank 0 ended with 11 CONFIG: no weights"),
        ({"0": {"code": "x"}, "1": 3}, None),
    ],
)
def test_a_failure_in_service_is_told_and_does_not_pass(
    ends: dict[str, Any], said: str | None
) -> None:
    report = judge(replace(served(stages()).parse(), exits=ends, finished=True))
    if said is None:
        assert (report.verdict, report.reasons) == (Verdict.PASS, [])
    else:
        assert (report.verdict, report.reasons) == (Verdict.INCONCLUSIVE, ["SERVICE_ENDED"])
        assert f"bring-up passed, then {said} (SERVICE_ENDED)" in report.sentence
        assert f"service: {said}" in report.statements[0]


def test_a_failure_before_service_is_told_and_so_is_a_run_without_an_end() -> None:
    before = judge(replace(simulate().parse(), exits={"0": LOST}))
    said = "rank 0 ended with 20 PEER_LOST: rank 1 was silent"
    assert said in before.statements
    assert f"bring-up passed, then {said}; first do what runbooks" in before.sentence
    one_rank = replace(simulate().set("topology.world_size", 1).parse(), exits={"0": LOST})
    assert f"drive a robot: {said} (INLINE); first do what runbooks" in judge(one_rank).sentence
    unfinished = "run.json has no end of this run: it runs on, was killed, or its disk was full"
    assert unfinished not in before.statements  # where the gate judges, all are so
    run = served(stages()).parse()
    assert unfinished in judge(run).statements
    assert judge(run).verdict is Verdict.PASS
    assert unfinished not in judge(replace(run, finished=True)).statements
    assert unfinished not in judge(replace(run, exits={"1": LOST})).statements  # it is known to end


def test_one_rank_that_was_refused_says_why_first() -> None:
    reason = "SHORT_LEASE: robots would hold 40.0% of the time; set actions.lease_ms to 88"
    end = {"code": 30, "name": "GATE_FAIL", "reason": reason, "generation": 0}
    warming = simulate().set("topology.world_size", 1).put(phase="warming").parse()
    report = judge(replace(warming, exits={"0": end}, finished=True))
    assert report.reasons == ["INLINE"]
    assert report.sentence == f"This pipeline may not drive a robot yet: {reason}."
    asked = judge(replace(warming, exits={"0": end | {"code": 0}}, finished=True))
    assert reason not in asked.sentence


@pytest.mark.parametrize(
    ("code", "ends", "said"),
    [
        (None, {"0": DRAINED}, ", which the run came to"),
        (0, {}, ", which the run came to"),
        (None, {"1": DRAINED}, ", and rank 0 left no exit record"),
        (20, {}, ", and rank 0 left no exit record"),
    ],
)
def test_a_service_without_its_end_is_said_to_have_one_only_where_rank_0_told_it(
    code: int | None, ends: dict[str, Any], said: str
) -> None:
    golden = full_disk().set("finished_utc", "then").set("exit_code", code)
    report = judge(replace(golden.parse(), exits=ends))
    assert report.reasons == ["MISSING_LOGS"]
    assert f"then the log has no end of the service (phase draining){said} (" in report.sentence


PLACED = {"placement": {"policy": ["cpu", "cpu"], "parts": [1, 2]}, "pipeline": {"d_in": 3}}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"placement": {"parts": "auto"}}, ""),
        ({"pipeline": {"d_in": 1}}, "topology.d_in 3 and pipeline.d_in 1"),
        ({"pipeline": {"d_out": 4}}, "topology.d_out 2 and pipeline.d_out 4"),
        ({"placement": {"policy": ["cpu"]}}, "3 ranks and 1 devices for policy ranks"),
        ({"placement": {"parts": [0, 2]}}, "[1, 2] in topology and [0, 2] in placement.parts"),
        ({"cut": {"chosen": [1, 1]}}, "[1, 2] in topology and [1, 1] in cut"),
        ({"cut": {"parts": ["a", "b"]}}, "other parts in topology than in cut"),
    ],
)
def test_a_topology_that_the_run_was_not_asked_for_contradicts_it(
    changes: dict[str, Any], said: str
) -> None:
    golden = simulate(chain(10, 10, a=9, x=0.1), PipelineForm(d_in=3))
    golden.manifest["cut"] = changes.get("cut")
    golden.manifest["config"] = PLACED | {k: v for k, v in changes.items() if k != "cut"}
    report = judge(golden.parse())
    assert report.verdict is (Verdict.INCONCLUSIVE if said else Verdict.PASS)
    assert ("CONTRADICTED" in report.reasons) is bool(said)
    assert any(said in sentence for sentence in report.statements)


@pytest.mark.parametrize(
    ("policy", "replicas", "members", "said"),
    [
        (["cpu"], 1, {2: 1}, ""),
        (["cuda:0", "cuda:1"], 1, {2: 1}, ""),
        (["cuda:0", "cuda:1", "cuda:2", "cuda:3"], 2, {3: 1, 4: 2}, ""),
        (["cpu", "cpu"], 1, {2: 1}, "2 ranks and 2 devices for policy ranks"),
        (["cuda:0"], 1, {2: 1}, "3 ranks and 1 devices for policy ranks"),
        (["cuda:0", "cuda:1", "cuda:2"], 1, {2: 1}, "3 ranks and 3 devices for policy ranks"),
        (["cuda:0", "cuda:1"], 1, {}, "2 ranks and 2 devices for policy ranks"),
        (["cuda:0", "cuda:1"], 2, {3: 1, 4: 2}, "5 ranks and 2 devices for policy ranks"),
    ],
)
def test_a_mesh_has_a_device_for_each_of_its_ranks_on_gpus(
    policy: list[str], replicas: int, members: dict[int, int], said: str
) -> None:
    golden = simulate(stages(a=4, b=9, c=1, x=0.1), PipelineForm(d_in=3, replicas=replicas))
    golden.manifest["config"] = {"placement": {"policy": policy}}
    golden.manifest["topology"]["members"] = [
        {"rank": rank, "device": policy[-1], "leader": leader} for rank, leader in members.items()
    ]
    report = judge(golden.parse())
    assert report.verdict is (Verdict.INCONCLUSIVE if said else Verdict.PASS), report.statements
    assert ("CONTRADICTED" in report.reasons) is bool(said)
    assert any(said in sentence for sentence in report.statements)


def test_ranks_in_any_order_are_read_by_their_numbers() -> None:
    golden = simulate(chain(10, 10, a=9, x=0.1), PipelineForm(d_in=3))
    parts = golden.parse().topology.parts
    golden.manifest["topology"]["ranks"].reverse()
    assert golden.parse().topology.parts == parts


def test_names_of_others_cannot_write_on_a_terminal_or_fill_a_report() -> None:
    golden = simulate(chain(10, 10, a=9, x=0.1), PipelineForm(d_in=3))
    golden.manifest["topology"]["ranks"][1] |= {"parts": ["a\x1b[2J\n"], "device": "x" * 10**6}
    topology = golden.parse().topology
    assert topology.parts[1] == ("a?[2J?",)
    assert len(topology.devices[1]) < 200


@pytest.mark.parametrize("field", ["places_ns", "parts_ns"])
def test_a_time_below_zero_is_no_measurement(field: str) -> None:
    golden = simulate(chain(10, 10, a=9, x=0.1), PipelineForm(d_in=3))
    bad: Any = [-1, 1] if field == "places_ns" else {"part_1": -1}
    golden.manifest["standalone"][field] = bad
    assert golden.parse().standalone is None


def test_verdict_of_another_generation_is_no_contradiction() -> None:
    said = {"verdict": "FAIL", "reasons": ["LOW_OVERLAP"], "overlap": 0.1, "generation": 7}
    run = simulate().tell({"kind": "event", "name": "verdict", "t": 1} | said).parse()
    events = tuple(event._replace(generation=7) for event in run.events)
    assert judge(replace(run, events=events)).verdict is Verdict.PASS


@pytest.mark.parametrize("least", [-5, -0.01, 1.01, float("nan"), "0.3", None])
def test_limit_that_is_none_is_bad_input(least: object) -> None:
    golden = simulate()
    golden.manifest["config"] = {"bringup": {"overlap_min": least}}
    with pytest.raises(LogError, match=r"overlap_min is .*, expected 0 to 1"):
        judged(golden)


@pytest.mark.parametrize("time_ms", [-1, float("nan"), float("inf"), 1e308, 10**400])
@pytest.mark.parametrize("name", ["lease_ms", "max_age_ms"])
def test_times_of_actions_that_are_none_are_bad_input(name: str, time_ms: float) -> None:
    golden = served(stages()).set("config.actions", {name: time_ms})
    golden.tell({"kind": "robot", "age_ns": 1, "executed": 1, "oldest_ns": 1})
    with pytest.raises(LogError, match=rf"config\.actions\.{name} is .*, expected 0 to 1e\+12"):
        judged(golden)


def test_values_of_wrong_types_in_run_json_are_passed_over() -> None:
    golden = served(stages()).put(1, rows=1).set("config.batch", {"rows": [1]})
    golden.set("config.streams", [{"name": ["q"], "max_request_hz": 5, "reference": True}])
    golden.set("topology.ranks.0.boot_id", {}).set("topology.ranks.1.boot_id", {})
    assert judged(golden).verdict is Verdict.PASS
