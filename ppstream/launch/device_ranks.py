"""Puts together what a rank on a GPU needs beyond a rank on the CPU: start, link, streams, loop.

Everything that loads, allocates or captures happens here, before a wait is queued anywhere.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import torch

from ppstream.config.rules import rank_problems
from ppstream.core.errors import ConfigError
from ppstream.core.interpreter import DEVICE_SWITCH_INTERVAL_S, set_switch_interval
from ppstream.cuda import startup
from ppstream.cuda.busy_kernel import GpuWork
from ppstream.cuda.streams import stream as cuda_stream
from ppstream.cuda.streams import torch_stream
from ppstream.launch import handshake
from ppstream.launch.placement import Placement, cuts_on_gpu, place
from ppstream.links.device_counters import CountedLink
from ppstream.links.device_link import Headers, new_device_slots, pinned_slots, run_ahead
from ppstream.links.device_replicas import DeviceReplicas
from ppstream.links.factory import open_device
from ppstream.links.headers import ENVELOPE_HEADER
from ppstream.links.latency_probe import measure
from ppstream.links.replicas import replica_folder
from ppstream.links.slots import Position, SlotLayout, new_slots
from ppstream.observe.attribution import block
from ppstream.pipeline.device.executor import DeviceExecutor
from ppstream.pipeline.device.policy_rank import DevicePolicyRank, PolicyDevice
from ppstream.pipeline.device.rank0_queue import Rank0Device, Streams
from ppstream.pipeline.device.stage_a import DeviceFrontParts, QueuedWindows, RingWindows
from ppstream.pipeline.device.stage_b import DeviceStageB
from ppstream.pipeline.device.stamped_hop import StampedHop
from ppstream.pipeline.device.stamping import EVENTS, Stamping, choose_stamps, device_clock
from ppstream.pipeline.inline_executor import InlineExecutor
from ppstream.pipeline.stage_b import StageB
from ppstream.policy.batch_sizes import BatchSizes, batch_sizes
from ppstream.policy.compiled import compiled
from ppstream.policy.graphed import GraphedPolicy, prepared_policy
from ppstream.policy.host_staged import StagedPolicy, zeros
from ppstream.policy.parts import Joined, name_of
from ppstream.policy.unwritten import FilledPolicy, drawn_for

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ppstream.config.schema import PipelineConfig
    from ppstream.control.launcher_store import LauncherStore
    from ppstream.control.peer import Peer
    from ppstream.core.waiter import Waiter
    from ppstream.cuda.streams import Role
    from ppstream.launch.rank0_parts import Rank0Parts
    from ppstream.links.device_link import DeviceLink
    from ppstream.links.slots import LinkShape
    from ppstream.observe.log_writer import TimestampLog
    from ppstream.pipeline.device.stage_a import DeviceStageA
    from ppstream.pipeline.policy_rank_peer import PolicyRankPeer
    from ppstream.pipeline.replica_losses import ReplicaHops, ReplicaLosses
    from ppstream.policy.parts import Place
    from ppstream.policy.protocol import Policy

logger = logging.getLogger("ppstream")


def place_here(config: PipelineConfig, world_size: int) -> Placement:
    """The placement of this run's ranks, as this process sees its devices.

    Raises:
        ConfigError: as ``place``, there are more ranks than ports, or CUDA would start with too few
            connections.
    """
    here = handshake.ranks_on_this_host(world_size)
    beside_rank0 = here if handshake.is_host_of_rank0() else None
    if found := rank_problems(config, world_size, beside_rank0):
        raise ConfigError(found)
    return place(
        config,
        world_size,
        here,
        has_peer_access=startup.peer_access(config),
    )


def open_rank0(
    parts: Rank0Parts,
    placement: Placement,
    policy_ranks: tuple[PolicyRankPeer, ...],
    store: LauncherStore,
    shape: LinkShape,
    front: tuple[Place, PreparedPolicy] | None,
    bearing_losses: Callable[[ReplicaHops], ReplicaLosses],
) -> tuple[DeviceStageA, DeviceExecutor]:
    """Rank 0's stage A on its GPU, which replaces that of ``parts``, and its executor.

    Args:
        parts: of rank 0, whatever its device.
        placement: of the run.
        policy_ranks: in the order of the chain, or all replicas.
        store: where ranks find each other.
        shape: of the first and the last hop.
        front: place 0 and its parts of the policy, if it has any.
        bearing_losses: makes the judge of lost replicas.

    Raises:
        ConfigError, DeviceError, PeerLostError, ProtocolError: as the link's opening. What parts of
            the policy raise on their first slots passes through.
    """
    config = parts.config
    device = torch.device(placement.ranks[0].device)
    startup.start(device)
    set_switch_interval(DEVICE_SWITCH_INTERVAL_S)
    stream = torch_stream("a")
    torch.cuda.set_stream(stream)
    work_a, work_c = _simulated_work(config, device)
    position = Position(0, config.placement.places)
    stamping = choose_stamps(
        config,
        placement.link,
        position,
        shape.envelope.slot_bytes,
        works_in_c=work_c.products > 0,
    )
    link, losses = _open_rank0_link(
        config, placement, position, store, shape, device, parts.log, stamping, bearing_losses
    )
    own = Rank0Device(
        link=link,
        shape=shape,
        streams=Streams(cuda_stream("a"), cuda_stream("c")),
        clock=device_clock(device, stamping),
        work_a=work_a,
        work_c=work_c,
        stamps=stamping.by(link),
    )
    front_parts = None
    if front is not None:
        front_parts = _front_parts(*front, config, device, len(link.out), shape)
        front_parts.prepare(link.out)
        _seal(front[1].policy, parts.log)
    stage_a = RingWindows(config, link.out, device, stream, front_parts)
    return stage_a, DeviceExecutor(own, policy_ranks, losses)


def _simulated_work(config: PipelineConfig, device: torch.device) -> tuple[GpuWork, GpuWork]:
    """Work that stages A and C only spend time with."""
    simulate = config.simulate
    a_ms, c_ms = (simulate.a_ms, simulate.c_ms) if simulate.kind == "gpu" else (0.0, 0.0)
    return GpuWork(a_ms, device), GpuWork(c_ms, device)


def _open_rank0_link(
    config: PipelineConfig,
    placement: Placement,
    position: Position,
    store: LauncherStore,
    shape: LinkShape,
    device: torch.device,
    log: TimestampLog,
    stamping: Stamping,
    bearing_losses: Callable[[ReplicaHops], ReplicaLosses],
) -> tuple[DeviceLink, ReplicaLosses | None]:
    """Rank 0's link; of replicas those to all of them, one after the other, and their losses."""
    replicas = config.placement.replicas
    if replicas == 1:
        link = open_link(config, placement, position, store, shape, device, log, stamping)
        return link, None
    with ExitStack() as opened:
        links: list[CountedLink] = []
        for rank in range(1, replicas + 1):
            here = store.within(replica_folder(rank))
            link = open_link(config, placement, position, here, shape, device, log, stamping)
            opened.callback(link.close)
            assert isinstance(link, CountedLink), "rules.py refuses others"
            links.append(link)
        opened.pop_all()
    turns = DeviceReplicas(links)
    return turns, bearing_losses(turns)


