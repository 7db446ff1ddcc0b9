"""The placement follows from the configuration and the number of ranks, here and in all."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ppstream.config.schema import (
    ActionConfig,
    LinkConfig,
    PipelineConfig,
    PlacementConfig,
    PolicyConfig,
    StreamConfig,
    WindowConfig,
)
from ppstream.core.errors import ConfigError
from ppstream.launch.placement import Placement, RankPlan, place, ranks_wanted

CONFIG = PipelineConfig(
    name="arm",
    streams=(StreamConfig(name="joints", dim=7, rate_hz=1000.0),),
    window=WindowConfig(steps=8, dt_ms=4.0),
    actions=ActionConfig(
        names=("x",), horizon=4, dt_ms=10.0, low=(-1.0,), high=(1.0,), lease_ms=100.0
    ),
    policy=PolicyConfig(target="acme:build"),
)


def placed(
    world_size: int,
    local_world_size: int,
    kind: str = "auto",
    *,
    trusted: bool = False,
    devices: tuple[str, str] = ("cpu", "cpu"),
    peer_access: bool = False,
) -> Placement:
    config = msgspec.structs.replace(
        CONFIG,
        link=LinkConfig(kind=kind, trusted_network=trusted),  # type: ignore[arg-type]
    )
    config = msgspec.structs.replace(
        config, placement=PlacementConfig(rank0=devices[0], policy=(devices[1],))
    )
    return place(config, world_size, local_world_size, has_peer_access=peer_access)


GPUS = ("cuda:0", "cuda:1")


def test_two_ranks_of_one_host_share_memory() -> None:
    placement = placed(2, 2)
    assert placement.ranks == (RankPlan(0, ("A", "C"), "cpu"), RankPlan(1, ("B",), "cpu"))
    assert placement.link == "host"
    assert not placement.is_inline


def test_one_rank_runs_every_stage_without_a_link() -> None:
    placement = placed(1, 1)
    assert placement.ranks == (RankPlan(0, ("A", "B", "C"), "cpu"),)
    assert placement.link is None
    assert placement.is_inline


@pytest.mark.parametrize("world_size", [0, 3, 8])
def test_number_of_ranks_that_cannot_be_used_is_one_clear_error(world_size: int) -> None:
    with pytest.raises(ConfigError) as caught:
        placed(world_size, world_size)
    (said,) = caught.value.problems
    assert f"got {world_size} ranks, want 2 (pipelined) or 1 (inline)" in said


def test_gloo_can_be_asked_for_on_one_host() -> None:
    placement = placed(2, 2, "gloo")
    assert placement.link == "gloo"
    assert "asked for" in placement.why


@pytest.mark.parametrize("kind", ["auto", "gloo"])
def test_two_hosts_need_a_network_declared_as_trusted(kind: str) -> None:
    with pytest.raises(ConfigError, match=r"link\.trusted_network: got false .* want true"):
        placed(2, 1, kind)
    assert placed(2, 1, kind, trusted=True).link == "gloo"


def test_shared_memory_between_two_hosts_is_refused_even_if_trusted() -> None:
    with pytest.raises(ConfigError, match=r"link\.kind: got 'host' for ranks on two hosts"):
        placed(2, 1, "host", trusted=True)


def test_gpus_of_one_host_that_reach_each_other_get_the_peer_link() -> None:
    placement = placed(2, 2, devices=GPUS, peer_access=True)
    assert (placement.link, placement.is_device_ordered) == ("peer", True)
    assert [plan.device for plan in placement.ranks] == ["cuda:0", "cuda:1"]


def test_gpus_of_one_host_that_do_not_reach_each_other_share_pinned_memory() -> None:
    placement = placed(2, 2, devices=GPUS)
    assert placement.link == "pinned"
    assert "do not reach" in placement.why


@pytest.mark.parametrize("kind", ["pinned", "nccl"])
def test_another_link_between_gpus_can_be_asked_for(kind: str) -> None:
    placement = placed(2, 2, kind, devices=GPUS, peer_access=True)
    assert (placement.link, placement.is_device_ordered) == (kind, True)


def test_gpus_of_two_hosts_need_a_trusted_network_and_nccl() -> None:
    assert placed(2, 1, trusted=True, devices=GPUS).link == "nccl"
    with pytest.raises(ConfigError, match=r"link\.trusted_network.*nccl"):
        placed(2, 1, devices=GPUS)


@pytest.mark.parametrize("kind", ["peer", "pinned"])
def test_links_of_one_host_are_refused_between_two(kind: str) -> None:
    with pytest.raises(ConfigError, match=r"link\.kind"):
        placed(2, 1, kind, devices=GPUS, trusted=True)


def test_a_peer_link_without_peer_access_is_refused() -> None:
    with pytest.raises(ConfigError, match="do not reach each other's memory"):
        placed(2, 2, "peer", devices=GPUS)


@pytest.mark.parametrize("kind", ["host", "gloo"])
def test_cpu_links_are_refused_between_gpus(kind: str) -> None:
    with pytest.raises(ConfigError, match=r"link\.kind.*on GPUs alone"):
        placed(2, 2, kind, devices=GPUS)


@pytest.mark.parametrize("kind", ["peer", "pinned", "nccl"])
def test_links_of_gpus_are_refused_between_cpus(kind: str) -> None:
    with pytest.raises(ConfigError, match=r"connects GPUs alone"):
        placed(2, 2, kind)


def test_a_gpu_for_rank_0_alone_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"placement\.rank0"):
        placed(2, 2, devices=("cuda:0", "cpu"))


def test_a_gpu_for_the_policy_alone_keeps_the_host_link() -> None:
    placement = placed(2, 2, devices=("cpu", "cuda:0"))
    assert (placement.link, placement.is_device_ordered) == ("host", False)


def test_replicas_on_gpus_are_all_on_one_host() -> None:
    config = msgspec.structs.replace(
        CONFIG,
        placement=PlacementConfig(rank0="cuda:0", policy=("cuda:1", "cuda:2"), replicas=2),
        link=LinkConfig(trusted_network=True),
    )
    placement = place(config, 3, 3, has_peer_access=True)
    assert (placement.link, placement.is_device_ordered) == ("peer", True)
    assert [placement.device_of(rank) for rank in range(3)] == ["cuda:0", "cuda:1", "cuda:2"]
    with pytest.raises(ConfigError, match=r"placement\.replicas: got 2 with GPUs in two hosts"):
        place(config, 3, 2, has_peer_access=True)


def meshed(world_size: int, mesh: int, *, local: int | None = None) -> Placement:
    config = msgspec.structs.replace(
        CONFIG,
        placement=PlacementConfig(mesh=mesh),
        link=LinkConfig(trusted_network=True),
    )
    return place(config, world_size, local or world_size)


def test_a_mesh_is_one_place_of_several_ranks() -> None:
    placement = meshed(4, 3)
    assert [plan.rank for plan in placement.ranks] == [0, 1]
    assert placement.members == (RankPlan(2, ("B",), "cpu"), RankPlan(3, ("B",), "cpu"))
    assert [placement.is_member(rank) for rank in range(4)] == [False, False, True, True]
    assert [placement.device_of(rank) for rank in range(4)] == ["cpu"] * 4
    assert placement.link == "host"
    assert meshed(4, 3, local=2).link == "gloo"


def test_a_mesh_wants_all_of_its_ranks_or_runs_whole_on_one() -> None:
    with pytest.raises(ConfigError, match=r"got 2 ranks, want 4 \(pipelined\) or 1"):
        meshed(2, 3)
    assert meshed(1, 3).members == ()
    config = msgspec.structs.replace(CONFIG, placement=PlacementConfig(mesh=3))
    assert ranks_wanted(config) == 4


def on_gpus(*devices: str, local: int = 3, kind: str = "auto", **placement: Any) -> Placement:
    """A mesh of two ranks on these devices; peer access changes nothing of it."""
    config = msgspec.structs.replace(
        CONFIG,
        placement=PlacementConfig(mesh=2, policy=devices, **placement),
        link=LinkConfig(kind=kind, trusted_network=True),  # type: ignore[arg-type]
    )
    return place(config, 3, local, has_peer_access=True)


def test_a_mesh_of_gpus_takes_its_envelopes_from_host_memory() -> None:
    placement = on_gpus("cuda:0", "cuda:1")
    assert [placement.device_of(rank) for rank in range(3)] == ["cpu", "cuda:0", "cuda:1"]
    assert placement.members == (RankPlan(2, ("B",), "cuda:1"),)
    assert (placement.link, placement.is_device_ordered) == ("host", False)
    beside = on_gpus("cuda:0", "cuda:1", rank0="cuda:0", parts=(0, 1))
    assert (beside.link, beside.is_device_ordered) == ("host", False)


def test_ranks_of_a_mesh_share_no_gpu_of_one_host() -> None:
    with pytest.raises(ConfigError, match="got cuda:0, cuda:0 for the mesh that rank 1 leads"):
        on_gpus("cuda:0", "cuda:0")
    assert on_gpus("cuda:0", "cuda:0", local=2).link == "gloo"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"kind": "nccl"}, r"link\.kind: got 'nccl' with placement\.mesh = 2, want 'auto'"),
        ({"rank0": "cuda:2"}, r"placement\.rank0: got cuda:2 with placement\.mesh = 2, want 'cpu'"),
    ],
)
def test_links_and_windows_of_gpus_are_refused_in_a_mesh(
    settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        on_gpus("cuda:0", "cuda:1", **settings)
