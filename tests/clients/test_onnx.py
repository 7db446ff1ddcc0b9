"""A policy of ours written as ONNX, and run by ONNX Runtime in its place."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import msgspec
import onnx
import pytest
import torch
from documents import BOOKS, FENCE
from ranks import SERVED, Ranks
from torch import Tensor

from ppstream import ConfigError
from ppstream.config.load import read
from ppstream.core.errors import ExitCode
from ppstream.ingest.window import input_specs
from ppstream.policy.compatibility import build_parts, places_of
from ppstream.policy.parts import specs_of
from ppstream_stages import export
from ppstream_stages.export import inputs_of, main
from ppstream_stages.onnx import SIDECAR, OnnxPolicy, PolicyFile, build

torch.set_num_threads(1)

CPU = torch.device("cpu")
PAGE = BOOKS / "policy-from-onnx.md"
ARM, ONNX = FENCE.findall(PAGE.read_text())[0], FENCE.findall(PAGE.read_text())[2]


@pytest.fixture(scope="module")
def arm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run-book's run."""
    file = tmp_path_factory.mktemp("arm") / "my-arm.toml"
    file.write_text(ARM)
    return file


@pytest.fixture(scope="module")
def model(arm: Path) -> Path:
    """Its policy as ONNX, where the run-book has it written."""
    folder = arm.parent / "exported"
    assert main(["--config", str(arm), "--out", str(folder)]) == 0
    return folder / "model.onnx"


@pytest.fixture
def copied(model: Path, tmp_path: Path) -> Path:
    """A model to spoil."""
    for file in (model, model.with_name(SIDECAR)):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path / model.name


def test_the_run_of_the_page_starts_where_few_cpus_let_it_overlap_little() -> None:
    accept = msgspec.toml.decode(ARM)["bringup"]["accept"]
    assert set(accept) == {"NOTHING_TO_HIDE", "LOW_OVERLAP", "CONTENDED"}


def about(model: Path) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode(model.with_name(SIDECAR).read_bytes())
    return found


def say(model: Path, **changes: Any) -> None:
    model.with_name(SIDECAR).write_bytes(msgspec.json.encode(about(model) | changes))


def built(model: Path) -> OnnxPolicy:
    policy = build({"weights": str(model)}, CPU)
    policy.load()
    return policy


