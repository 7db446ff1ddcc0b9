"""Evidence that robots ask in lock-step, from lines whose rows are named; made-up logs."""

from __future__ import annotations

from typing import Any

import pytest
from faulty_runs import event
from golden_runs import GoldenRun, ms, simulate, stages
from judging import judged

from ppstream.analysis.period_model import PipelineForm
from ppstream.analysis.records import RobotRequests
from ppstream.analysis.requests import ROBOTS_MAX, Requests, is_on_request
from ppstream.analysis.run_report import RunReport
from ppstream.core.quantiles import bin_of
from ppstream.report.html.page import render_page
from ppstream.report.text import WIDTH, render

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


# ---- what a gateway counted ----------------------------------------------------------------------


def gateway_line(robot: str, requests: int, answered: int, **more: Any) -> dict[str, Any]:
    """Of answers that took 10 ms each."""
    times = {"max_ns": ms(10), "bins": {str(bin_of(ms(10))): answered}} if answered else {}
    counts = {"requests": requests, "answered": answered, "unanswered": 0, "errors": {}}
    return {"kind": "requests", "wire": "openpi", "robot": robot, **counts, **times, **more}


def with_gateway(*lines: dict[str, Any]) -> tuple[RunReport, str, str]:
    """The report, its text and its page."""
    golden = simulate()
    run = golden.tell(*lines).parse()
    report = judged(golden)
    return report, render(report), render_page([(run, report)])


def test_a_run_without_a_gateway_shows_no_table() -> None:
    report, text, page = with_gateway()
    assert report.as_dict()["requests"] == []
    assert "Requests" not in text
    assert "Requests" not in page


def test_the_table_has_a_row_for_each_robot_and_the_json_its_numbers() -> None:
    errors = {"timeout": 2, "bad_request": 1}
    report, text, page = with_gateway(
        gateway_line("left", 700, 690, errors=errors, unanswered=7),
        gateway_line("right", 5, 4, unanswered=1),
        gateway_line("left", 400, 407, unanswered=0),
        gateway_line("right", 0, 0, errors={"gone": 1}),
    )
    left, right = report.as_dict()["requests"]  # type: ignore[misc]
    assert left == {
        "wire": "openpi",
        "robot": "left",
        "requests": 1100,
        "answered": 1097,
        "errors": errors,
        "unanswered": 0,
        "imbalance": 0,
        "p50_ms": pytest.approx(10, rel=0.02),
        "p95_ms": pytest.approx(10, rel=0.02),
        "p99_ms": pytest.approx(10, rel=0.02),
        "max_ms": pytest.approx(10),
    }
    assert (right["p99_ms"], right["errors"]) == (None, {"gone": 1})  # too few for a p99
    head, first, second = text[text.index("Requests\n") :].splitlines()[1:4]
    assert head.split() == ["wire", "robot", "requests", "answered", "p50", "p99", "max", "errors"]
    assert first.split()[:5] == ["openpi", "left", "1100", "1097", "10.0"]
    assert first.endswith("2 timeout, 1 bad_request")
    assert second.split()[-7:] == ["10.0", "ms", "NA", "10.0", "ms", "1", "gone"]
    assert "ledger off: " not in text + page
    assert "<h2>Requests</h2>" in page
    assert "<td>2 timeout, 1 bad_request</td>" in page


def test_a_robot_without_an_answer_is_unserved() -> None:
    errors = {"timeout": 5, "gone": 1}
    report, text, _ = with_gateway(
        gateway_line("left", 6, 6),
        gateway_line("right", 7, 0, errors=errors, unanswered=1),
        gateway_line("early", 2, 0, errors={"not_ready": 2}),
        gateway_line("newest", 1, 0, unanswered=1),
    )
    assert report.reasons == ["SERVICE_UNSERVED"]
    said = "robot right (openpi) had 0 of 7 requests answered: 5 timeout, 1 gone"
    assert report.service is not None
    assert report.service.reasons == {"SERVICE_UNSERVED": said}
    assert said in text


@pytest.mark.parametrize(("left", "tries"), [(6, 4), (200, 6)])
def test_a_few_requests_of_somebody_who_tries_are_no_robot_unserved(left: int, tries: int) -> None:
    trials = [gateway_line(f"t{n}", 1, 0, errors={"bad_request": 1}) for n in range(tries)]
    report, _, _ = with_gateway(gateway_line("left", left, left), *trials)
    assert report.reasons == []


