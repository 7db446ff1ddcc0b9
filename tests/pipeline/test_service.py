"""A run's service in one process: the phases it tells, and the demo robot that it starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pipeline_in_process import NewestValues, PipelineInProcess, small_config
from robot_rig import ANY_PORT, wait_until

from ppstream.config.schema import DemoConfig, RecordConfig, ServiceConfig
from ppstream.control.peer_process import children
from ppstream.core.clock import NS_PER_S
from ppstream.core.errors import ConfigError, ExitCode
from ppstream.observe.run_folder import ROBOT_STORY, Run
from ppstream.pipeline import service
from ppstream.pipeline.child_process import ChildProcess
from ppstream.pipeline.service import Service
from ppstream.recording.recorder import Recorder
from ppstream.wire.robot_messages import ChunkReport


@contextmanager
def serving(folder: Path, **parts: Any) -> Iterator[tuple[PipelineInProcess, Service]]:
    """A service of 0.1 s whose loop calls no policy, as nobody comes."""
    config = small_config(service=ServiceConfig(endpoint=ANY_PORT, duration_s=0.1), **parts)
    with (
        PipelineInProcess(config, NewestValues(), folder, inline=True) as pipeline,
        Service(config, Run(folder), pipeline.rank0) as running,
    ):
        yield pipeline, running


def test_robots_are_told_that_a_sensor_degrades_the_run_until_it_drains(tmp_path: Path) -> None:
    """A run that drains must not be called ready again, whatever sensors do."""
    phases: list[str] = []
    told: list[str] = []
    with serving(tmp_path) as (pipeline, running):
        rank0, row = pipeline.rank0, running.intake.rows[0]

        def fall_silent(phase: str) -> None:
            phases.append(phase)
            row.open(7)
            for seconds in (0, 10, 20):
                if seconds == 20:
                    row.close()
                for look in rank0.on_second:
                    look(seconds * NS_PER_S)

        assert running.sessions is not None
        running.sessions.set_phase = told.append  # type: ignore[method-assign]
        rank0.on_phase.append(fall_silent)
        running.run()
        events = [line["degraded"] for line in pipeline.lines() if line.get("name") == "degraded"]
        del running.sessions.set_phase
    assert phases == ["ready", "draining"]
    assert told == ["degraded", "ready"]
    assert events == [True, False, True, False]


def test_a_sensor_that_is_refused_is_printed_and_logged_with_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "ppstream")
    told: list[tuple[Any, ...]] = []
    with serving(tmp_path) as (pipeline, running):
        rank0, row = pipeline.rank0, running.intake.rows[0]
        assert running.sessions is not None
        running.sessions.set_degraded = lambda *line: told.append(line)  # type: ignore[method-assign]

        def be_refused(phase: str) -> None:
            if phase != "ready":
                return
            row.open(7)
            for seconds, refused in ((0, 0), (1, 3), (1, 0)):
                row.reference.refuse("non_finite", refused)
                for look in rank0.on_second:
                    look(seconds * NS_PER_S)
            row.close()

        rank0.on_phase.append(be_refused)
        running.run()
        (event,) = (line for line in pipeline.lines() if line.get("condition") == "refused")
    why = "100% of samples non_finite; send values that float32 can hold"
    assert event["why"] == why
    assert f"refused, was ok: {why}" in caplog.text
    name = row.reference.stream.name
    of_it = [line for _, stream, line in told if stream == name]
    assert of_it == [f"{name}: refused: {why}", ""]


def test_a_robot_is_told_that_rank_0_read_nothing(tmp_path: Path) -> None:
    told: list[str] = []
    with serving(tmp_path) as (pipeline, running):
        rank0, row = pipeline.rank0, running.intake.rows[0]
        assert running.sessions is not None
        running.sessions.set_degraded = lambda _row, _stream, why: told.append(why)  # type: ignore[method-assign]

        def stand_still(phase: str) -> None:
            if phase == "ready":
                row.open(7)
                for seconds in (0, 10):
                    rank0.unread_ns = 2 * NS_PER_S
                    for look in rank0.on_second:
                        look(seconds * NS_PER_S)
                row.close()

        rank0.on_phase.append(stand_still)
        running.run()
    assert told
    assert all("; rank 0 read nothing for 2.00 s, " in why for why in told)


def test_a_service_begins_with_an_epoch_of_its_own_and_logs_what_robots_tell(
    tmp_path: Path,
) -> None:
    """Results that bring-up still has under way are of the epoch before: they reach no robot."""
    with serving(tmp_path) as (pipeline, running):
        before = pipeline.rank0.epoch
        assert running.sessions is not None
        running.sessions.reports.append(ChunkReport(7, 1, 3, 5, 1))
        running.run()
        assert pipeline.rank0.epoch == before + 1
        (told,) = (line for line in pipeline.lines() if line["kind"] == "robot")
    assert (told["session"], told["epoch"], told["seq"]) == (7, 1, 3)


def test_what_a_recording_loses_is_in_the_log_at_once_and_the_whole_of_it_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mcap")
    monkeypatch.setattr(Recorder, "losses", lambda _: [{"to": "disk", "dropped": 7}])

    def losses() -> list[dict[str, Any]]:
        return [line for line in pipeline.lines() if line.get("name") == "recorder"]

    with serving(tmp_path, record=RecordConfig(file=str(tmp_path / "run.mcap"))) as parts:
        pipeline, running = parts
        rank0 = pipeline.rank0
        rank0.on_phase.append(lambda _: [look(NS_PER_S) for look in rank0.on_second])
        running.run()
        assert {line["dropped"] for line in losses()} == {7}
        running.__exit__()
        assert losses()[-1]["dropped"] == 0


@pytest.fixture
def own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder whose modules a demo robot may be."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_demo_robot_that_ended_before_the_run_was_ready_ends_the_run(own_modules: Path) -> None:
    (own_modules / "leaves.py").write_text("raise SystemExit(3)\n")
    others = {*children(os.getpid())}
    with serving(own_modules, demo=DemoConfig(robot="leaves")) as (_, running):
        (robot,) = {*children(os.getpid())} - others
        os.waitid(os.P_PID, robot, os.WEXITED | os.WNOWAIT)
        with pytest.raises(ConfigError, match=r"demo\.robot: it ended with code 3 before the run"):
            running.run()


STAYS = """
import signal, sys, time

