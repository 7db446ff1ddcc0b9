"""The first sentence and the seven figures: what a robotics engineer reads before anything else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from golden_runs import GoldenRun, chain, ms, simulate, stages
from judging import judged

from ppstream.analysis.judge import judge
from ppstream.analysis.period_model import PipelineForm
from ppstream.report.text import lines_of, render

NAMES = ["rate", "age", "longest gap", "overlap", "gain", "limit", "lost"]


def served(golden: GoldenRun, *, period_ms: float, pause_ms: float = 0) -> GoldenRun:
    """The run, and a service behind it whose input comes so often, with one pause."""
    ready = simulate(stages(t_in=period_ms), phase="ready", pacing="sample", epoch=1)
    ready.later(10_000).later(pause_ms, slice(200, None))
    golden.lines += ready.lines
    golden.policy_lines += ready.policy_lines
    return golden


def serialized() -> GoldenRun:
    return simulate(form=PipelineForm("serial", "decode_first"))


def inline() -> GoldenRun:
    return serialized().set("topology.world_size", 1)


def machine(**fields: Any) -> dict[str, Any]:
    event = {"kind": "event", "name": "machine", "t": 5, "usable_cpus": 2, "busy_threads": 2}
    return event | {"load_1min": 9.5, "steal_share": 0.0, "others_cpus": 1.4} | fields


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            simulate,
            "This pipeline may drive your robot: it gives 100.0 chunks/s, and the policy rank sets "
            "that pace (busy 100% of the time); for more, make the policy faster or cut it over "
            "more ranks.",
        ),
        (
            lambda: served(simulate(), period_ms=40),
            "This pipeline may drive your robot: it gives 100.0 chunks/s, and in service its "
            "robots asked for 25.0; there is nothing to do.",
        ),
        (lambda: simulate(stages(c=20), PipelineForm("split")), "rank 0 sets that pace (busy 100%"),
        (lambda: simulate(form=PipelineForm(d_in=1)), "; for 50% more, set pipeline.d_in to 2."),
        (
            lambda: simulate(chain(8, 10, 6), PipelineForm("split", d_in=4)),
            "and place 2 (part_2 on cpu) sets that pace (busy 100% of the time); for more, make "
            "part_2 faster or split it into parts.",
        ),
        (
            lambda: simulate(stages(a=4, b=18), PipelineForm(d_in=3, replicas=2)),
            "each replica sets that pace (busy 96% of the time); for more, make the policy faster "
            "or add a replica.",
        ),
        (
            serialized,
            "This pipeline may not drive a robot yet: its ranks work too little at the same time "
            "(LOW_OVERLAP); first see in the report what holds them up, or accept it with "
            "bringup.accept if 50.0 chunks/s are enough for you.",
        ),
        (
            lambda: serialized().tell(machine()),
            "first free the machine (load 9.5 on 2 CPUs), then see in the report what holds them",
        ),
        (
            lambda: simulate(stages(b=200)).tell(machine()),
            "(NOTHING_TO_HIDE); first free the machine (",
        ),
        (lambda: serialized().tell(machine(others_cpus=0.1)), "; first see in the report"),
        (
            lambda: serialized().set("config.bringup", {"accept": ["LOW_OVERLAP"]}),
            "Its ranks work too little at the same time (LOW_OVERLAP). bringup.accept permits that"
            ", so it serves robots all the same: it gives 50.0 chunks/s, and its stages run in turn"
            "; for more, see in the report what each stage waits for.",
        ),
        (
            lambda: simulate(n=60).tell(machine()),
            "(TOO_FEW); first free the machine (load 9.5 on 2 CPUs)",
        ),
        (
            lambda: simulate(n=60),
            "Nobody can tell yet whether this pipeline may drive a robot: too few chunks were "
            "measured (TOO_FEW); first raise bringup.envelopes.",
        ),
        (lambda: simulate(n=60, phase="ready"), "(TOO_FEW); first let it run longer."),
        (
            inline,
            "runs in one process, and no gate has judged it: all stages run in turn and give",
        ),
        (
            lambda: simulate().put(at=slice(200, 201), outstanding_max=9),
            "Do not drive a robot with this pipeline: a queue held more than its bound (QUEUE_BOUN",
        ),
    ],
)
def test_sentence_says_whether_to_drive_what_limits_and_what_to_do(
    make: Callable[[], GoldenRun], says: str
) -> None:
    assert says in judged(make()).sentence


@pytest.mark.parametrize(
    ("make", "begins"),
    [
        (simulate, "PASS: This pipeline may drive your robot: it"),
        (serialized, "FAIL: This pipeline may not drive a robot yet: its"),
        (
            lambda: serialized().set("config.bringup", {"accept": ["LOW_OVERLAP"]}),
            "FAIL, accepted: Its ranks work too little at the same time (LOW_OVERLAP). bringup.ac",
        ),
    ],
)
def test_headline_of_log_and_report_is_one_and_agrees_with_the_verdict(
    make: Callable[[], GoldenRun], begins: str
) -> None:
    report = judged(make())
    assert report.headline.startswith(begins)
    first = " ".join(line.text for line in lines_of(report)[1:5])
    assert first.startswith(report.headline[:90])


def test_a_service_with_a_stall_is_sent_to_look_at_it_whatever_bring_up_said() -> None:
    golden = served(simulate(), period_ms=40, pause_ms=689)
    golden.set("config.actions", {"lease_ms": 300.0})
    streams = {"received": 9, "used": 9, "dropped": {}, "in_flight": 0, "holes": 1}
    golden.tell(golden.book() | {"streams": {"imu": streams | {"longest_hole_ns": ms(683)}}})
    report = judged(golden)
    assert report.verdict.name == "PASS"
    assert report.sentence.endswith(
        "; first find out why a robot once had no new chunk for 729 ms, longer than the lease of "
        "300 ms (imu was silent for up to 683 ms)."
    )
    gap = report.figures[2]
    assert (gap.value, gap.is_bad) == ("729 ms", True)
    assert gap.note == "without a new chunk in service; 1 above 251 ms (lease less age)"


def test_a_robot_s_own_account_of_its_longest_gap_counts_before_rank_0_s() -> None:
    """Rank 0 also counts the time in which no robot was connected."""
    golden = served(simulate(), period_ms=40, pause_ms=60_000)
    golden.tell({"kind": "robot_state", "session": 7, "t": 5, "chunk_gap_ns": ms(44)})
    report = judged(golden)
    assert report.figures[2][:2] == ("longest gap", "44.0 ms")
    assert not report.figures[2].is_bad
    assert report.sentence.endswith("there is nothing to do.")
    service = report.as_dict()["service"]
    assert isinstance(service, dict)
    assert service["chunks_per_s"] == pytest.approx(25.0)  # the pause is no slower rate


def told_gap(gap_ms: float, **fields: Any) -> GoldenRun:
    golden = served(simulate(), period_ms=40).set("config.actions", {"lease_ms": 300.0})
    state = {"kind": "robot_state", "session": 7, "t": 5, "chunk_gap_ns": ms(gap_ms)}
    return golden.tell(state | fields)


@pytest.mark.parametrize("told", [{}, {"holds": 1}])
def test_longest_gap_is_one_number_in_figure_note_text_and_json(told: dict[str, Any]) -> None:
    report = judged(told_gap(900, **told))
    assert report.figures[2] == (
        "longest gap",
        "900 ms",
        "without a new chunk in service; in 1 session above 251 ms (lease less age)",
        True,
    )
    assert "no new chunk for 900 ms" in report.sentence
    service = report.as_dict()["service"]
    assert isinstance(service, dict)
    assert service["longest_without_chunk_ms"] == pytest.approx(900)
    text = " ".join(render(report).split())
    assert "longest without a new chunk 900 ms in 1 session above 251 ms (lease less age)" in text


def test_a_robot_that_held_never_had_no_need_of_a_chunk() -> None:
    report = judged(told_gap(900, holds=0))
    assert report.figures[2].note.endswith("; in 1 session above 251 ms (lease less age)")
    assert not report.figures[2].is_bad
    assert report.sentence.endswith("there is nothing to do.")


@pytest.mark.parametrize("told", [None, 0])
def test_what_a_robot_tells_hides_no_gap_of_a_robot_that_tells_nothing(told: int | None) -> None:
    golden = told_gap(44)
    golden.tell({"kind": "robot_state", "session": 8, "t": 6, "holds": 1, "chunk_gap_ns": told})
    ready = [line for line in golden.lines if line["phase"] == "ready"]
    for number, line in enumerate(ready):  # the robot of session 8 is absent from a hundred
        end = 0 if 100 <= number < 200 else number + 1
        line |= {"session": [7, 8], "session_epoch": [0, 0], "window_end_ns": [number + 1, end]}
    figure = judged(golden).figures[2]
    assert 4000 < float(figure.value.removesuffix(" ms")) < 4100
    assert figure.note.endswith("; in 1 session above 251 ms (lease less age)")
    assert figure.is_bad


def test_pauses_of_robots_that_ask_for_their_chunks_are_no_gaps() -> None:
    golden = told_gap(60_000).set("config.streams", [{"name": "obs", "max_request_hz": 10}])
    report = judged(golden)
    assert report.figures[2][1:] == ("unknown", "robots ask for their chunks", False)
    ready = [line for line in golden.lines if line["phase"] == "ready"]
    for number, line in enumerate(ready):
        line |= {"session": 7, "session_epoch": 0, "window_end_ns": number + 1}
    figure = judged(golden).figures[2]
    assert figure.note == "before a robot's first chunk; 0 above the lease of 300 ms"


def test_rate_of_service_counts_chunks_that_come_in_bursts_and_no_time_without_a_robot() -> None:
    golden = served(simulate(), period_ms=10)
    ready = [line for line in golden.lines if line["phase"] == "ready"]
    for number, line in enumerate(ready):
        by_ms = number // 3 * 70 + (3_600_000 if number >= 100 else 0)
        line |= {k: line[k] + ms(by_ms) for k in line if k[0] == "t" and k[1].isupper()}
    assert judged(golden).figures[0].note.endswith("; 30.1 in service")


def test_a_bring_up_that_was_stopped_is_no_reason_to_lengthen_it() -> None:
    golden = simulate(n=60).tell({"kind": "event", "name": "phase", "phase": "bring-up", "t": 1})
    drained = {"0": {"code": 0, "generation": 0}}
    report = judge(replace(golden.parse(), exits=drained, finished=True))
    assert report.sentence.endswith("(TOO_FEW); first let it run until it is ready.")
    assert "TOO_FEW: 49 envelopes after warm-up, 100 needed; let it run until it is ready" in (
        report.statements
    )


def test_a_robot_that_held_longer_than_a_lease_comes_before_any_advice_on_speed() -> None:
    golden = served(simulate(), period_ms=40).set("config.actions", {"lease_ms": 300.0})
    state = {"kind": "robot_state", "session": 7, "t": 5, "chunk_gap_ns": ms(44)}
    golden.tell(state | {"holds": 9, "held_ns": ms(500)}, machine())
    report = judged(golden)
    assert report.verdict.name == "PASS"
    assert report.sentence.endswith(
        "; first free the machine (load 9.5 on 2 CPUs), then find out why robots held 9 times, 500 "
        "ms in all, for want of young actions."
    )
    assert report.figures[2].note.endswith("; robots held for 500 ms")
    assert report.figures[2].is_bad
    golden.tell(state | {"holds": 1, "held_ns": ms(500)})
    assert "find out why robots held 1 time, 500 ms in all" in judged(golden).sentence
    golden.tell(state | {"holds": 1, "held_ns": ms(20)})
    assert judged(golden).sentence.endswith("there is nothing to do.")


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([], "; there is nothing to do."),
        (
            [{"kind": "robot_state", "holds": 1, "held_ns": 0, "faults": 1, "fault": "lease"}],
            "find out why robot of session 7 latched 1 fault, the newest: lease.",
        ),
        (
            [{"kind": "robot_state", "holds": 1, "held_ns": 0, "faults": 1, "fault": "stop"}],
            "; there is nothing to do.",
        ),
        (
            [
                {"kind": "event", "name": "phase", "phase": "ready", "t": 0, "generation": 0},
                *({"kind": "memory", "resident_bytes": mib << 20} for mib in (900, 2858)),
            ],
            "find out why the memory of rank 0 grew by 1.91 GiB in service.",
        ),
    ],
)
def test_a_fault_or_a_leak_is_something_to_do(lines: list[dict[str, Any]], says: str) -> None:
    golden = served(simulate(), period_ms=40).set("config.actions", {"lease_ms": 300.0})
    golden.tell(
        *({"session": 7, "t": ms(k), "chunk_gap_ns": ms(44)} | e for k, e in enumerate(lines))
    )
    assert judged(golden).sentence.endswith(says)


@pytest.mark.parametrize(
    ("clipped", "refused", "says"),
    [
        (0, {"non_finite": 17}, "17 refused (17 non_finite); find what makes them NaN or infinite"),
        (9, {}, "9 of 600 chunks clipped (9 values), none refused; check its scaling before you"),
        (0, {"limit": 2, "non_finite": 1}, "widen the limits; find what makes them NaN"),
    ],
)
def test_chunks_that_are_no_numbers_are_no_question_of_scaling(
    clipped: int, refused: dict[str, int], says: str
) -> None:
    golden = served(simulate(), period_ms=40)
    counts = {"clipped_chunks": clipped, "clipped_values": clipped, "refused": refused}
    golden.tell(golden.book() | {"actions": {"chunks": 600} | counts})
    (told,) = (one for one in judged(golden).statements if one.startswith("the rules of [actions]"))
    assert says in told
    assert ("scaling" in told) == (refused != {"non_finite": 17})


def test_calls_that_failed_in_service_are_something_to_do() -> None:
    golden = served(simulate(), period_ms=40)
    golden.put(at=slice(500, 503), drop="policy_error").put(at=slice(600, 601), drop="non_finite")
    assert judged(golden).sentence.endswith(
        "first find out why chunks could not be used (3 policy_error, 1 non_finite): see first "
        "faults in the report."
    )


@pytest.mark.parametrize(("clipped", "is_told"), [(336, True), (63, False)])
def test_many_clipped_chunks_are_marked_and_no_reason(*, clipped: int, is_told: bool) -> None:
    """A robot at rest at a limit is healthy."""
    golden = served(simulate(), period_ms=40)
    actions = {"chunks": 637, "clipped_chunks": clipped, "clipped_values": 58800, "refused": {}}
    report = judged(golden.tell(golden.book() | {"actions": actions}))
    assert report.verdict.name == "PASS"
    assert report.figures[-1].is_bad is is_told
    assert ("; 53% of the chunks clipped" in report.figures[-1].note) is is_told
    assert ("first find out why 53% of the chunks were clipped" in report.sentence) is is_told
    actions |= {"chunks": 0}  # of a damaged log
    assert "clipped" not in judged(golden.tell(golden.book() | {"actions": actions})).sentence


def test_one_rank_that_lost_lines_of_its_service_says_so_first() -> None:
    golden = served(inline(), period_ms=40).set("finished_utc", "2026-01-01T00:00:00Z")
    golden.tell({"kind": "event", "name": "phase", "phase": "ready", "t": 5, "generation": 0})
    report = judged(golden)
    assert report.reasons == ["INLINE", "MISSING_LOGS"]
    assert "robot again: the log has no end of the service" in report.sentence
    assert "(MISSING_LOGS and 1 more)" in report.sentence


def test_one_rank_that_served_nobody_is_not_said_to_serve() -> None:
    golden = inline()
    assert judged(golden).figures[5].note == "one process runs all stages in turn"
    golden.lines, golden.policy_lines = [], []
    assert judged(golden).sentence == (
        "This pipeline runs in one process, and no gate has judged it: nothing was measured after "
        "its warm-up (INLINE); first let it serve a robot."
    )


def test_bring_up_whose_log_lacks_lines_too_has_not_passed() -> None:
    golden = served(simulate().lose("w_result_ns", "w_emit_ns"), period_ms=40)
    golden.set("finished_utc", "2026-01-01T00:00:00Z")
    golden.tell({"kind": "event", "name": "phase", "phase": "ready", "t": 5, "generation": 0})
    report = judged(golden)
    assert report.judged_reasons[0] == "MISSING_LOGS"
    assert "drive a robot again: the log has no end of the service" in report.sentence


def test_one_rank_is_told_of_robots_without_actions_and_of_clipped_ones() -> None:
    golden = served(inline(), period_ms=40)
    actions = {"chunks": 600, "clipped_chunks": 300, "clipped_values": 300, "refused": {}}
    golden.tell(golden.book() | {"actions": actions})
    assert "(INLINE); first find out why 50% of the chunks were clipped" in judged(golden).sentence
    golden.tell({"kind": "robot_state", "session": 7, "t": 5, "chunk_gap_ns": ms(1100)})
    says = "(INLINE); first find out why a robot once had no new chunk for 1100 ms"
    assert says in judged(golden).sentence


def test_service_that_was_not_like_bring_up_says_so_in_the_sentence() -> None:
    golden = served(simulate(), period_ms=40)
    golden.tell({"kind": "robot_state", "session": 7, "t": 5, "holds": 3, "held_ns": ms(4000)})
    assert judged(golden).sentence == (
        "Look at this run before you drive a robot again: bring-up passed, then robot of session 7 "
        "held 30% of the time, 0 faults (SERVICE_HELD); first see in the report how long it had "
        "no new chunk, and why."
    )


def test_chunks_that_came_too_late_are_part_of_the_time_in_which_a_robot_held() -> None:
    golden = served(simulate(), period_ms=40)
    half = slice(len(golden.lines) - 165, None)  # of service
    golden.put(0, half, drop="expired").lose("tEmit", at=half)
    golden.tell({"kind": "robot_state", "session": 7, "t": 5, "holds": 1, "held_ns": ms(6600)})
    (said,) = (text for text in judged(golden).statements if "robot of session 7" in text)
    assert "held 50% of the time" in said


def test_a_lease_that_is_too_short_is_told_with_what_it_must_cover() -> None:
    short = simulate().set("config.actions", {"lease_ms": 28.0})
    assert judged(short).sentence == (
        "This pipeline may not drive a robot yet: robots would hold 20.0% of the time, behind 318 "
        "of 318 chunks (limit 5% of each), as actions are 20.0 ms old when they are made (p95), "
        "and the next ones come 10.0 ms later (p50): robots need 30.0 ms, and actions.lease_ms is "
        "28 (SHORT_LEASE); first set actions.lease_ms to 33, a tenth to spare; robots that ask for "
        "each chunk (RobotClient.ask) need no more than its age: give what they send "
        "max_request_hz in place of rate_hz."
    )
    held = served(simulate(), period_ms=40).set("config.actions", {"lease_ms": 50.0})
    held.tell({"kind": "robot_state", "session": 7, "t": 5, "holds": 3, "held_ns": ms(4000)})
    says = "40.0 ms later (p50): robots need 89.0 ms, and actions.lease_ms is 50 (SERVICE_HELD); "
    assert says + "first set actions.lease_ms to 98, a tenth to spare." in judged(held).sentence
    long = judged(held.set("config.actions", {"lease_ms": 300.0})).sentence
    assert "SERVICE_HELD" in long
    assert "robots need" not in long  # it held for another reason


@pytest.mark.parametrize(
    ("make", "accept", "says"),
    [
        (serialized, ["LOW_OVERLAP"], "bring-up was accepted, then robot of session 7 held"),
        (
            serialized,
            [],
            "drive a robot again: robot of session 7 held 30% of the time, 0 faults (",
        ),
        (inline, [], "drive a robot again: robot of session 7 held 30% of the time, 0 faults ("),
        (
            lambda: simulate().put(at=slice(200, 201), outstanding_max=9),
            ["LOW_OVERLAP"],
            "a queue held more than its bound (QUEUE_BOUND and 1 more)",
        ),
    ],
)
def test_sentence_names_no_accepted_reason_and_the_robots_before_the_overlap(
    make: Callable[[], GoldenRun], accept: list[str], says: str
) -> None:
    golden = served(make(), period_ms=40).set("config.bringup", {"accept": accept})
    golden.tell({"kind": "robot_state", "session": 7, "t": 5, "holds": 3, "held_ns": ms(4000)})
    report = judged(golden)
    assert says in report.sentence
    hides = [reason for reason in report.reasons if reason in accept]
    assert not any(reason in report.sentence for reason in hides)


@pytest.mark.parametrize(
    "golden",
    [simulate(), served(simulate(), period_ms=40), serialized(), inline(), simulate(n=3)],
    ids=["bring-up", "service", "serialized", "inline", "three envelopes"],
)
def test_figures_are_seven_in_every_run_and_say_what_is_not_known(golden: GoldenRun) -> None:
    figures = judged(golden).figures
    assert [figure.name for figure in figures] == NAMES
    assert all(figure.value and figure.note for figure in figures)
    assert judged(golden).as_dict()["figures"] == [figure._asdict() for figure in figures]


def test_figures_are_those_of_the_report() -> None:
    golden = served(simulate(), period_ms=40)
    golden.extra += [{"kind": "robot", "seq": k, "age_ns": ms(30 + k % 7)} for k in range(1200)]
    shown = {figure.name: figure for figure in judged(golden).figures}
    assert shown["rate"].value == "100.0 chunks/s"
    assert shown["rate"].note == "one every 10.0 ms (period P) at full speed; 25.0 in service"
    assert (shown["age"].value, shown["age"].note) == ("33.0 / 36.0 ms", "p50 and p99 at the robot")
    assert shown["overlap"].value == "1.00"
    assert (shown["gain"].value, shown["limit"].value) == ("1.90 x", "policy rank")
    assert shown["lost"].value == "0 of 330"
    assert not any(figure.is_bad for figure in shown.values())


@pytest.mark.parametrize(
    ("age_ms", "value", "note", "is_bad"),
    [
        (98, "98.0 / 98.0 ms", "p50 and max at the robot's receipt; robots executed 0 of 9", True),
        (40, "49.0 / 49.0 ms", "rank 0 (latency); robots executed 0 of 9 chunks", False),
    ],
)
def test_a_robot_that_executed_no_chunk_has_said_so(
    age_ms: float, value: str, note: str, is_bad: bool
) -> None:
    golden = served(simulate(), period_ms=40).set("config.actions", {"lease_ms": 90.0})
    golden.tell(*({"kind": "robot", "age_ns": ms(age_ms), "executed": 0} for _ in range(9)))
    figure = judged(golden).figures[1]
    assert (figure.value, figure.is_bad) == (value, is_bad)
    assert note in figure.note


def test_a_robot_that_waited_for_its_first_chunk_is_no_outage_that_vanishes() -> None:
    """It cannot tell of it itself: it measures from one chunk to the next."""
    golden = served(simulate(), period_ms=40)
    ready = [line for line in golden.lines if line["phase"] == "ready"]
    for number, line in enumerate(ready):
        line |= {"session": 7, "session_epoch": 0, "window_end_ns": number + 1}
        if number < 150:
            line |= {"drop": "policy_error", "tEmit": None}
    golden.tell({"kind": "robot_state", "session": 7, "t": 5, "chunk_gap_ns": ms(44)})
    figure = judged(golden).figures[2]
    assert figure.is_bad
    assert figure.note.endswith("in 1 session above 951 ms (lease less age)")
    assert 6000 < float(figure.value.removesuffix(" ms")) < 6100
