"""Robots beside others that are served: which of them a run is to be doubted for."""

from __future__ import annotations

import pytest
from faulty_runs import event, robot, unserved
from golden_runs import Fields, GoldenRun, ms, simulate, stages
from judging import judged

from ppstream.report.text import lines_of

ARM, LEG = 5, 6  # sessions
WHOLE = range(700)  # envelopes, 10 ms each


def run(
    leg: range = WHOLE,
    *,
    has_window: bool,
    told: list[int] | None = None,
    tells_ends: bool = True,
) -> GoldenRun:
    """The arm is served and moves all along; the leg has a row in the envelopes ``leg``.

    ``told``: steps of each chunk that the leg tells of.
    """
    golden = simulate(stages(), n=len(WHOLE), phase="ready")
    for k, line in enumerate(golden.lines):
        session = LEG if k in leg else 0
        line |= {"session": [ARM, session], "session_epoch": [0, 0]}
        line["window_end_ns"] = [k + 1, (k + 1) * has_window]
    golden.tell(robot(session=ARM, robot="arm"), robot(session=LEG, robot="leg"))
    if tells_ends:
        golden.tell(left(LEG, golden.lines[leg[-1]]))
    golden.tell(*(report(ARM, k, 1) for k in range(50)))
    return golden.tell(*(report(LEG, k, steps) for k, steps in enumerate(told or ())))


def left(session: int, line: Fields) -> Fields:
    """The robot's end, as of an envelope's begin."""
    return event("robot_left", session=session, heard_ns=line["tA0"])


def report(session: int, seq: int, executed: int) -> Fields:
    return {"kind": "robot", "session": session, "seq": seq, "age_ns": 10, "executed": executed}


def service(golden: GoldenRun) -> dict[str, str]:
    found = judged(golden).service
    assert found is not None
    return found.reasons


def test_a_robot_without_a_window_beside_one_that_is_served_is_unserved() -> None:
    assert service(run(has_window=False)) == {
        "SERVICE_UNSERVED": "robot leg (session 6) was there for 7.0 s and got no chunk, beside "
        "others that did"
    }


@pytest.mark.parametrize("changes", [{}, {"tells_ends": False}])
def test_a_stream_on_request_that_ends_no_windows_excuses_nothing(changes: dict[str, bool]) -> None:
    joints = {"name": "joints", "rate_hz": 100.0, "reference": True}
    golden = run(has_window=False, **changes)
    golden.set("config.streams", [joints, {"name": "scene", "max_request_hz": 5.0}])
    assert "robot leg" in service(golden)["SERVICE_UNSERVED"]


def test_robots_that_find_no_room_in_the_sentence_are_counted() -> None:
    golden = run(has_window=False)
    for k, line in enumerate(golden.lines):
        line |= {"session": [ARM, *range(LEG, LEG + 6)], "session_epoch": [0] * 7}
        line["window_end_ns"] = [k + 1] + [0] * 6
    golden.tell(*(robot(session=LEG + k, robot=f"leg{k}") for k in range(1, 6)))
    said = service(golden)["SERVICE_UNSERVED"]
    assert said.count("was there for") == 4
    assert said.endswith("; and 2 more, beside others that did")


def test_names_in_a_ledger_are_shown_as_a_line_can_hold_them() -> None:
    golden = run(has_window=True)
    table = {"received": 5, "used": 0, "in_flight": 0, "dropped": {"st\x1b[31male": 5}}
    golden.tell(golden.book() | {"streams": {"jo\x1b[31m\ud800": table}})
    text = "\n".join(row.text for row in lines_of(judged(golden)))
    assert "of jo" in text
    assert "\x1b" not in text
    text.encode()


ON_REQUEST = [{"name": "joints", "max_request_hz": 5.0}]


