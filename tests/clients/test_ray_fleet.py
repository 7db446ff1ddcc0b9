"""A fleet on a real Ray cluster of two nodes: pipeline, node and directory are killed in turn."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fleet_robot import LEASE_MS, ROBOTS, RUN, FleetRobot
from real_runs import SOURCES, free_port
from robot_rig import wait_until

from ppstream.analysis.judge import judge
from ppstream.analysis.log_reader import find_runs, read_run
from ppstream.core.clock import now_ns
from ppstream.core.errors import ConfigError
from ppstream.fleet import status
from ppstream.launch.commands import main as ppstream

PACKAGE = "ray"
CLUSTER = Path(__file__).parents[1] / "support" / "ray_cluster.py"
TICKS_MS = 100.0  # of a robot on a machine that is shared: an action is noted when it is executed
AGAIN_S = 10.0
LIMIT_S = 180.0


class Fleet:
    """A cluster, and the commands that people give it."""

    def __init__(self, python: str, folder: Path) -> None:
        self.folder = folder
        self._python = python
        path = os.pathsep.join(SOURCES)
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self.environment = os.environ | {"PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0"} | token
        listen = f"127.0.0.1:{free_port()}"
        self.url = f"http://{listen}"
        (folder / "arm.toml").write_text(f'{RUN}\n[log]\nroot = "{folder}/logs"\n')
        (folder / "token").write_text("a-robot's-token\n")
        self.file = folder / "fleet.toml"
        self.file.write_text(
            f'name = "arms"\nrun = "arm.toml"\npipelines = 2\ncpus = 2\n'
            f'endpoint = "unix://{folder}/sockets/{{pipeline}}"\n'
            f'[directory]\nlisten = "{listen}"\ntoken_file = "token"\n'
        )
        self._cluster = subprocess.Popen(
            [python, str(CLUSTER)],
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.address = self._answer()["address"]
        assert self._answer()["nodes"] == 3

    def ask(self, *words: str) -> dict[str, Any]:
        assert self._cluster.stdin is not None
        self._cluster.stdin.write(" ".join(words) + "\n")
        self._cluster.stdin.flush()
        return self._answer()

    def command(
        self, word: str, *words: str, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """``ppstream fleet``, where Ray is."""
        start = [self._python, "-m", "ppstream.launch.commands", "fleet"]
        command = [*start, word, str(self.file), *words]
        return subprocess.run(
            [*command, "--address", self.address],
            env=self.environment | environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )

    def phases(self) -> dict[str, str]:
        found = status.ask(self.url, "a-robot's-token")
        return {row.report.pipeline: row.phase for row in found.pipelines}

    def wait_for(self, **phases: str) -> None:
        wanted = {name.replace("_", "-"): phase for name, phase in phases.items()}
        wait_until(lambda: _or_nothing(self.phases) == wanted, seconds=LIMIT_S)

    def robot(self, number: int) -> FleetRobot:
        return FleetRobot(self.url, f"robot-{number}", token_file=self.folder / "token")

    def close(self) -> None:
        try:
            self._cluster.communicate(timeout=60)  # the end of its input is its end
        except subprocess.TimeoutExpired:
            self._cluster.kill()
            self._cluster.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self._cluster.stdout is not None
        for line in self._cluster.stdout:
            if line.startswith("{"):  # Ray prints there, too, what its nodes meet
                found: dict[str, Any] = json.loads(line)
                return found
        raise AssertionError("the cluster has ended")


@pytest.fixture(scope="module")
def fleet(python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    made = Fleet(python, tmp_path_factory.mktemp("fleet"))
    try:
        yield made
    finally:
        made.close()


@contextmanager
def four_robots(fleet: Fleet) -> Iterator[list[FleetRobot]]:
    robots: list[FleetRobot] = []
    try:
        robots.extend(fleet.robot(number) for number in range(ROBOTS))
        for robot in robots:
            wait_until(lambda robot=robot: robot.acts, seconds=LIMIT_S)
        yield robots
    finally:
        for robot in robots:
            robot.close()
    for robot in robots:  # nothing is lost uncounted
        found = robot.client.statistics()
        assert found.sent + found.unsent == robot.pushed
        assert max(act.age_ns for act in robot.acts) <= LEASE_MS * 1e6


def pipelines_of(robots: list[FleetRobot]) -> list[str]:
    return [robot.directory.pipeline for robot in robots]


def judge_failover(robots: list[FleetRobot], lost: str, fault: Callable[[], int]) -> str:
    """Robots of ``lost`` are safe within their lease, and all serve again elsewhere.

    ``fault`` returns when it was done.
    """
    sessions = [robot.client.statistics().session for robot in robots]
    theirs = [pipeline == lost for pipeline in pipelines_of(robots)]
    assert any(theirs)
    at_ns = fault()
    told = []
    for robot, session, is_lost in zip(robots, sessions, theirs, strict=True):
        if not is_lost:
            assert robot.client.statistics().session == session
            continue
        wait_until(lambda r=robot, s=session: r.serves_again_at(at_ns, s), seconds=60)
        again_s = ((robot.serves_again_at(at_ns, session) or 0) - at_ns) / 1e9
        old = [a.at_ns for a in robot.acts_since(at_ns) if a.session == session]
        safe_ms = (max(old, default=at_ns) - at_ns) / 1e6
        told.append(f"safe {safe_ms:.0f} ms, again {again_s:.2f} s")
        assert safe_ms <= LEASE_MS + TICKS_MS
        assert again_s <= AGAIN_S
    for robot in robots:  # those that were elsewhere have been served all the while
        wait_until(lambda r=robot: r.acts_since(now_ns() - 10**9), seconds=60)
    assert lost not in pipelines_of(robots)
    return "; ".join(told)


def drained(fleet: Fleet, pipeline: str) -> int:
    done = fleet.command("drain", pipeline)
    assert done.returncode == 0, done.stderr
    return now_ns()


def _or_nothing(look: Callable[[], Any]) -> Any:
    try:
        return look()
    except ConfigError:  # the directory is being restarted
        return None


@pytest.mark.timeout(900)
def test_a_fleet_serves_four_robots_through_every_failure(
    fleet: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = fleet.command("up", RAY_AUTH_MODE="disabled")
    assert refused.returncode == 11, refused.stderr
    assert "RAY_AUTH_MODE: got 'disabled', want 'token'" in refused.stderr

    begun = fleet.command("up")
    assert begun.returncode == 0, begun.stdout + begun.stderr
    fleet.wait_for(arms_0="ready", arms_1="ready")
    assert ppstream(["fleet", "status", str(fleet.file), "--json"]) == 0  # without Ray
    found = json.loads(capsys.readouterr().out)
    assert [row["free"] for row in found["pipelines"]] == [ROBOTS, ROBOTS]

    with four_robots(fleet) as robots:
        assert sorted(pipelines_of(robots)) == ["arms-0", "arms-0", "arms-1", "arms-1"]

        said = judge_failover(robots, "arms-0", lambda: fleet.ask("kill", "arms-0")["at_ns"])
        print(f"pipeline killed: {said}")
        fleet.wait_for(arms_0="ready", arms_1="ready")  # Ray has started it anew

        before = [robot.client.statistics().session for robot in robots]
        fleet.ask("kill", "arms/directory")
        began = time.monotonic()
        fleet.wait_for(arms_0="ready", arms_1="ready")
        print(f"directory killed: it knows all again after {time.monotonic() - began:.1f} s")
        assert [robot.client.statistics().session for robot in robots] == before
        assert pipelines_of(robots) == ["arms-1"] * ROBOTS

        said = judge_failover(robots, "arms-1", lambda: drained(fleet, "arms-1"))
        print(f"pipeline drained: {said}")
        fleet.wait_for(arms_0="ready", arms_1="ended")  # it stays so until people start it
        begun = fleet.command("up")
        assert begun.returncode == 0, begun.stdout + begun.stderr
        fleet.wait_for(arms_0="ready", arms_1="ready")

        said = judge_failover(robots, "arms-0", lambda: fleet.ask("kill_node", "arms-0")["at_ns"])
        print(f"node killed: {said}")
        assert pipelines_of(robots) == ["arms-1"] * ROBOTS

    ended = fleet.command("down")
    assert ended.returncode == 0, ended.stderr
    runs = [judge(read_run(folder)) for folder in find_runs(fleet.folder / "logs")]
    assert len(runs) >= 3
    for run in runs:  # what the killed ones logged balances as far as it goes
        assert run.drops["imbalance"] == {}
