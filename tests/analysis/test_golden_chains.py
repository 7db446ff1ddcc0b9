"""The golden table of chains of policy ranks: a run's log in, its report's JSON out.

The cases are those of ``test_golden_table.py``, with a log of each policy rank.
"""

from __future__ import annotations

import pytest
from faulty_runs import at_once, contended_place, in_parts, turned_round, unset, without_places
from golden_runs import chain, jittered, ms
from golden_runs import simulate as run
from judging import Case, check

from ppstream.analysis.period_model import PipelineForm

CHAIN, LONG_CHAIN = PipelineForm(d_in=3), PipelineForm("split", d_in=4)
THREE = chain(10, 10, a=9, x=0.1)
FOUR = chain(8, 10, 6, a=5, x=0.1)
PARTS = ["vision"], ["language", "denoise_1"], ["denoise_2"]

# fmt: off
TABLE: dict[str, Case] = {
    "three places": (lambda: run(THREE, CHAIN), "PASS", {
        "primary.S": 0.995, "primary.S_alone": 0.99,
        "primary.P_ms": 10.1, "primary.G_star": 3, "model.W_star": 3, "model.gap": 0,
        "compat.overlap_score": 1, "class": "stage0-limited", "places.2.rank": 2,
        "places.2.parts": ["part_2"], "places.2.device": "cpu", "places.2.busy_ns": ms(10),
        "places.2.alone_ns": ms(10), "places.2.share": 0.99, "places.1.hop_ns": ms(0.1),
        "primary.bubble.mesh": 0.01, "primary.bubble.place1": 0.01}),
    "three places, split": (lambda: run(THREE, PipelineForm("split", d_in=3)), "PASS",
        {"primary.P_ms": 10, "primary.S": 1, "class": "stage1-limited"}),
    "four places": (lambda: run(FOUR, LONG_CHAIN), "PASS", {"primary.P_ms": 10, "primary.S": 1,
        "class": "stage1-limited", "primary.bubble": {"r0A": 0.5, "r0C": 0.9, "place1": 0.2,
            "place2": 0, "place3": 0.4, "link": 0.96, "mesh": 0.2},
        "critical_path.B2": {"previous B": 1},
        "says": ["place 2 (part_2 on cpu) sets the period: it is busy 100%"]}),
    "four places, jittered": (
        lambda: run(jittered(FOUR, 400, seed=3, spread=0.1), LONG_CHAIN), "PASS", {"model.gap": 0}),
    "three places, one credit": (lambda: run(THREE, PipelineForm(d_in=1)), "FAIL LOW_OVERLAP",
        {"primary.P_ms": 29.3, "primary.S": 0.035, "class": "window-limited", "model.gap": 0,
        "says": ["raise D_in from 1 to 3"]}),
    "three places, two credits": (lambda: run(THREE, PipelineForm(d_in=2)), "PASS",
        {"primary.P_ms": 14.635, "primary.S": 0.768, "model.gap": 0,
        "critical_path.A.credit": 1,
        "says": "raise D_in from 2"}),
    "four places, one credit": (lambda: run(FOUR, PipelineForm("split", d_in=1)),
        "FAIL LOW_OVERLAP", {"primary.P_ms": 29.4, "model.W_star": 3}),
    "device times": (
        lambda: run(FOUR, LONG_CHAIN).put(2, eB_ns=ms(9)).put(3, eB_ns=ms(5)), "PASS",
        {"primary.bubble.place2": 0.1, "places.3.busy_ns": ms(5), "on_device.0.stage": "B2",
        "on_device.0.device_ms.p50": 9, "on_device.0.alone_ms": 10, "on_device.1.stage": "B3"}),
    "one place slow": (lambda: contended_place(run(chain(8, 30, 6, a=5), LONG_CHAIN), 2, 10),
        "FAIL CONTENDED", {"class": "stage1-limited", "places.2.busy_ns": ms(30),
        "places.2.alone_ns": ms(10), "primary.S": 1,
        "says": ["place 2 (part_2 on cpu) sets the period", "B2 of place 2 (part_2 on cpu) 3.00"]}),
    "one place slow by itself": (lambda: run(chain(8, 30, 6, a=5), LONG_CHAIN), "PASS",
        {"places.2.share": 1, "places.1.share": 0.267, "primary.G_star": 1.667}),
    "places that take turns": (
        lambda: contended_place(contended_place(run(FOUR, LONG_CHAIN), 2, 4), 1, 4),
        "FAIL CONTENDED", {"primary.S": 1, "says": "B1 of place 1 (part_1 on cpu) 2.00"}),
    "a place's log is lost": (lambda: run(FOUR, LONG_CHAIN).lose(rank=2),
        "INCONCLUSIVE MISSING_LOGS BAD_INSTRUMENT | stamps(lines of place 2 (part_2 on cpu)",
        {"primary": None, "places.2.busy_ns": None, "model": None,
        "says": "the log lacks the lines of place 2 (part_2 on cpu)"}),
    "every place's log is lost": (lambda: without_places(run(FOUR, LONG_CHAIN)),
        "INCONCLUSIVE MISSING_LOGS NOT_AUDITED", {"model": None, "primary.bubble.mesh": 0,
        "says": "stamps: the policy ranks' lines are missing"}),
    "places on other hosts": (lambda: without_places(run(FOUR, LONG_CHAIN))
            .set("topology.ranks.2.boot_id", "there"), "PASS", {"model": None}),
    "a place a little behind": (lambda: run(FOUR, LONG_CHAIN).lose(rank=3, at=slice(-4, None)),
        "PASS", {"primary.S": 1}),
    "a place misses ten": (lambda: run(FOUR, LONG_CHAIN).lose(rank=3, at=slice(100, 110)),
        "INCONCLUSIVE BAD_INSTRUMENT | stamps(lines of place 3 (part_3 on cpu) missing)"),
    "a place works on two at once": (lambda: at_once(run(FOUR, LONG_CHAIN), 2),
        "INCONCLUSIVE BAD_INSTRUMENT | order(place 2 (part_2 on cpu): two B at the same time)"),
    "a place all the time on two": (
        lambda: run(FOUR, LONG_CHAIN).put(2, tB1=lambda line: line["tB1"] + ms(8)),
        "INCONCLUSIVE BAD_INSTRUMENT | conservation(place2); order(two B at the same time); "
        "bounds(place2); outstanding; stamps"),
    "a place out of order": (lambda: turned_round(run(FOUR, LONG_CHAIN), 2),
        "INCONCLUSIVE BAD_INSTRUMENT | order(place 2 (part_2 on cpu): B of envelope 151 comes "
        "before that of 150)"),
    "a hop that holds results": (
        lambda: run(chain(8, 10, 6, a=5, x=[0.1, 0.1, 8, 0.1]), LONG_CHAIN), "PASS",
        {"places.2.hop_ns": ms(8), "places.1.hop_ns": ms(0.1), "primary.P_ms": 10,
        "says": "the hop from place 2 (part_2 on cpu) to place 3 (part_3 on cpu) takes 8.00 ms"}),
    "a hop that sets the period": (
        lambda: run(chain(8, 10, 6, a=5, x=[0.1, 0.1, 15, 0.1]), LONG_CHAIN), "PASS",
        {"primary.P_ms": 15, "places.1.hop_ns": ms(0.1), "class": "window-limited",
        "says": "the hop from place 2 (part_2 on cpu) to place 3 (part_3 on cpu) takes"}),
    "results wait for rank 0's thread": (lambda: run(chain(8, 9, a=9, x=[0.1, 0.1, 7]), CHAIN),
        "PASS", {"places.2.hop_ns": ms(7),
        "says": "results wait 7.00 ms an envelope for rank 0, whose one thread"}),
    "there before it was sent": (lambda: run(FOUR, LONG_CHAIN).add(3, tB0=-20, tB1=-20),
        "INCONCLUSIVE BAD_INSTRUMENT | order(place 3 (part_3 on cpu) has envelope)"),
    "there before it was sent, another clock": (
        lambda: run(FOUR, LONG_CHAIN).add(3, tB0=-20, tB1=-20)
            .set("topology.ranks.3.boot_id", "there"), "PASS", {"places.2.hop_ns": None}),
    "rank 0 tells of the fastest place": (
        lambda: run(FOUR, LONG_CHAIN).put(B_ns=ms(6)), "INCONCLUSIVE BAD_INSTRUMENT | stamps"),
    "rank 0 leaves a stay out": (lambda: run(FOUR, LONG_CHAIN).add(residence_ns=-6),
        "INCONCLUSIVE BAD_INSTRUMENT | residence"),
    "B longer than its stay": (
        lambda: run(FOUR, LONG_CHAIN).put(2, residence_ns=ms(5)).lose("residence_ns"),
        "INCONCLUSIVE BAD_INSTRUMENT | residence"),
    "there before its slot was free": (
        lambda: run(FOUR, LONG_CHAIN).add(2, residence_ns=60).lose("residence_ns")
            .set("topology.ranks.2.boot_id", "there"),
        "INCONCLUSIVE BAD_INSTRUMENT | residence; credit"),
    "rank 0 is the slowest": (lambda: run(chain(2, 2, a=8, c=2), CHAIN), "PASS",
        {"class": "stage0-limited", "critical_path.C.A on the same thread": 0.994,
        "critical_path.A.C on the same thread": 0.994}),
    "a wait of one place left out": (lambda: run(FOUR, LONG_CHAIN).put(3, wait_input_ns=0),
        "INCONCLUSIVE BAD_INSTRUMENT | conservation(place3)"),
    "a device outlasts its place": (lambda: run(FOUR, LONG_CHAIN).put(1, eB_ns=ms(9)),
        "INCONCLUSIVE BAD_INSTRUMENT | bounds(eB_ns over B_ns of place1)"),
    "a place with more CPU than time": (lambda: run(FOUR, LONG_CHAIN).add(3, cpu_b_ns=1),
        "INCONCLUSIVE BAD_INSTRUMENT | cpu"),
    "places not timed alone": (lambda: unset("standalone.places_ns", run(FOUR, LONG_CHAIN)),
        "INCONCLUSIVE NOT_AUDITED"),
    "a better cut": (lambda: in_parts(run(chain(12, 4, a=4, x=0.1), CHAIN), PARTS,
            vision=3, language=7, denoise_1=5, denoise_2=4), "PASS",
        {"better_cut.placement": [0, 1, 2, 2], "better_cut.limiting": 1,
        "says": "place 1 (language, denoise_1 on cpu) limits; moving `denoise_1` to place 2 would "
                "give 9.00 ms: placement.parts = [0, 1, 2, 2]"}),
    "the best cut": (lambda: in_parts(run(chain(7, 9, a=4, x=0.1), CHAIN),
            (["vision"], ["language"], ["denoise_1", "denoise_2"]),
            vision=3, language=7, denoise_1=5, denoise_2=4), "PASS", {"better_cut": None}),
}
# fmt: on


@pytest.mark.parametrize("name", TABLE)
def test_report_of_a_chain_s_logs(name: str) -> None:
    check(TABLE[name])
