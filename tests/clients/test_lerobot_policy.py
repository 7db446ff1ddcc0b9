"""Policies that LeRobot saves, served without it: exactly its own actions."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from bench.peers_environments import Unavailable, python_with
from safetensors.torch import load_file

from ppstream_stages.lerobot import build

SCRIPT = Path(__file__).parents[1] / "support" / "lerobot_policy.py"
KINDS = ("usual", "other")
LIMIT_S = 200
NAMES = {
    "observation.state": "state.values",
    "observation.environment_state": "environment.values",
    "observation.images.front": "front.frames",
    "observation.images.wrist": "hand.frames",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        python, vision = python_with("lerobot"), python_with("torchvision")
    except Unavailable as error:
        pytest.skip(f"lerobot cannot be had: {error}")
    (packages,) = vision.parents[1].glob("lib/python*/site-packages")
    folder = tmp_path_factory.mktemp("policies")
    done = subprocess.run(
        [str(python), str(SCRIPT), str(folder), *KINDS],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(packages)},
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("kind", KINDS)
def test_the_actions_are_lerobots_own(folders: Path, kind: str) -> None:
    folder = folders / kind
    options = {"steps": 2, "cameras": {"hand": "observation.images.wrist"}}
    (policy,) = build(
        {**options, "weights": str(folder / "model.safetensors")}, torch.device("cpu")
    )
    policy.load()
    known = load_file(folder / "reference.safetensors")
    expected = known.pop("action")
    window = {}
    for key, tensor in known.items():
        newest = tensor.unsqueeze(1)
        is_frame = NAMES[key].endswith(".frames")
        window[NAMES[key]] = newest if is_frame else torch.cat([newest + 9, newest], 1)
    assert window.keys() == {spec.name for spec in policy.inputs}
    out = torch.full_like(expected, torch.nan)
    policy(window, {"actions": out})
    assert expected.std() > 0.1
    assert not torch.allclose(expected[0], expected[1], atol=1e-3)
    assert (out - expected).abs().max() <= 1e-5
