"""Puts together what a rank on a GPU needs beyond a rank on the CPU: start, link, streams, loop.

Everything that loads, allocates or captures happens here, before a wait is queued anywhere.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

import torch

from ppstream.config.rules import rank_problems
from ppstream.control.launcher_store import OPEN_TIMEOUT_S
from ppstream.core.errors import ConfigError
from ppstream.core.interpreter import DEVICE_SWITCH_INTERVAL_S, set_switch_interval
from ppstream.cuda import startup
from ppstream.cuda.busy_kernel import GpuWork
from ppstream.cuda.device_clock import DeviceClock
from ppstream.cuda.driver import DeviceProbe
from ppstream.cuda.streams import stream as cuda_stream
from ppstream.cuda.streams import torch_stream
from ppstream.launch import handshake
from ppstream.launch.placement import Placement, place
from ppstream.links.device_link import run_ahead
from ppstream.links.factory import open_device
from ppstream.links.latency_probe import measure
from ppstream.links.slots import BACK, FRONT
from ppstream.observe.attribution import block
from ppstream.pipeline.device.executor import DeviceExecutor
from ppstream.pipeline.device.policy_rank import DevicePolicyRank, PolicyDevice
from ppstream.pipeline.device.rank0_queue import Rank0Device, Streams
from ppstream.pipeline.device.stage_a import RingWindows
from ppstream.pipeline.device.stage_b import DeviceStageB
from ppstream.pipeline.stage_b import StageB
from ppstream.policy.graphed import GraphedPolicy, prepared_policy
from ppstream.policy.host_staged import StagedPolicy, zeros
from ppstream.policy.parts import Joined, name_of
from ppstream.policy.unwritten import drawn_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ppstream.config.schema import PipelineConfig
    from ppstream.control.launcher_store import LauncherStore
    from ppstream.control.peer import Peer
    from ppstream.core.waiter import Waiter
    from ppstream.launch.rank0_parts import Rank0Parts
    from ppstream.links.device_link import DeviceLink
    from ppstream.links.slots import LinkShape
    from ppstream.observe.log_writer import TimestampLog
    from ppstream.pipeline.device.stage_a import DeviceStageA
    from ppstream.pipeline.policy_rank_peer import PolicyRankPeer
    from ppstream.policy.parts import Place
    from ppstream.policy.protocol import Policy

logger = logging.getLogger("ppstream")


def place_here(config: PipelineConfig, world_size: int) -> Placement:
    """The placement of this run's ranks, as this process sees its devices.

    Raises:
        ConfigError: as ``place``, there are more ranks than ports, or CUDA would start with too few
            connections.
    """
    if found := rank_problems(config, world_size):
        raise ConfigError(found)
    return place(
        config,
        world_size,
        handshake.ranks_on_this_host(world_size),
        has_peer_access=startup.peer_access(config),
    )


def open_rank0(
    parts: Rank0Parts,
    placement: Placement,
    policy_rank: PolicyRankPeer,
    store: LauncherStore,
    shape: LinkShape,
) -> tuple[DeviceStageA, DeviceExecutor]:
    """Rank 0's stage A on its GPU, which replaces that of ``parts``, and its executor.

    Raises:
        ConfigError, DeviceError, PeerLostError, ProtocolError: as the link's opening.
    """
    config = parts.config
    device = torch.device(placement.ranks[0].device)
    startup.start(device)
    set_switch_interval(DEVICE_SWITCH_INTERVAL_S)
    stream = torch_stream("a")
    torch.cuda.set_stream(stream)
    simulate = config.simulate
    is_simulated = simulate.kind == "gpu"
    work_a, work_c = (
        GpuWork(mean_ms if is_simulated else 0.0, device)
        for mean_ms in (simulate.a_ms, simulate.c_ms)
    )
    link = _open_link(config, placement, FRONT, store, shape, device, parts.log)
    own = Rank0Device(
        link=link,
        shape=shape,
        streams=Streams(cuda_stream("a"), cuda_stream("c")),
        clock=DeviceClock(DeviceProbe(cuda_stream("clock"))),
        work_a=work_a,
        work_c=work_c,
    )
    stage_a = RingWindows(config, link.out, device, stream)
    return stage_a, DeviceExecutor(own, policy_rank)


class PreparedPolicy(NamedTuple):
    """A policy on a GPU as its loop runs it, before any link is open.

    Attributes:
        policy: compiled, replayed from graphs, or as it is.
        is_stateless: its ``reset`` need never be called.
        ahead: as ``LinkShape.ahead``.
        nodes: kernels, copies and memsets of a call; None: not known.
    """

    policy: Policy
    is_stateless: bool
    ahead: int
    nodes: int | None


def prepare_policy(
    policy: Policy, config: PipelineConfig, device: torch.device, run_id: str
) -> PreparedPolicy:
    """Rehearses ``policy``, which was built on ``device``, to see how far ahead it may be queued.

    A policy that takes instructions is queued for envelopes that were seen alone: the text reaches
    it between two of them, on the stream where more would wait for rank 0.

    Raises:
        ConfigError: the policy cannot be recorded. What it raises on zeros passes through.
    """
    torch.cuda.set_stream(torch_stream("b"))
    prepared = prepared_policy(policy, config.policy, device, drawn_for(run_id))
    is_stateless = bool(getattr(policy, "stateless", False))
    if not isinstance(prepared, GraphedPolicy):
        return PreparedPolicy(prepared, is_stateless, 0, None)
    batch = config.batch.rows
    rows = None if is_stateless else torch.zeros(batch, dtype=torch.bool, device=device)
    window, out = (zeros(specs, batch, device) for specs in (policy.inputs, policy.outputs))
    found = prepared.rehearse(window, out, rows)
    ahead = run_ahead(found.nodes, found.duration_ns, config.pipeline.d_in)
    if config.policy.instructions:
        ahead = 0
    return PreparedPolicy(prepared, is_stateless, ahead, found.nodes)


def policy_at(
    place: Place,
    parts: Sequence[Policy],
    config: PipelineConfig,
    device: torch.device,
    run_id: str,
) -> Policy:
    """Returns what runs at a place: of ``parts`` loaded on ``device``; one alone as it is."""
    mine = place.of(parts)
    is_whole = len(parts) == 1 and place.names == (name_of(parts[0]),)
    if is_whole and {s.name for s in mine[0].outputs} == {s.name for s in place.outputs}:
        return mine[0]
    return Joined(mine, place, config.batch.rows, device, drawn_for(run_id), block)


def stage_b_on_host_slots(
    policy: Policy, config: PipelineConfig, device: torch.device, run_id: str
) -> StageB:
    """Stage B of a loop with slots in host memory, of a policy that was built on ``device``."""
    integers = drawn_for(run_id)
    prepared = prepared_policy(policy, config.policy, device, integers)
    if device.type != "cpu":
        prepared = StagedPolicy(prepared, device, config.batch.rows)
    return StageB(prepared, config.batch.rows, integers)


def open_policy_rank(
    config: PipelineConfig,
    prepared: PreparedPolicy,
    placement: Placement,
    peer: Peer,
    store: LauncherStore,
    shape: LinkShape,
    log: TimestampLog,
    waiter: Waiter,
) -> DevicePolicyRank:
    """The policy rank's loop on its GPU; warm, nothing queued.

    Raises:
        ConfigError, DeviceError, PeerLostError, ProtocolError: as the link's opening. What the
            policy raises on its first slots passes through.
    """
    set_switch_interval(DEVICE_SWITCH_INTERVAL_S)
    device = torch.device(placement.ranks[1].device)
    link = _open_link(config, placement, BACK, store, shape, device, log)
    policy = prepared.policy
    parts = PolicyDevice(
        config=config,
        stage_b=DeviceStageB(policy, config.batch.rows, device, is_stateless=prepared.is_stateless),
        link=link,
        peer=peer,
        log=log,
        waiter=waiter,
        clock=DeviceClock(DeviceProbe(cuda_stream("clock"))),
        stream=torch_stream("b"),
        shape=shape,
        nodes=prepared.nodes,
    )
    loop = DevicePolicyRank(parts)
    loop.prepare()
    log.event("run_ahead", envelopes=shape.ahead, nodes=prepared.nodes, slots=len(link.out))
    if isinstance(policy, GraphedPolicy):
        policy.seal()
        log.event("policy_graphs", **policy.statistics()._asdict())
    return loop


def _open_link(
    config: PipelineConfig,
    placement: Placement,
    side: str,
    store: LauncherStore,
    shape: LinkShape,
    device: torch.device,
    log: TimestampLog,
) -> DeviceLink:
    """One end, and in the log which link it is, why, and how quick.

    Raises:
        ConfigError, DeviceError, PeerLostError, ProtocolError: as ``open_device`` and ``measure``.
    """
    assert placement.link is not None
    link = open_device(
        placement.link, side, store, shape, device, looks=config.link.wait == "kernel"
    )
    latency = measure(link, side, OPEN_TIMEOUT_S)
    log.event("link", link=link.name, why=placement.why, **latency._asdict())
    if side == FRONT:
        logger.info(
            "link %s: %s; %.1f µs one way for %d bytes, queued ahead",
            link.name,
            placement.why,
            latency.one_way_ns / 1e3,
            latency.note_bytes,
        )
    return link
