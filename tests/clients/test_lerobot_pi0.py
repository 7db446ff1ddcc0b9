"""π0 from a LeRobot folder: exactly LeRobot's actions, which ``tests/golden/pi0`` keeps.

``$PPSTREAM_LEROBOT_PI0`` may name an interpreter that has LeRobot of 0.6 with its extra ``pi``, for
Python 3.12 or newer; it then makes them again.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from documents import BOOKS, FENCE
from lerobot_folder import FILES, change, edits, step
from pi0_folder import GOLDEN, NAMES, actions_of, loaded, make_small, reference, saved, weights
from pi0_sizes import CHUNK, MOST, PREFIX, SEED, TEXTS, expanded
from safetensors.torch import load_file, save_file

from ppstream import ConfigError
from ppstream.analysis.verdict import ACCEPTABLE
from ppstream.config.load import read
from ppstream.ingest.window import input_specs
from ppstream.policy.compatibility import build_parts, places_of
from ppstream.policy.host_staged import zeros
from ppstream.policy.parts import Joined, load, specs_of
from ppstream.policy.protocol import instruct
from ppstream_stages.building import NetworkPart
from ppstream_stages.instruction_table import TEXTS_MAX
from ppstream_stages.lerobot import build
from ppstream_stages.lerobot_pi0 import fitted
from ppstream_stages.lerobot_pi0_names import sources_of

torch.set_num_threads(1)

SCRIPT = Path(__file__).parents[1] / "support" / "lerobot_pi0.py"
LEROBOT = "PPSTREAM_LEROBOT_PI0"
LIMIT_S = 300
CLOSE = {"float32": 1e-5, "bfloat16": 1e-2, "linear": 1e-5, "exp": 1e-5}
OPTIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "linear": {"rtc": {"execution_horizon": PREFIX}},
    "exp": {"rtc": {"execution_horizon": PREFIX, "schedule": "exp"}},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_small(monkeypatch)
    return saved(tmp_path / "pi0_pick")


def edited(folder: Path, **changed: Any) -> Path:
    """The folder with other weights in its file; None takes one away."""
    file = folder / "model.safetensors"
    kept = {name: one for name, one in (load_file(file) | changed).items() if one is not None}
    save_file(kept, file)
    return folder


@pytest.mark.parametrize("kind", OPTIONS)
def test_the_actions_are_lerobots_own(folder: Path, kind: str) -> None:
    window, expected = reference()
    made = actions_of(loaded(folder, **OPTIONS[kind]), window)
    assert (made - expected[kind]).abs().max() <= CLOSE[kind]
    others = [expected[name] for name in expected if name != kind]
    assert min((made - other).abs().max() for other in others) > 2e-3
    assert (made[0] - made[1]).abs().max() > 0.1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("pieces", [1, 2])
def test_how_it_is_cut_changes_no_bit_of_the_actions(folder: Path, dtype: str, pieces: int) -> None:
    window, _ = reference()
    cut = {"language_layers_per_part": pieces, "denoising_steps_per_part": pieces}
    parts = loaded(folder, dtype=dtype, **cut)
    counts = -(-3 // pieces), -(-5 // pieces)
    assert [part.name for part in parts] == [
        "vision",
        *(f"language_{number + 1}" for number in range(counts[0])),
        *(f"denoise_{number + 1}" for number in range(counts[1])),
    ]
    whole = loaded(folder, dtype=dtype, denoising_steps_per_part=9)
    assert len(whole) == 3
    assert torch.equal(actions_of(parts, window), actions_of(whole, window))


def test_every_weight_of_lerobot_is_read_or_known_to_be_idle(folder: Path) -> None:
    shapes = expanded(json.loads((GOLDEN / "shapes.json").read_text()))
    parts = loaded(folder)
    ours = {name: one for part in parts for name, one in part.network.state_dict().items()}
    sources, unused = sources_of(ours, shapes)
    named = [name for several in sources.values() for name in several]
    assert sorted([*named, *unused]) == sorted(shapes)
    theirs = weights()
    for name, several in sources.items():
        assert torch.equal(ours[name], torch.cat([theirs[one] for one in several]))
    ends = ("paligemma.lm_head", "gemma_expert.lm_head", "language_model.norm")
    assert len(unused) == len(ends)
    assert all(any(name.endswith(f"{end}.weight") for name in unused) for end in ends)


def test_a_folder_of_full_size_fits_and_its_weights_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        make_small(patch)
        saved(tmp_path / "whole")
        tokenizers = sys.modules["tokenizers"]
    monkeypatch.setitem(sys.modules, "tokenizers", tokenizers)
    change(tmp_path / "whole", "config", edits(max_state_dim=32, max_action_dim=32))
    change(tmp_path / "whole", "config", edits(image_resolution=[224, 224]))
    full = expanded(json.loads((GOLDEN / "names.json").read_text()))
    header, end = {}, 0
    for name, shape in full.items():
        begin, end = end, end + 4 * int(torch.Size(shape).numel())
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (tmp_path / "whole" / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)  # holes
    given = {"tokenizer": str(tmp_path / "whole"), "weights": str(Path(file.name))}
    parts = build(given, torch.device("cpu"))
    count = sum({n: torch.Size(s).numel() for p in parts for n, s in p.weights.items()}.values())
    assert count == pytest.approx(3.24e9, rel=0.01)
    assert all(one.is_meta for part in parts for one in part.network.parameters())


def test_folders_of_other_releases_name_the_same_weights_otherwise(folder: Path) -> None:
    window, expected = reference()
    found = load_file(folder / "model.safetensors")
    words = [name for name in found if name.endswith("embed_tokens.weight")]
    head = "model.paligemma_with_expert.paligemma.lm_head.weight"
    found[head] = found.pop(words[0])
    renamed = {
        name.removeprefix("model.").replace("action_time_mlp", "time_mlp"): one
        for name, one in found.items()
    }
    assert len(renamed) == len(found)
    save_file(renamed, folder / "model.safetensors")
    made = actions_of(loaded(folder), window)
    assert (made - expected["float32"]).abs().max() <= CLOSE["float32"]


def test_each_weight_counts_but_those_of_tokens_that_nobody_reads(folder: Path) -> None:
    window, _ = reference()
    parts = loaded(folder)
    expected = actions_of(parts, window)
    idle = []
    for name, weight in {n: w for p in parts for n, w in p.network.state_dict().items()}.items():
        before = weight.clone()
        weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
        if torch.equal(actions_of(parts, window), expected):
            idle.append(name)
        weight.copy_(before)
    last = "prefix.language_layers.2"
    ends = ("join", "narrow", "norm_feed", "widen")
    assert sorted(idle) == [f"{last}.{end}.weight" for end in ends]


def test_a_text_that_a_robot_did_not_send_is_the_task(folder: Path) -> None:
    window, _ = reference()
    known = actions_of(loaded(folder), window)
    other = window | {"instruction_id": torch.tensor([0, 2, 0])}
    made = actions_of(loaded(folder, task=TEXTS[0]), other)
    assert torch.equal(made[:2], known[:2])
    assert not torch.equal(made[2], known[2])
    alone = loaded(folder, task=TEXTS[1], instructions=False)
    assert not any(hasattr(part, "instruct") for part in alone)
    assert "instruction_id" not in {spec.name for part in alone for spec in part.inputs}
    assert torch.equal(actions_of(alone, window)[1], known[1])


def test_texts_that_are_too_long_or_too_many_are_refused(folder: Path) -> None:
    parts = loaded(folder)
    (taker,) = (part for part in parts if hasattr(part, "instruct"))
    taker.instruct(TEXTS_MAX, "a" * (MOST - 2))  # and what it begins and ends with
    with pytest.raises(ValueError, match=f"has {MOST + 1} tokens, at most {MOST} fit"):
        taker.instruct(1, "a" * (MOST - 1))
    for number in (0, TEXTS_MAX + 1):
        with pytest.raises(ValueError, match="1024 texts are the limit"):
            taker.instruct(number, "fold")
    with pytest.raises(ConfigError, match=r"policy\.options\.task: the text has 42 tokens"):
        loaded(folder, task="a" * 40)


def test_fresh_noise_differs_in_each_call_and_row(folder: Path) -> None:
    window, _ = reference()
    same = {name: one[:1].expand_as(one).contiguous() for name, one in window.items()}
    parts = loaded(folder, noise="fresh", seed=None)
    first, second = actions_of(parts, same), actions_of(parts, same)
    assert (first - second).abs().max() > 0.1
    assert (first[0] - first[1]).abs().max() > 0.1
    fixed = actions_of(loaded(folder), same)
    assert torch.allclose(fixed[0], fixed[1], atol=1e-5)


def test_a_robot_of_which_no_prefix_is_known_is_not_guided(folder: Path) -> None:
    window, expected = reference()
    window["executed_prefix"][1], window["delay_steps"][1] = 0, 0
    made = actions_of(loaded(folder, **OPTIONS["linear"]), window)
    assert (made[1] - expected["float32"][1]).abs().max() <= CLOSE["float32"]
    assert (made[2] - expected["linear"][2]).abs().max() <= CLOSE["linear"]


def test_its_operations_are_counted_from_the_shapes_alone(folder: Path) -> None:
    for options in OPTIONS.values():
        assert all(part.flops > 0 for part in loaded(folder, **options))


@pytest.mark.parametrize(
    ("name", "edit", "said"),
    [
        ("config", edits(n_obs_steps=2), "n_obs_steps: got 2, want 1"),
        ("config", edits(paligemma_variant="gemma_9b"), "got 'gemma_9b', want 'gemma_2b' or 'gem"),
        ("config", edits(dtype="float16"), "got 'float16', want 'float32' or 'bfloat16'"),
        ("config", edits(use_relative_actions=True), "got True, want False"),
        ("config", edits(max_state_dim=5), "got 6 values, want at most max_state_dim = 5"),
        ("config", edits(max_action_dim=3), "action: got 4 values, want at most 3"),
        ("config", edits(image_resolution=[28, 42]), "got [28, 42], want a square of a multiple"),
        ("config", edits(num_inference_steps=0), "num_inference_steps: got 0, want 1 or more"),
        ("config", edits(n_action_steps=9), "got 9, want 1 or more and at most chunk_size = 8"),
        ("config", edits(min_period=5), "got 5.0 and 4.0, want rising numbers above 0"),
        (
            "config",
            edits(input_features={"observation.state": {"type": "STATE", "shape": [6]}}),
            "input_features: got no camera, want one or more",
        ),
        (
            "config",
            lambda one: one["input_features"].update(
                {"observation.environment_state": {"type": "ENV", "shape": [2]}}
            ),
            "got observation.environment_state, which π0 does not read",
        ),
        ("before", step(3, config={"max_length": 99}), "max_length: got 99, want 12"),
        ("before", step(5, config={"enabled": True}), "(relative_actions_processor): enabled: got"),
        ("behind", step(1, config={"enabled": True}), "(absolute_actions_processor): enabled: got"),
        ("before", step(3, registry_name="mine"), "step 3 (mine) is not known here"),
    ],
)
def test_what_is_not_known_is_refused_by_name(
    folder: Path, name: str, edit: Callable[[Any], object], said: str
) -> None:
    change(folder, name, edit)
    with pytest.raises(ConfigError) as caught:
        loaded(folder)
    assert said in str(caught.value)
    assert FILES[name] in str(caught.value)


def test_weights_that_do_not_fit_are_refused_by_lerobots_names(folder: Path) -> None:
    key = "model.paligemma_with_expert.gemma_expert.model.layers.1.self_attn.k_proj.weight"
    edited(folder, **{key: torch.ones(9, 16)})
    together = r"k_proj.weight \[9, 16\], .*v_proj.weight \[8, 16\], want \[32, 16\] together$"
    with pytest.raises(ConfigError, match=together):
        loaded(folder)
    edited(folder, **{key: None, "model.extra": torch.ones(1)})
    with pytest.raises(ConfigError) as caught:
        loaded(folder)
    assert f"it lacks {key}; it has too many: model.extra" in str(caught.value)


def test_a_tokenizer_is_needed_and_what_reads_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(**options: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            loaded(folder, **options)
        (problem,) = caught.value.problems
        return problem

    assert "tokenizer: got none, want a local folder" in said(tokenizer=None)
    assert "nowhere cannot be read" in said(tokenizer="nowhere")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert said() == (
        "policy.options.tokenizer: needs tokenizers: pip install 'ppstream[language]'"
    )


def test_the_library_reads_a_text_as_the_stand_in_does(folder: Path) -> None:
    texts = [f"{text.strip()}\n" for text in TEXTS]
    read = sys.modules.pop("tokenizers").Tokenizer.from_file(str(folder / "tokenizer.json"))
    try:
        library = importlib.import_module("tokenizers")
    except ImportError as error:
        pytest.skip(f"tokenizers is not installed: {error}")
    real = library.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert [real.encode(one).ids for one in texts] == [read.encode(one).ids for one in texts]


def test_options_of_other_policies_are_refused_with_those_of_the_run(folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(folder, horizon=CHUNK + 1, noise="fresh", cameras={"front": "none"})
    assert [text.partition("options.")[2] for text in caught.value.problems] == [
        "cameras.front: got 'none', the policy reads observation.images.front, "
        "observation.images.wrist",
        f"horizon: got {CHUNK + 1}, the policy makes {CHUNK} steps",
        "seed: got 5, but fresh noise has none; want noise = 'fixed'",
    ]


def test_tensors_of_the_window_are_those_that_stage_a_makes(folder: Path) -> None:
    parts: list[NetworkPart] = loaded(folder, steps=3, **OPTIONS["linear"])
    made = {spec.name for part in parts for spec in part.outputs}
    read = {
        spec.name: (spec.shape, spec.dtype)
        for part in parts
        for spec in part.inputs
        if spec.name not in made
    }
    assert set(read) == {*NAMES.values(), "instruction_id", "executed_prefix", "delay_steps"}
    assert read["state.values"] == ((3, 6), "float32")
    assert read["front.frames"] == ((1, 3, 20, 37), "float32")
    assert read["executed_prefix"] == ((PREFIX, 4), "float32")
    assert parts[-1].outputs[0].shape == (CHUNK, 4)


def test_the_last_step_of_the_state_is_read(folder: Path) -> None:
    window, expected = reference()
    older = window["state.values"] + torch.tensor([3.0, 2.0, 0.0]).view(1, 3, 1)
    made = actions_of(loaded(folder, steps=3), window | {"state.values": older})
    assert (made - expected["float32"]).abs().max() <= CLOSE["float32"]


def test_a_frame_lies_in_the_middle_of_a_dark_square() -> None:
    frame = torch.full((1, 3, 20, 37), 2.0)  # brighter than white
    made = fitted(frame, 28)
    assert made.shape == (1, 3, 28, 28)
    assert made[:, :, 6:21].eq(1).all()
    assert made[:, :, :6].eq(-1).all()
    assert made[:, :, 21:].eq(-1).all()
    assert torch.equal(fitted(frame[:, :, :20, :20], 20), frame[:, :, :20, :20] * 2 - 1)


@pytest.mark.timeout(LIMIT_S + 60)
def test_lerobot_makes_the_same_actions_today(tmp_path: Path) -> None:
    python = os.environ.get(LEROBOT)
    if python is None:
        pytest.skip(f"{LEROBOT} names no interpreter of Python 3.12 with lerobot[pi] 0.6")
    done = subprocess.run(
        [python, str(SCRIPT), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={"PATH": os.environ["PATH"], "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert done.returncode == 0, done.stderr
    for name in ("names.json", "shapes.json", *FILES.values()):
        assert json.loads((tmp_path / name).read_text()) == json.loads((GOLDEN / name).read_text())
    made, kept = (load_file(one / "reference.safetensors") for one in (tmp_path, GOLDEN))
    assert made.keys() == kept.keys()
    limits = {name: CLOSE.get(name.removeprefix("action."), 0.0) for name in made}
    assert all((made[name] - kept[name]).abs().max() <= limits[name] for name in made)
    theirs = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(one, theirs[name]) for name, one in weights().items())


@pytest.fixture
def described(folder: Path) -> Path:
    """The run-book's run, with a policy of random weights where it says."""
    run = FENCE.findall((BOOKS / "policy-pi0.md").read_text())[0]
    place = folder.parent / "checkpoints" / folder.name
    place.parent.mkdir()
    folder.rename(place)
    (folder.parent / "pi0.toml").write_text(run.replace('"checkpoints', f'"{place.parent}'))
    return folder.parent / "pi0.toml"


