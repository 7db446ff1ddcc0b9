"""The fleet on Ray: a placement group and an actor for each pipeline, and the directory's actor.

Control plane only: Ray reserves the resources of a pipeline, keeps its process running somewhere
and restarts it; no sample and no action passes through it. An actor has all ranks of its pipeline,
started by ``ppstream run``: they are on one node, and one that names ``cuda:1`` must see all GPUs
of the bundle. The directory is on the node where ``up`` was called, so its address stays.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, NamedTuple

import msgspec
import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import (
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from ppstream.core.clock import now_ns
from ppstream.core.errors import ConfigError
from ppstream.fleet.directory import Directory, PipelineReport
from ppstream.fleet.directory_server import DirectoryServer
from ppstream.fleet.fleet_config import FleetPlan
from ppstream.fleet.pipeline_process import FAILED, start

NAMESPACE: Final = "ppstream"
REPORT_S: Final = 0.5
LOOK_S: Final = 0.1
CALL_LIMIT_S: Final = 2.0  # of a report
START_LIMIT_S: Final = 120.0  # of the directory's actor
END_LIMIT_S: Final = 40.0
AUTH_MODE: Final = "RAY_AUTH_MODE"


class Where(NamedTuple):
    """Place of what an actor runs: Ray's number of the node, and the process there."""

    node: str
    pid: int


class DirectoryActor:
    """The directory with its face; it begins empty and knows all a report later."""

    def __init__(self, listen: str, token: str | None) -> None:
        self._directory = Directory()
        self._server = DirectoryServer(listen, self._directory, token)

    def url(self) -> str:
        return self._server.url

    def where(self) -> Where:
        return _here(os.getpid())

    def report(self, report: bytes) -> None:
        found = msgspec.json.decode(report, type=PipelineReport)
        with self._server.lock:
            self._directory.report(found, now_ns())

    def drain(self, pipeline: str) -> bool:
        with self._server.lock:
            return self._directory.drain(pipeline)

    def forget(self, pipeline: str) -> None:
        with self._server.lock:
            self._directory.forget(pipeline)


class PipelineActor:
    """One pipeline's process, reported to the directory; its end is this actor's, so Ray's.

    A pipeline that drained, or whose failure no restart improves, stays as it is: ``ended``.
    """

    def __init__(self, plan: bytes, name: str) -> None:
        found = msgspec.json.decode(plan, type=FleetPlan)
        self._directory = directory_name(found)
        self._process = start(found, name, ray.util.get_node_ip_address())
        threading.Thread(target=self._watch, daemon=True).start()

    def where(self) -> Where:
        return _here(self._process.pid)

    def is_over(self) -> bool:
        """True when it has ended and stays so."""
        return self._process.is_final()

    def drain(self) -> None:
        self._process.drain()

    def end(self) -> None:
        self._process.end()

    def _watch(self) -> None:
        while True:
            report = self._process.report()
            self._tell(report)
            if report.phase == FAILED:
                os._exit(1)  # Ray starts another
            time.sleep(REPORT_S)

    def _tell(self, report: PipelineReport) -> None:
        with suppress(RayError, ValueError):  # it is being restarted: the next report is as good
            directory = ray.get_actor(self._directory, NAMESPACE)
            ray.get(directory.report.remote(msgspec.json.encode(report)), timeout=CALL_LIMIT_S)


def directory_name(plan: FleetPlan) -> str:
    """Name of the directory's actor."""
    return f"{plan.fleet.name}/directory"


def join(address: str, *, authenticated: bool = True) -> None:
    """Connect this process to a Ray cluster.

    Raises:
        ConfigError: there is none, or its authentication is off: whoever reaches its ports could
            run code there.
    """
    if authenticated and os.environ.get(AUTH_MODE) != "token":
        raise ConfigError(
            [
                f"{AUTH_MODE}: got {os.environ.get(AUTH_MODE, 'nothing')!r}, want 'token' here and "
                "on every node: without it whoever reaches Ray's ports runs code there; "
                "--no-authentication goes on"
            ]
        )
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError([f"Ray at {address!r}: {error}; start it with ray start"]) from error


