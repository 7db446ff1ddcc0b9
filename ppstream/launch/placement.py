"""Placement: which rank runs what, where, over which link; decided once, at start.

Pure: nothing is started, opened or imported here; the answer is logged and printed by ``--check``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from ppstream.config.schema import LinkConfig, PipelineConfig
from ppstream.core.errors import ConfigError

LinkKind = Literal["host", "gloo", "peer", "pinned", "nccl"]
Stage = Literal["A", "B", "C"]

DEVICE_LINKS: Final = ("peer", "pinned", "nccl")  # between GPUs, ordered by them


@dataclass(frozen=True, slots=True)
class RankPlan:
    """Role of one rank."""

    rank: int
    stages: tuple[Stage, ...]
    device: str  # as torch.device reads it

    @property
    def is_gpu(self) -> bool:
        return self.device.startswith("cuda")


@dataclass(frozen=True, slots=True)
class Placement:
    """The whole run: its ranks in order, and the link between them (None: inline) with why.

    ``ranks`` are those that envelopes pass, one for each place.
    """

    ranks: tuple[RankPlan, ...]
    link: LinkKind | None
    why: str
    members: tuple[RankPlan, ...] = ()  # of meshes, but their leaders; behind all others

    @property
    def is_inline(self) -> bool:
        """One process runs A, B and C in turn: the unpipelined twin."""
        return self.link is None

    def device_of(self, rank: int) -> str:
        """The device that a rank computes on."""
        return (*self.ranks, *self.members)[rank].device

    def is_member(self, rank: int) -> bool:
        """Of a mesh, and not its leader: envelopes reach it through the leader alone."""
        return rank >= len(self.ranks)

    @property
    def is_device_ordered(self) -> bool:
        """Both ranks compute on GPUs, which order the work among themselves."""
        return self.link in DEVICE_LINKS


def cuts_on_gpu(config: PipelineConfig) -> bool:
    """True when one rank alone cuts windows on its policy's GPU."""
    return config.placement.rank0 != "cpu" and config.placement.policy[0] != "cpu"


def ranks_wanted(config: PipelineConfig) -> int:
    """Returns how many ranks overlap something: one where both would share a GPU."""
    devices = config.placement
    if devices.rank0 != "cpu" and {devices.rank0} == set(devices.policy):
        return 1
    return devices.ranks


def place(
    config: PipelineConfig,
    world_size: int,
    local_world_size: int,
    *,
    has_peer_access: bool = False,
) -> Placement:
    """The placement of ``world_size`` ranks, ``local_world_size`` of which share this host.

    Args:
        config: names a device for each rank.
        world_size: ranks in all.
        local_world_size: ranks on this host.
        has_peer_access: the devices named can reach each other's memory.

    Raises:
        ConfigError: there are too many ranks, or the link asked for cannot connect them.
    """
    devices = config.placement
    most = devices.ranks
    if world_size not in (1, most):
        raise ConfigError(
            [
                f"world size: got {world_size} ranks, want {most} (pipelined) or 1 (inline); "
                f"start with ppstream run --nproc {most}, or torchrun --nproc-per-node={most}"
            ]
        )
    if world_size == 1:
        whole = RankPlan(0, ("A", "B", "C"), devices.policy[0])
        where = f", with windows cut on {whole.device}" if cuts_on_gpu(config) else ""
        return Placement((whole,), None, f"one rank runs every stage in turn{where}")
    plans = [RankPlan(rank, ("B",), devices.device_of(rank)) for rank in range(1, most)]
    ranks = RankPlan(0, ("A", "C"), devices.rank0), *plans[: devices.leaders]
    members = tuple(plans[devices.leaders :])
    is_one_host = local_world_size >= world_size
    if devices.mesh == 1 and all(plan.is_gpu for plan in ranks):
        who = "both GPUs" if most == 2 else f"all {most} GPUs"
        return Placement(
            ranks,
            *_choose_device_link(
                config.link,
                who,
                is_one_host=is_one_host,
                has_peer_access=has_peer_access,
                shares_gpus=len({plan.device for plan in ranks}) < most,
                replicas=devices.replicas,
            ),
        )
    if devices.mesh > 1:
        _refuse_in_mesh(config, ranks[0], is_one_host=is_one_host)
    else:
        _refuse_device_link(config.link, ranks, has_front_parts=0 in devices.cut)
    return Placement(ranks, *_choose_link(config.link, most, is_one_host=is_one_host), members)