def leave(*_):
    print("told", flush=True)
    sys.exit()

signal.signal(signal.SIGTERM, leave)
print("up", flush=True)
while True:
    time.sleep(60)
"""


def test_a_demo_robot_that_stays_is_told_to_leave_before_it_is_made_to(
    own_modules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "ROBOT_END_LIMIT_S", 2.0)
    (own_modules / "stays.py").write_text(STAYS)
    story = own_modules / ROBOT_STORY
    others = {*children(os.getpid())}
    with serving(own_modules, demo=DemoConfig(robot="stays")):
        wait_until(lambda: story.read_text() == "up\n")
    assert story.read_text() == "up\ntold\n"
    assert {*children(os.getpid())} <= others


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (1, [(1, 0.0), (1, 0.0), (1, None)]),
        (ExitCode.CONFIG, [(11, None)]),
        (ExitCode.DRAINED, [(0, None)]),  # somebody asked it to
    ],
)
def test_a_child_that_ends_is_started_again_so_often_and_only_where_that_may_help(
    code: int, told: list[tuple[int, float | None]], caplog: pytest.LogCaptureFixture
) -> None:
    found: list[tuple[str, float | None]] = []
    child = ChildProcess(
        "gateway",
        [sys.executable, "-c", f"print('here', flush=True); raise SystemExit({code})"],
        addresses=1,
        effect="start one",
        end_limit_s=5.0,
        again_s=(0.0, 0.0),
        on_end=lambda *end: found.append(end),
    )
    child.check_started()
    wait_until(lambda: found and found[-1][1] is None)
    child.close()
    assert found == [(f"ended with exit status {code}", again_s) for code, again_s in told]
    assert [record.getMessage() for record in caplog.records] == [
        f"the gateway {how}: "
        + ("start one" if again_s is None else f"it is started again in 0 s ({n} of 2)")
        for n, (how, again_s) in enumerate(found, 1)
    ]


def test_a_child_that_waits_for_its_next_start_is_not_started_after_the_end() -> None:
    found: list[tuple[str, float | None]] = []
    child = ChildProcess(
        "gateway",
        [sys.executable, "-c", "print('here', flush=True); raise SystemExit(1)"],
        addresses=1,
        effect="start one",
        end_limit_s=5.0,
        again_s=(3600.0,),
        on_end=lambda *end: found.append(end),
    )
    child.check_started()
    wait_until(lambda: found)
    others = {*children(os.getpid())}
    child.close()
    assert {*children(os.getpid())} <= others
    assert found == [("ended with exit status 1", 3600.0)]
