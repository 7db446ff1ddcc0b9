"""Evidence that robots ask in lock-step, from lines whose rows are named; made-up logs."""

from __future__ import annotations

from typing import Any

import pytest
from golden_runs import GoldenRun, ms, simulate, stages
from judging import judged

from ppstream.analysis.period_model import PipelineForm
from ppstream.analysis.requests import Requests, is_on_request
from ppstream.analysis.run_report import RunReport

ON_REQUEST = {"name": "joints", "max_request_hz": 50.0, "rate_hz": None}
BY_ITSELF = {"name": "joints", "max_request_hz": None, "rate_hz": 50.0}
ROBOT, OTHER = 0x2A, 0x2B


def served(*windows: Any, stream: dict[str, Any] = ON_REQUEST) -> RunReport:
    """A run whose envelopes have these windows: of each row its session and window's end."""
    golden = in_turn()
    golden.manifest["config"] = {"streams": [stream]}
    for number, line in enumerate(golden.lines):
        rows = [of(number) for of in windows]
        names = ("session", "session_epoch", "window_end_ns")
        for name, column in zip(names, zip(*rows, strict=True), strict=True):
            line[name] = list(column) if len(rows) > 1 else column[0]
    return judged(golden)


def in_turn() -> GoldenRun:
    """Envelopes that begin when the one before is out."""
    form = PipelineForm(order="decode_first")
    return simulate(stages(), form, phase="ready", pacing="rows")


def requests(report: RunReport) -> Requests | None:
    assert report.service is not None
    return report.service.requests


def test_a_robot_that_waits_for_each_answer_asks_in_step() -> None:
    report = served(lambda n: (ROBOT, 0, 1000 + n))
    found = requests(report)
    assert found is not None
    assert found.in_step
    assert (found.ahead, found.share) == (0, 1.0)
    assert found.windows == 330
    (said,) = [s for s in report.statements if s.startswith("robots ask in lock-step")]
    assert f"{found.windows} of {found.windows} windows" in said
    for remedy in ('pipeline.pacing = "rows"', 'answer = "newest"', "RobotClient"):
        assert remedy in said
    service = report.as_dict()["service"]
    assert isinstance(service, dict)
    assert service["requests"] == found._asdict()


def test_a_window_that_comes_again_is_counted_once() -> None:
    report = served(lambda n: (ROBOT, 0, 1000 + n // 2), lambda n: (OTHER, 0, n))
    found = requests(report)
    assert found is not None
    assert found.share == pytest.approx(1.5, abs=0.02)


def test_a_free_row_and_an_invented_robot_ask_nothing() -> None:
    report = served(lambda n: (0, 0, n), lambda n: (-1, 0, n), lambda n: (OTHER, 0, 0))
    assert requests(report) == (0, 0, 0)
    assert not [s for s in report.statements if "lock-step" in s]


def test_a_robot_that_asks_before_its_answer_is_not_in_step() -> None:
    golden = simulate(stages(), phase="ready")  # saturated: envelopes overlap
    golden.manifest["config"] = {"streams": [ON_REQUEST]}
    for number, line in enumerate(golden.lines):
        line |= {"session": ROBOT, "session_epoch": 0, "window_end_ns": number}
    report = judged(golden)
    found = requests(report)
    assert found is not None
    assert found.ahead > 0.9 * found.windows
    assert not found.in_step
    assert not [s for s in report.statements if "lock-step" in s]


def test_two_robots_in_turn_are_each_in_step_though_their_envelopes_overlap() -> None:
    golden = simulate(stages(), phase="ready")
    golden.manifest["config"] = {"streams": [ON_REQUEST]}
    for number, line in enumerate(golden.lines):
        line |= {"session": ROBOT + number % 4, "session_epoch": 0, "window_end_ns": number}
    found = requests(judged(golden))
    assert found is not None
    assert found.in_step


def test_samples_that_come_by_themselves_prove_nothing() -> None:
    report = served(lambda n: (ROBOT, 0, 1000 + n), stream=BY_ITSELF)
    assert requests(report) is None
    assert not [s for s in report.statements if "lock-step" in s]


@pytest.mark.parametrize(
    ("streams", "expected"),
    [
        ([BY_ITSELF | {"rate_hz": 10.0}, ON_REQUEST], True),
        ([BY_ITSELF, ON_REQUEST | {"max_request_hz": 10.0}], False),
        ([BY_ITSELF, ON_REQUEST | {"max_request_hz": 10.0, "reference": True}], True),
        ([ON_REQUEST, BY_ITSELF | {"reference": True}], False),
        ([], False),
        ("nonsense", False),
    ],
)
def test_the_stream_that_ends_windows_decides(streams: object, expected: bool) -> None:
    assert is_on_request({"streams": streams}) is expected


def test_holes_of_a_stream_on_request_are_none() -> None:
    golden = in_turn()
    golden.manifest["config"] = {"streams": [ON_REQUEST]}
    balance = {"received": 900, "used": 900, "dropped": {}, "in_flight": 0}
    joints = balance | {"holes": 9, "longest_hole_ns": ms(164), "targets": 1000, "invalid": 0}
    golden.extra = [golden.book() | {"streams": {"joints": joints, "imu": joints}}]
    report = judged(golden)
    assert report.service is not None
    assert {s.stream: s.is_on_request for s in report.service.streams} == {
        "joints": True,
        "imu": False,
    }
