"""Policies that LeRobot saves, and what it makes of observations, in an environment of its own.

``lerobot_policy.py FOLDER KIND...`` writes, into a folder named by each kind, what LeRobot's ACT
and its processors save with random weights, and ``reference.safetensors``: observations, and the
actions that LeRobot's ``predict_action_chunk`` and its processors make of them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from stand_ins import stand_in_for
from torch.library import Library

ABSENT = {
    *("accelerate", "av", "cv2", "datasets", "diffusers", "gymnasium", "imageio", "jsonlines"),
    *("pandas", "pyarrow", "transformers"),
}
#: Compiled operators of torchvision want its CUDA; ACT uses none, but their names must be there.
COMPILED = (
    *("nms", "qnms", "roi_align", "qroi_align", "_roi_align_backward", "roi_pool"),
    *("_roi_pool_backward", "ps_roi_align", "_ps_roi_align_backward", "ps_roi_pool"),
    *("_ps_roi_pool_backward", "deform_conv2d", "_deform_conv2d_backward"),
)

stand_in_for(ABSENT)
operators = Library("torchvision", "DEF")
for operator in COMPILED:
    operators.define(f"{operator}() -> Tensor")

from lerobot.configs.types import FeatureType, NormalizationMode, PolicyFeature  # noqa: E402
from lerobot.policies.act.configuration_act import ACTConfig  # noqa: E402
from lerobot.policies.act.modeling_act import ACTPolicy  # noqa: E402
from lerobot.policies.act.processor_act import make_act_pre_post_processors  # noqa: E402

ROWS = 3
STATE, ENVIRONMENT, ACTION = "observation.state", "observation.environment_state", "action"
CAMERAS = ("observation.images.front", "observation.images.wrist")
KINDS: dict[str, dict[str, Any]] = {
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


def config_of(kind: str) -> ACTConfig:
    given = dict(KINDS[kind])
    norms = zip(("VISUAL", "STATE", "ENV", "ACTION"), given.pop("norms"), strict=True)
    inputs = {STATE: PolicyFeature(FeatureType.STATE, (6,))}
    inputs |= {key: PolicyFeature(FeatureType.VISUAL, (3, 64, 90)) for key in CAMERAS}
    if given.pop("has_environment", False):
        inputs[ENVIRONMENT] = PolicyFeature(FeatureType.ENV, (5,))
    return ACTConfig(
        input_features=inputs,
        output_features={ACTION: PolicyFeature(FeatureType.ACTION, (4,))},
        normalization_mapping={name: NormalizationMode(mode) for name, mode in norms},
        chunk_size=16,
        n_action_steps=16,
        dim_model=64,
        n_heads=4,
        dim_feedforward=128,
        n_encoder_layers=2,
        n_vae_encoder_layers=1,
        pretrained_backbone_weights=None,
        push_to_hub=False,
        device="cpu",
        **given,
    )


def numbers(size: tuple[int, ...]) -> dict[str, torch.Tensor]:
    low = torch.randn(size)
    found = {"mean": torch.randn(size), "std": torch.rand(size) + 0.2, "min": low, "q01": low}
    return found | {"max": low + torch.rand(size) + 0.1, "q99": low + torch.rand(size) + 0.1}


def write(folder: Path, kind: str) -> None:
    torch.manual_seed(1)
    config = config_of(kind)
    policy = ACTPolicy(config).eval()
    for name, buffer in policy.named_buffers():  # batch norms do nothing until they are trained
        if ".backbone." in name:
            buffer.uniform_(0.5, 1.5)
    stats = {key: numbers((size,)) for key, size in ((STATE, 6), (ENVIRONMENT, 5), (ACTION, 4))}
    stats[ACTION]["max"][1] = stats[ACTION]["min"][1]  # a motor that never moved
    stats |= {key: numbers((3, 1, 1)) for key in CAMERAS}
    before, behind = make_act_pre_post_processors(config, stats)
    for one in (policy, before, behind):
        one.save_pretrained(folder)
    loaded = ACTPolicy.from_pretrained(folder, strict=True)
    seen = {key: torch.rand(ROWS, *one.shape) for key, one in config.input_features.items()}
    with torch.no_grad():
        actions = behind(loaded.predict_action_chunk(before(dict(seen))))
    save_file(seen | {ACTION: actions.contiguous()}, folder / "reference.safetensors")


if __name__ == "__main__":
    for kind in sys.argv[2:]:
        write(Path(sys.argv[1]) / kind, kind)
