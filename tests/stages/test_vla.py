from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from policy_calls import ROWS, actions_of, in_a_row
from safetensors.torch import save_file

from ppstream.config.load import locate, read
from ppstream.core.errors import ConfigError
from ppstream.ingest.window import input_specs
from ppstream.policy.compatibility import policy_problems
from ppstream.policy.parts import specs_of
from ppstream_stages.building import NetworkPart
from ppstream_stages.instruction_table import TEXTS_MAX
from ppstream_stages.vla import build, token_ids

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
INSTRUCTED = SMALL | {"instructions": True, "vocabulary": 50}
PI0_PARAMETERS = 2.71e9  # image encoder, language model and action expert of that size together


def loaded(**options: Any) -> list[NetworkPart]:
    parts = build(SMALL | options, CPU)
    for part in parts:
        part.load()
    return parts


def window_of(parts: list[NetworkPart]) -> dict[str, torch.Tensor]:
    """Random tensors for whatever no part makes."""
    generator = torch.Generator().manual_seed(3)
    made = {spec.name for part in parts for spec in part.outputs}
    return {
        spec.name: torch.ones(ROWS, *spec.shape, dtype=torch.bool)
        if spec.dtype == "bool"
        else torch.rand(ROWS, *spec.shape, generator=generator).to(getattr(torch, spec.dtype))
        for part in parts
        for spec in part.inputs
        if spec.name not in made
    }