def _front_parts(
    place: Place,
    prepared: PreparedPolicy,
    config: PipelineConfig,
    device: torch.device,
    slots: int,
    shape: LinkShape,
) -> DeviceFrontParts:
    rows = config.batch.rows
    layout = SlotLayout(ENVELOPE_HEADER, place.inputs, rows)
    takes_texts = config.policy.instructions  # as ``PreparedPolicy.ahead``
    return DeviceFrontParts(
        DeviceStageB(prepared.policy, rows, device, is_stateless=prepared.is_stateless),
        new_device_slots(layout, 1, device)[0],
        Headers(layout, slots, shape.generation),
        None if takes_texts else prepared.nodes,
        prepared.duration_ns,
        prepared.parts_ns,
        cuda_stream("a"),
        sizes_at_front(config, prepared, shape),
    )


class PreparedPolicy(NamedTuple):
    """A policy on a GPU as its loop runs it, before any link is open.

    Attributes:
        policy: compiled, replayed from graphs, or as it is.
        is_stateless: its ``reset`` need never be called.
        nodes: kernels, copies and memsets of a call; None: not known.
        duration_ns: of a call, where nodes are known.
        parts_ns: of each part alone, where several are replayed from graphs.
    """

    policy: Policy
    is_stateless: bool
    nodes: int | None = None
    duration_ns: int = 0
    parts_ns: Mapping[str, int] = MappingProxyType({})

    def ahead(self, config: PipelineConfig) -> int:
        """Returns how far ahead of envelopes it may be queued (``LinkShape.ahead``).

        A policy that takes instructions is queued for envelopes that were seen alone: the text
        reaches it between two of them, on the stream where more would wait for rank 0.
        """
        if config.policy.instructions:
            return 0
        return run_ahead(self.nodes, self.duration_ns, config.pipeline.d_in)