def _choose_link(link: LinkConfig, ranks: int, *, is_one_host: bool) -> tuple[LinkKind, str]:
    who = "both ranks" if ranks == 2 else f"all {ranks} ranks"
    if is_one_host:
        if link.kind == "gloo":
            return "gloo", f"asked for by link.kind, though {who} share one host"
        return "host", f"{who} share one host and its memory"
    if link.kind == "host":
        raise ConfigError(["link.kind: got 'host' for ranks on two hosts, want 'auto' or 'gloo'"])
    _check_trusted(link, "gloo")
    return "gloo", "the ranks are on two hosts, over a network declared as trusted"


def _choose_device_link(
    link: LinkConfig,
    who: str,
    *,
    is_one_host: bool,
    has_peer_access: bool,
    shares_gpus: bool,
    replicas: int,
) -> tuple[LinkKind, str]:
    """Between GPUs alone."""
    if link.kind in ("host", "gloo"):
        raise ConfigError(
            [
                f"link.kind: got {link.kind!r} for ranks on GPUs alone, want 'auto', 'peer', "
                "'pinned' or 'nccl'"
            ]
        )
    if not is_one_host:
        if link.kind in ("peer", "pinned"):
            raise ConfigError(
                [f"link.kind: got {link.kind!r} for ranks on two hosts, want 'auto' or 'nccl'"]
            )
        if replicas > 1:
            raise ConfigError(
                [
                    f"placement.replicas: got {replicas} with GPUs in two hosts, want all ranks on "
                    "one host, or placement.rank0 = 'cpu'"
                ]
            )
        _check_trusted(link, "nccl")
        return "nccl", "the GPUs are in two hosts, over a network declared as trusted"
    if link.kind == "nccl":
        return "nccl", f"asked for by link.kind, though {who} are in one host"
    if link.kind == "pinned":
        return "pinned", f"asked for by link.kind: slots in pinned memory that {who} reach"
    if shares_gpus and link.kind == "auto":
        return "pinned", "ranks share a GPU: a kernel that waits would hold up the other's work"
    if has_peer_access:
        return "peer", f"{who} are in one host and reach each other's memory"
    if link.kind == "peer":
        raise ConfigError(
            [
                "link.kind: got 'peer', but the GPUs do not reach each other's memory; "
                "want 'auto' or 'pinned'"
            ]
        )
    return "pinned", f"{who} are in one host, but do not reach each other's memory"


def _refuse_device_link(
    link: LinkConfig, ranks: tuple[RankPlan, ...], *, has_front_parts: bool
) -> None:
    problems = []
    if link.kind in DEVICE_LINKS:
        problems.append(
            f"link.kind: got {link.kind!r}, which connects GPUs alone; want 'auto', or CUDA "
            "devices for placement.rank0 and placement.policy"
        )
    if ranks[0].is_gpu and not has_front_parts:
        problems.append(
            f"placement.rank0: got {ranks[0].device} beside a policy rank on the CPU, want 'cpu', "
            "CUDA devices for all of placement.policy, or parts of the policy on rank 0"
        )
    if problems:
        raise ConfigError(problems)


def _refuse_in_mesh(config: PipelineConfig, rank0: RankPlan, *, is_one_host: bool) -> None:
    """Refuses what ranks that compute a policy together cannot have; GPUs or none."""
    devices, kind, problems = config.placement, config.link.kind, []
    got = f"with placement.mesh = {devices.mesh}"
    if kind in DEVICE_LINKS:
        problems.append(
            f"link.kind: got {kind!r} {got}, want 'auto' or 'gloo': ranks of a mesh take "
            "envelopes from host memory"
        )
    if rank0.is_gpu and 0 not in devices.cut:
        problems.append(
            f"placement.rank0: got {rank0.device} {got}, want 'cpu', or parts of the policy on "
            "rank 0: windows for a mesh are cut on a CPU"
        )
    for leader in range(1, devices.leaders + 1):
        mesh = [devices.device_of(rank) for rank in devices.mesh_of(leader)]
        if is_one_host and "cpu" not in mesh and len(set(mesh)) < len(mesh):
            problems.append(
                f"placement.policy: got {', '.join(mesh)} for the mesh that rank {leader} leads, "
                "want another GPU for each of its ranks"
            )
    if problems:
        raise ConfigError(problems)


def _check_trusted(link: LinkConfig, kind: str) -> None:
    if not link.trusted_network:
        raise ConfigError(
            [
                f"link.trusted_network: got false for ranks on two hosts, want true: {kind} "
                "neither encrypts nor authenticates, so set it only where nobody else can reach "
                "the network"
            ]
        )
