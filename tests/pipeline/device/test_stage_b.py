"""Stage B on a device: which rows begin a new episode, told there and from memory of its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ppstream.core.specs import TensorSpec
from ppstream.pipeline.device.stage_b import DeviceStageB

CPU = torch.device("cpu")


class Remembering:
    """Adds up what it saw since each row's reset."""

    inputs = (TensorSpec("x", ()),)
    outputs = (TensorSpec("actions", ()),)

    def __init__(self) -> None:
        self.total = torch.zeros(2)
        self.resets: list[list[bool]] = []

    def reset(self, rows: torch.Tensor) -> None:
        self.resets.append(rows.tolist())
        self.total.mul_(~rows)

    def __call__(self, window: Any, out: Any) -> None:
        self.total.add_(window["x"])
        out["actions"].copy_(self.total)


def envelope(epoch: int, *episodes: tuple[int, int]) -> Any:
    """Of one row for each (session, session_epoch); the header as the link lays it out."""
    rows = torch.tensor([[*episode, 5, 6] for episode in episodes])
    return SimpleNamespace(
        header=torch.tensor([7, 3, epoch, 9]), tensors={"rows": rows, "x": torch.ones(2)}
    )


def result() -> Any:
    return SimpleNamespace(tensors={"actions": torch.zeros(2)})


def test_rows_are_reset_when_their_session_episode_or_the_epoch_changes() -> None:
    policy = Remembering()
    stage_b = DeviceStageB(policy, 2, CPU, is_stateless=False)
    steps = [
        (envelope(0, (1, 0), (2, 0)), [True, True]),  # nobody was there before
        (envelope(0, (1, 0), (2, 0)), [False, False]),
        (envelope(0, (1, 1), (2, 0)), [True, False]),  # an episode began
        (envelope(0, (1, 1), (3, 0)), [False, True]),  # another robot
        (envelope(1, (1, 1), (3, 0)), [True, True]),  # a cut by the operator
        (envelope(1, (1, 1), (3, 0)), [False, False]),
    ]
    for given, _ in steps:
        out = result()
        stage_b(given, out)
    assert policy.resets == [expected for _, expected in steps]
    assert out.tensors["actions"].tolist() == [2.0, 2.0]


def test_a_stateless_policy_is_never_told() -> None:
    policy = Remembering()
    DeviceStageB(policy, 2, CPU, is_stateless=True)(envelope(0, (1, 0), (2, 0)), result())
    assert policy.resets == []


class Made(TorchDispatchMode):
    """Operations whose result is memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {arg.untyped_storage().data_ptr() for arg in _tensors(args, kwargs or {})}
        if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in given:
            self.found.append(str(func))
        return made


def _tensors(args: Any, kwargs: Any) -> list[torch.Tensor]:
    return [arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Tensor)]


@pytest.mark.parametrize("is_stateless", [True, False])
def test_no_call_takes_memory(is_stateless: bool) -> None:
    class Plain(Remembering):
        def reset(self, rows: torch.Tensor) -> None:
            self.total.masked_fill_(rows, 0)

    stage_b = DeviceStageB(Plain(), 2, CPU, is_stateless=is_stateless)
    given, out = envelope(0, (1, 0), (2, 0)), result()
    with Made() as made:
        stage_b(given, out)
        assert made.found == []
        torch.cat([given.header, given.header])  # what it would catch
        assert len(made.found) == 1