@pytest.mark.parametrize(("robot_name", "is_told"), [("leg", True), ("arm", False)])
def test_a_robot_that_asks_with_samples_that_are_refused_is_unserved(
    robot_name: str, *, is_told: bool
) -> None:
    golden = run(has_window=False).set("config.streams", ON_REQUEST)
    golden.tell(event("sensor", robot=robot_name, stream="joints", condition="refused"))
    told = {"SERVICE_UNSERVED": "robot leg (session 6) was there for 7.0 s and got no chunk "
        "(joints refused), beside others that did"}  # fmt: skip
    assert service(golden) == (told if is_told else {})


@pytest.mark.parametrize("is_stale", [True, False])
def test_a_robot_alone_that_asks_with_stale_samples_is_unserved(*, is_stale: bool) -> None:
    counts = {"received": 90, "dropped": {"stale" if is_stale else "overwritten": 90}}
    report = judged(unserved(robot(robot="arm"), **counts).set("config.streams", ON_REQUEST))
    assert report.reasons == ["SERVICE_UNSERVED"] * is_stale
    if is_stale:
        assert "got no chunk: 90 stale of 90 samples of joints" in report.statements[0]


def test_the_streams_of_a_robot_that_is_unserved_are_told() -> None:
    golden = run(has_window=False)
    for robot_name, stream, condition in (
        ("leg", "front", "silent"),
        ("leg", "imu", "refused"),
        ("leg", "imu", "ok"),
        ("leg", "joints", "unchanged"),
        ("arm", "left", "silent"),
    ):
        golden.tell(event("sensor", robot=robot_name, stream=stream, condition=condition))
    assert "got no chunk (front silent), beside" in service(golden)["SERVICE_UNSERVED"]


def test_a_robot_that_executes_none_of_its_chunks_is_told_with_their_number() -> None:
    assert service(run(has_window=True, told=[0] * 600)) == {
        "SERVICE_UNEXECUTED": "robot leg (session 6) was there for 7.0 s, got 600 chunks and told "
        "of none that it executed"
    }


@pytest.mark.parametrize(("late", "is_told"), [(50, True), (6, True), (5, False)])
def test_a_robot_whose_chunks_are_late_hides_behind_no_good_one(
    late: int, *, is_told: bool
) -> None:
    """Of the arm's 50 chunks; the leg executes 600: all together 7.7 % are late at most."""
    golden = run(has_window=True, told=[1] * 600).set("config.actions", {"lease_ms": 90.0})
    for line in [line for line in golden.extra if line.get("session") == ARM and "seq" in line]:
        if line["seq"] < late:
            line |= {"executed": 0, "age_ns": ms(91)}
    says = f"robot arm (session 5) executed {50 - late} of 50 chunks; {late} came too late, 91.0 ms"
    told = {"SERVICE_LATE": f"{says} old (p50) of 90 allowed"}
    assert service(golden) == (told if is_told else {})


@pytest.mark.parametrize(("leg_ns", "reasons"), [(10, {"SERVICE_UNEXECUTED"}), (ms(91), set())])
def test_late_chunks_of_one_robot_excuse_no_other(leg_ns: int, reasons: set[str]) -> None:
    """Of the arm's chunks all are late; the leg executes none of its own, late or not."""
    golden = run(has_window=True, told=[0] * 600).set("config.actions", {"lease_ms": 90.0})
    for line in golden.extra:
        if line["kind"] == "robot":
            is_arm = line["session"] == ARM
            line |= {"executed": 0, "age_ns": ms(91) if is_arm else leg_ns}
    golden.tell(*(report(ARM, k, 0) | {"age_ns": ms(91)} for k in range(50, 600)))
    assert service(golden).keys() == {"SERVICE_LATE"} | reasons


@pytest.mark.parametrize(
    "golden",
    [
        run(range(200), has_window=False),
        run(range(200), has_window=True, told=[0] * 200),
        run(range(50), has_window=False, tells_ends=False),
        run(has_window=True, told=[0] * 599 + [1]),
        run(has_window=True),
        run(has_window=False).set(
            "config.streams", [{"name": "joints", "max_request_hz": 5.0}, {"name": "imu"}]
        ),
    ],
    ids=[
        "there for 2 s",
        "2 s of chunks",
        "old log, 0.5 s",
        "moved once",
        "tells of no chunk",
        "on request",
    ],
)
def test_nothing_is_said_of_a_robot_that(golden: GoldenRun) -> None:
    assert service(golden) == {}