@pytest.mark.parametrize(
    ("pauses_s", "told"),
    [
        ((), None),
        ((1.0,), "the gateway ended with signal 9 SIGKILL: its robots held until the run had"),
        (
            (1.0, None),
            "the gateway ended with signal 9 SIGKILL 2 times: its robots hold until somebody",
        ),
    ],
)
def test_a_gateway_that_ended_is_told_with_what_became_of_its_robots(
    pauses_s: tuple[float | None, ...], told: str | None
) -> None:
    golden = in_turn()
    for again_s in pauses_s:
        more = {} if again_s is None else {"again_in_s": again_s}
        golden.tell(event("gateway", gateway="ended with signal 9 SIGKILL", **more))
    said = [text for text in judged(golden).statements if text.startswith("the gateway")]
    assert [text[: len(told or "")] for text in said] == ([] if told is None else [told])


OPENPI = {"wire": "openpi", "answer": "exact", "timeout_ms": 29.0}
SHORT = (
    "robots that ask a gateway wait up to 30.0 ms here, 10.0 for a window and 20.0 for its actions"
)


def wait_notes(gateway: dict[str, Any], rows: int = 8, **settings: Any) -> list[str]:
    """Of a bring-up whose chunks are 20 ms old, 10 ms apart."""
    golden = simulate(stages())
    golden.manifest["config"] = {
        "gateway": [gateway],
        "streams": [ON_REQUEST],
        "batch": {"rows": rows},
        "pipeline": {"pacing": "sample"},
        "actions": {"lease_ms": 500.0, "horizon": 10, "dt_ms": 20.0},
    } | settings
    return [text for text in judged(golden).statements if text.startswith("robots that ask a")]


def test_a_time_out_below_the_wait_for_a_turn_is_told_with_the_remedy() -> None:
    assert wait_notes(OPENPI) == [
        f"{SHORT}, and gateway[0].timeout_ms is 29: raise it to 33, a tenth to spare, or have them "
        'share windows with pipeline.pacing = "rows"'
    ]


def test_actions_that_are_past_when_their_robot_has_its_turn_are_told() -> None:
    actions = {"lease_ms": 25.0, "horizon": 4, "dt_ms": 7.0}
    (told,) = wait_notes(OPENPI | {"timeout_ms": 1000.0}, actions=actions)
    assert told.startswith(
        f"{SHORT}, and actions.lease_ms is 25 and actions.horizon x dt_ms is 28: raise each to 33"
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"gateway": OPENPI | {"timeout_ms": 30.0}},
        {"gateway": OPENPI | {"answer": "newest"}},
        {"gateway": OPENPI | {"wire": "lerobot"}},
        {"gateway": OPENPI, "rows": 1},
        {"gateway": OPENPI, "pipeline": {"pacing": "rows"}},
        {"gateway": OPENPI, "streams": [BY_ITSELF]},
    ],
)
def test_robots_that_wait_for_no_turn_or_that_long_are_told_nothing(
    settings: dict[str, Any],
) -> None:
    assert wait_notes(**settings) == []


def test_a_ledger_that_does_not_balance_is_told() -> None:
    report, text, page = with_gateway(gateway_line("left", 9, 5, errors={"gone": 1}, unanswered=1))
    (row,) = report.requests
    assert row.imbalance == 2
    said = "5 answered + 1 errors + 1 unanswered"
    assert f"  ledger off openpi left: 9 requests, and {said}" in text
    assert f"ledger off: {said}" in page


def test_many_robots_with_long_names_keep_the_table_small() -> None:
    lines = [gateway_line(f"{'long' * 15}-{n}", n, n) for n in range(1, 1001)]
    errors = dict.fromkeys(("bad_request", "not_executable", "gateway_failed", "timeout"), 1)
    lines.append(gateway_line("\x1b[31m", 2000, 1996, errors=errors))
    report, text, _ = with_gateway(*lines)
    assert len(report.requests) == ROBOTS_MAX + 1
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "\x1b" not in text
    others = report.requests[-1]
    assert others.robot == f"{1001 - ROBOTS_MAX} others"
    assert others.requests == sum(range(1, 1001 - ROBOTS_MAX + 1))
    assert sum(row.requests for row in report.requests) == sum(range(1, 1001)) + 2000


@pytest.mark.parametrize("bins", [{"x": 1}, {"-1": 1}, {"9999999": 1}, {"5": -9}, [1], None])
def test_bins_that_are_none_are_left_out(bins: object) -> None:
    report, _, _ = with_gateway(gateway_line("left", 1, 1, bins=bins))
    assert report.requests == (RobotRequests("openpi", "left", 1, 1, max_ns=ms(10)),)