RANKS = {
    "whole": [],
    "three": [
        "policy.options.language_layers_per_part=2",
        "placement.policy=['cpu', 'cpu']",
        "placement.parts=[0, 1, 1, 1, 2, 2]",
    ],
}


@pytest.mark.parametrize("ranks", RANKS)
def test_the_run_of_the_run_book_gives_these_actions_on_one_and_more_ranks(
    described: Path, ranks: str
) -> None:
    config = read(str(described), [f"policy.options.seed={SEED}", *RANKS[ranks]])
    parts = build_parts(config, torch.device("cpu"))
    places = places_of(config, specs_of(parts), input_specs(config))
    assert len(places) == 1 + len(config.placement.policy)
    assert set(config.bringup.accept) == set(ACCEPTABLE)  # as refused: its A and C are far shorter
    load(parts, "lerobot")
    window, expected = reference()
    rows = len(TEXTS)
    known: dict[str, torch.Tensor] = dict(zeros(input_specs(config), rows, torch.device("cpu")))
    known |= window
    known["present"] = torch.ones(rows, dtype=torch.bool)
    for place in (one for one in places if one.names):
        joined = Joined(place.of(parts), place, rows, torch.device("cpu"), 7)
        for number, text in enumerate(TEXTS):
            instruct(joined, number + 1, text)
        out = zeros(place.outputs, rows, torch.device("cpu"))
        joined(known, out)
        known |= out
    kept = expected["linear"][:, : config.actions.horizon]
    assert (known["actions"] - kept).abs().max() <= CLOSE["linear"]


OWN_MEAN = "streams.front.image.mean=[0.5, 0.5, 0.5]"


def test_another_window_does_not_fit(described: Path) -> None:
    config = read(str(described), ["streams.joints.dim=5", "actions.prefix_steps=5", OWN_MEAN])
    parts = specs_of(build_parts(config, torch.device("cpu")))
    with pytest.raises(ConfigError) as caught:
        places_of(config, parts, input_specs(config))
    said = "; ".join(caught.value.problems)
    assert "state.values" in said
    assert "executed_prefix" in said
    assert "normalises the frames of front itself" in said
