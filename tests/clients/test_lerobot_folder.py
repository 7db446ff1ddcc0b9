"""Folders of LeRobot, read without it; ``test_lerobot_policy`` has the actions beside its own."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from documents import BOOKS, FENCE
from lerobot_folder import FILES, change, edits, loaded, saved, step
from ranks import SERVED, Ranks
from safetensors.torch import load_file, save_file
from torch import Tensor

from ppstream import ConfigError
from ppstream.analysis.verdict import ACCEPTABLE
from ppstream.config.load import read
from ppstream.core.errors import ExitCode
from ppstream.ingest.window import input_specs
from ppstream.policy.compatibility import build_parts, places_of
from ppstream.policy.parts import specs_of
from ppstream_stages import export, onnx

torch.set_num_threads(1)

CPU = torch.device("cpu")
RUN = FENCE.findall((BOOKS / "policy-from-lerobot.md").read_text())[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved(tmp_path / "act_pick")


def actions_of(policy: Any, state: Tensor, environment: Tensor) -> Tensor:
    window = {"state.values": state, "environment.values": environment}
    out = torch.full((len(state), *policy.outputs[0].shape), torch.nan)
    policy(window, {"actions": out})
    return out


def test_normalisation_of_the_processors_is_part_of_the_policy(folder: Path) -> None:
    state, environment = torch.randn(2, 1, 6), torch.randn(2, 1, 2)
    normalised = actions_of(loaded(folder), state, environment)
    for name in ("before", "behind"):
        change(
            folder, name, lambda one: [step["config"].pop("norm_map", 0) for step in one["steps"]]
        )
        change(
            folder,
            name,
            lambda one: [
                step["config"].update(norm_map={}) for step in one["steps"] if "state_file" in step
            ],
        )
    plain = loaded(folder)
    low, high = torch.tensor([-2.0, 1.0]), torch.tensor([2.0, 2.0])
    expected = actions_of(
        plain, (state - torch.arange(6.0)) / 2, 2 * (environment - low) / (high - low) - 1
    )
    assert expected.std() > 0.01
    assert torch.allclose(normalised, expected * 3 + 10, atol=1e-5)
    assert not torch.allclose(normalised, actions_of(plain, state, environment), atol=0.1)


def test_a_value_that_never_moved_is_minus_one_as_in_lerobot(folder: Path) -> None:
    state, environment = torch.randn(2, 1, 6), torch.tensor([[[0.0, 1.0]]]).repeat(2, 1, 1)
    file, name = folder / "a.safetensors", "observation.environment_state"
    whole = actions_of(loaded(folder), state, environment)  # 1.0 is the least of 1.0 to 2.0
    save_file({**load_file(file), f"{name}.max": torch.tensor([2.0, 1.0])}, file)
    assert torch.equal(actions_of(loaded(folder), state, environment), whole)


def test_the_last_step_is_read_and_the_chunk_is_cut(folder: Path) -> None:
    state, environment = torch.randn(2, 1, 6), torch.randn(2, 1, 2)
    whole = actions_of(loaded(folder), state, environment)
    assert whole.shape == (2, 20, 6)
    policy = loaded(folder, steps=3, horizon=7)
    older = torch.randn(2, 2, 6), torch.randn(2, 2, 2)
    window = torch.cat([older[0], state], 1), torch.cat([older[1], environment], 1)
    assert torch.equal(actions_of(policy, *window), whole[:, :7])


def test_weights_that_do_not_fit_are_refused(folder: Path) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    save_file({**weights, "model.extra": torch.ones(1)}, file)
    with pytest.raises(ConfigError, match=r"it has too many: model\.extra$"):
        loaded(folder)
    del weights["model.action_head.bias"]
    save_file(weights, file)
    with pytest.raises(ConfigError, match=r"it lacks model\.action_head\.bias$"):
        loaded(folder)


@pytest.mark.parametrize(
    ("name", "edit", "said"),
    [
        (
            "config",
            edits(type="smolvla"),
            "got a policy 'smolvla', want 'act' or 'diffusion' or 'pi0'; it would need its la",
        ),
        (
            "config",
            edits(type="pi05"),
            "'pi0'; it would need the state as text for its tokenizer, and",
        ),
        ("config", edits(type="tdmpc"), "got a policy 'tdmpc', want 'act' or 'diffusion' or 'pi0'"),
        ("config", edits(n_obs_steps=2), "n_obs_steps: got 2, want 1"),
        ("config", edits(chunk_size="20"), "Expected `int`, got `str` - at `$.chunk_size`"),
        ("config", edits(feedforward_activation="glu"), "got 'glu', want 'relu' or 'gelu'"),
        (
            "config",
            edits(
                vision_backbone="resnet50",
                input_features={"observation.image": {"type": "VISUAL", "shape": [3, 8, 8]}},
            ),
            "vision_backbone: got 'resnet50', want 'resnet18' or 'resnet34'",
        ),
        (
            "config",
            edits(input_features={"observation.state": {"type": "STATE", "shape": []}}),
            "got observation.state STATE [], which no window has",
        ),
        (
            "config",
            edits(output_features={}),
            "output_features: got none, want one row of 'action'",
        ),
        (
            "before",
            step(1, registry_name="tokenizer_processor"),
            "step 1 (tokenizer_processor) is n",
        ),
        (
            "before",
            step(1, **{"registry_name": None, "class": "os.system"}),
            "step 1 (os.system) is",
        ),
        (
            "behind",
            step(0, registry_name="normalizer_processor"),
            "step 0 (normalizer_processor) is",
        ),
        ("before", step(2, config={"float_dtype": "bfloat16"}), "float_dtype: got 'bfloat16'"),
        ("before", step(3, state_file="../a.safetensors"), "want a file of this folder"),
        ("before", step(3, state_file="none.safetensors"), "none.safetensors cannot be read"),
        ("before", step(3, state_file="b.safetensors", config={}), "missing required field"),
        (
            "behind",
            lambda one: one["steps"][0]["config"].update(norm_map={"ACTION": "MIN_MAX"}),
            "action: MIN_MAX needs min and max, which its state file lacks",
        ),
        (
            "behind",
            lambda one: one["steps"][0]["config"].update(norm_map={"ACTION": "LOG"}),
            "action: got 'LOG', want MEAN_STD, MIN_MAX, QUANTILES, QUANTILE10 or IDENTITY",
        ),
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


def test_every_reason_is_told_at_once(folder: Path) -> None:
    change(folder, "config", edits(n_obs_steps=2))
    (folder / FILES["before"]).unlink()
    change(folder, "behind", step(0, registry_name="mine"))
    with pytest.raises(ConfigError) as caught:
        loaded(folder, horizon=21, cameras={"front": "observation.images.top"})
    said = [text.rpartition(".json: ")[2] for text in caught.value.problems]
    assert said == [
        "n_obs_steps: got 2, want 1",
        "policy.options.cameras.front: got 'observation.images.top', the policy reads no camera",
        "policy.options.horizon: got 21, the policy makes 20 steps",
        "No such file or directory",
        "step 0 (mine) is not known here; want device_processor, unnormalizer_processor",
    ]


@pytest.fixture(scope="module")
def so101(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run-book's run, with a policy of random weights where it says."""
    root = tmp_path_factory.mktemp("so101")
    weights = tomllib.loads(RUN)["policy"]["weights"]
    saved(root / Path(weights).parent, has_camera=True)
    (root / "so101.toml").write_text(RUN)
    return root / "so101.toml"


