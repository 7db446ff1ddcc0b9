import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from robot_rig import wait_until

from ppstream.config.load import read
from ppstream.config.schema import PipelineConfig
from ppstream.core.clock import NS_PER_S, now_ns
from ppstream.ingest.intake import Intake, build_intake
from ppstream.sessions.server import Sessions

LIMIT_S = 30.0


class Server:
    """Rank 0 as far as a robot sees it, without a pipeline: takes samples, sends no action."""

    def __init__(self, folder: Path) -> None:
        self.config: PipelineConfig = read("demo", [f"service.endpoint=unix://{folder}/robot.sock"])
        self.intake: Intake = build_intake(self.config)
        self.sessions = Sessions(self.config, self.intake.rows)
        self.sessions.set_phase("bring-up")

    def serve_until(self, condition: Callable[[], object]) -> None:
        wait_until(lambda: self.sessions.drain(now_ns()) < 0 or condition(), seconds=LIMIT_S)

    def serve(self, seconds: float) -> None:
        until_ns = now_ns() + round(seconds * NS_PER_S)
        self.serve_until(lambda: now_ns() > until_ns)


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
        row = server.intake.rows[0]
        server.serve_until(lambda: server.sessions.statistics().frames_received)
        server.sessions.set_phase("ready")
        began_ns = now_ns()
        server.serve(2.0)
        seconds = (now_ns() - began_ns) / NS_PER_S
        rates = {name: ring.accepted / seconds for name, ring in row.rings.items()}
        stamp_ns = row.reference.newest_ns
        server.sessions.set_phase("draining")
        server.serve_until(lambda: robot.poll() is not None)
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
        server.serve_until(lambda: server.sessions.statistics().frames_received)
        server.serve(0.5)
        server.sessions.set_phase("draining")
        server.serve_until(lambda: robot.poll() is not None)
        line = robot.communicate(timeout=LIMIT_S)[0]
    finally:
        robot.kill()
        robot.wait()
    assert not json.loads((tmp_path / "robot.json").read_text())["released"]
    assert "never released" in line


def test_it_imports_no_torch() -> None:
    code = "import sys, ppstream_stages.cartpole.robot; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_stop_ends_it_at_once_while_it_waits_for_a_session(
    server: Server, tmp_path: Path
) -> None:
    robot = start(server, tmp_path)
    try:
        hears = 1 << (signal.SIGTERM - 1)
        status = Path(f"/proc/{robot.pid}/status")

        def takes_signals() -> bool:
            caught = next(x for x in status.read_text().splitlines() if x.startswith("SigCgt"))
            return bool(int(caught.split()[1], 16) & hears)

        wait_until(takes_signals, seconds=LIMIT_S)
        time.sleep(0.5)  # it asks for a session, which nobody reads
        robot.terminate()
        assert robot.wait(5.0) == 0
    finally:
        robot.kill()
        robot.communicate()
