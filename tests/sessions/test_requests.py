from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from robot_rig import make_client, make_config, serving, wait_until
from session_desk import Desk, hello, open_desk, samples

from ppstream.config.schema import PipelineConfig
from ppstream.core.clock import NS_PER_MS, NS_PER_S, now_ns
from ppstream.observe.log_writer import EnvelopeRecord, TimestampLog
from ppstream.pipeline.rank0 import write_reports
from ppstream.sessions.requests import STATES_PER_S
from ppstream.sessions.table import SILENCE_NS
from ppstream.wire import robot_messages as m
from ppstream.wire.fields import MAX_INSTRUCTION, WIRE_MINOR

Events = list[tuple[str, dict[str, Any]]]
OFFSET_NS = -(10**15)


def asking_config() -> PipelineConfig:
    """Clocks are asked each second, and instructions taken."""
    config = make_config()
    return msgspec.structs.replace(
        config,
        service=msgspec.structs.replace(config.service, clock_probe_s=1.0),
        policy=msgspec.structs.replace(config.policy, instructions=True),
    )


@pytest.fixture
def events() -> Events:
    return []


@pytest.fixture
def desk(events: Events) -> Iterator[Desk]:
    with open_desk(config=asking_config(), phase="bring-up") as desk:
        desk.sessions.requests.attach(
            lambda number, text, done: done(number, ""),
            lambda name, **fields: events.append((name, fields)),
        )
        desk.sessions.requests.clock = lambda: desk.now_ns
        yield desk


def test_a_robots_answer_gives_the_offset_of_its_clock_for_the_log(
    desk: Desk, events: Events
) -> None:
    robot = desk.robot()
    session = desk.admit(robot, minor=WIRE_MINOR).session
    desk.now_ns += NS_PER_S
    desk.sessions.drain(desk.now_ns)
    question = desk.receive(robot)
    assert question == m.ClockQuestion(session, desk.now_ns)
    asked_ns = desk.now_ns
    desk.now_ns += 4 * NS_PER_MS  # there and back
    desk.send(robot, m.ClockReading(session, asked_ns, asked_ns + NS_PER_MS + OFFSET_NS))
    [(name, fields)] = events
    assert (name, fields["session"]) == ("robot_clock", session)
    assert fields["uncertainty_ns"] == 2 * NS_PER_MS
    assert abs(fields["offset_ns"] - OFFSET_NS) <= fields["uncertainty_ns"]


def test_the_log_has_when_a_robot_that_left_last_said_something(desk: Desk, events: Events) -> None:
    session = desk.admit(desk.robot(), robot="arm").session
    heard_ns = desk.now_ns
    desk.now_ns += SILENCE_NS
    desk.sessions.drain(desk.now_ns)
    told = {"session": session, "robot": "arm", "reason": "silent", "heard_ns": heard_ns}
    assert events == [("robot_left", told)]


def test_an_answer_from_the_future_is_ignored(desk: Desk, events: Events) -> None:
    robot = desk.robot()
    session = desk.admit(robot).session
    desk.send(robot, m.ClockReading(session, desk.now_ns + 1, 0))
    assert events == []


def test_an_instruction_waits_for_ready_and_the_newest_counts(desk: Desk, events: Events) -> None:
    robot = desk.robot()
    session = desk.admit(robot, instruction="pick", conditioning_epoch=1).session
    desk.send(robot, m.Instruct(session, 3, "place"), m.Instruct(session, 2, "stale"))
    assert events == []
    assert desk.rows[0].instruction_id == 0
    desk.sessions.set_phase("ready")
    assert [fields["text"] for _, fields in events] == ["place"]
    assert (desk.rows[0].instruction_id, desk.rows[0].conditioning_epoch) == (1, 3)
    assert desk.receive(robot) == m.Conditioned(session, 3)


@pytest.mark.parametrize("fault", ["", "no such word"])
def test_a_robot_that_comes_with_a_text_is_not_moved_before_the_policy_has_answered(
    fault: str,
) -> None:
    asked: list[Callable[[], None]] = []
    with open_desk(config=asking_config()) as desk:
        desk.sessions.requests.attach(
            lambda number, text, done: asked.append(lambda: done(number, fault)),
            lambda name, **fields: None,
        )
        row, robot = desk.rows[0], desk.robot()
        session = desk.admit(robot, instruction="pick", conditioning_epoch=3, resumes=99).session
        desk.send(robot, samples(session, 1))
        assert (row.reference.count, row.present) == (1, False)
        asked.pop()()
        desk.sessions.drain(desk.now_ns)
        assert row.present
        assert (row.instruction_id, row.conditioning_epoch) == (0 if fault else 1, 3)
        assert desk.receive(robot) == m.Conditioned(session, 3, fault)
        desk.send(robot, m.Instruct(session, 4, "place"))
        assert row.present  # it follows the one before until then
        desk.send(robot, m.Bye(session))
        session = desk.admit(robot).session
        desk.send(robot, samples(session, 1))
        assert row.present


def test_a_run_that_takes_no_instructions_says_so() -> None:
    with open_desk() as desk:
        robot = desk.robot()
        session = desk.admit(robot).session
        desk.send(robot, m.Instruct(session, 1, "pick"))
        answer = desk.receive(robot)
        assert (answer.session, answer.conditioning_epoch) == (session, 1)
        assert "policy.instructions" in answer.fault
        assert desk.rows[0].conditioning_epoch == 0


