import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ppstream.config.load import read
from ppstream.config.schema import PipelineConfig
from ppstream.core.clock import now_ns
from ppstream.ingest.intake import Intake, build_intake
from ppstream.sessions.server import Sessions

LIMIT_S = 30.0


class Server:
    """Rank 0 as far as a robot sees it, without a pipeline: takes samples, sends no action."""

    def __init__(self, folder: Path) -> None:
        self.config: PipelineConfig = read("demo", [f"service.endpoint=ipc://{folder}/robot.sock"])
        self.intake: Intake = build_intake(self.config)
        self.sessions = Sessions(self.config, self.intake.rows)
        self.sessions.set_phase("bring-up")

    def serve(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.sessions.drain(now_ns())
            time.sleep(0.002)

    def serve_until_left(self, robot: subprocess.Popen[str]) -> None:
        until = time.monotonic() + LIMIT_S
        while robot.poll() is None and time.monotonic() < until:
            self.serve(0.05)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.sessions.close()


def start(server: Server, folder: Path) -> subprocess.Popen[str]:
    module = "ppstream_stages.cartpole.robot"
    report = ["--report", str(folder / "robot.json"), "--seed", "4"]
    command = [sys.executable, "-m", module, "--endpoint", server.sessions.endpoint, *report]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_it_is_held_until_ready_then_falls_without_actions_and_says_so(
    server: Server, tmp_path: Path
) -> None:
    robot = start(server, tmp_path)
    try:
        server.serve(3.0)
        server.sessions.set_phase("ready")
        server.serve(3.5)
        row = server.intake.rows[0]
        rates = {name: ring.accepted / 3.5 for name, ring in row.rings.items()}
        stamp_ns = row.reference.newest_ns
        server.sessions.set_phase("draining")
        server.serve_until_left(robot)
        line = robot.communicate(timeout=LIMIT_S)[0]
    finally:
        robot.kill()
        robot.wait()
    assert robot.returncode == 0
    story = json.loads((tmp_path / "robot.json").read_text())
    assert story["released"]
    assert story["fell"]
    assert 0.3 < story["stood_s"] < 1.5
    assert story["age"]["count"] == 0
    assert story["idle_share"] == 1.0
    assert "FELL after" in line
    assert "no action was executed" in line
    # a machine that others use may keep the robot waiting, never make it send more
    for stream in server.config.streams:
        assert 0.5 * stream.rate_hz < rates[stream.name] < 1.1 * stream.rate_hz
    assert abs(stamp_ns - now_ns()) > 10**12  # its clock is its own


def test_a_run_that_never_becomes_ready_never_releases_it(server: Server, tmp_path: Path) -> None:
    robot = start(server, tmp_path)
    try:
        server.serve(2.0)
        server.sessions.set_phase("draining")
        server.serve_until_left(robot)
        line = robot.communicate(timeout=LIMIT_S)[0]
    finally:
        robot.kill()
        robot.wait()
    assert not json.loads((tmp_path / "robot.json").read_text())["released"]
    assert "never released" in line


def test_it_imports_no_torch() -> None:
    code = "import sys, ppstream_stages.cartpole.robot; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