def window_of(policy: Any, rows: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    drawn = {s.name: torch.rand(rows, *s.shape, generator=generator) for s in policy.inputs}
    return {
        s.name: drawn[s.name] < 0.8
        if s.dtype == "bool"
        else drawn[s.name].to(getattr(torch, s.dtype))
        for s in policy.inputs
    }


def actions_of(policy: Any, window: dict[str, Tensor], *, strided: bool = False) -> Tensor:
    rows = len(next(iter(window.values())))
    (spec,) = policy.outputs
    space = torch.full((rows, *spec.shape, 2), torch.nan)
    out = space[..., 0] if strided else space[..., 0].contiguous()
    policy(window, {"actions": out})
    return out


def torch_actions(arm: Path, window: dict[str, Tensor]) -> Tensor:
    known = dict(window)
    for part in build_parts(read(str(arm)), CPU):
        part.load()
        out = {
            spec.name: torch.empty(len(window["state.values"]), *spec.shape)
            for spec in part.outputs
        }
        part({spec.name: known[spec.name] for spec in part.inputs}, out)
        known |= out
    return known["actions"]


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_the_actions_are_torchs_for_any_number_of_rows(arm: Path, model: Path, rows: int) -> None:
    policy = built(model)
    for seed in range(3):
        window = window_of(policy, rows, seed)
        expected = torch_actions(arm, window)
        assert expected.abs().max() > 0.01
        assert (actions_of(policy, window) - expected).abs().max() <= 1e-5
    assert policy.inputs == inputs_of(build_parts(read(str(arm)), CPU))


def test_a_policy_json_of_before_says_nothing_of_frames_and_samples(copied: Path) -> None:
    content = about(copied)
    assert (content.pop("needs_samples"), content.pop("plain_frames")) == (False, False)
    copied.with_name(SIDECAR).write_bytes(msgspec.json.encode(content))
    policy = built(copied)
    assert (policy.needs_samples, policy.plain_frames) == (False, False)


def test_tensors_with_gaps_are_read_and_written_as_well(model: Path) -> None:
    policy = built(model)
    window = window_of(policy, 2)
    expected = actions_of(policy, window)
    apart = {name: torch.stack([one, one], -1)[..., 0] for name, one in window.items()}
    assert not apart["state.values"].is_contiguous()
    assert torch.equal(actions_of(policy, apart, strided=True), expected)


def test_what_fits_is_read_and_written_where_it_lies(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = built(model)
    window = window_of(policy, 2)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: pytest.fail("memory of its own"))
    actions_of(policy, window)


def test_normalisation_is_applied_on_the_way_in_and_out(copied: Path) -> None:
    policy = built(copied)
    values, actions = policy.inputs[-2].shape, policy.outputs[0].shape
    scales = {
        "state.values": {"mean": list(range(values[1])), "std": [4.0] * values[1]},
        "front.frames": {"mean": [0.5, 0.25, 0.0], "std": [0.5, 0.25, 2.0]},
        "actions": {"mean": [1.0] * actions[1], "std": list(range(1, actions[1] + 1))},
    }
    say(copied, normalisation=scales)
    window = window_of(policy, 2)
    inner = dict(window)
    inner["state.values"] = (window["state.values"] - torch.arange(values[1])) / 4
    mean, std = (torch.tensor(scales["front.frames"][key]).view(3, 1, 1) for key in ("mean", "std"))
    inner["front.frames"] = (window["front.frames"] - mean) / std
    expected = actions_of(policy, inner) * torch.arange(1, actions[1] + 1) + 1
    normalised = built(copied)
    for _ in range(2):
        assert torch.allclose(actions_of(normalised, window), expected, atol=1e-5)


def test_stats_become_the_normalisation_of_the_policy(
    arm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stats = tmp_path / "stats.json"
    stats.write_text('{"actions": {"mean": [0, 0, 1], "std": [1, 2, 3]}}')
    line = ["--config", str(arm), "--out", str(tmp_path), "--stats", str(stats)]
    assert main(line) == 0
    scale = about(tmp_path / "model.onnx")["normalisation"]["actions"]
    assert scale == {"mean": [0, 0, 1], "std": [1, 2, 3]}
    printed = capsys.readouterr().out
    assert hashlib.sha256((tmp_path / "model.onnx").read_bytes()).hexdigest() in printed
    assert "largest difference from torch on a random window" in printed
    stats.write_text('{"action": {"mean": [0], "std": [1]}}')
    assert main(line) == ExitCode.CONFIG
    assert "--stats: got action, want some of" in capsys.readouterr().err


def test_every_difference_of_model_and_policy_json_is_one_line_of_one_error(copied: Path) -> None:
    inputs = {one["name"]: one for one in about(copied)["inputs"]}
    inputs["state.values"]["shape"][0] += 1
    inputs["state.valid"]["dtype"] = "uint8"
    inputs["state.age_s"] = {"name": "state.age_s", "shape": [2], "dtype": "float32"}
    del inputs["front.frames"]
    copied.write_bytes(copied.read_bytes() + b"\x72\x00")  # one more field, and empty
    say(
        copied,
        inputs=[*inputs.values()],
        normalisation={"actions": {"mean": [0.0], "std": [1.0, 1.0, 1.0]}},
    )
    with pytest.raises(ConfigError) as caught:
        built(copied)
    found = [text.removeprefix("policy.weights: ") for text in caught.value.problems]
    assert found[0].startswith(f"{copied}: its sha256 is ")
    assert found[1:] == [
        "input state.values: the model has [4, 7] float32 a row, policy.json says [5, 7] float32",
        "input state.valid: the model has [4, 2] bool a row, policy.json says [4, 2] uint8",
        "policy.json names input 'state.age_s', which the model does not have",
        "the model has input 'front.frames', which policy.json does not name",
        "policy.json: normalisation.actions.mean: got 1 numbers, want 3",
    ]


def test_frames_of_no_image_with_a_normalisation_are_one_line_of_the_error(copied: Path) -> None:
    inputs = {one["name"]: one for one in about(copied)["inputs"]}
    inputs["front.frames"] |= {"shape": [3], "dtype": "float32"}
    scale = {"mean": [0.0], "std": [1.0]}
    say(copied, inputs=[*inputs.values()], normalisation={"front.frames": scale})
    with pytest.raises(ConfigError) as caught:
        built(copied)
    said = "policy.json: normalisation.front.frames: want an input or output of fractions"
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            None,
            "policy.json: No such file or directory; want it beside the .onnx file: ppstream",
        ),
        (b"{", "Input data was truncated"),
        (b'{"sha256": "a"}', "sha256"),
        (b'{"format": 2}', "format"),
        (b'{"inputs": [{"name": "a", "shape": [1], "dtype": "int3"}]}', "dtype 'int3'"),
    ],
)
def test_a_policy_json_that_is_none_is_refused(
    copied: Path, content: bytes | None, said: str
) -> None:
    file = copied.with_name(SIDECAR)
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        built(copied)
    assert said in str(caught.value)
    assert len(caught.value.problems) == 1