def test_a_robot_client_answers_with_the_clock_that_stamps_its_samples(events: Events) -> None:
    def clock() -> int:
        return now_ns() + OFFSET_NS

    with serving(asking_config()) as server:
        requests = server.sessions.requests
        server.order(
            lambda: requests.attach(
                lambda number, text, done: done(number, ""),
                lambda name, **fields: events.append((name, fields)),
            )
        )
        with make_client(server.sessions.endpoint, clock=clock) as client:
            client.connect(10)
            wait_until(lambda: events)
    fields = events[0][1]
    assert abs(fields["offset_ns"] - OFFSET_NS) <= fields["uncertainty_ns"]


def test_an_instruction_too_long_for_the_wire_is_not_one(desk: Desk) -> None:
    robot = desk.robot()
    session = desk.admit(robot).session
    desk.send(robot, m.Instruct(session, 1, "x" * MAX_INSTRUCTION))
    desk.send(robot, m.Instruct(session, 2, "x" * (MAX_INSTRUCTION + 1)))
    assert desk.sessions.statistics().frames_dropped == {"undecodable": 1}
    assert hello().instruction == ""


def test_how_a_robot_fares_is_for_the_log_bounded_and_printable(desk: Desk) -> None:
    robot = desk.robot()
    session = desk.admit(robot).session
    state = m.RobotState(session, 2, 310_000_000, 1, "stop: \x1b[2J\nforged", 690_000_000)
    desk.send(robot, state)
    [told] = desk.sessions.reports
    shown = {"fault": told.fault, "robot": "arm"}
    assert msgspec.structs.asdict(told) == msgspec.structs.asdict(state) | shown
    assert told.fault == "stop:  [2J forged"
    desk.send(robot, *[state] * (STATES_PER_S + 4))
    assert len(desk.sessions.reports) == STATES_PER_S
    assert desk.sessions.statistics().reports_lost == 5
    desk.now_ns += NS_PER_S
    desk.send(robot, state)
    assert len(desk.sessions.reports) == STATES_PER_S + 1


def test_a_line_of_the_log_says_how_a_robot_fared(tmp_path: Path) -> None:
    log = TimestampLog(tmp_path / "log", EnvelopeRecord, 8, run_id="r", generation=0)
    report, state = m.ChunkReport(7, 0, 3, 25, 4), m.RobotState(7, 2, 310, 1, "stop: operator", 690)
    before_ns = now_ns()
    write_reports(log, deque([report, state]))
    log.close()
    first, second = map(msgspec.json.decode, (tmp_path / "log").read_bytes().splitlines())
    assert (first["kind"], first["seq"]) == ("robot", 3)
    assert before_ns <= second.pop("t") <= now_ns()
    assert second == {
        "kind": "robot_state",
        "run_id": "r",
        "generation": 0,
        "session": 7,
        "holds": 2,
        "held_ns": 310,
        "faults": 1,
        "fault": "stop: operator",
        "chunk_gap_ns": 690,
    }


IMPOSSIBLE = (-1, -(2**62), 2**53 + 1, 2**63 - 1)


@pytest.mark.parametrize("value", IMPOSSIBLE)
@pytest.mark.parametrize(
    ("kind", "field"),
    [
        *((m.ChunkReport, f) for f in m.ChunkReport.__struct_fields__ if f != "session"),
        *((m.RobotState, f) for f in m.RobotState.__struct_fields__ if f.endswith("s")),
        (m.Prefix, "delay_ns"),
    ],
)
def test_a_duration_or_count_that_cannot_be_is_dropped_and_counted(
    desk: Desk, kind: Any, field: str, value: int
) -> None:
    robot = desk.robot()
    session = desk.admit(robot).session
    good = {
        m.ChunkReport: m.ChunkReport(session, 0, 0, 1, 1, 1, 1),
        m.RobotState: m.RobotState(session, 1, 1, 1, "", 1),
        m.Prefix: m.Prefix(session, 0, 0, 1, 0, 0, memoryview(bytes(8))),
    }[kind]
    largest = msgspec.structs.replace(good, **{field: 2**53})
    desk.send(robot, largest)
    told = list(desk.sessions.reports)
    desk.send(robot, msgspec.structs.replace(good, **{field: value}))
    assert desk.sessions.statistics().frames_dropped == {"undecodable": 1}
    assert list(desk.sessions.reports) == told
    assert desk.sessions.statistics().open == 1


@pytest.mark.parametrize("robot_ns", [-(2**62) - 1, 2**62 + 1])
def test_an_instant_that_no_clock_shows_is_dropped_and_counted(
    desk: Desk, events: Events, robot_ns: int
) -> None:
    robot = desk.robot()
    session = desk.admit(robot).session
    desk.send(robot, m.ClockReading(session, desk.now_ns, robot_ns))
    desk.send(robot, m.Prefix(session, 0, robot_ns, 1, 0, 0, memoryview(bytes(8))))
    assert desk.sessions.statistics().frames_dropped == {"undecodable": 2}
    assert events == []
