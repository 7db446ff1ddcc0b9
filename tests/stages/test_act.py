from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from policy_calls import actions_of, blocks_of, in_a_row
from safetensors.torch import save_file
from torch.nn.functional import conv2d

from ppstream.config.load import read
from ppstream.core.errors import ConfigError
from ppstream.ingest.window import input_specs
from ppstream.policy.compatibility import policy_problems
from ppstream.policy.parts import specs_of
from ppstream_stages.act import build
from ppstream_stages.building import Patches

torch.set_num_threads(1)

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {
    "steps": 6,
    "dim": 5,
    "streams": 2,
    "horizon": 4,
    "action_dim": 3,
    "width": 64,
    "encoder_blocks": 1,
    "decoder_blocks": 1,
    "dtype": "float32",
}
CAMERA = {"name": "front", "height": 32, "width": 48, "frames": 2, "dtype": "float32"}


def run(config: dict[str, Any], seed: int = 0, **given: torch.Tensor) -> torch.Tensor:
    return actions_of(build(config, CPU), 0.9, seed, **given)


def test_the_same_seed_gives_the_same_actions_and_another_does_not() -> None:
    first = run(SMALL)
    assert first.shape == (2, 4, 3)
    assert first.abs().max() < 1
    assert torch.equal(first, run(SMALL))
    assert not torch.equal(first, run(SMALL | {"seed": 1}))


def test_its_parts_are_named_blocks() -> None:
    expected, seen = run(SMALL), []
    opened = blocks_of(lambda: seen.append(run(SMALL)))
    assert torch.equal(seen[0], expected)
    assert opened == ["embed", "encoder", "decoder", "head"]


def test_building_it_leaves_torchs_random_numbers_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    build(SMALL, CPU)
    assert torch.equal(torch.rand(3), expected)


def test_invalid_steps_do_not_count() -> None:
    valid = torch.ones(2, 6, 2, dtype=torch.bool)
    valid[:, :3, 1] = False
    spoiled = torch.rand(2, 6, 5)
    values = spoiled.clone()
    values[:, :3] = 7
    window = {"state.valid": valid}
    assert torch.equal(
        run(SMALL, **window, **{"state.values": values}),
        run(SMALL, **window, **{"state.values": spoiled}),
    )


@pytest.mark.parametrize(("height", "width"), [(32, 48), (39, 30), (16, 16)])
def test_patches_are_a_convolution_without_what_fills_none(height: int, width: int) -> None:
    patches, images = Patches(24, 16), torch.randn(3, 3, height, width)
    seen = conv2d(images, patches.weight, patches.bias, 16).flatten(2).transpose(1, 2)
    assert torch.allclose(patches(images), seen, atol=1e-5)


def test_every_camera_counts() -> None:
    config = SMALL | {"cameras": [CAMERA]}
    dark = torch.zeros(2, 2, 3, 32, 48)
    assert not torch.equal(run(config, **{"front.frames": dark}), run(config))


def test_backbones_and_transformer_in_a_row_are_the_whole_policy() -> None:
    config = SMALL | {"cameras": [CAMERA]}
    window = {
        "state.values": torch.rand(2, 6, 5),
        "state.valid": torch.ones(2, 6, 2, dtype=torch.bool),
        "front.frames": torch.rand(2, 2, 3, 32, 48),
    }
    backbones, transformer = build(config, CPU)
    assert (backbones.name, transformer.name) == ("backbones", "transformer")
    assert [spec.name for spec in backbones.inputs] == ["front.frames"]
    assert [spec.name for spec in transformer.inputs] == ["state.values", "state.valid", "features"]
    transformer.load()  # each draws its own, in any order
    backbones.load()
    made = in_a_row([backbones, transformer], window)
    assert torch.equal(made["actions"], run(config, **window))
    patches = backbones.network.patches[0]
    for frame in range(2):
        with torch.inference_mode():
            seen = patches(window["front.frames"][:, frame])
        features = made["features"][:, 6 * frame : 6 * frame + 6]
        assert torch.allclose(features, seen, atol=1e-5)  # of another batch size: another order
    assert backbones.flops == 2 * 2 * 6 * 3 * 16 * 16 * 64
    assert backbones.parameters == 64 * (3 * 16 * 16 + 1)


def test_weights_are_read_and_must_fit(tmp_path: Path) -> None:
    file = tmp_path / "act.safetensors"
    config = SMALL | {"cameras": [CAMERA]}
    weights: dict[str, torch.Tensor] = {}
    for part in build(config | {"seed": 3}, CPU):
        part.load()
        weights |= part.network.state_dict()
    assert {"patches.0.weight", "embed.weight", "place", "encoder.0.attend.ask.bias"} < set(weights)
    save_file(weights, file)
    loaded = run(config | {"weights": str(file)})
    assert torch.equal(loaded, run(config | {"seed": 3}))
    assert not torch.equal(loaded, run(config))
    with pytest.raises(ConfigError, match="does not fit"):
        run(config | {"weights": str(file), "width": 128})
    with pytest.raises(ConfigError, match="width"):
        run(SMALL | {"width": 65})


def test_the_shipped_configuration_with_three_cameras_fits_the_policy() -> None:
    config = read("three_cameras")
    small = {"width": 64, "encoder_blocks": 1, "decoder_blocks": 1}
    parts = build({**config.policy.options, "weights": None, **small}, CPU)
    assert policy_problems(config, input_specs(config), specs_of(parts)) == []
    assert [stream.name for stream in config.cameras] == ["left", "right", "wrist"]
    assert config.bringup.accept == ("NOTHING_TO_HIDE",)  # as fast GPUs have it
