"""Policies that LeRobot saves, served without it: exactly its own actions."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.peers_environments import Unavailable, python_with
from safetensors.torch import load_file
from torch import Tensor

from ppstream_stages.lerobot import build

SCRIPT = Path(__file__).parents[1] / "support" / "lerobot_policy.py"
ACT_KINDS = ("usual", "other")
DIFFUSION_KINDS = {
    "state": 2,
    "camera": 2,
    "pair": 2,
    "cameras": 3,
}  # and the observations that it reads
CHUNK = 6  # actions of Diffusion that LeRobot keeps
SEED = 7  # that LeRobot's noise came from
LIMIT_S = 300
NAMES = {
    "observation.state": "state.values",
    "observation.environment_state": "environment.values",
    "observation.images.front": "front.frames",
    "observation.images.wrist": "hand.frames",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        python, *others = (python_with(name) for name in ("lerobot", "torchvision", "diffusers"))
    except Unavailable as error:
        pytest.skip(f"lerobot cannot be had: {error}")
    seen = [str(*other.parents[1].glob("lib/python*/site-packages")) for other in others]
    folder = tmp_path_factory.mktemp("policies")
    done = subprocess.run(
        [str(python), str(SCRIPT), str(folder), *ACT_KINDS, *DIFFUSION_KINDS],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(seen)},
    )
    assert done.returncode == 0, done.stderr
    return folder


def loaded(folder: Path, observations: Mapping[str, Tensor], **options: Any) -> Any:
    """The policy of a folder whose cameras' streams are front and hand."""
    if "observation.images.wrist" in observations:
        options["cameras"] = {"hand": "observation.images.wrist"}
    weights = str(folder / "model.safetensors")
    (policy,) = build({**options, "weights": weights}, torch.device("cpu"))
    policy.load()
    return policy


def actions_of(policy: Any, window: Mapping[str, Tensor]) -> Tensor:
    assert window.keys() == {spec.name for spec in policy.inputs}
    rows = len(next(iter(window.values())))
    out = torch.full((rows, *policy.outputs[0].shape), torch.nan)
    policy(window, {"actions": out})
    return out


def assert_equal_actions(made: Tensor, expected: Tensor) -> None:
    assert expected.std() > 0.1
    assert not torch.allclose(expected[0], expected[1], atol=1e-3)
    assert (made - expected).abs().max() <= 1e-5


@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("kind", ACT_KINDS)
def test_the_actions_are_lerobots_own(folders: Path, kind: str) -> None:
    known = load_file(folders / kind / "reference.safetensors")
    expected = known.pop("action")
    policy = loaded(folders / kind, known, steps=2)
    window = {}
    for key, tensor in known.items():
        newest = tensor.unsqueeze(1)
        is_frame = NAMES[key].endswith(".frames")
        window[NAMES[key]] = newest if is_frame else torch.cat([newest + 9, newest], 1)
    assert_equal_actions(actions_of(policy, window), expected)


def window_of(known: Mapping[str, Tensor], newest: int, count: int) -> dict[str, Tensor]:
    """The window as stage A cuts it at a step of an episode, with ``count`` steps and frames.

    Before the first step a number is held, and a frame is missing: zeros, invalid, of age 0.
    """
    window = {}
    steps = torch.arange(newest - count + 1, newest + 1)
    for key, tensor in known.items():
        seen = tensor[:, steps.clamp(min=0)]
        if NAMES[key].endswith(".frames"):
            stream, valid = NAMES[key].removesuffix(".frames"), steps >= 0
            seen = seen * valid.view(-1, 1, 1, 1)
            window[f"{stream}.valid"] = valid.expand(len(tensor), -1)
            window[f"{stream}.age_s"] = ((newest - steps) * 0.1 * valid).expand(len(tensor), -1)
        window[NAMES[key]] = seen
    return window


@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("newest", [0, CHUNK], ids=["begin", "midst"])
@pytest.mark.parametrize("kind", DIFFUSION_KINDS)
def test_the_actions_of_diffusion_are_lerobots_own(folders: Path, kind: str, newest: int) -> None:
    known = load_file(folders / kind / "reference.safetensors")
    expected = known.pop("action")[:, newest : newest + CHUNK]
    policy = loaded(folders / kind, known, seed=SEED)
    window = window_of(known, newest, DIFFUSION_KINDS[kind])
    made = actions_of(policy, window)
    assert_equal_actions(made, expected)
    assert torch.equal(made, actions_of(policy, window))
