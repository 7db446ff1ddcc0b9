"""The golden table of replicas: a run's log in, its report's JSON out.

The cases are those of ``test_golden_table.py``, with policy ranks that take envelopes in turn.
"""

from __future__ import annotations

import pytest
from faulty_runs import answered_by_another, at_once, event, in_turns, joined, turned_round
from golden_runs import GoldenRun, jittered, ms, stages
from golden_runs import simulate as run
from judging import Case, check

from ppstream.analysis.period_model import PipelineForm, StageTimes

TWO, THREE = PipelineForm(d_in=3, replicas=2), PipelineForm("split", d_in=4, replicas=3)
LONG_B = stages(a=4, b=18, c=1, x=0.1)
SHORT_A = stages(a=0.2, b=10, c=0.2, x=0.05)


def one_of_two(times: StageTimes) -> GoldenRun:
    """A service that has lost the second of two replicas."""
    golden = run(times, PipelineForm("split", d_in=3), phase="degraded", epoch=1)
    golden.put(replica=1)
    golden.behind.append([])
    return golden


# fmt: off
TABLE: dict[str, Case] = {
    "one rank": (lambda: run(LONG_B), "PASS", {"primary.P_ms": 18, "class": "stage1-limited"}),
    "two replicas": (lambda: run(LONG_B, TWO), "PASS", {
        "primary.P_ms": 8.988, "primary.S": 1, "primary.S_alone": 1, "primary.G_star": 23 / 9,
        "model.gap": 0, "model.formula": "B / 2", "class": "stage1-limited",
        "primary.bubble.mesh": 0,
        "places.1.rank": 1, "places.1.ranks": [1, 2], "places.1.busy_ns": ms(18),
        "places.1.alone_ns": ms(18), "places.1.share": 1,
        "places.1.replicas_ns": [ms(18), ms(18)], "places.0.ranks": [0],
        "says": ["each of 2 replicas sets the period: it is busy 100%",
            "only a faster B or one more replica helps"]}),
    "two replicas beside short stages": (
        lambda: run(SHORT_A, PipelineForm("split", d_in=4, replicas=2)), "PASS", {
        "primary.P_ms": 5, "primary.S": 1, "primary.G": 10.4 / 5, "primary.G_star": 10.4 / 5,
        "alone.G_star": 10.4 / 5, "figures.4.value": "2.08 x"}),
    "two replicas beside short stages, slow links": (
        lambda: run(stages(a=0.2, b=10, c=0.2, x=0.6), PipelineForm("split", d_in=2,
            replicas=2)), "PASS", {"primary.G": 10.4 / 5.69, "figures.3.is_bad": False}),
    "two replicas beside short stages, in turn": (
        lambda: run(SHORT_A, PipelineForm("split", d_in=1, replicas=2)), "FAIL LOW_OVERLAP",
        {"primary.G": 1.01, "figures.3.is_bad": True}),
    "three replicas, split": (lambda: run(LONG_B, THREE), "PASS", {
        "primary.P_ms": 6, "primary.S": 1, "model.gap": 0, "model.W_star": 4,
        "model.formula": "B / 3"}),
    "three replicas, one credit each": (
        lambda: run(LONG_B, PipelineForm("split", d_in=3, replicas=3)), "PASS",
        {"primary.P_ms": 7.389, "class": "window-limited", "says": "raise D_in from 3 to 4"}),
    "three replicas, one credit": (
        lambda: run(LONG_B, PipelineForm("split", d_in=1, replicas=3)), "FAIL LOW_OVERLAP",
        {"primary.P_ms": 22.2}),
    "two replicas, jittered": (
        lambda: run(jittered(LONG_B, 400, seed=3, spread=0.1), TWO), "PASS", {}),
    "rank 0 sets the period": (
        lambda: run(stages(a=9, b=10, c=3, x=0.1), TWO), "PASS", {"class": "stage0-limited"}),
    "a slow replica": (lambda: run(in_turns(18, 27, 18), THREE), "PASS", {
        "primary.P_ms": 9, "class": "stage1-limited",
        "places.1.replicas_ns": [ms(18), ms(27), ms(18)], "model.formula": "B / 3",
        "says": ["replica 2 sets the period: it is busy 100% of it; only a faster replica helps",
            "replica 2 holds all back: its B takes 27.00 ms, that of the others 18.00 ms",
            "so the period is 9.00 ms at least, where 6.00 ms would do"]}),
    "a replica out of turn": (
        lambda: run(LONG_B, THREE).put(at=slice(150, 151), replica=3),
        "INCONCLUSIVE BAD_INSTRUMENT | order(envelope 150 went to replica 3, out of turn: 149 "
        "went to replica 3)"),
    "a replica is left out all the time": (
        lambda: run(LONG_B, THREE).put(replica=lambda line: line["seq"] % 2 + 1),
        "INCONCLUSIVE BAD_INSTRUMENT | order(out of turn)"),
    "a lost replica is left out": (
        lambda: run(in_turns(18, 18), TWO)
            .set("topology.replicas", 3).set("topology.world_size", 4)
            .tell(event("replica_lost", rank=3, left=2)), "PASS",
        {"says": "replica 3 was lost: 2 of 3 went on serving", "primary.P_ms": 8.988}),
    "one of two replicas serves": (
        lambda: joined(run(SHORT_A, TWO), one_of_two(SHORT_A), 20_000), "PASS",
        {"service.class": "stage1-limited", "service.utilisation.mesh": 0.5,
        "service.latency_ms.p50": 30.2}),
    "one of two replicas serves, slower": (
        lambda: joined(run(SHORT_A, TWO), one_of_two(stages(a=0.2, b=25, c=0.2)), 20_000),
        "INCONCLUSIVE SERVICE_SLOWER"),
    "another replica answers": (
        lambda: answered_by_another(run(LONG_B, TWO)),
        "INCONCLUSIVE BAD_INSTRUMENT | order(replica 2 answers envelope 100 of replica 1)"),
    "a replica works on two at once": (
        lambda: at_once(run(LONG_B, TWO), 2),
        "INCONCLUSIVE BAD_INSTRUMENT | order(replica 2: two B at the same time)"),
    "a replica out of order": (
        lambda: turned_round(run(LONG_B, TWO, n=700), 2),
        "INCONCLUSIVE BAD_INSTRUMENT | order(replica 2: B of envelope 303 comes before that of "
        "301)"),
    "a replica's log is lost": (
        lambda: run(LONG_B, TWO).lose(rank=2),
        "INCONCLUSIVE BAD_INSTRUMENT | stamps(lines of the policy rank missing)"),
    "a wait of one replica left out": (
        lambda: run(stages(a=6, b=10, c=3, x=0.1), TWO).put(2, wait_input_ns=0),
        "INCONCLUSIVE BAD_INSTRUMENT | conservation(replica2)"),
    "a replica all the time on two": (
        lambda: run(LONG_B, TWO).put(2, tB1=lambda line: line["tB1"] + ms(9)),
        "INCONCLUSIVE BAD_INSTRUMENT | conservation(replica2); order(two B at the same time); "
        "bounds(replica2); stamps"),
    "B shorter alone": (
        lambda: run(LONG_B, TWO).set("standalone.B_ns", ms(6)).put(1, cpu_b_ns=ms(6))
            .put(2, cpu_b_ns=ms(6)), "FAIL CONTENDED", {"primary.S": 1, "says": "B 3.00"}),
}
# fmt: on


@pytest.mark.parametrize("name", TABLE)
def test_report_of_the_logs_of_replicas(name: str) -> None:
    check(TABLE[name])
