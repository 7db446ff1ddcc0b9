"""The directory, by its reports and the time: who gets which pipeline."""

from __future__ import annotations

from typing import Any

import pytest

from ppstream.core.clock import NS_PER_S
from ppstream.fleet.directory import SILENT_NS, TTL_NS, Directory, PipelineReport
from ppstream.wire.directory_messages import Resolved, Unresolved

S = NS_PER_S


def reported(*pipelines: str, at_ns: int = 0, **fields: Any) -> Directory:
    made = Directory()
    for name in pipelines:
        tell(made, name, at_ns, **fields)
    return made


def tell(directory: Directory, name: str, at_ns: int, **fields: Any) -> None:
    known = {"phase": "ready", "endpoint": f"unix:///run/{name}", "rows": 2, "pid": 1}
    directory.report(PipelineReport(pipeline=name, **known | fields), at_ns)


def given(directory: Directory, robot: str, at_ns: int = 0, avoid: str = "") -> str:
    """The pipeline that a robot gets, or why none."""
    found = directory.resolve(robot, avoid, at_ns)
    return found.pipeline if isinstance(found, Resolved) else found.reason


def test_a_robot_gets_the_pipeline_with_the_most_free_rows() -> None:
    directory = reported("a", "b")
    tell(directory, "a", 0, robots=1)
    found = directory.resolve("arm", "", 0)
    assert isinstance(found, Resolved)
    assert (found.pipeline, found.endpoint, found.ttl_s) == ("b", "unix:///run/b", TTL_NS / S)


def test_robots_that_ask_at_once_do_not_all_get_the_last_row() -> None:
    directory = reported("a", "b")
    got = [given(directory, f"arm-{k}") for k in range(5)]
    assert sorted(got[:4]) == ["a", "a", "b", "b"]
    assert got[4] == "full"


def test_a_promise_ends_when_its_robot_has_come_or_its_time_is_over() -> None:
    directory = reported("a")
    assert [given(directory, name) for name in ("x", "y", "z")] == ["a", "a", "full"]
    tell(directory, "a", 0, robots=1)  # x is there: its row is no longer promised but taken
    assert given(directory, "z") == "full"
    tell(directory, "a", TTL_NS, robots=1)  # y never came
    assert given(directory, "z", TTL_NS) == "a"


def test_a_robot_stays_with_its_pipeline_also_when_that_is_full() -> None:
    directory = reported("a", "b")
    first = given(directory, "arm")
    tell(directory, first, S, robots=2)
    assert given(directory, "arm", S) == first
    assert given(directory, "another", S) != first


def test_a_robot_that_is_not_served_there_goes_elsewhere() -> None:
    directory = reported("a", "b")
    first = given(directory, "arm")
    assert given(directory, "arm", avoid=first) != first


def test_what_it_avoids_is_better_than_nothing() -> None:
    directory = reported("a")
    assert given(directory, "arm") == "a"
    assert given(directory, "arm", avoid="a") == "a"


@pytest.mark.parametrize("phase", ["starting", "warming", "bring-up", "draining", "ended"])
def test_what_does_not_serve_is_given_to_nobody(phase: str) -> None:
    directory = reported("a", phase=phase)
    found = directory.resolve("arm", "", 0)
    assert found == Unresolved("none_serves", "none of 1 pipelines serves")


def test_a_degraded_pipeline_serves() -> None:
    assert given(reported("a", phase="degraded"), "arm") == "a"


def test_a_pipeline_that_reports_no_more_serves_nobody() -> None:
    directory = reported("a")
    assert given(directory, "arm", SILENT_NS) == "a"
    assert given(directory, "arm", SILENT_NS + 1) == "none_serves"
    (row,) = directory.status(SILENT_NS + 1)
    assert (row.phase, row.report.phase, row.free) == ("silent", "ready", 0)
    tell(directory, "a", SILENT_NS + 2)
    assert given(directory, "arm", SILENT_NS + 2) == "a"


def test_a_draining_pipeline_is_given_to_nobody_until_it_is_started_anew() -> None:
    directory = reported("a", "b")
    mine = given(directory, "arm")
    other = {"a": "b", "b": "a"}[mine]
    assert directory.drain(mine)
    assert given(directory, "arm") == other
    directory.forget(mine)
    tell(directory, mine, 0)
    assert not next(r for r in directory.status(0) if r.report.pipeline == mine).is_draining
    assert not directory.drain("nobody")


def test_status_counts_starts_and_keeps_the_last_exit() -> None:
    directory = reported("a")
    tell(directory, "a", 1, phase="failed", exit="20 PEER_LOST: gone")
    tell(directory, "a", 2, pid=2, phase="starting")
    (row,) = directory.status(2)
    assert (row.starts, row.last_exit, row.phase) == (2, "20 PEER_LOST: gone", "starting")


def test_one_that_begins_anew_knows_all_a_report_later() -> None:
    directory = Directory()
    assert given(directory, "arm") == "none_serves"
    tell(directory, "a", 0, robots=1)
    assert given(directory, "arm") == "a"
    assert given(directory, "another") == "full"
