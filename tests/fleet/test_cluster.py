"""What is started and stopped of a fleet, on a stand-in for Ray: it keeps actors and groups."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ppstream.fleet.fleet_config import FleetConfig, FleetPlan


class Actor:
    """Answers each call at once."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, method: str) -> SimpleNamespace:
        answer = {"url": "http://127.0.0.1:1", "is_over": False}.get(method)
        return SimpleNamespace(remote=lambda *_: answer)


class Ray:
    """The calls of Ray that a fleet makes."""

    def __init__(self) -> None:
        self.actors: dict[str, Actor] = {}
        self.groups: dict[str, str] = {}
        self.all_groups: list[str] = []  # Ray's table keeps those that are removed

    def remote(self, _: type) -> SimpleNamespace:
        def options(*, name: str, **_: Any) -> SimpleNamespace:
            return SimpleNamespace(
                remote=lambda *_: self.actors.setdefault(name, Actor(name)),
            )

        return SimpleNamespace(options=options)

    def get_actor(self, name: str, _: str) -> Actor:
        if name not in self.actors:
            raise ValueError(name)
        return self.actors[name]

    def kill(self, actor: Actor) -> None:
        del self.actors[actor.name]

    def get_group(self, name: str) -> str:
        if name not in self.groups:
            raise ValueError(name)
        return self.groups[name]

    def make_group(self, *_: Any, name: str, **__: Any) -> str:
        self.all_groups.append(name)
        return self.groups.setdefault(name, name)

    def table(self) -> dict[int, dict[str, str]]:
        return {number: {"name": name} for number, name in enumerate(self.all_groups)}


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ray]:
    held = Ray()
    modules = {
        "ray": {
            "remote": held.remote,
            "get_actor": held.get_actor,
            "kill": held.kill,
            "get": lambda answer, **_: answer,
            "wait": lambda *_, **__: None,
            "get_runtime_context": lambda: SimpleNamespace(get_node_id=lambda: "node"),
        },
        "ray.exceptions": {"GetTimeoutError": TimeoutError, "RayError": RuntimeError},
        "ray.util": {"get_placement_group": held.get_group},
        "ray.util.placement_group": {
            "placement_group": held.make_group,
            "placement_group_table": held.table,
            "remove_placement_group": held.groups.pop,
        },
        "ray.util.scheduling_strategies": {
            "NodeAffinitySchedulingStrategy": lambda *_, **__: None,
            "PlacementGroupSchedulingStrategy": lambda *_: None,
        },
    }
    for name, values in modules.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    vars(sys.modules["ray"])["util"] = sys.modules["ray.util"]
    monkeypatch.delitem(sys.modules, "ppstream.fleet.cluster", raising=False)
    yield held
    sys.modules.pop("ppstream.fleet.cluster", None)


def plan(pipelines: int, name: str = "arms") -> FleetPlan:
    fleet = FleetConfig(name=name, run="arm.toml", pipelines=pipelines)
    return FleetPlan(fleet, "arm.toml", 4, 1.0, None, None)


def test_down_stops_what_was_started_before_the_fleet_was_made_smaller(ray: Ray) -> None:
    cluster: Any = import_module("ppstream.fleet.cluster")
    cluster.up(plan(12))
    cluster.up(plan(1, "arms-1"))
    assert cluster.surplus(plan(12)) == []
    assert cluster.surplus(plan(10)) == ["arms-10", "arms-11"]
    cluster.down(plan(2))
    assert ray.groups.keys() == {"arms-1-0"}
    assert ray.actors.keys() == {"arms-1/directory", "arms-1-0"}
    assert cluster.surplus(plan(2)) == []