def test_the_run_of_the_run_book_fits_and_another_does_not(so101: Path) -> None:
    config = read(str(so101))
    parts = specs_of(build_parts(config, torch.device("cpu")))
    places_of(config, parts, input_specs(config), inline=True)
    assert set(config.bringup.accept) == set(ACCEPTABLE)  # as refused: its A and C are far shorter
    config = read(str(so101), ["streams.front.image.resize=[48, 64]", "streams.joints.dim=5"])
    with pytest.raises(ConfigError) as caught:
        places_of(config, parts, input_specs(config), inline=True)
    assert len(caught.value.problems) == 2


@pytest.mark.parametrize("kind", ["act", "diffusion"])
def test_a_camera_with_its_own_mean_and_std_is_refused(
    so101: Path, tmp_path: Path, kind: str
) -> None:
    folder = saved(tmp_path / "pick", kind=kind, has_camera=True)
    weights = f"policy.weights={folder / 'model.safetensors'}"
    settings = [weights, "policy.options.steps=2", "window.steps=2"]
    if kind == "diffusion":
        settings += ["policy.options.horizon=7", "actions.horizon=7"]
        settings += ["streams.front.image.frames=2"]
    own = [
        "streams.front.image.mean=[0.485, 0.456, 0.406]",
        "streams.front.image.std=[0.229, 0.224, 0.225]",
    ]
    plain, config = read(str(so101), settings), read(str(so101), settings + own)
    parts = specs_of(build_parts(config, torch.device("cpu")))
    places_of(plain, parts, input_specs(plain), inline=True)
    with pytest.raises(ConfigError) as caught:
        places_of(config, parts, input_specs(config), inline=True)
    (problem,) = caught.value.problems
    assert "normalises the frames of front itself: streams.front.image has mean [0.485," in problem