def up(plan: FleetPlan) -> str:
    """Start what is not running; returns the directory's address. Waits for no pipeline.

    Raises:
        ConfigError: the directory does not start.
    """
    fleet, body = plan.fleet, msgspec.json.encode(plan)
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    directory = _actor(
        DirectoryActor, directory_name(plan), max_restarts=-1, num_cpus=0, scheduling_strategy=here
    ).remote(fleet.directory.listen, plan.token)
    try:
        url = str(ray.get(directory.url.remote(), timeout=START_LIMIT_S))
    except (RayError, GetTimeoutError) as error:
        ray.kill(directory)
        raise ConfigError([f"the directory does not start: {error}"]) from error
    for name in fleet.pipeline_names():
        _clear_ended(directory, name)
        group = _group(name)
        if group is None:
            bundle = {"CPU": fleet.cpus} | ({"GPU": plan.gpus} if plan.gpus else {})
            group = placement_group([bundle], "STRICT_PACK", name=name, lifetime="detached")
        _actor(
            PipelineActor,
            name,
            max_restarts=fleet.restarts,
            num_cpus=fleet.cpus,
            num_gpus=plan.gpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0),
        ).remote(body, name)
    return url


def drain(plan: FleetPlan, pipeline: str) -> None:
    """Hand the pipeline to no robot from now on, then stop it; its robots go elsewhere.

    Raises:
        ConfigError: there is no such pipeline.
    """
    with _talking(pipeline):
        ray.get(_named(directory_name(plan)).drain.remote(pipeline), timeout=CALL_LIMIT_S)
        ray.get(_named(pipeline).drain.remote(), timeout=CALL_LIMIT_S)


def surplus(plan: FleetPlan) -> list[str]:
    """Pipelines of the fleet that are here beyond ``pipelines``: it was larger once."""
    return sorted(_groups(plan).keys() - set(plan.fleet.pipeline_names()))


def down(plan: FleetPlan) -> None:
    """Stop all pipelines, at once, and the directory; free what was reserved."""
    groups = _groups(plan)
    actors = [actor for name in groups if (actor := _find(name)) is not None]
    ends = [actor.end.remote() for actor in actors]
    if ends:
        ray.wait(ends, num_returns=len(ends), timeout=END_LIMIT_S)
    for actor in actors:
        ray.kill(actor)
    for group in groups.values():
        remove_placement_group(group)
    if (directory := _find(directory_name(plan))) is not None:
        ray.kill(directory)


def _clear_ended(directory: Any, name: str) -> None:
    """Makes room for a pipeline that drained, or that failed for good."""
    actor = _find(name)
    if actor is None:
        return
    with suppress(RayError, GetTimeoutError):  # it is being started
        if ray.get(actor.is_over.remote(), timeout=CALL_LIMIT_S):
            ray.kill(actor)
            ray.get(directory.forget.remote(name), timeout=CALL_LIMIT_S)
            while _find(name) is not None:
                time.sleep(LOOK_S)


def _here(pid: int) -> Where:
    return Where(ray.get_runtime_context().get_node_id(), pid)


def _actor(kind: type, name: str, **options: Any) -> Any:
    """An actor that outlives this process; the one of that name if it is there."""
    return ray.remote(kind).options(
        name=name, get_if_exists=True, lifetime="detached", namespace=NAMESPACE, **options
    )


def _find(name: str) -> Any:
    with suppress(ValueError):
        return ray.get_actor(name, NAMESPACE)
    return None


def _named(name: str) -> Any:
    found = _find(name)
    if found is None:
        raise ConfigError([f"there is no {name!r} here; ppstream fleet up starts it"])
    return found


def _group(name: str) -> Any:
    with suppress(ValueError):
        return ray.util.get_placement_group(name)
    return None


def _groups(plan: FleetPlan) -> dict[str, Any]:
    """Placement groups of the fleet's pipelines, by their names."""
    name = re.compile(rf"{re.escape(plan.fleet.name)}-\d+")
    named = {str(row["name"]) for row in placement_group_table().values()}
    found = {one: _group(one) for one in named if name.fullmatch(one)}
    return {one: group for one, group in found.items() if group is not None}  # else it is removed


@contextmanager
def _talking(pipeline: str) -> Iterator[None]:
    """Turns an actor's silence into an error for people."""
    try:
        yield
    except (RayError, GetTimeoutError) as error:
        text = f"{pipeline} does not answer within {CALL_LIMIT_S:g} s: {error}"
        raise ConfigError([text]) from error
