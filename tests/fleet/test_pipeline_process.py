"""One pipeline as its actor sees it, without Ray: real ranks, their health and metrics."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from hashlib import sha256
from pathlib import Path

import pytest
from fleet_robot import ROBOTS, RUN
from forked_process import FORKING
from msgspec.structs import replace
from robot_rig import wait_until

from ppstream.control.peer_process import descendants
from ppstream.core.clock import now_ns
from ppstream.fleet import fleet_config, pipeline_process, status
from ppstream.fleet.directory import Directory
from ppstream.fleet.directory_server import DirectoryServer
from ppstream.fleet.pipeline_process import PipelineProcess, UnstartedPipeline, start
from ppstream.launch.commands import main as ppstream
from ppstream.observe import top
from ppstream.robot.client import RobotClient
from ppstream.robot.fleet_directory import FleetDirectory

LIMIT_S = 100.0
WEIGHTS = b"of a file that a simulated policy does not read"
WEIGHTED = """
from ppstream_stages import simulated


def build(options, device):
    return simulated.build(options | {"weights": None}, device)
"""


def fleet_in(folder: Path, listen: str = "127.0.0.1:1") -> Path:
    (folder / "w.safetensors").write_bytes(WEIGHTS)
    (folder / "weighted_policy.py").write_text(WEIGHTED)
    run = RUN.replace("[policy]\n", f'[policy]\nweights = "{folder}/w.safetensors"\n')
    run = run.replace("ppstream_stages.simulated:build", "weighted_policy:build")
    (folder / "arm.toml").write_text(f'{run}\n[log]\nroot = "{folder}/logs"\n')
    file = folder / "fleet.toml"
    file.write_text(
        f'name = "arms"\nrun = "arm.toml"\npipelines = 1\n'
        f'endpoint = "unix://{folder}/s/{{pipeline}}"\n'
        f'[directory]\nlisten = "{listen}"\n'
    )
    return file


@contextmanager
def started(folder: Path) -> Iterator[PipelineProcess]:
    process = PipelineProcess(fleet_config.read(fleet_in(folder)), "arms-0", "127.0.0.1")
    try:
        yield process
    finally:
        process.end()


def wait_ready(process: PipelineProcess) -> None:
    wait_until(lambda: process.report().phase in {"ready", "failed", "ended"}, seconds=LIMIT_S)
    report = process.report()
    assert report.phase == "ready", report


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pipelines are forks of a process that has imported torch, and so are their ranks."""
    monkeypatch.setattr(pipeline_process, "subprocess", FORKING)


@pytest.mark.multirank
@pytest.mark.usefixtures("forked")
def test_it_tells_its_phase_its_robots_and_its_drain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(tmp_path) as process:
        first = process.report()
        assert (first.phase, first.rows, first.pid) == ("starting", ROBOTS, process.pid)
        wait_ready(process)
        assert (first.weights, process.report().weights) == ("", sha256(WEIGHTS).hexdigest()[:16])
        directory = Directory()
        directory.report(process.report(), now_ns())
        with closing(DirectoryServer("127.0.0.1:0", directory)) as server:
            asks = FleetDirectory(server.url, "arm")
            with RobotClient.from_fleet(asks) as client:  # its contract, too, is the pipeline's
                client.connect(60)
                wait_until(lambda: process.report().robots == 1)
                with monkeypatch.context() as patched:  # rank 0 has no time for its metrics
                    patched.setattr(top, "ANSWER_LIMIT_S", 1e-6)
                    assert process.report().robots == 1
        assert not process.is_final()
        process.drain()
        wait_until(lambda: process.report().phase == "ended", seconds=LIMIT_S)
        assert process.is_final()
        assert process.report().exit.startswith("0 DRAINED: ")


@pytest.mark.multirank
@pytest.mark.usefixtures("forked")
def test_one_that_is_killed_has_failed_and_may_be_started_anew(tmp_path: Path) -> None:
    with started(tmp_path) as process:
        wait_ready(process)
        for pid in reversed((process.pid, *descendants(process.pid))):
            with suppress(ProcessLookupError):  # a rank may leave by itself once another is gone
                os.kill(pid, signal.SIGKILL)
        wait_until(lambda: process.report().phase == "failed")
        assert not process.is_final()
        assert process.report().exit.startswith("-9 signal 9")


def test_one_that_is_drained_before_it_listens_is_not_started_anew(tmp_path: Path) -> None:
    """An interpreter that has just started knows no signal yet, and is killed by it."""
    with started(tmp_path) as process:
        process.drain()
        wait_until(lambda: process.report().phase in {"failed", "ended"}, seconds=LIMIT_S)
        report = process.report()
        assert (report.phase, report.exit) == ("ended", "-15 signal 15: ")
        assert process.is_final()


@pytest.mark.multirank
@pytest.mark.usefixtures("forked")
def test_a_configuration_that_is_refused_is_final(tmp_path: Path) -> None:
    plan = fleet_config.read(fleet_in(tmp_path))
    (tmp_path / "arm.toml").write_text(RUN.replace("simulated:build", "nobody:build"))
    process = PipelineProcess(plan, "arms-0", "127.0.0.1")
    wait_until(lambda: process.report().phase == "ended", seconds=LIMIT_S)
    assert process.is_final()
    assert "CONFIG" in process.report().exit
    process.end()


def test_a_node_without_the_files_says_so(tmp_path: Path) -> None:
    plan = fleet_config.read(fleet_in(tmp_path))
    told = UnstartedPipeline(plan, "arms-0", "127.0.0.1", "arm.toml: not here").report()
    assert (told.phase, told.exit) == ("ended", "arm.toml: not here")


@pytest.mark.parametrize(
    ("endpoint", "node", "says"),
    [
        ("tcp://{node}:{port}", "192.0.2.9", r"\[Errno 99\] Cannot assign"),
        ("tcp://{node}:{port}", "2001:db8::9", r"\[Errno 99\] Cannot assign"),
        ("unix:///dev/null/{pipeline}", "192.0.2.9", r".*'/dev/null'"),
    ],
)
def test_an_address_that_the_node_cannot_have_is_said(
    endpoint: str, node: str, says: str, tmp_path: Path
) -> None:
    plan = fleet_config.read(fleet_in(tmp_path))
    plan = replace(plan, fleet=replace(plan.fleet, endpoint=endpoint))
    told = start(plan, "arms-0", node).report()
    assert told.phase == "ended"
    assert re.search(f"^node {node} cannot start it: {says}", told.exit)


def test_status_is_a_table_and_says_by_its_code_whether_all_serve(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = Directory()
    with closing(DirectoryServer("127.0.0.1:0", directory)) as server:
        file = fleet_in(tmp_path, server.url.removeprefix("http://"))
        assert ppstream(["fleet", "status", str(file)]) == status.NOT_ALL
        plan = fleet_config.read(file)
        gone = UnstartedPipeline(plan, "arms-0", "127.0.0.1", "why").report()
        directory.report(gone, now_ns())
        assert ppstream(["fleet", "status", str(file)]) == status.NOT_ALL
        said = capsys.readouterr().out
        assert "arms-0" in said
        assert "ended" in said
    assert ppstream(["fleet", "status", str(file)]) == 11
    assert "no directory answers" in capsys.readouterr().err


def test_without_ray_the_extra_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ppstream.fleet.operate.find_spec", lambda _: None)
    assert ppstream(["fleet", "up", str(fleet_in(tmp_path))]) == 11
    assert "pip install 'ppstream[fleet]'" in capsys.readouterr().err
