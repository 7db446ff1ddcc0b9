"""Robots beside others that are served: which of them a run is to be doubted for."""

from __future__ import annotations

import pytest
from faulty_runs import robot
from golden_runs import Fields, GoldenRun, simulate, stages
from judging import judged

ARM, LEG = 5, 6  # sessions
WHOLE = range(700)  # envelopes, 10 ms each


def run(leg: range = WHOLE, *, has_window: bool, told: list[int] | None = None) -> GoldenRun:
    """The arm is served and moves all along; the leg has a row in the envelopes ``leg``.

    ``told``: steps of each chunk that the leg tells of.
    """
    golden = simulate(stages(), n=len(WHOLE), phase="ready")
    for k, line in enumerate(golden.lines):
        session = LEG if k in leg else 0
        line |= {"session": [ARM, session], "session_epoch": [0, 0]}
        line["window_end_ns"] = [k + 1, (k + 1) * has_window]
    golden.tell(robot(session=ARM, robot="arm"), robot(session=LEG, robot="leg"))
    golden.tell(*(report(ARM, k, 1) for k in range(50)))
    return golden.tell(*(report(LEG, k, steps) for k, steps in enumerate(told or ())))


def report(session: int, seq: int, executed: int) -> Fields:
    return {"kind": "robot", "session": session, "seq": seq, "age_ns": 10, "executed": executed}


def service(golden: GoldenRun) -> dict[str, str]:
    found = judged(golden).service
    assert found is not None
    return found.reasons


def test_a_robot_without_a_window_beside_one_that_is_served_is_unserved() -> None:
    assert service(run(has_window=False)) == {
        "SERVICE_UNSERVED": "robot leg (session 6) was there for 7 s and got no chunk, beside "
        "others that did"
    }


def test_a_robot_that_executes_none_of_its_chunks_is_told_with_their_number() -> None:
    assert service(run(has_window=True, told=[0] * 600)) == {
        "SERVICE_UNEXECUTED": "robot leg (session 6) was there for 7 s, got 600 chunks and told of "
        "none that it executed"
    }


@pytest.mark.parametrize(
    "golden",
    [
        run(range(200), has_window=False),
        run(range(200), has_window=True, told=[0] * 200),
        run(has_window=True, told=[0] * 599 + [1]),
        run(has_window=True),
        run(has_window=False).set(
            "config.streams", [{"name": "joints", "max_request_hz": 5.0}, {"name": "imu"}]
        ),
    ],
    ids=["there for 2 s", "2 s of chunks", "moved once", "tells of no chunk", "on request"],
)
def test_nothing_is_said_of_a_robot_that(golden: GoldenRun) -> None:
    assert service(golden) == {}


def test_a_robot_is_judged_in_all_its_sessions() -> None:
    golden = run(range(350), has_window=True, told=[1] * 300)
    for k in range(350, 700):
        golden.lines[k]["session"] = [ARM, 7]
    golden.tell(robot(session=7, robot="leg"), *(report(7, k, 0) for k in range(300)))
    assert service(golden) == {}
