"""What the gateway counts of its clients' requests, and the file in the run's folder."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
from gateway_rig import LONG_NS, Gateway, emit, gated, observation
from lerobot_rig import MAP, observed, robot_at, values
from robot_rig import file_size_limit, wait_until

from ppstream.analysis.log_reader import read_run
from ppstream.analysis.records import RobotRequests, RunLog
from ppstream.core.clock import NS_PER_MS, now_ns
from ppstream.core.durations import LABELS_MAX, OTHER
from ppstream.core.errors import ConfigError
from ppstream.gateway.request_log import EVERY_S, CountedRequest, RequestCounts, RequestLog
from ppstream.wire import groot

GROOT: dict[str, Any] = {
    "wire": "groot",
    "map": {"joints": "state.arm", "imu": "state.base"},
    "action_keys": {"x": (0, 1), "y": (1, 2)},
}
ARM: dict[str, Any] = {"state.arm": [[0.0, 1.0, 2.0]], "state.base": [[0.5, 0.5]]}
LEROBOT: dict[str, Any] = {"wire": "lerobot", "map": MAP}


def run_folder(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    topology = {"world_size": 2, "d_in": 1, "d_out": 1}
    manifest = {"schema": "ppstream.log/1", "run_id": "this-run", "topology": topology}
    (folder / "run.json").write_text(json.dumps(manifest))
    return folder


def begun(counts: RequestCounts, robot: str, ago_ns: int = 0) -> CountedRequest:
    request = counts.received(robot, now_ns() - ago_ns)
    request.begin()
    return request


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("gateway.*"))


def ends(requests: RobotRequests) -> tuple[int, int, dict[str, int], int]:
    return requests.requests, requests.answered, requests.errors, requests.unanswered


# ---- counts --------------------------------------------------------------------------------------


def test_a_request_is_counted_when_it_begins_and_its_first_end_alone() -> None:
    counts = RequestCounts("openpi")
    late, early, never = (begun(counts, "arm", ms * NS_PER_MS) for ms in (100, 10, 0))
    late.answered()
    late.failed("gone")
    early.failed("timeout")
    early.answered()
    never.begin()
    counts.received("arm", now_ns())  # no request for actions
    (row,) = counts.drain()
    assert ends(row) == (3, 1, {"timeout": 1}, 1)
    assert row.imbalance == 0
    assert row.latency is not None
    assert 100 * NS_PER_MS <= row.latency.p50_ns <= row.latency.max_ns
    assert counts.drain() == []
    never.failed("gone")
    (row,) = counts.drain()
    assert ends(row) == (0, 0, {"gone": 1}, 0)


def test_names_are_bounded_in_number_and_length_and_print() -> None:
    counts = RequestCounts("openpi")
    in_work = begun(counts, "evil\n\x1b[31m" + "x" * 100)
    for number in range(1000):
        begun(counts, f"robot-{number}").answered()
    rows = {row.robot: row for row in counts.drain()}
    assert len(rows) == LABELS_MAX + 1
    assert rows[OTHER].answered == 1000 - (LABELS_MAX - 1)
    (evil,) = (name for name in rows if name.startswith("evil"))
    assert evil == "evil??[31m" + "x" * 54
    in_work.answered()
    (row,) = counts.drain()
    assert (row.robot, row.answered) == (evil, 1)


# ---- the file ------------------------------------------------------------------------------------


def test_the_file_is_read_back_with_what_was_counted_however_often_it_was_written(
    tmp_path: Path,
) -> None:
    counts = [RequestCounts("openpi"), RequestCounts("groot")]
    log = RequestLog(run_folder(tmp_path), counts)
    for number in range(300):
        begun(counts[0], "left", number * NS_PER_MS).answered()
        begun(counts[number % 2], "right").failed("timeout" if number % 3 else "bad_request")
        if number % 50 == 0:
            log.write()
    begun(counts[1], "left")
    log.close()
    run = read_run(tmp_path)
    assert [(row.wire, row.robot) for row in run.requests] == [
        ("openpi", "left"),
        ("openpi", "right"),
        ("groot", "right"),
        ("groot", "left"),
    ]
    left, right, _, waits = run.requests
    assert ends(left) == (300, 300, {}, 0)
    assert ends(right) == (150, 0, {"bad_request": 50, "timeout": 100}, 0)
    assert ends(waits) == (1, 0, {}, 1)
    assert not any(row.imbalance for row in run.requests)
    assert left.latency is not None
    assert left.latency.p50_ns == pytest.approx(149 * NS_PER_MS, rel=0.1)
    assert (run.torn_lines, run.ignored_lines, run.strangers) == (0, 0, ())


def test_the_file_stays_small_however_many_requests_and_names_there_are(tmp_path: Path) -> None:
    step_bytes = 20_000
    counts = RequestCounts("openpi")
    log = RequestLog(run_folder(tmp_path), [counts], step_bytes=step_bytes)
    intervals_s = [log.interval_s]
    for number in range(2000):
        for robot in range(1000) if number == 0 else (number % 7,):
            for _ in range(3):
                begun(counts, f"robot-{robot}", robot * 1000).answered()
        log.write()
        intervals_s.append(log.interval_s)
    (file,) = files(tmp_path)
    assert len(file.read_bytes().splitlines()) <= LABELS_MAX + 1 + 1999
    assert intervals_s[0] == EVERY_S
    assert intervals_s[-1] == EVERY_S * 2.0 ** (file.stat().st_size // step_bytes) > 1e6
    log.close()
    assert sum(row.answered for row in read_run(tmp_path).requests) == 3 * (1000 + 1999)


def test_a_full_disk_costs_no_request_and_leaves_no_part_of_a_line(tmp_path: Path) -> None:
    counts = RequestCounts("openpi")
    log = RequestLog(run_folder(tmp_path), [counts])
    begun(counts, "arm").answered()
    log.write()
    (file,) = files(tmp_path)
    whole = file.read_bytes()
    begun(counts, "arm").failed("timeout")
    with file_size_limit(len(whole) + 100):
        log.write()
    assert file.read_bytes() == whole
    begun(counts, "arm").answered()
    log.close()
    (row,) = read_run(tmp_path).requests
    assert ends(row) == (3, 2, {"timeout": 1}, 0)


def test_a_file_that_was_cut_within_a_line_is_read(tmp_path: Path) -> None:
    counts = RequestCounts("openpi")
    log = RequestLog(run_folder(tmp_path), [counts])
    for _ in range(2):
        begun(counts, "arm").answered()
        log.write()
    log.close()
    (file,) = files(tmp_path)
    file.write_bytes(file.read_bytes()[:-40])
    run = read_run(tmp_path)
    assert (run.torn_lines, [row.answered for row in run.requests]) == (1, [1])


def test_each_start_has_a_file_of_its_own_and_their_counts_are_added(tmp_path: Path) -> None:
    for _ in range(3):
        counts = RequestCounts("openpi")
        log = RequestLog(run_folder(tmp_path), [counts])
        begun(counts, "arm").answered()
        begun(counts, "arm")
        log.close()
    assert [file.name for file in files(tmp_path)] == [f"gateway.gen{n}.jsonl" for n in range(3)]
    (row,) = read_run(tmp_path).requests
    assert (ends(row), row.imbalance) == ((6, 3, {}, 3), 0)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="want the folder of a run"):
        RequestLog(tmp_path, [])


# ---- what the wires count ------------------------------------------------------------------------


def logged(gateway: Gateway, folder: Path) -> RunLog:
    """What the report reads of all that this gateway has counted."""
    RequestLog(run_folder(folder), [gateway.requests]).close()
    return read_run(folder)


def test_openpis_clients_are_counted_as_they_count_themselves(tmp_path: Path) -> None:
    found: Counter[str] = Counter()
    with gated() as (rank0, gateway):
        for wrong in ({"a": 1}, b"nonsense", "text"):
            with gateway.robot("/robots/arm") as robot:
                for value in range(5):
                    found["answered"] += "actions" in robot.ask(observation(value / 8))
                robot.ask({"endpoint": "reset"})  # no request for actions
                found["bad_request"] += isinstance(robot.ask(wrong), str)
            wait_until(lambda: not rank0.rows[0].session)
    (row,) = logged(gateway, tmp_path).requests
    assert (row.wire, row.robot, row.unanswered) == ("openpi", "arm", 0)
    assert row.answered == found.pop("answered") == 15
    assert row.errors == found == {"bad_request": 3}
    assert row.requests == 18


def test_a_run_that_is_not_ready_is_the_reason(tmp_path: Path) -> None:
    with gated(phase="warming", timeout_ms=50.0) as (_, gateway), gateway.robot() as robot:
        assert "the run is warming" in robot.ask()
    (row,) = logged(gateway, tmp_path).requests
    assert ends(row) == (1, 0, {"not_ready": 1}, 0)


def test_an_observation_without_actions_is_a_timeout(tmp_path: Path) -> None:
    with gated(answers=False, timeout_ms=50.0) as (_, gateway), gateway.robot() as robot:
        assert "no actions came" in robot.ask()
    (row,) = logged(gateway, tmp_path).requests
    assert row.robot.startswith("openpi-1-127.0.0.1-")
    assert ends(row) == (1, 0, {"timeout": 1}, 0)


def test_an_answer_whose_client_has_left_is_none(tmp_path: Path) -> None:
    with gated(answers=False) as (rank0, gateway):
        with gateway.robot() as robot:
            robot.send(observation())
            wait_until(lambda: rank0.rows[0].rings["joints"].newest_ns > 0)
        emit(rank0, 0)
        wait_until(lambda: not rank0.rows[0].session)
    (row,) = logged(gateway, tmp_path).requests
    assert ends(row) == (1, 0, {"gone": 1}, 0)


@contextmanager
def groot_client(gateway: Gateway, **options: Any) -> Iterator[Callable[..., Any]]:
    with zmq.Context() as context, context.socket(zmq.REQ) as socket:
        socket.set(zmq.RCVTIMEO, 20_000)
        for name, value in options.items():
            socket.set(getattr(zmq, name), value)
        socket.connect(f"tcp://127.0.0.1:{gateway.port}")

        def ask(endpoint: str, data: Any = None) -> Any:
            socket.send(groot.encode({"endpoint": endpoint, "data": data}))
            return groot.decode_reply(socket.recv())

        yield ask


def test_groots_clients_are_counted_as_they_count_themselves(tmp_path: Path) -> None:
    with gated(**GROOT) as (_, gateway), groot_client(gateway) as ask:
        ask("ping")
        ask("get_modality_config")
        for _ in range(4):
            assert "action.x" in ask("get_action", ARM)
        assert "missing" in ask("get_action", {"state.arm": [[0.0, 1.0, 2.0]]})["error"]
        ask("reset")
        assert "Unknown" in ask("dance")["error"]
    (row,) = logged(gateway, tmp_path).requests
    assert row.wire == "groot"
    assert row.robot.startswith("groot-1-127.0.0.1-")  # and the client's port
    assert ends(row) == (6, 4, {"bad_request": 2}, 0)


def test_a_second_request_is_busy_and_the_one_in_work_ends_with_the_gateway(
    tmp_path: Path,
) -> None:
    silent = GROOT | {"answers": False}
    request = [b"", groot.encode({"endpoint": "get_action", "data": ARM})]
    with (
        gated(**silent) as (rank0, gateway),
        zmq.Context() as context,
        context.socket(zmq.DEALER) as socket,
    ):
        socket.set(zmq.RCVTIMEO, 20_000)
        socket.connect(f"tcp://127.0.0.1:{gateway.port}")
        socket.send_multipart(request)
        wait_until(lambda: rank0.rows[0].rings["joints"].newest_ns > 0)
        robot = rank0.rows[0].robot
        socket.send_multipart(request)
        said = groot.decode_reply(socket.recv_multipart()[-1])
        assert "is not answered yet" in said["error"]
    (row,) = logged(gateway, tmp_path).requests
    assert (row.robot, ends(row)) == (robot, (2, 0, {"busy": 1, "gateway_ends": 1}, 0))


def test_a_token_that_is_wrong_is_a_refusal_of_no_robot(tmp_path: Path) -> None:
    changes = GROOT | {"api_key": "0123456789abcdef"}
    with gated(**changes) as (_, gateway), groot_client(gateway) as ask:
        assert "Unauthorized" in ask("get_action", ARM)["error"]
    (row,) = logged(gateway, tmp_path).requests
    assert (row.robot, ends(row)) == ("unnamed", (1, 0, {"refused": 1}, 0))


def test_a_client_of_groot_that_names_nobody_is_counted_as_the_robot_that_it_is(
    tmp_path: Path,
) -> None:
    with gated(**GROOT) as (rank0, gateway), groot_client(gateway) as ask:
        assert "action.x" in ask("get_action", ARM)
        robot = rank0.rows[0].robot
    (row,) = logged(gateway, tmp_path).requests
    assert (row.robot, ends(row)) == (robot, (1, 1, {}, 0))


def test_lerobots_clients_are_counted_as_they_count_themselves(tmp_path: Path) -> None:
    with gated(**LEROBOT) as (_, gateway), robot_at(gateway.server.address) as robot:
        robot.start()
        for step in range(4):
            assert robot.ask(timestep=step)
        with pytest.raises(Exception, match=r"j2\.pos is missing"):
            robot.send(observed(values(j2_pos=None)))
    (row,) = logged(gateway, tmp_path).requests
    assert row.robot.startswith("lerobot-1-127-0-0-1-")
    assert ends(row) == (5, 4, {"bad_request": 1}, 0)


def test_of_lerobots_observations_those_before_the_answered_one_are_superseded(
    tmp_path: Path,
) -> None:
    silent = LEROBOT | {"answers": False}
    with gated(**silent) as (rank0, gateway), robot_at(gateway.server.address) as robot:
        robot.start()
        joints = rank0.rows[0].rings["joints"]
        stamps = [0]
        for step in range(4):
            robot.send(timestep=step)
            wait_until(lambda: joints.newest_ns > stamps[-1])
            stamps.append(joints.newest_ns)
        for seq in range(2):  # two chunks of one observation are one answer
            emit(rank0, seq, end_ns=stamps[3], expires_ns=stamps[3] + LONG_NS)
            assert robot.actions()
    (row,) = logged(gateway, tmp_path).requests
    assert ends(row) == (4, 1, {"superseded": 2, "gateway_ends": 1}, 0)
