"""Graph breaks and recompiles of a compiled policy: counted by part, named by line, refused."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import breaking_policy
import graph_breaks
import pytest
import torch
import torch.distributed as dist
from breaking_policy import Summing, line_of

from ppstream.core.errors import ConfigError, PolicyError
from ppstream.policy.compiled import (
    RecompileMeter,
    break_lines,
    check_graph_breaks,
    compiled,
    compiled_parts,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's compiler warns about itself

OPTIONS = {"steps": 8, "dim": 5, "horizon": 4, "action_dim": 2}


@pytest.fixture(scope="module")
def world() -> Iterator[Any]:
    """A group of this process alone, over gloo."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def called(policy: Any, rows: int = 1) -> torch.Tensor:
    out = {"actions": torch.zeros(rows, 4, 2)}
    with torch.no_grad():
        policy({"state.values": torch.ones(rows, 8, 5)}, out)
    return out["actions"]


@pytest.mark.parametrize(("breaks", "mark"), [("print", "BREAK"), ("branch", "BRANCH")])
def test_a_break_in_front_of_a_collective_is_refused_with_its_line(
    world: Any, breaks: str, mark: str
) -> None:
    policy = compiled(Summing(OPTIONS | {"breaks": breaks}, world), "eager")
    assert torch.allclose(called(policy), torch.ones(1, 4, 2).tanh())
    parts = compiled_parts(policy)
    assert parts[0].counts["breaks"] == 1
    assert break_lines(parts)[0].startswith(f"{line_of(mark)}: part 'summing': ")
    with pytest.raises(ConfigError) as refusal:
        check_graph_breaks(parts, 0)
    text, line = refusal.value.problems
    assert text.startswith("policy.graph_breaks_max: torch.compile broke 1 graph of the policy")
    assert line_of(mark) in line
    check_graph_breaks(parts, 1)


def test_a_collective_without_a_break_is_one_graph(world: Any) -> None:
    policy = compiled(Summing(OPTIONS, world), "eager")
    called(policy)
    (part,) = compiled_parts(policy)
    assert part.counts == {"graphs": 1, "breaks": 0, "recompiles": 0, "kernels": 0}
    check_graph_breaks([part], 0)


def test_what_is_compiled_again_after_the_warm_up_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    policy = compiled(Summing(OPTIONS), "eager")
    meter = RecompileMeter(compiled_parts(policy))
    events: list[dict[str, Any]] = []

    def note(_name: str, **fields: Any) -> None:
        events.append(fields)

    called(policy)
    meter.phase("warming", note)
    meter.phase("bring-up", note)
    assert meter.drain() == 1
    with caplog.at_level(logging.WARNING, "ppstream"):
        called(policy, rows=2)
        assert meter.drain() == 1
    assert "part 'summing' was compiled again after the warm-up: tensor" in caplog.text
    assert "size mismatch" in caplog.text
    meter.phase("ready", note)
    assert [event["parts"]["summing"]["recompiles"] for event in events] == [0, 0, 1]
    assert events[-1]["late_graphs"] == 1


def test_bring_up_begins_only_within_the_limit() -> None:
    policy = compiled(Summing(OPTIONS | {"breaks": "print"}), "eager")
    called(policy)
    for limit, is_refused in ((1, False), (0, True)):
        meter = RecompileMeter(compiled_parts(policy), limit)
        meter.phase("warming", lambda *_, **__: None)
        if is_refused:
            with pytest.raises(ConfigError, match="limit 0"):
                meter.phase("bring-up", lambda *_, **__: None)
        else:
            meter.phase("bring-up", lambda *_, **__: None)


def test_many_parts_of_one_class_are_all_compiled() -> None:
    """The compiler keeps a limited number of graphs of one code."""
    policies = [compiled(Summing(OPTIONS), "eager") for _ in range(12)]
    for policy in policies:
        called(policy)
    assert [compiled_parts(policy)[0].graphs for policy in policies] == [1] * 12


def test_the_compiler_of_kernels_counts_them() -> None:
    policy = compiled(Summing(OPTIONS))
    called(policy)
    (part,) = compiled_parts(policy)
    assert part.kernels >= 1


@pytest.mark.parametrize(
    ("breaks", "limit", "code", "marks"),
    [("", 0, 0, []), ("print", 0, 1, ["BREAK"]), ("print", 1, 0, ["BREAK"])],
)
def test_the_tool_prints_each_break_and_refuses_too_many(
    breaks: str, limit: int, code: int, marks: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    options = f'policy.options={{steps=8, dim=5, horizon=4, action_dim=2, breaks="{breaks}"}}'
    found = graph_breaks.main(
        [
            f"{breaking_policy.__name__}:build",
            "--config",
            "tests/support/small.toml",
            *("--set", options),
            *("--set", f"policy.graph_breaks_max={limit}"),
            *("--backend", "eager"),
        ]
    )
    printed = [line for line in capsys.readouterr().out.splitlines() if ": part " in line]
    assert found == code
    assert [line.partition(": part ")[0] for line in printed] == [line_of(mark) for mark in marks]


def without_kernels(*_: object) -> Any:
    """A backend that fails, as inductor does at a view in inference mode."""
    raise RuntimeError("no kernel for it")


def test_a_part_that_cannot_be_compiled_is_named_with_the_setting() -> None:
    backend: Any = without_kernels
    with pytest.raises(ConfigError) as refusal:
        called(compiled(Summing(OPTIONS), backend))
    (text,) = refusal.value.problems
    assert text.startswith("policy.compile: torch.compile failed at part 'summing' (RuntimeError: ")
    assert "no kernel for it); set policy.compile = false" in text


class Misshapen(Summing):
    """A policy with a fault of its own."""

    def __call__(self, window: Any, out: Any) -> None:
        window["state.values"].reshape(7, 9)  # MISSHAPEN


class Narrow(Summing):
    """A policy whose fault shows in a line of torch."""

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.layer = torch.nn.Linear(3, 2)

    def __call__(self, window: Any, out: Any) -> None:
        self.layer(window["state.values"])  # NARROW


@torch.library.custom_op("ppstream_tests::doubled", mutates_args=())
def doubled(values: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(values.numpy() * 2)


class Opaque(Summing):
    """A policy that the compiler cannot read, and that runs without it."""

    def __call__(self, window: Any, out: Any) -> None:
        out["actions"].copy_(doubled(window["state.values"])[:, :4, :2])  # OPAQUE


@pytest.mark.parametrize(
    ("policy", "mark", "said"),
    [
        (Misshapen, "MISSHAPEN", "RuntimeError(\"shape '[7, 9]' is invalid for input"),
        (Narrow, "NARROW", "RuntimeError('a and b must have same reduction dim"),
        (Opaque, "OPAQUE", "RuntimeError("),
    ],
)
def test_what_the_policy_raises_as_it_is_compiled_is_told_with_its_own_line(
    policy: type[Summing], mark: str, said: str
) -> None:
    with pytest.raises(PolicyError) as caught:
        called(compiled(policy(OPTIONS), "eager"))
    text, remedy = str(caught.value).split("; set ")
    assert text.startswith(f"part 'summing' raised {said}")
    assert text.endswith(line_of(mark, __file__))
    assert remedy == "policy.compile = false if it runs uncompiled"
