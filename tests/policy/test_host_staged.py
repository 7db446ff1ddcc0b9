"""A staged policy gives what the policy gives, in the caller's memory, and keeps none of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from ppstream.core.specs import TensorSpec
from ppstream.links.slots import SlotLayout, new_slots
from ppstream.pipeline.stage_b import StageB
from ppstream.policy.graphed import GraphedPolicy
from ppstream.policy.host_staged import StagedPolicy
from ppstream.policy.protocol import Policy, instruct
from ppstream.policy.unwritten import FilledPolicy

ROWS = 2


class Doubler:
    inputs = (TensorSpec("state.values", (3,)),)
    outputs = (TensorSpec("actions", (3,)),)

    def __init__(self) -> None:
        self.resets: list[Tensor] = []
        self.seen: set[int] = set()

    def reset(self, rows: Tensor) -> None:
        self.resets.append(rows)

    def __call__(self, window: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        self.out = out
        self.seen.add(window["state.values"].data_ptr())
        torch.mul(window["state.values"], 2, out=out["actions"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_what_a_policy_on_a_gpu_writes_is_in_host_memory_when_the_call_returns() -> None:
    device = torch.device("cuda", 0)
    policy = Doubler()
    staged = StagedPolicy(policy, device, ROWS)
    for value in range(5):
        window = {"state.values": torch.full((ROWS, 3), float(value)), "other": torch.zeros(1)}
        out = {"actions": torch.zeros(ROWS, 3)}
        staged(window, out)
        assert out["actions"].eq(2 * value).all()
    assert len(policy.seen) == 1  # the same memory each time: a graph can hold it
    with pytest.raises(TypeError, match="mappingproxy"):
        policy.out["actions"] = torch.zeros(ROWS, 3)  # type: ignore[index]
    staged.reset(torch.tensor([True, False]))
    assert policy.resets[0].device.type == "cuda"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_stage_b_lends_page_locked_memory_for_what_comes_from_a_gpu() -> None:
    """A copy to any other memory holds the caller up until the GPU is done, and goes twice."""

    class Noting(StagedPolicy):
        def __call__(
            self, window: Mapping[str, Tensor], out: Mapping[str, Tensor], rows: int | None = None
        ) -> None:
            super().__call__(window, out, rows)
            locked.append(out["actions"].is_pinned())

    locked: list[bool] = []
    who = TensorSpec("rows", (4,), "int64"), TensorSpec("present", (), "bool")
    envelope, result = (
        new_slots(SlotLayout(("index",), specs, ROWS), 1)[0]
        for specs in ((*Doubler.inputs, *who), Doubler.outputs)
    )
    envelope.tensors["present"].fill_(1)
    stage_b = StageB(Noting(Doubler(), torch.device("cuda", 0), ROWS), ROWS)
    for value in range(3):
        envelope.tensors["state.values"].fill_(value)
        stage_b(0, envelope, result)
        assert result.tensors["actions"].eq(2 * value).all()
    assert all(locked)
    assert not result.tensors["actions"].is_pinned()


class Told(Doubler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: dict[int, str] = {}

    def instruct(self, number: int, text: str) -> None:
        self.texts[number] = text


def as_it_is(policy: Policy) -> Policy:
    return policy


def filled(policy: Policy) -> Policy:
    return FilledPolicy(policy, 1)


def graphed(policy: Policy) -> Policy:
    return GraphedPolicy(filled(policy))


@pytest.mark.parametrize("prepare", [as_it_is, filled, graphed])
def test_a_staged_part_takes_texts_if_the_part_does(prepare: Callable[[Any], Policy]) -> None:
    """A later part of a chain knows nothing of the texts that an earlier one reads."""
    told, cpu = Told(), torch.device("cpu")
    assert instruct(StagedPolicy(prepare(Doubler()), cpu, ROWS), 1, "pick") == ""
    assert instruct(StagedPolicy(prepare(told), cpu, ROWS), 1, "pick") == ""
    assert told.texts == {1: "pick"}