def test_a_policy_of_diffusion_fits_with_the_changes_that_the_run_book_names(
    so101: Path, tmp_path: Path
) -> None:
    folder = saved(tmp_path / "diffusion_pick", kind="diffusion", has_camera=True)
    settings = [
        f"policy.weights={folder / 'model.safetensors'}",
        "policy.options.horizon=7",
        "actions.horizon=7",
        "window.steps=2",
        "streams.front.image.frames=2",
    ]
    config = read(str(so101), settings)
    parts = specs_of(build_parts(config, torch.device("cpu")))
    places_of(config, parts, input_specs(config), inline=True)
    config = read(str(so101), [*settings, "streams.front.image.frames=1"])
    with pytest.raises(ConfigError, match=r"front\.frames"):
        places_of(config, parts, input_specs(config), inline=True)


def test_such_a_policy_can_be_written_as_onnx(
    so101: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export.main(["--config", str(so101), "--out", str(tmp_path)]) == 0
    assert float(capsys.readouterr().out.rpartition(" ")[2]) <= 1e-4
    (policy,) = build_parts(read(str(so101)), CPU)
    model = onnx.build({"weights": str(tmp_path / "model.onnx")}, CPU)
    generator = torch.Generator().manual_seed(0)
    window = {
        spec.name: torch.rand(2, *spec.shape, generator=generator).to(getattr(torch, spec.dtype))
        for spec in policy.inputs
    }
    made = []
    for one in (policy, model):
        one.load()
        made.append(torch.full((2, *one.outputs[0].shape), torch.nan))
        one(window, {"actions": made[-1]})
    assert made[0].std() > 0.01
    assert (made[0] - made[1]).abs().max() <= 1e-5
    assert (model.needs_samples, model.plain_frames) == (True, True)


def test_the_frames_of_such_a_policy_written_as_onnx_are_not_normalised_twice(
    so101: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export.main(["--config", str(so101), "--out", str(tmp_path)]) == 0
    settings = [
        "policy.target=ppstream_stages.onnx:build",
        f"policy.weights={tmp_path / 'model.onnx'}",
        "policy.options={}",
    ]
    own = ["streams.front.image.mean=[0.5, 0.5, 0.5]", "streams.front.image.std=[0.5, 0.5, 0.5]"]
    plain, config = read(str(so101), settings), read(str(so101), settings + own)
    parts = specs_of(build_parts(config, CPU))
    places_of(plain, parts, input_specs(plain), inline=True)
    with pytest.raises(ConfigError) as caught:
        places_of(config, parts, input_specs(config), inline=True)
    (problem,) = caught.value.problems
    assert "normalises the frames of front itself: streams.front.image has mean [0.5," in problem
    stats = tmp_path / "stats.json"
    stats.write_text('{"front.frames": {"mean": [0, 0, 0], "std": [1, 1, 1]}}')
    line = ["--config", str(so101), "--out", str(tmp_path), "--stats", str(stats)]
    assert export.main(line) == ExitCode.CONFIG
    said = "--stats: got front.frames, which the policy normalises itself; leave it out"
    assert said in capsys.readouterr().err


@pytest.mark.multirank
def test_the_run_of_the_run_book_serves_the_policy(so101: Path, tmp_path: Path) -> None:
    endpoint = f"service.endpoint=unix://{tmp_path}/r"
    with Ranks(tmp_path, endpoint, SERVED, config=so101, world_size=1) as ranks:
        ranks.wait_for_event("phase", phase="ready")
        assert ranks.wait() == [ExitCode.DRAINED]
