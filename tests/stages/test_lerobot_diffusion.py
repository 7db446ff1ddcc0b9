"""Diffusion from a LeRobot folder; ``test_lerobot_policy`` has the actions beside LeRobot's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lerobot_folder import FILES, change, edits, loaded, saved
from policy_calls import ROWS, in_a_row
from safetensors.torch import load_file, save_file
from torch import Tensor

from ppstream import ConfigError, TensorSpec
from ppstream.policy.parts import blind_reads, specs_of

torch.set_num_threads(1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved(tmp_path / "diffusion_pick", kind="diffusion")


def window_of(policy: Any) -> dict[str, Tensor]:
    """A random window, a different one for each row; every frame is there."""
    generator = torch.Generator().manual_seed(3)
    made = {spec.name: torch.rand(ROWS, *spec.shape, generator=generator) for spec in policy.inputs}
    return made | {name: one >= 0 for name, one in made.items() if name.endswith(".valid")}


def actions_of(policy: Any, window: dict[str, Tensor]) -> Tensor:
    return in_a_row([policy], window)["actions"]


def test_fixed_noise_gives_the_same_actions_each_time_and_no_row_counts_for_another(
    folder: Path,
) -> None:
    policy = loaded(folder)
    window = window_of(policy)
    expected = actions_of(policy, window)
    torch.manual_seed(11)  # draws of others change nothing
    assert torch.equal(actions_of(loaded(folder, noise="fixed", seed=0), window), expected)
    assert (expected[0] - expected[1]).abs().max() > 1e-3
    turned = {name: tensor.flip(0) for name, tensor in window.items()}
    assert torch.allclose(actions_of(policy, turned).flip(0), expected, atol=1e-5)
    other = actions_of(loaded(folder, seed=1), window)
    assert (other - expected).abs().max() > 0.1


def test_fresh_noise_differs_in_each_call_and_row(folder: Path) -> None:
    policy = loaded(folder, noise="fresh")
    window = {name: tensor[:1].expand_as(tensor) for name, tensor in window_of(policy).items()}
    torch.manual_seed(11)
    first, second = actions_of(policy, window), actions_of(policy, window)
    assert (first - second).abs().max() > 0.1
    assert (first[0] - first[1]).abs().max() > 0.1
    torch.manual_seed(11)
    assert torch.equal(actions_of(policy, window), first)


def test_ddim_draws_noise_only_where_it_begins(folder: Path) -> None:
    change(folder, "config", edits(noise_scheduler_type="DDIM", num_inference_steps=2))
    policy = loaded(folder, noise="fresh")
    torch.manual_seed(11)
    actions_of(policy, window_of(policy))
    behind = torch.rand(1)
    torch.manual_seed(11)
    torch.randn(ROWS, 8, 6)
    assert torch.equal(torch.rand(1), behind)


def test_the_last_steps_are_read_and_the_chunk_begins_at_the_newest(folder: Path) -> None:
    policy = loaded(folder)
    window = window_of(policy)
    kept = actions_of(policy, window)
    assert kept.shape == (ROWS, 4, 6)
    longer = loaded(folder, steps=5, horizon=7)  # all that there are behind the first observation
    spoiled = {
        name: torch.cat([torch.full_like(tensor, 9.0), torch.zeros_like(tensor[:, :1]), tensor], 1)
        for name, tensor in window.items()
    }
    made = actions_of(longer, spoiled)
    assert made.shape == (ROWS, 7, 6)
    assert torch.equal(made[:, :4], kept)


def test_the_frame_after_a_missing_one_takes_its_place_and_an_old_one_stays(
    tmp_path: Path,
) -> None:
    policy = loaded(saved(tmp_path / "seen", kind="diffusion", has_camera=True))
    window = window_of(policy)
    known = actions_of(policy, window)
    twice = window["front.frames"][:, 1:].expand_as(window["front.frames"])
    held = actions_of(policy, window | {"front.frames": twice})
    invalid = torch.tensor([False, True]).expand(ROWS, 2)
    window = window | {"front.valid": invalid}
    assert torch.equal(actions_of(policy, window), known)  # it is old
    missing = {"front.age_s": window["front.age_s"] * invalid}
    assert torch.equal(actions_of(policy, window | missing), held)
    assert (held - known).abs().max() > 1e-4


def test_one_call_reads_no_value_on_the_host(folder: Path) -> None:
    for noise in ("fixed", "fresh"):
        assert loaded(folder, noise=noise).flops > 0  # counted on tensors that have no values


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        ({"noise_scheduler_type": "EDM"}, "noise_scheduler_type: got 'EDM', want 'DDPM' or 'DDIM'"),
        ({"beta_schedule": "sigmoid"}, "got 'sigmoid', want 'squaredcos_cap_v2' or 'linear'"),
        ({"prediction_type": "v_prediction"}, "got 'v_prediction', want 'epsilon' or 'sample'"),
        ({"compile_model": True}, "compile_model: got True, want False"),
        ({"kernel_size": 4}, "kernel_size: got 4, want an odd number"),
        ({"down_dims": [16, 30]}, "down_dims: got [16, 30], want multiples of n_groups = 4"),
        ({"down_dims": []}, "down_dims: got [], want multiples of n_groups = 4"),
        ({"down_dims": [12, 32]}, "down_dims: got 12 first, want a multiple of 8"),
        ({"horizon": 10}, "horizon: got 10, want a multiple of 4"),
        ({"n_action_steps": 8}, "got 2 and 8 of horizon 8, want n_action_steps at most 7"),
        ({"diffusion_step_embed_dim": 7}, "got 7, want an even number of at least 4"),
        ({"num_inference_steps": 6}, "got 6, want 1 or more and at most num_train_timesteps = 5"),
        (
            {"beta_schedule": "linear", "beta_start": 0.0},
            "beta_start, beta_end: got 0.0 and 0.02, want rising numbers between 0 and 1",
        ),
        ({"clip_sample_range": 0.0}, "clip_sample_range: got 0.0, want more than 0"),
        (
            {"input_features": {"observation.state": {"type": "STATE", "shape": [6]}}},
            "got no camera and no observation.environment_state, want one",
        ),
        (
            {"input_features": {"observation.environment_state": {"type": "ENV", "shape": [2]}}},
            "got no observation.state, which Diffusion reads",
        ),
    ],
)
def test_what_is_not_known_is_refused_by_name(
    folder: Path, edit: dict[str, Any], said: str
) -> None:
    change(folder, "config", edits(**edit))
    with pytest.raises(ConfigError) as caught:
        loaded(folder)
    assert said in str(caught.value)
    assert FILES["config"] in str(caught.value)


def test_every_reason_is_told_at_once(tmp_path: Path) -> None:
    folder = saved(tmp_path / "seen", kind="diffusion", has_camera=True)
    state = {"type": "STATE", "shape": [6]}
    cameras = {f"camera.{side}": {"type": "VISUAL", "shape": [3, side, 64]} for side in (64, 32)}
    change(
        folder,
        "config",
        edits(
            vision_backbone="resnet50",
            crop_shape=[40, 64],
            spatial_softmax_num_keypoints=0,
            input_features={"observation.state": state, **cameras},
        ),
    )
    with pytest.raises(ConfigError) as caught:
        loaded(folder, horizon=8, steps=1, noise="fresh", seed=4)
    assert [text.rpartition(".json: ")[2] for text in caught.value.problems] == [
        "vision_backbone: got 'resnet50', want 'resnet18' or 'resnet34'",
        "input_features: got cameras of [3, 32, 64], [3, 64, 64], want one shape",
        "crop_shape: got [40, 64], want at most [32, 64] and at least 1",
        "spatial_softmax_num_keypoints: got 0, want 1 or more",
        "policy.options.horizon: got 8, the policy makes 7 steps",
        "policy.options.steps: got 1, the policy reads 2",
        "policy.options.seed: got 4, but fresh noise has none; want noise = 'fixed'",
    ]


def test_options_of_other_policies_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(
            saved(tmp_path / "act_pick"),
            noise="fresh",
            seed=1,
            rtc={"execution_horizon": 4},
            task="fold",
        )
    assert caught.value.problems == [
        "policy.options.noise: got 'fresh', which is for diffusion and pi0 alone",
        "policy.options.seed: got 1, which is for diffusion and pi0 alone",
        "policy.options.rtc: got {'execution_horizon': 4, 'schedule': 'linear', 'max_guidance': "
        "10.0}, which is for diffusion and pi0 alone",
        "policy.options.task: got 'fold', which is for pi0 alone",
    ]


def chunking(folder: Path, **options: Any) -> tuple[Any, dict[str, Tensor], Tensor]:
    """A policy that goes on from a prefix of five steps, its window, and actions without it."""
    policy = loaded(folder, horizon=7, rtc={"execution_horizon": 5, **options})
    window = window_of(policy)
    window["executed_prefix"] = 10 + window["executed_prefix"] * 3
    window["delay_steps"] = torch.tensor([2, 4])
    free = {name: one for name, one in window.items() if "e_" not in name and "_s" not in name}
    return policy, window, actions_of(loaded(folder, horizon=7), free)


@pytest.mark.parametrize("kind", ["DDPM", "DDIM"])
def test_a_chunk_begins_with_what_is_executed_and_leaves_it_by_and_by(
    folder: Path, kind: str
) -> None:
    change(folder, "config", edits(noise_scheduler_type=kind))
    policy, window, free = chunking(folder)
    assert policy.inputs[-2:] == (
        TensorSpec("executed_prefix", (5, 6)),
        TensorSpec("delay_steps", (), "int64"),
    )
    made = actions_of(policy, window)
    prefix = window["executed_prefix"]
    for row, delay in enumerate(window["delay_steps"]):
        assert torch.allclose(made[row, :delay], prefix[row, :delay], atol=1e-4)
    away = (made[0, :5] - prefix[0]).abs().mean(1)
    assert away[2:].min() > 1e-3
    assert (free[0, :5] - prefix[0]).abs().mean() > 2 * away.mean()
    assert (made[0, 5:] - free[0, 5:]).abs().max() > 1e-3  # the rest follows


def test_an_action_that_never_moved_in_training_leaves_all_others_numbers(folder: Path) -> None:
    """Its spread is 0, and the prefix is normalised by it."""
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        if "action.std" in tensors:
            tensors["action.std"][1], tensors["action.mean"][1] = 0, 0.25
            save_file(tensors, file)
    policy, window, _ = chunking(folder)
    window["executed_prefix"][:, :, 1] = 0.25
    made = actions_of(policy, window)
    assert made.isfinite().all()
    assert torch.allclose(made[:, :, 1], torch.tensor(0.25))


def test_a_robot_of_which_no_prefix_is_known_gets_a_free_chunk(folder: Path) -> None:
    policy, window, free = chunking(folder)
    window["executed_prefix"][1], window["delay_steps"][1] = 0, 0
    made = actions_of(policy, window)
    assert torch.allclose(made[1], free[1], atol=1e-5)
    assert not torch.allclose(made[0], free[0], atol=0.1)


def test_a_prefix_longer_than_the_chunk_and_one_of_delayed_steps_alone(folder: Path) -> None:
    policy, window, free = chunking(folder, execution_horizon=9, schedule="zeros")
    made = actions_of(policy, window)
    prefix = window["executed_prefix"]
    assert torch.allclose(made[0, :2], prefix[0, :2], atol=1e-4)
    assert (made[0, 2:] - prefix[0, 2:7]).abs().mean() > 0.1
    window["delay_steps"][:] = 9
    assert torch.allclose(actions_of(policy, window), prefix[:, :7], atol=1e-4)
    assert free.shape == made.shape == (ROWS, 7, 6)
    whole, window, _ = chunking(folder, schedule="ones")
    made = actions_of(whole, window)
    assert torch.allclose(made[:, :5], window["executed_prefix"], atol=1e-4)


def test_in_each_step_the_prefix_is_as_noisy_as_the_sample(folder: Path) -> None:
    policy, window, _ = chunking(folder, execution_horizon=9)
    window["delay_steps"][:] = 9
    noisy: list[Tensor] = []
    unet = policy.network.diffusion.unet
    unet.register_forward_pre_hook(lambda _, given: noisy.append(given[0].clone()))
    actions_of(policy, window)
    clean = (window["executed_prefix"][:, :7] - 10) / 3
    steps = policy.network.schedule.steps
    assert len(noisy) == len(steps) == 5
    for step, sample in zip(steps[1:], noisy[1:], strict=True):
        expected = step.signal * clean + step.noise * noisy[0][:, 1:]
        assert torch.allclose(sample[:, 1:], expected, atol=1e-5)


def test_a_delay_longer_than_the_prefix_binds_all_of_it(folder: Path) -> None:
    policy, window, _ = chunking(folder)
    window["delay_steps"][:] = 6  # of five
    made = actions_of(policy, window)
    assert made.isfinite().all()
    assert torch.allclose(made[:, :5], window["executed_prefix"], atol=1e-4)


def test_a_camera_that_is_missing_is_not_excused_by_what_it_reads_to_pad(tmp_path: Path) -> None:
    policy = loaded(saved(tmp_path / "diffusion_see", kind="diffusion", has_camera=True))
    assert "front.valid" in {spec.name for spec in policy.inputs}
    assert blind_reads(specs_of([policy])) == {"state": True, "front": False}  # one frame is enough