def weights_of(parts: list[NetworkPart]) -> dict[str, torch.Tensor]:
    """By the names that a file has."""
    return {name: w for part in parts for name, w in part.network.state_dict().items()}


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
    spec = next(s for part in build(SMALL, CPU) for s in part.inputs if s.name == name)
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("per_part", [1, 2, 3])
def test_how_it_is_cut_changes_no_bit_of_the_actions(per_part: int, dtype: str) -> None:
    sizes = {"layers": 5, "denoising_steps": 5, "dtype": dtype}
    cut = {"language_layers_per_part": per_part, "denoising_steps_per_part": per_part}
    pieces = -(-5 // per_part)
    parts = loaded(**sizes, **cut)
    assert [part.name for part in parts] == [
        "vision",
        *(f"language_{number + 1}" for number in range(pieces)),
        *(f"denoise_{number + 1}" for number in range(pieces)),
    ]
    window = window_of(parts)
    made = in_a_row(parts, window)
    expected = in_a_row(loaded(**sizes), window)["actions"]
    assert torch.equal(made["actions"], expected)
    assert all(tensor.isfinite().all() for tensor in made.values())


def test_a_part_that_is_loaded_alone_is_the_one_that_is_loaded_with_all() -> None:
    whole = weights_of(loaded())
    for number in range(len(build(SMALL, CPU))):
        part = build(SMALL, CPU)[number]
        part.load()
        own = weights_of([part])
        assert own.keys() == part.weights.keys()
        assert all(torch.equal(whole[name], weight) for name, weight in own.items())


def test_every_tensor_between_parts_is_made_once_before_it_is_read_and_read_later() -> None:
    parts = build(SMALL | {"language_layers_per_part": 1, "denoising_steps_per_part": 1}, CPU)
    made: list[Any] = []
    read: set[str] = set()
    for part in parts:
        own = [spec for spec in part.inputs if spec.name.split("_")[0] in ("hidden", "kv", "noisy")]
        assert set(own) <= set(made)
        read |= {spec.name for spec in part.inputs}
        made += part.outputs
    names = [spec.name for spec in made]
    assert len(set(names)) == len(names)
    assert set(names) - read == {"actions"}
    assert parts[-1].outputs[0].name == "actions"


def test_building_it_makes_no_weights_until_a_part_is_loaded() -> None:
    vision, *others = build(SMALL, CPU)
    vision.load()
    assert not any(weight.is_meta for weight in weights_of([vision]).values())
    assert all(weight.is_meta for weight in weights_of(others).values())


def test_denoising_parts_share_their_weights_and_load_them_once() -> None:
    *_, first, second = build(SMALL | {"denoising_steps_per_part": 1}, CPU)
    first.load()
    places = {name: weight.data_ptr() for name, weight in weights_of([first]).items()}
    second.load()
    for part in (first, second):
        assert {name: weight.data_ptr() for name, weight in weights_of([part]).items()} == places


@pytest.mark.parametrize("options", [SMALL, INSTRUCTED], ids=["", "instructions"])
def test_every_weight_counts_but_what_only_makes_tokens_that_nobody_reads(
    options: dict[str, Any],
) -> None:
    parts = loaded(**options)
    window = window_of(parts)
    if options is INSTRUCTED:
        window["instruction_id"] = torch.tensor([1, 1])
        parts[1].instruct(1, "fold")
    expected = in_a_row(parts, window)["actions"]
    idle = []
    for name, weight in weights_of(parts).items():
        before = weight.clone()
        weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
        if torch.equal(in_a_row(parts, window)["actions"], expected):
            idle.append(name)
        weight.copy_(before)
    last = "prefix.language_layers.1"
    assert sorted(idle) == [
        f"{last}.{end}.weight" for end in ("join", "narrow", "norm_feed", "widen")
    ]


def test_parameters_and_operations_of_a_part_are_those_of_its_shapes() -> None:
    vision, language, denoise = build(SMALL | {"cameras": ["front"]}, CPU)
    linear = 16 * 16 * 4 + 2 * 16 * 32  # weights of a layer: queries, keys, values, join, feed
    tokens = (28 // 14) ** 2
    attention = 2 * 2 * tokens**2 * 16
    patches, project = 3 * 14 * 14 * 16, 16 * 24
    assert vision.flops == 2 * tokens * (linear + patches + project) + attention
    biases = 16 + (3 + 1 + 1) * 16 + 32 + 24
    norms = 3 * 2 * 16
    assert vision.parameters == linear + patches + project + tokens * 16 + biases + norms
    before = language.flops, denoise.flops
    for part in (language, denoise):
        part.load()
    assert (language.flops, denoise.flops) == before
    assert before[0] > 0
    halves = build(SMALL | {"cameras": ["front"], "denoising_steps_per_part": 1}, CPU)[-2:]
    assert [half.flops * 2 for half in halves] == [denoise.flops] * 2


def test_each_row_follows_its_own_instruction() -> None:
    parts = loaded(**INSTRUCTED)
    language = parts[1]
    language.instruct(1, "fold the towel")
    language.instruct(2, "open drawer")
    window = window_of(parts)
    for name, tensor in window.items():
        window[name] = tensor[:1].expand(ROWS, *tensor.shape[1:]).contiguous()

    def actions(*numbers: int) -> torch.Tensor:
        window["instruction_id"] = torch.tensor(numbers)
        return in_a_row(parts, window)["actions"]

    towel, drawer = actions(1, 2)
    nothing = actions(0, 0)[0]
    assert not torch.equal(towel, drawer)
    assert not torch.equal(towel, nothing)
    assert torch.equal(actions(2, 1), torch.stack([drawer, towel]))
    language.instruct(TEXTS_MAX, " fold  the\ntowel ")
    assert torch.equal(actions(TEXTS_MAX, 0)[0], towel)


def test_words_become_numbers_of_the_table_and_too_many_are_refused() -> None:
    ids = token_ids("fold the größe", 5, 7)
    assert all(0 < number < 7 for number in ids[:3])
    assert ids[3:] == [0, 0]
    (language,) = (part for part in loaded(**INSTRUCTED) if part.name == "language_1")
    with pytest.raises(
        ValueError, match=r"has 4 words, at most 3 fit \(policy.options.text_tokens"
    ):
        language.instruct(1, "fold the red towel")
    for number in (0, TEXTS_MAX + 1):
        with pytest.raises(ValueError, match="1024 texts are the limit"):
            language.instruct(number, "fold")


def test_a_configuration_with_instructions_fits_the_policy_that_takes_them() -> None:
    small = {name: SMALL[name] for name in ("layers", "image", "language", "expert")}

    def problems(*settings: str) -> list[str]:
        config = read("vla_1", settings)
        options = {**config.policy.options, **small}
        return policy_problems(config, input_specs(config), specs_of(build(options, CPU)))

    assert problems("policy.instructions=true", "policy.options.instructions=true") == []
    (problem,) = problems("policy.options.instructions=true")
    assert "reads 'instruction_id', which no window" in problem


def test_only_a_policy_with_instructions_takes_texts_and_it_says_so_in_its_inputs() -> None:
    assert not any(hasattr(part, "instruct") for part in build(SMALL, CPU))
    takers = [part for part in build(INSTRUCTED, CPU) if hasattr(part, "instruct")]
    assert [part.name for part in takers] == ["language_1"]
    assert "instruction_id" in {spec.name for spec in takers[0].inputs}


def test_building_it_leaves_torchs_random_numbers_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    build(SMALL, CPU)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("options", [SMALL, INSTRUCTED])
def test_each_part_takes_its_own_weights_from_the_file(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    file = tmp_path / "vla.safetensors"
    expected = weights_of(loaded(**options, seed=7))
    save_file(expected, file)
    fine = {"weights": str(file), "language_layers_per_part": 1, "denoising_steps_per_part": 1}
    found = weights_of(loaded(**options, **fine))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def test_weights_that_do_not_fit_are_refused_before_any_is_read(tmp_path: Path) -> None:
    file = tmp_path / "vla.safetensors"
    weights = weights_of(loaded())

    def refusal(weights: dict[str, torch.Tensor]) -> str:
        save_file(weights, file)
        with pytest.raises(ConfigError, match="does not fit this policy") as refused:
            build(SMALL | {"weights": str(file)}, CPU)
        return str(refused.value)

    lacking = {name: weight for name, weight in weights.items() if name != "prefix.text"}
    assert "it lacks prefix.text" in refusal(lacking)
    assert "it has too many: colour" in refusal(weights | {"colour": torch.zeros(1)})
    found = refusal(weights | {"prefix.text": torch.zeros(1, 24)})
    assert "prefix.text [1, 24], want [3, 24]" in found
    assert "and 7 more" in refusal({n: w for n, w in weights.items() if "image_layers" not in n})
    file.write_bytes(b"{}")
    with pytest.raises(ConfigError, match="cannot be read"):
        build(SMALL | {"weights": str(file)}, CPU)


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
    config = read("vla_1")
    parts = build(config.policy.options, CPU)
    weights = {name: shape for part in parts for name, shape in part.weights.items()}
    count = sum(torch.Size(shape).numel() for shape in weights.values())
    assert count == pytest.approx(PI0_PARAMETERS, rel=0.05)
    small = {name: SMALL[name] for name in ("layers", "image", "language", "expert")}
    small_parts = build(config.policy.options | small, CPU)
    assert policy_problems(config, input_specs(config), specs_of(small_parts)) == []


@pytest.mark.parametrize("name", ["1", "2", "3", "4", "tiny"])
def test_a_shipped_cut_fits_the_parts_and_leaves_no_place_empty(name: str) -> None:
    config = read(f"vla_{name}")
    parts = build(config.policy.options, CPU)
    assert policy_problems(config, input_specs(config), specs_of(parts)) == []
    where = config.placement.cut
    if config.placement.parts == "auto":
        where = range(len(config.placement.policy) + 1)  # a part for each place, at least
    assert len(where or parts) <= len(parts)
    assert {*(where or (1,)), 0} == set(range(len(config.placement.policy) + 1))


@pytest.mark.parametrize("count", [2, 3, 4])
def test_configurations_for_more_gpus_differ_in_name_and_placement_alone(count: int) -> None:
    one, more = (tomllib.loads(locate(f"vla_{n}").read_text()) for n in (1, count))
    differ = {key for key in one | more if one.get(key) != more.get(key)}
    assert differ == {"name", "placement"}
    assert len(more["placement"]["policy"]) == count - 1