def prepare_policy(
    policy: Policy, config: PipelineConfig, device: torch.device, run_id: str, role: Role
) -> PreparedPolicy:
    """Rehearses ``policy``, built on ``device``, on the stream of ``role``, which becomes current.

    Raises:
        ConfigError: the policy cannot be recorded. What it raises on zeros passes through.
    """
    torch.cuda.set_stream(torch_stream(role))
    prepared = prepared_policy(policy, config.policy, device, drawn_for(run_id))
    is_stateless = bool(getattr(policy, "stateless", False))
    if not isinstance(prepared, GraphedPolicy):
        return PreparedPolicy(prepared, is_stateless)
    batch = config.batch.rows
    rows = None if is_stateless else torch.zeros(batch, dtype=torch.bool, device=device)
    window, out = (zeros(specs, batch, device) for specs in (policy.inputs, policy.outputs))
    found = prepared.rehearse(window, out, rows)
    parts_ns: dict[str, int] = {}
    if isinstance(policy, Joined) and not config.policy.compile:
        for part in policy.parts:
            alone = GraphedPolicy(FilledPolicy(part, drawn_for(run_id)))
            given, made = (zeros(specs, batch, device) for specs in (part.inputs, part.outputs))
            parts_ns[name_of(part)] = alone.rehearse(given, made, None).duration_ns
    return PreparedPolicy(prepared, is_stateless, found.nodes, found.duration_ns, parts_ns)


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
    if config.policy.compile:  # what lies between parts is not for a compiler
        mine = [compiled(part) for part in mine]
    joined = Joined(mine, place, config.batch.rows, device, drawn_for(run_id), block)
    # rows that one place leaves out hold its fill: no other place may look at them
    joined.any_rows = all(bool(getattr(part, "any_rows", False)) for part in parts)
    return joined


def stage_b_on_host_slots(
    policy: Policy, config: PipelineConfig, device: torch.device, run_id: str
) -> StageB:
    """Stage B of a loop with slots in host memory, of a policy that was built on ``device``."""
    integers, sizes = drawn_for(run_id), batch_sizes(config, policy)
    prepared = prepared_policy(policy, config.policy, device, integers)
    if device.type != "cpu":
        prepared = StagedPolicy(prepared, device, config.batch.rows)
    return StageB(prepared, config.batch.rows, integers, sizes)


def open_inline(
    parts: Rank0Parts, policy: Policy, shape: LinkShape, device: torch.device
) -> tuple[Rank0Parts, InlineExecutor]:
    """Parts and the executor of a run on one rank.

    Where ``placement.rank0`` is a GPU, too, windows are cut on it, into what the policy reads.

    Args:
        parts: of rank 0, whatever its device.
        policy: all of it, loaded.
        shape: of an envelope and its result.
        device: of the policy; CUDA has started there.
    """
    config, run_id = parts.config, parts.log.run_id
    if not cuts_on_gpu(config):
        (envelope,), (result,) = new_slots(shape.envelope, 1), new_slots(shape.result, 1)
        stage_b = stage_b_on_host_slots(policy, config, device, run_id)
        return parts, InlineExecutor(stage_b, envelope=envelope, result=result)
    logger.info("windows are cut on %s, where the policy reads them", device)
    stream = torch_stream("a")
    torch.cuda.synchronize(device)  # what was loaded, on another stream
    torch.cuda.set_stream(stream)
    layout, rows = shape.envelope, config.batch.rows
    (slot,), (result,) = new_device_slots(layout, 1, device), pinned_slots(shape.result, 1)
    told = tuple(spec for spec in layout.tensors if spec.name in ("rows", "present"))
    (on_host,) = new_slots(SlotLayout(layout.header, told, rows), 1)
    prepared = prepared_policy(policy, config.policy, device, drawn_for(run_id))
    staged = StagedPolicy(prepared, device, rows, reads_host=False)
    stage_b = StageB(staged, rows, drawn_for(run_id), batch_sizes(config, policy))
    envelope = replace(on_host, tensors=slot.tensors)
    use_device = partial(torch.cuda.set_device, device)  # a robot's first frame locks its memory
    executor = InlineExecutor(stage_b, envelope=envelope, result=result, begin_thread=use_device)
    staged.wait = executor.await_device
    return parts._replace(stage_a=QueuedWindows(config, slot, device, stream)), executor