def test_a_file_that_is_no_model_and_one_that_changed_are_refused(copied: Path) -> None:
    policy = build({"weights": str(copied)}, CPU)
    copied.write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="its sha256 is "):
        policy.load()
    say(copied, sha256=hashlib.sha256(b"nothing").hexdigest())
    with pytest.raises(ConfigError, match="it is not an ONNX file"):
        build({"weights": str(copied)}, CPU)
    with pytest.raises(ConfigError, match=r"policy.weights: got none, want an .onnx file"):
        build({"weights": None}, CPU)


def test_weights_elsewhere_and_a_fixed_number_of_rows_are_refused(copied: Path) -> None:
    model = onnx.load(str(copied))
    for one in (*model.graph.input, *model.graph.output):
        one.type.tensor_type.shape.dim[0].dim_value = 1
    onnx.save_model(
        model, str(copied), save_as_external_data=True, location="weights", size_threshold=0
    )
    say(copied, sha256=hashlib.sha256(copied.read_bytes()).hexdigest())
    with pytest.raises(ConfigError) as caught:
        build({"weights": str(copied)}, CPU)
    assert "want all of them in this one" in caught.value.problems[0]
    assert "output actions: the model has 1 rows, want any number" in caught.value.problems[-1]
    assert len(caught.value.problems) == 1 + len(model.graph.input) + 1


def test_a_library_that_is_not_there_is_named_with_the_remedy(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ConfigError, match=r"needs onnxruntime: pip install 'ppstream\[onnx\]'"):
        build({"weights": str(model)}, CPU)


def test_a_gpu_without_its_execution_provider_is_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="pip install onnxruntime-gpu"):
        build({"weights": str(model)}, torch.device("cuda:0"))


def test_a_window_that_differs_is_refused_with_every_reason(arm: Path, model: Path) -> None:
    config = read(str(arm), ["window.steps=3", "streams.front.image.resize=[16, 32]"])
    with pytest.raises(ConfigError) as caught:
        places_of(config, specs_of([built(model)]), input_specs(config), inline=True)
    assert len(caught.value.problems) == 3
    assert "reads state.values [4, 7] float32, but streams and window make" in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["policy.options.dtype=bfloat16"], "--set policy.options.dtype=float32"),
        (
            [
                "policy.target=ppstream_stages.echo:build",
                "policy.options={steps=4, dim=7, horizon=8, action_dim=3}",
            ],
            "gave EchoPolicy, want parts that are NetworkPart",
        ),
    ],
)
def test_what_cannot_be_written_as_onnx_is_refused(
    arm: Path, settings: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["--config", str(arm), "--out", str(tmp_path / "out")]
    assert main([*line, *(word for one in settings for word in ("--set", one))]) == ExitCode.CONFIG
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_policy_of_other_parts_is_told_the_policy_json_to_write_by_hand(
    arm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["--config", str(arm), "--out", str(tmp_path / "out")]
    echo = ["policy.target=ppstream_stages.echo:build"]
    echo += ["policy.options={steps=4, dim=7, horizon=8, action_dim=3}"]
    settings = [word for one in echo for word in ("--set", one)]
    assert main([*line, *settings]) == ExitCode.CONFIG
    told = capsys.readouterr().err
    text = told.partition(f"{SIDECAR}: ")[2].partition("; both are served by policy.target = ")[0]
    about = msgspec.json.decode(text.replace("of model.onnx", "0" * 64), type=PolicyFile)
    (policy,) = build_parts(read(str(arm), echo), CPU)
    assert (about.inputs, about.outputs) == (tuple(policy.inputs), tuple(policy.outputs))


@pytest.mark.parametrize("has_older", [True, False])
def test_a_model_that_differs_from_torch_leaves_the_folder_as_it_was(
    arm: Path,
    copied: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *,
    has_older: bool,
) -> None:
    monkeypatch.setattr(export, "DIFFERENCE_MAX", -1.0)
    folder = copied.parent if has_older else copied.parent / "out"
    before = {file: file.stat() for file in folder.glob("*")}
    assert main(["--config", str(arm), "--out", str(folder)]) == ExitCode.CONFIG
    assert "from torch, limit -1e+00; nothing was written" in capsys.readouterr().err
    assert {file: file.stat() for file in folder.iterdir()} == before


@pytest.mark.multirank
def test_the_run_of_the_run_book_serves_the_model(arm: Path, model: Path, tmp_path: Path) -> None:
    file = model.parents[1] / "onnx.toml"
    file.write_text(ARM.partition("[policy]")[0] + ONNX)
    endpoint = f"service.endpoint=unix://{tmp_path}/r"
    with Ranks(tmp_path, endpoint, SERVED, config=file, world_size=1) as ranks:
        ranks.wait_for_event("phase", phase="ready")
        assert ranks.wait() == [ExitCode.DRAINED]
