"""The client that LeRobot publishes, unmodified, against a real run with a gateway."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ranks import Ranks
from robot_rig import wait_until

from ppstream.core.errors import ExitCode

PACKAGE = "lerobot"
ROBOT = Path(__file__).parents[1] / "support" / "lerobot_robot.py"
DETAILS = re.compile(r'details = "(.*)"')
HAS_LEFT = re.compile(r"lerobot-1-\S+ has left")
ACTIONS = 120
LIMIT_S = 100
RUN = """
name = "so101"

[[streams]]
name = "joints"
dim = 6
max_request_hz = 100
reference = true

[[streams]]
name = "front"
max_request_hz = 100
image = { height = 480, width = 640, resize = [60, 80] }

[[streams]]
name = "top"
max_request_hz = 100
image = { height = 480, width = 640, resize = [60, 80] }

[[streams]]
name = "wrist"
max_request_hz = 100
image = { height = 480, width = 640, resize = [60, 80] }

[window]
steps = 1
dt_ms = 33

[actions]
names = ["shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper"]
horizon = 16
dt_ms = 33
low = [-9.0, -9.0, -9.0, -9.0, -9.0, -9.0]
high = [9.0, 9.0, 9.0, 9.0, 9.0, 9.0]
lease_ms = 5000

[policy]
target = "ppstream_stages.echo:build"
options = { steps = 1, dim = 6, horizon = 16, action_dim = 6 }

[[gateway]]
wire = "lerobot"
listen = "127.0.0.1:0"
timeout_ms = 5000

[gateway.map]
joints = [
    "shoulder_pan.pos", "shoulder_lift.pos", "elbow_flex.pos",
    "wrist_flex.pos", "wrist_roll.pos", "gripper.pos",
]
front = "front"
top = "top"
wrist = "wrist"
"""


def run_in(folder: Path) -> Path:
    file = folder / "so101.toml"
    file.write_text(f'{RUN}\n[service]\nendpoint = "unix://{folder}/robots"\n')
    return file


def play(python: str, folder: Path, *words: str) -> tuple[dict[str, Any], str]:
    """What the robot tells, and what LeRobot's client logs."""
    done = subprocess.run(
        [python, str(ROBOT), *words],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        cwd=folder,  # the client writes a log where it stands
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found, done.stderr


@pytest.mark.timeout(240)
def test_the_client_executes_actions_of_its_own_observations(python: str, tmp_path: Path) -> None:
    with Ranks(tmp_path, config=run_in(tmp_path), world_size=2) as ranks:
        found, said = play(python, tmp_path, ranks.gateway_address("lerobot"), str(ACTIONS), "16")
        assert found["started"] is True, said
        assert found["strange"] == []
        executed = found["executed"]
        assert len(executed) >= ACTIONS
        assert executed == sorted(executed), "an action of an older observation came behind"
        assert len(set(executed)) > 5
        assert executed[-1] <= found["observations"]
        assert set(DETAILS.findall(said)) <= {"Channel closed!"}  # by the client itself, at its end
        wait_until(lambda: HAS_LEFT.search(ranks.output()))
        ranks.processes[0].terminate()
        assert ranks.wait() == [ExitCode.DRAINED] * 2
        rate = len(executed) / found["seconds"]
        print(
            f"lerobot {found['version']}: {rate:.1f} actions/s of {found['observations']} observed"
        )


@pytest.mark.timeout(240)
def test_a_client_whose_contract_differs_does_not_start_and_is_told_why(
    python: str, tmp_path: Path
) -> None:
    setting = "gateway.0.map.front=cam_high"
    with Ranks(tmp_path, setting, config=run_in(tmp_path), world_size=1) as ranks:
        found, said = play(python, tmp_path, ranks.gateway_address("lerobot"), "1", "17")
        assert found["started"] is False
        assert "cam_high: the robot has no such camera, stream front wants it" in said
        assert "'front': the robot sends it, no stream wants it" in said
        assert "actions_per_chunk: got 17, want 16 at most" in said