def again(at: int, *, has_window: bool = True) -> GoldenRun:
    """The leg's second session begins at this envelope and executes nothing; the first one did."""
    golden = run(range(at), has_window=True, told=[1] * 150)
    for k in range(at, 700):
        golden.lines[k]["session"] = [ARM, 7]
        golden.lines[k]["window_end_ns"] = [k + 1, (k + 1) * has_window]
    newer = robot(session=7, robot="leg", t=golden.lines[at]["tA0"])
    return golden.tell(newer, *(report(7, k, 0) for k in range(300 * has_window)))


def test_a_robot_is_judged_in_the_newest_sessions_that_are_long_enough() -> None:
    assert service(again(350)) == {}
    assert service(again(150)) == {
        "SERVICE_UNEXECUTED": "robot leg (session 7) was there for 5.5 s, got 300 chunks and told "
        "of none that it executed"
    }
    unserved = service(again(150, has_window=False))["SERVICE_UNSERVED"]
    assert "(session 7) was there for 5.5 s" in unserved


def test_short_sessions_are_judged_together() -> None:
    golden = run(range(200), has_window=False)
    for k in range(200, 700):
        golden.lines[k]["session"] = [ARM, 7 + k // 400]
    for session, at in ((7, 200), (8, 400)):
        golden.tell(robot(session=session, robot="leg", t=golden.lines[at]["tA0"]))
    golden.tell(left(7, golden.lines[400]))
    assert "leg (2 sessions) was there for 5.0 s" in service(golden)["SERVICE_UNSERVED"]


# ---- how long a robot waited for its first chunk ------------------------------------------------


def late(envelopes: int) -> GoldenRun:
    """The leg's first window is whole behind so many envelopes that are the arm's alone."""
    golden = run(has_window=False).set("config.actions", {"lease_ms": 300.0})
    for line in golden.lines[envelopes:]:
        line["window_end_ns"] = [line["window_end_ns"][0]] * 2
    return golden


@pytest.mark.parametrize(("envelopes", "waited"), [(200, "2 s"), (600, "6 s"), (700, "7 s")])
def test_a_wait_for_the_first_chunk_beside_a_robot_that_is_served_is_told(
    envelopes: int, waited: str
) -> None:
    report = judged(late(envelopes))
    assert report.service is not None
    assert report.service.gaps is not None
    assert f"{report.service.gaps.longest_ns / ms(1000):.0f} s" == waited
    gap = report.figures[2]
    assert gap.is_bad is (envelopes > 500)  # a row fills its first window for a while
    assert gap.note.endswith("above 300 ms (lease less age); robot leg before its first one")
    arm, leg = (row for row in lines_of(report) if row.text.startswith("  robot"))
    assert "longest without a new chunk 30.0 ms" in arm.text
    assert f"longest without a new chunk {gap.value}" in leg.text
    if envelopes < len(WHOLE):
        assert ("robot leg once had no" in report.sentence) is gap.is_bad


def test_a_first_window_that_took_a_while_hides_no_gap_of_another_robot() -> None:
    golden = late(200).tell(robot(session=ARM, robot="arm", chunk_gap_ns=ms(900)))
    report = judged(golden)
    assert "robot arm once had no new chunk for 900 ms, longer" in report.sentence
    assert report.figures[2].is_bad


def test_a_robot_that_asks_waits_from_its_first_question_on() -> None:
    golden = late(200).set("config.streams", [{"name": "joints", "max_request_hz": 5.0}])
    report = judged(golden)
    assert report.service is not None
    assert report.service.gaps is not None
    assert report.service.gaps.first_ns < ms(300)
