from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from policy_calls import actions_of, blocks_of
from safetensors.torch import save_file

from ppstream.config.load import read
from ppstream.core.errors import ConfigError
from ppstream.ingest.window import input_specs
from ppstream.policy.compatibility import policy_problems
from ppstream_stages.vla import Network, Options, build

torch.set_num_threads(1)

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {
    "steps": 6,
    "dim": 5,
    "streams": 2,
    "horizon": 4,
    "action_dim": 3,
    "cameras": ["front", "wrist"],
    "image_side": 28,
    "text_tokens": 3,
    "denoising_steps": 2,
    "layers": 2,
    "heads": 2,
    "head_width": 8,
    "image": {"layers": 1, "width": 16, "heads": 2, "feed_forward": 32},
    "language": {"width": 24, "feed_forward": 32},
    "expert": {"width": 16, "feed_forward": 32},
    "dtype": "float32",
}
BLOCKS = ["image encoder", "language", "expert"]
PI0_PARAMETERS = 2.71e9  # image encoder, language model and action expert of that size together


def run(config: dict[str, Any], seed: int = 0, **given: torch.Tensor) -> torch.Tensor:
    return actions_of(build(config, CPU), 1.0, seed, **given)


def test_the_same_seed_gives_the_same_actions_and_another_does_not() -> None:
    first = run(SMALL)
    assert first.shape == (2, 4, 3)
    assert first.abs().max() < 1
    assert torch.equal(first, run(SMALL))
    assert not torch.equal(first, run(SMALL | {"seed": 1}))


@pytest.mark.parametrize("name", ["state.values", "front.frames", "wrist.frames"])
def test_it_reads_every_input_of_every_row(name: str) -> None:
    spec = next(spec for spec in build(SMALL, CPU).inputs if spec.name == name)
    values = torch.rand(2, *spec.shape, generator=torch.Generator().manual_seed(9))
    other = values.clone()
    other[1] += 0.5
    first, second = (run(SMALL, **{name: given}) for given in (values, other))
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[1], second[1])


def test_a_state_with_an_invalid_stream_is_seen_as_zeros() -> None:
    invalid = torch.ones(2, 6, 2, dtype=torch.bool)
    invalid[1, -1, 0] = False
    values = torch.rand(2, 6, 5)
    zeros = values.clone()
    zeros[1] = 0
    seen = run(SMALL, **{"state.values": values, "state.valid": invalid})
    assert torch.equal(seen, run(SMALL, **{"state.values": zeros}))


def test_every_denoising_step_changes_the_actions() -> None:
    one, two = (run(SMALL | {"denoising_steps": steps}) for steps in (1, 2))
    assert not torch.equal(one, two)


def test_its_parts_are_named_blocks() -> None:
    expected, seen = run(SMALL), []
    opened = blocks_of(lambda: seen.append(run(SMALL)))
    assert torch.equal(seen[0], expected)
    assert opened == BLOCKS


def test_building_it_leaves_torchs_random_numbers_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    build(SMALL, CPU)
    assert torch.equal(torch.rand(3), expected)


def test_weights_come_from_a_file_and_must_fit(tmp_path: Path) -> None:
    options = msgspec.convert(SMALL | {"seed": 7}, Options)
    network = Network(options)
    network.draw(7)
    file = tmp_path / "vla.safetensors"
    save_file(network.state_dict(), file)
    drawn = SMALL | {"seed": 7}
    assert torch.equal(run(drawn | {"weights": str(file)}), run(drawn))
    with pytest.raises(ConfigError, match="does not fit this policy"):
        build(SMALL | {"weights": str(file), "layers": 1}, CPU)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_side": 30}, "want a multiple of image.patch = 14"),
        ({"image": {"width": 15, "heads": 2}}, "want a multiple of image.heads = 2"),
        ({"cameras": []}, "policy.options"),
        ({"colour": 1}, "policy.options"),
        ({"dim": 33}, "policy.options"),
    ],
)
def test_options_that_cannot_be_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(SMALL | change, CPU)


def test_the_shipped_configuration_is_of_full_size_and_fits_its_policy() -> None:
    config = read("vla")
    options = msgspec.convert(config.policy.options, Options)
    with torch.device("meta"):
        network = Network(options)
    count = sum(weight.numel() for weight in network.parameters())
    assert count == pytest.approx(PI0_PARAMETERS, rel=0.05)
    small = {name: SMALL[name] for name in ("layers", "image", "language", "expert")}
    policy = build(config.policy.options | small, CPU)
    assert policy_problems(config, input_specs(config), policy.inputs, policy.outputs) == []
