"""Shipped policies however they are called: with the first rows alone, or compiled."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lerobot_folder
import pi0_folder
import pytest
import torch
from policy_calls import in_a_row
from torch import Tensor

from ppstream.policy.compiled import compiled
from ppstream_stages import act, echo, simulated, vla
from ppstream_stages.cartpole import policy as cartpole

torch.set_num_threads(1)
CPU = torch.device("cpu")
ROWS = 4
SHAPE = {"steps": 2, "dim": 3, "horizon": 4, "action_dim": 3}
CAMERA = {"name": "front", "height": 32, "width": 48, "dtype": "float32"}
ACT = SHAPE | {"streams": 1, "cameras": [CAMERA], "width": 64, "dtype": "float32"}
VLA = SHAPE | {
    "streams": 1,
    "cameras": ["front"],
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
KINDS = ["act", "vla", "echo", "cartpole", "simulated", "lerobot act", "lerobot diffusion", "pi0"]


def built(kind: str, folder: Path) -> Sequence[Any]:
    match kind:
        case "act":
            return act.build(ACT, CPU)
        case "vla":
            return vla.build(VLA, CPU)
        case "echo":
            return [echo.build(SHAPE, CPU)]
        case "cartpole":
            return [cartpole.build({}, CPU)]
        case "simulated":
            return [simulated.build({"b_ms": 0.0, "horizon": 4, "action_dim": 2}, CPU)]
        case "pi0":
            return pi0_folder.loaded(pi0_folder.saved(folder / "pi0"))
    kind = kind.removeprefix("lerobot ")
    made = lerobot_folder.saved(folder / kind, kind=kind, has_camera=True)
    return [lerobot_folder.loaded(made, CPU)]


def loaded(
    kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Sequence[Any], dict[str, Tensor]]:
    """Parts with weights, and a window for ``ROWS`` rows."""
    pi0_folder.make_small(monkeypatch)
    parts = built(kind, folder)
    made = {spec.name for part in parts for spec in part.outputs}
    generator = torch.Generator().manual_seed(1)
    window = {}
    for spec in (spec for part in parts for spec in part.inputs if spec.name not in made):
        given = torch.rand(ROWS, *spec.shape, generator=generator)
        window[spec.name] = (given + 0.5).to(getattr(torch, spec.dtype))
    for part in parts:
        if hasattr(part, "load"):
            part.load()
    return parts, window


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_rows_alone_give_the_same_actions(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, window = loaded(kind, tmp_path, monkeypatch)
    assert all(part.any_rows for part in parts)
    whole = in_a_row(parts, window, ROWS)["actions"]
    assert whole.isfinite().all()
    for rows in (1, 3):
        first = {name: tensor[:rows] for name, tensor in window.items()}
        actions = in_a_row(parts, first, rows)["actions"]
        torch.testing.assert_close(actions, whole[:rows], rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns about itself
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_they_give_the_same_actions(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, window = loaded(kind, tmp_path, monkeypatch)
    plain = in_a_row(parts, window, ROWS)["actions"]
    made = [compiled(part, "aot_eager") for part in parts]
    actions = in_a_row(made, window, ROWS)["actions"]
    torch.testing.assert_close(actions, plain, rtol=1e-4, atol=1e-5)
