from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ppstream.config.action_rules import action_rule_problems
from ppstream.config.load import read
from ppstream.config.rules import rank_problems
from ppstream.config.schema import ActionConfig

PLAIN: dict[str, Any] = {
    "names": ("x", "gripper"),
    "horizon": 4,
    "dt_ms": 10.0,
    "low": (-1.0, 0.0),
    "high": (1.0, 1.0),
    "lease_ms": 200.0,
}

OPENPI = "gateway=[{wire='openpi',map={joints='j',top='t',wrist='w'}}]"  # at 127.0.0.1:8000


def problems(**changes: Any) -> list[str]:
    return list(action_rule_problems(msgspec.convert(PLAIN | changes, ActionConfig)))


def test_rules_that_agree_are_no_problem() -> None:
    agreeing = {
        "velocity": (2.0, float("inf")),
        "acceleration": (50.0, 50.0),
        "discrete": {"gripper": (0.0, 1.0)},
        "robots": {"arm-2": {"low": (-0.5, 0.0), "velocity": (1.0, 1.0)}},
        "max_age_ms": 200.0,
    }
    assert problems() == []
    assert problems(**agreeing) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"low": (1.0, 0.0), "high": (1.0000000000000002, 1.0)},
            "actions.low: got 1.0 for 'x', want it below its high, 1.0000000000000002, as float32",
        ),
        ({"robots": {"a": {"low": (1 - 1e-9, 0.0)}}}, "actions.robots.a.low: got [0.999999999, 0"),
        (
            {
                "names": tuple(f"a{k}" for k in range(16)),
                "low": (-1.0,) * 16,
                "high": (1.0,) * 16,
                "horizon": 65536,
                "discrete": {},
            },
            "actions.horizon: got 65536 x 16 actions, 4194304 bytes a chunk, want 4128768 at most",
        ),
        ({"velocity": (1.0,)}, "actions.velocity: got 1 limit, want 2"),
        ({"acceleration": (1.0, 1.0, 1.0)}, "actions.acceleration: got 3 limits, want 2"),
        ({"discrete": {"grip": (0.0, 1.0)}}, "actions.discrete.grip: got 'grip', want one of x,"),
        ({"discrete": {"gripper": (1.0, 1.0)}}, "want two different values at least"),
        ({"discrete": {"gripper": (0.0, 2.0)}}, "got [0.0, 2.0], want all of them from 0 to 1"),
        ({"max_age_ms": 10.0}, "actions.max_age_ms: got 10, want more than actions.dt_ms = 10"),
        ({"max_age_ms": 201.0}, "and at most actions.lease_ms = 200"),
        ({"robots": {"a": {"low": (-2.0, 0.0)}}}, "actions.robots.a.low: got [-2.0, 0.0], want no"),
        ({"robots": {"a": {"high": (1.0, 2.0)}}}, "actions.robots.a.high: got [1.0, 2.0], want no"),
        ({"robots": {"a": {"high": (1.0,)}}}, "actions.robots.a.high: got 1 limit, want 2"),
        ({"robots": {"a": {"low": (1.0, 0.0)}}}, "actions.robots.a.low: got [1.0, 0.0], want each"),
        (
            {"velocity": (1.0, 1.0), "robots": {"a": {"velocity": (2.0, 1.0)}}},
            "actions.robots.a.velocity: got [2.0, 1.0], want none wider than [1.0, 1.0]",
        ),
    ],
)
def test_each_disagreement_is_said_once_with_its_place(changes: dict[str, Any], said: str) -> None:
    (line,) = problems(**changes)
    assert said in line


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("metrics.port=8000", "view.port=8000"), "view.port: got port 8000, which metrics of"),
        (("metrics.port=8000", "view.port=8001"), "which metrics of rank 1 has; want another, or"),
        (("metrics.port=8000", OPENPI), "gateway[0].listen: got port 8000, which metrics of rank"),
        (("view.port=8000", OPENPI), "gateway[0].listen: got port 8000, which view.port has; w"),
        (("metrics.port=65535",), "metrics.port: got 65535, want 65534 at most with 2 ranks"),
    ],
)
def test_a_port_of_a_run_has_one_listener(settings: tuple[str, ...], said: str) -> None:
    (found,) = rank_problems(read("two_cameras", settings), world_size=2, beside_rank0=2)
    assert said in found


@pytest.mark.parametrize("beside", [1, None])
def test_the_metrics_of_a_rank_on_another_host_take_no_port_of_rank_0s(beside: int | None) -> None:
    for setting in ("view.port=8000", OPENPI):
        assert rank_problems(read("two_cameras", ("metrics.port=7999", setting)), 2, beside) == []
    (found,) = rank_problems(read("two_cameras", ("metrics.port=8000", OPENPI)), 2, beside)
    assert "which metrics of rank 0 has" in found


def test_ports_that_differ_or_are_any_free_ones_agree() -> None:
    for settings in (("metrics.port=0", "view.port=0"), ("metrics.port=8001", OPENPI)):
        assert rank_problems(read("two_cameras", settings), world_size=2, beside_rank0=2) == []