def open_policy_rank(
    config: PipelineConfig,
    prepared: PreparedPolicy,
    placement: Placement,
    position: Position,
    peer: Peer,
    store: LauncherStore,
    shape: LinkShape,
    log: TimestampLog,
    waiter: Waiter,
) -> DevicePolicyRank:
    """A policy rank's loop on its GPU; warm, nothing queued.

    Raises:
        ConfigError, DeviceError, PeerLostError, ProtocolError: as the link's opening. What the
            policy raises on its first slots passes through.
    """
    set_switch_interval(DEVICE_SWITCH_INTERVAL_S)
    device = torch.device(placement.ranks[store.rank].device)
    stamping = choose_stamps(config, placement.link, position, shape.result.slot_bytes)
    is_replica, folder = config.placement.replicas > 1, replica_folder(store.rank)
    meets_in = store.within(folder) if is_replica else store
    link = open_link(config, placement, position, meets_in, shape, device, log, stamping)
    stamped = stamping.by(link)
    policy = prepared.policy
    parts = PolicyDevice(
        config=config,
        stage_b=DeviceStageB(policy, config.batch.rows, device, is_stateless=prepared.is_stateless),
        link=link if stamped is None else StampedHop(stamped, cuda_stream("b")),
        peer=peer,
        log=log,
        waiter=waiter,
        clock=device_clock(device, stamping),
        stream=torch_stream("b"),
        shape=shape,
        nodes=prepared.nodes,
        sizes=sizes_on_gpu(config, policy, shape),
        position=position,
        rank=store.rank,
        parts_ns=prepared.parts_ns,
    )
    loop = DevicePolicyRank(parts)
    loop.prepare()
    loop.make_graphs()
    log.event("run_ahead", envelopes=shape.ahead, nodes=prepared.nodes, slots=len(link.out))
    _seal(policy, log)
    return loop


def sizes_on_gpu(config: PipelineConfig, policy: Policy, shape: LinkShape) -> BatchSizes | None:
    """Returns the sizes of batches; None: one alone, as where B is queued ahead of envelopes."""
    sizes = batch_sizes(config, policy)
    return sizes if sizes.smaller and not shape.ahead else None


def sizes_at_front(
    config: PipelineConfig, prepared: PreparedPolicy, shape: LinkShape
) -> BatchSizes | None:
    """As ``sizes_on_gpu``, at place 0; None, too, where A may be queued ahead of credits."""
    return None if prepared.ahead(config) else sizes_on_gpu(config, prepared.policy, shape)


def _seal(policy: Policy, log: TimestampLog) -> None:
    """All graphs are recorded."""
    if isinstance(policy, GraphedPolicy):
        policy.seal()
        log.event("policy_graphs", **policy.statistics()._asdict())


def open_link(
    config: PipelineConfig,
    placement: Placement,
    position: Position,
    store: LauncherStore,
    shape: LinkShape,
    device: torch.device,
    log: TimestampLog,
    stamping: Stamping = EVENTS,
) -> DeviceLink:
    """Both hops of this rank, and in the log which link it is, why, and how quick.

    Raises:
        ConfigError, DeviceError, PeerLostError, ProtocolError: as ``open_device`` and ``measure``.
    """
    assert placement.link is not None
    limit_s = config.liveness.start_s
    spins = config.link.wait == "kernel"
    link = open_device(
        placement.link,
        position,
        store,
        shape,
        device,
        timeout_s=limit_s,
        spins=spins,
        stamps=stamping.stamps == "device",
    )
    latency = measure(link, position, limit_s)
    told = latency._asdict() | {"stamps": stamping.stamps, "stamps_why": stamping.why}
    log.event("link", link=link.name, why=placement.why, **told)
    if position.is_front:
        logger.info(
            "link %s: %s; %.1f µs one way for %d bytes, queued ahead",
            link.name,
            placement.why,
            latency.one_way_ns / 1e3,
            latency.note_bytes,
        )
    return link
