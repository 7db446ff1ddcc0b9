"""Folders as LeRobot saves them, with random weights, made without it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file

from ppstream_stages.lerobot import build
from ppstream_stages.lerobot_act import ActSizes, LeRobotWeights
from ppstream_stages.lerobot_diffusion import DiffusionSizes, DiffusionWeights
from ppstream_stages.lerobot_network import Reads

CPU = torch.device("cpu")
FRAMES = (3, 120, 160)
FILES = {
    "config": "config.json",
    "before": "policy_preprocessor.json",
    "behind": "policy_postprocessor.json",
}
ACT: dict[str, Any] = {
    "type": "act",
    "n_obs_steps": 1,
    "chunk_size": 20,
    "dim_model": 32,
    "n_heads": 2,
    "dim_feedforward": 32,
    "n_encoder_layers": 1,
    "n_decoder_layers": 1,
    "latent_dim": 4,
    "optimizer_lr": 1e-5,
}
DIFFUSION: dict[str, Any] = {
    "type": "diffusion",
    "n_obs_steps": 2,
    "horizon": 8,
    "n_action_steps": 4,
    "down_dims": [16, 32],
    "n_groups": 4,
    "diffusion_step_embed_dim": 8,
    "spatial_softmax_num_keypoints": 4,
    "crop_shape": [32, 64],
    "num_train_timesteps": 5,
    "optimizer_lr": 1e-5,
}


def numbers(size: int, kind: str) -> dict[str, Any]:
    return {"type": kind, "shape": [size]}


def json(folder: Path, name: str, content: Any) -> None:
    (folder / FILES[name]).write_bytes(msgspec.json.encode(content))


def saved(folder: Path, *, kind: str = "act", has_camera: bool = False) -> Path:
    """A folder with a state of 6 values, and either a camera or an environment of 2 values."""
    folder.mkdir(parents=True, exist_ok=True)
    state, environment = numbers(6, "STATE"), numbers(2, "ENV")
    inputs: dict[str, Any] = {"observation.state": state}
    if has_camera:
        inputs["observation.images.front"] = {"type": "VISUAL", "shape": FRAMES}
    else:
        inputs["observation.environment_state"] = environment
    outputs = {"action": numbers(6, "ACTION")}
    sizes = {"act": ACT, "diffusion": DIFFUSION}[kind]
    json(folder, "config", {**sizes, "input_features": inputs, "output_features": outputs})
    processors(folder, {**inputs, **outputs})
    reads = Reads(
        steps=1,
        state=("state", 6),
        environment=None if has_camera else ("environment", 2),
        cameras=(("front", FRAMES),) if has_camera else (),
    )
    weights: torch.nn.Module
    if kind == "act":
        prefix, weights = "model", LeRobotWeights(msgspec.convert(ACT, ActSizes), reads, 6)
    else:
        known = msgspec.convert(DIFFUSION, DiffusionSizes)
        prefix, weights = "diffusion", DiffusionWeights(known, reads, 6)
    torch.manual_seed(0)
    drawn = {
        f"{prefix}.{name}": torch.randn(weight.shape) * 0.1
        for name, weight in weights.named_parameters()
    }
    drawn |= {name: one.abs() + 0.5 for name, one in drawn.items() if "running_var" in name}
    if kind == "act":
        drawn["model.vae_encoder_cls_embed.weight"] = torch.ones(1)
    else:  # norms and places of a size at which frames count
        drawn |= {name: one + 1 for name, one in drawn.items() if one.ndim == 1}
        drawn |= {name: one * 10 for name, one in drawn.items() if name.endswith("pos_grid")}
    save_file(drawn, folder / "model.safetensors")
    return folder


def processors(folder: Path, features: dict[str, Any]) -> None:
    """Writes both processors and their numbers."""
    modes = {"STATE": "MEAN_STD", "ENV": "MIN_MAX", "ACTION": "MEAN_STD", "VISUAL": "MEAN_STD"}
    norms = {"eps": 1e-8, "norm_map": modes, "features": features}
    steps = [
        {"registry_name": "rename_observations_processor", "config": {"rename_map": {}}},
        {"registry_name": "to_batch_processor", "config": {}},
        {"registry_name": "device_processor", "config": {"device": "cuda", "float_dtype": None}},
        {"registry_name": "normalizer_processor", "config": norms, "state_file": "a.safetensors"},
    ]
    json(folder, "before", {"name": "policy_preprocessor", "steps": steps})
    last = {
        "registry_name": "unnormalizer_processor",
        "config": norms,
        "state_file": "b.safetensors",
    }
    json(folder, "behind", {"name": "policy_postprocessor", "steps": [last, steps[2]]})
    stats = {
        "observation.state.mean": torch.arange(6.0),
        "observation.state.std": torch.ones(6) * 2,
    }
    stats |= {"observation.environment_state.min": torch.tensor([-2.0, 1.0])}
    stats |= {"observation.environment_state.max": torch.tensor([2.0, 2.0])}
    save_file(stats, folder / "a.safetensors")
    actions = {"action.mean": torch.full((6,), 10.0), "action.std": torch.full((6,), 3.0)}
    save_file(actions, folder / "b.safetensors")


def change(folder: Path, name: str, edit: Callable[[Any], object]) -> None:
    content = msgspec.json.decode((folder / FILES[name]).read_bytes())
    edit(content)
    json(folder, name, content)


def edits(**values: Any) -> Callable[[Any], object]:
    return lambda content: content.update(values)


def step(index: int, **values: Any) -> Callable[[Any], object]:
    return lambda content: content["steps"][index].update(values)


def loaded(folder: Path, device: torch.device = CPU, **options: Any) -> Any:
    weights = str(folder / "model.safetensors")
    (policy,) = build({**options, "weights": weights}, device)
    policy.load()
    return policy
