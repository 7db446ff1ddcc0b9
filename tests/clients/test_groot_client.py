"""Clients of GR00T's wire, one of them as strands-robots publishes it, against a real run."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ranks import Ranks

from ppstream.core.errors import ExitCode

PACKAGE = "strands-robots"
ROBOT = Path(__file__).parents[1] / "support" / "groot_robot.py"
REQUESTS = 200
LIMIT_S = 100
TOKEN = "0123456789abcdef0123"
RUN = """
name = "so100"

[[streams]]
name = "single_arm"
dim = 5
rate_hz = 100
reference = true

[[streams]]
name = "gripper"
dim = 1
rate_hz = 100

[[streams]]
name = "webcam"
rate_hz = 100
image = { height = 224, width = 224 }

[window]
steps = 1
dt_ms = 33

[actions]
names = ["a0", "a1", "a2", "a3", "a4", "grip"]
horizon = 16
dt_ms = 33
low = [-9.0, -9.0, -9.0, -9.0, -9.0, -9.0]
high = [9.0, 9.0, 9.0, 9.0, 9.0, 9.0]
lease_ms = 20000

[policy]
target = "ppstream_stages.echo:build"
options = { steps = 1, dim = 6, horizon = 16, action_dim = 6 }

[batch]
rows = 2

[[gateway]]
wire = "groot"
listen = "127.0.0.1:0"
timeout_ms = 20000
map = { single_arm = "state.single_arm", gripper = "state.gripper", webcam = "video.webcam" }
action_keys = { single_arm = [0, 5], gripper = [5, 6] }
"""


def run_in(folder: Path) -> Path:
    file = folder / "so100.toml"
    file.write_text(f'{RUN}\n[service]\nendpoint = "unix://{folder}/robots"\n')
    return file


def robot(python: str, *words: str) -> subprocess.Popen[str]:
    command = [python, str(ROBOT), *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def said(process: subprocess.Popen[str]) -> dict[str, Any]:
    try:
        out, errors = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    found: dict[str, Any] = json.loads(out)
    return found


@pytest.mark.timeout(240)
def test_both_generations_are_answered_with_their_own_actions_side_by_side(
    python: str, tmp_path: Path
) -> None:
    with Ranks(tmp_path, config=run_in(tmp_path), world_size=2) as ranks:
        port = ranks.gateway_address("groot").rpartition(":")[2]
        robots = {name: robot(python, port, name, str(REQUESTS)) for name in ("n1.5", "n1.6")}
        found = {name: said(process) for name, process in robots.items()}
        for name, one in found.items():
            assert "state.single_arm: it is missing, want numbers [5]" in one["error"]
            print(f"{name}: strands-robots {one['version']}, p50 {one['p50_ms']:.2f} ms")
        assert found["n1.5"]["ping"] is True
        newer = found["n1.6"]
        assert newer["ping"] == {"status": "ok", "message": "Server is running"}
        assert newer["reset"] == {}
        assert newer["get_modality_config"]["video"]["as_json"]["modality_keys"] == ["webcam"]
        ranks.processes[0].terminate()
        assert ranks.wait() == [ExitCode.DRAINED] * 2


@pytest.mark.timeout(240)
def test_a_client_with_the_token_is_served_and_one_without_is_not(
    python: str, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(0o600)
    setting = f"gateway.0.api_key_file={file}"
    with Ranks(tmp_path, setting, config=run_in(tmp_path), world_size=1) as ranks:
        port = ranks.gateway_address("groot").rpartition(":")[2]
        assert said(robot(python, port, "n1.6", "5", TOKEN))["p50_ms"] > 0
        with pytest.raises(AssertionError, match="Unauthorized: Invalid API token"):
            said(robot(python, port, "n1.6", "5"))
