"""Policies that LeRobot saves, and what it makes of observations, in an environment of its own.

``lerobot_policy.py FOLDER KIND...`` writes, into a folder named by each kind, what LeRobot's ACT or
Diffusion and its processors save with random weights, and ``reference.safetensors``: observations,
and the actions that LeRobot and its processors make of them: ACT by ``predict_action_chunk``,
Diffusion in a control loop (``select_action``), twice: as an episode begins, and in its midst.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from stand_ins import stand_in_for, stand_in_for_operators

ABSENT = {
    *("accelerate", "av", "cv2", "datasets", "gymnasium", "imageio", "jsonlines"),
    *("pandas", "pyarrow", "transformers"),
}

stand_in_for(ABSENT)
operators = stand_in_for_operators()

from lerobot.configs.types import FeatureType, NormalizationMode, PolicyFeature  # noqa: E402
from lerobot.policies.act.configuration_act import ACTConfig  # noqa: E402
from lerobot.policies.act.modeling_act import ACTPolicy  # noqa: E402
from lerobot.policies.act.processor_act import make_act_pre_post_processors  # noqa: E402
from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig  # noqa: E402
from lerobot.policies.diffusion.modeling_diffusion import DiffusionPolicy  # noqa: E402
from lerobot.policies.diffusion.processor_diffusion import (  # noqa: E402
    make_diffusion_pre_post_processors,
)

ROWS = 3
SEED = 7  # of torch, before each call that draws noise
STATE, ENVIRONMENT, ACTION = "observation.state", "observation.environment_state", "action"
CAMERAS = ("observation.images.front", "observation.images.wrist")
ACT_KINDS: dict[str, dict[str, Any]] = {
    "usual": {"norms": ("MEAN_STD", "MEAN_STD", "IDENTITY", "MEAN_STD")},
    "other": {
        "norms": ("IDENTITY", "QUANTILES", "MIN_MAX", "MIN_MAX"),
        "has_environment": True,
        "pre_norm": True,
        "feedforward_activation": "gelu",
        "vision_backbone": "resnet34",
        "use_vae": False,
        "n_decoder_layers": 2,
    },
}
DIFFUSION_KINDS: dict[str, dict[str, Any]] = {
    "state": {
        "norms": ("IDENTITY", "MIN_MAX", "MEAN_STD", "MIN_MAX"),
        "cameras": 0,
        "has_environment": True,
        "num_train_timesteps": 10,
    },
    "camera": {
        "norms": ("MEAN_STD", "MIN_MAX", "IDENTITY", "MIN_MAX"),
        "cameras": 1,
        "crop_shape": (56, 71),
        "noise_scheduler_type": "DDIM",
        "num_inference_steps": 10,
    },
    "pair": {
        "norms": ("IDENTITY", "QUANTILES", "IDENTITY", "MIN_MAX"),
        "cameras": 2,
        "noise_scheduler_type": "DDIM",
        "num_train_timesteps": 30,
        "num_inference_steps": 3,
        "prediction_type": "sample",
        "clip_sample_range": 0.7,
    },
    "cameras": {
        "norms": ("MEAN_STD", "IDENTITY", "MEAN_STD", "MEAN_STD"),
        "cameras": 2,
        "has_environment": True,
        "n_obs_steps": 3,
        "vision_backbone": "resnet34",
        "use_group_norm": False,
        "use_separate_rgb_encoder_per_camera": True,
        "resize_shape": (48, 83),
        "crop_ratio": 0.9,
        "use_film_scale_modulation": False,
        "num_train_timesteps": 50,
        "num_inference_steps": 12,
        "beta_schedule": "linear",
        "prediction_type": "sample",
        "clip_sample": False,
    },
}


def features_of(given: dict[str, Any]) -> dict[str, Any]:
    """Settings of a configuration about its tensors; takes out of ``given`` what they are from."""
    norms = zip(("VISUAL", "STATE", "ENV", "ACTION"), given.pop("norms"), strict=True)
    inputs = {STATE: PolicyFeature(FeatureType.STATE, (6,))}
    cameras = CAMERAS[: given.pop("cameras", len(CAMERAS))]
    inputs |= {key: PolicyFeature(FeatureType.VISUAL, (3, 64, 90)) for key in cameras}
    if given.pop("has_environment", False):
        inputs[ENVIRONMENT] = PolicyFeature(FeatureType.ENV, (5,))
    return {
        "input_features": inputs,
        "output_features": {ACTION: PolicyFeature(FeatureType.ACTION, (4,))},
        "normalization_mapping": {name: NormalizationMode(mode) for name, mode in norms},
        "pretrained_backbone_weights": None,
        "push_to_hub": False,
        "device": "cpu",
    }


def act_of(kind: str) -> ACTConfig:
    given = dict(ACT_KINDS[kind])
    return ACTConfig(
        **features_of(given),
        chunk_size=16,
        n_action_steps=16,
        dim_model=64,
        n_heads=4,
        dim_feedforward=128,
        n_encoder_layers=2,
        n_vae_encoder_layers=1,
        **given,
    )


def diffusion_of(kind: str) -> DiffusionConfig:
    given = dict(DIFFUSION_KINDS[kind])
    return DiffusionConfig(
        **features_of(given),
        horizon=16,
        n_action_steps=6,
        down_dims=(32, 64),
        n_groups=4,
        kernel_size=3,
        diffusion_step_embed_dim=16,
        spatial_softmax_num_keypoints=8,
        **given,
    )


def numbers(size: tuple[int, ...]) -> dict[str, torch.Tensor]:
    low = torch.randn(size)
    found = {"mean": torch.randn(size), "std": torch.rand(size) + 0.2, "min": low, "q01": low}
    return found | {"max": low + torch.rand(size) + 0.1, "q99": low + torch.rand(size) + 0.1}


def chunk_of(policy: Any, before: Any, behind: Any, seen: dict[str, torch.Tensor]) -> torch.Tensor:
    """The actions of one call, ``[rows, steps, values]``; ``seen`` are observations of rows."""
    made: torch.Tensor = behind(policy.predict_action_chunk(before(dict(seen))))
    return made


def episode_of(
    policy: Any, before: Any, behind: Any, seen: dict[str, torch.Tensor]
) -> list[torch.Tensor]:
    """The actions of each step of an episode; before each call that draws noise comes a seed."""
    policy.reset()
    made = []
    for step in range(len(next(iter(seen.values())))):
        if step % policy.config.n_action_steps == 0:
            torch.manual_seed(SEED)
        one = {key: tensor[step : step + 1] for key, tensor in seen.items()}
        made.append(behind(policy.select_action(before(one))))
    return made


def write(folder: Path, kind: str) -> None:
    torch.manual_seed(1)
    is_act = kind in ACT_KINDS
    config = act_of(kind) if is_act else diffusion_of(kind)
    policy = (ACTPolicy if is_act else DiffusionPolicy)(config).eval()
    for name, buffer in policy.named_buffers():  # batch norms do nothing until they are trained
        if name.endswith("running_mean"):
            buffer.normal_(0.0, 0.1)
        elif name.endswith("running_var"):
            buffer.uniform_(1.0, 2.0)
    stats = {key: numbers((size,)) for key, size in ((STATE, 6), (ENVIRONMENT, 5), (ACTION, 4))}
    stats[ACTION]["max"][1] = stats[ACTION]["min"][1]  # a motor that never moved
    stats |= {key: numbers((3, 1, 1)) for key in CAMERAS}
    make = make_act_pre_post_processors if is_act else make_diffusion_pre_post_processors
    before, behind = make(config, stats)
    for one in (policy, before, behind):
        one.save_pretrained(folder)
    loaded = type(policy).from_pretrained(folder, strict=True)
    steps = () if is_act else (2 * config.n_action_steps,)
    shapes = {key: one.shape for key, one in config.input_features.items()}
    seen = {key: torch.rand(ROWS, *steps, *shape) for key, shape in shapes.items()}
    with torch.no_grad():
        if is_act:
            actions = chunk_of(loaded, before, behind, seen)
        else:
            rows = [{key: one[row] for key, one in seen.items()} for row in range(ROWS)]
            made = [torch.cat(episode_of(loaded, before, behind, row)) for row in rows]
            actions = torch.stack(made)
    save_file(seen | {ACTION: actions.contiguous()}, folder / "reference.safetensors")


if __name__ == "__main__":
    for kind in sys.argv[2:]:
        write(Path(sys.argv[1]) / kind, kind)
