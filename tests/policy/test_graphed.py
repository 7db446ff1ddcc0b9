from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from ppstream.config.schema import PolicyConfig
from ppstream.core.specs import TensorSpec
from ppstream.policy.compiled import RecompileMeter, compiled
from ppstream.policy.graphed import GraphedPolicy, prepared_policy
from ppstream.policy.unwritten import FilledPolicy

torch.set_num_threads(1)


def nothing() -> None: ...


class Doubling:
    inputs = (TensorSpec("x", (4,)),)
    outputs = (TensorSpec("actions", (4,)),)
    stateless = True

    def __init__(self, *, breaks: bool = False) -> None:
        self.uncompiled = torch.compiler.disable(nothing) if breaks else None

    def reset(self, rows: Tensor) -> None: ...

    def __call__(self, window: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        if self.uncompiled is not None:
            self.uncompiled()  # breaks the graph of its caller
        out["actions"].copy_(window["x"] * 2)


def call(policy: Any, size: int) -> Tensor:
    window, out = {"x": torch.arange(float(size))}, {"actions": torch.zeros(size)}
    policy(window, out)
    return out["actions"]


def test_a_policy_on_the_cpu_is_left_as_it_is() -> None:
    policy = Doubling()
    assert prepared_policy(policy, PolicyConfig(target="a:b"), torch.device("cpu")) is policy


def test_the_configuration_chooses() -> None:
    config = PolicyConfig(target="a:b")
    assert isinstance(prepared_policy(Doubling(), config, torch.device("cuda")), GraphedPolicy)
    eager = msgspec.structs.replace(config, graph=False)
    prepared: Any = prepared_policy(Doubling(), eager, torch.device("cuda"))
    assert isinstance(prepared, FilledPolicy)
    assert call(prepared, 4).tolist() == [0, 2, 4, 6]


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns about itself
def test_what_the_compiler_does_after_the_warm_up_is_counted() -> None:
    meter = RecompileMeter()
    policy = compiled(Doubling(), backend="eager")
    assert torch.equal(call(policy, 4), torch.arange(4.0) * 2)
    assert meter.drain() == 1  # the warm-up's own
    events: list[dict[str, object]] = []
    meter.phase("bring-up", lambda kind, **fields: events.append({"kind": kind, **fields}))
    assert events[0]["kind"] == "compiler"
    assert events[0]["late_graphs"] == 0
    call(policy, 4)
    assert (meter.drain(), meter.after_warm_up()) == (0, (0, 0))
    assert torch.equal(call(policy, 5), torch.arange(5.0) * 2)  # another shape
    assert meter.drain() == 1
    assert meter.drain() == 0
    assert meter.after_warm_up() == (1, 0)


@pytest.mark.filterwarnings("ignore")
def test_a_graph_break_is_counted() -> None:
    meter = RecompileMeter()
    meter.seal()
    call(compiled(Doubling(breaks=True), backend="eager"), 4)
    assert meter.after_warm_up().breaks == 1


def test_what_else_a_policy_says_passes_through() -> None:
    assert GraphedPolicy(FilledPolicy(Doubling(), 1 << 30)).stateless  # type: ignore[arg-type]
    assert compiled(Doubling(), backend="eager").stateless  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="instruct"):
        GraphedPolicy(Doubling()).instruct(1, "text")
