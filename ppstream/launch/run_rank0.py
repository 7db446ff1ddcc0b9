"""Rank 0 of a run: builds its parts, meets the policy rank, proves overlap, serves, drains.

The order of a run stands in ``run_front``; what happens to an envelope in ``pipeline/loop.py``.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from typing import Any, Final

import msgspec
import numpy as np
import torch

from ppstream.config.schema import PipelineConfig
from ppstream.control.generation import begin_generation
from ppstream.control.launcher_store import LauncherStore, open_store
from ppstream.control.peer import Peer
from ppstream.core.clock import NS_PER_MS, NS_PER_S
from ppstream.core.errors import PeerLeftError, PeerLostError, PpstreamError
from ppstream.core.interpreter import set_switch_interval
from ppstream.core.specs import TensorSpec
from ppstream.core.version import VERSION
from ppstream.cuda import startup
from ppstream.ingest.intake import Intake, build_intake
from ppstream.ingest.sources import served_recording
from ppstream.launch import auto_cut, device_ranks, handshake, held_rank, rank_exit
from ppstream.launch.course import Course, start_watchdog
from ppstream.launch.monitoring import Monitoring
from ppstream.launch.placement import Placement
from ppstream.launch.progress import Progress
from ppstream.launch.rank0_parts import Rank0Parts, rank0_parts
from ppstream.launch.way_to_ready import WayToReady
from ppstream.links.factory import open_hops
from ppstream.links.headers import ENVELOPE_HEADER, link_shape
from ppstream.links.protocol import Hops, Neighbours
from ppstream.links.replicas import ReplicasIn, in_turn, replica_folder
from ppstream.links.slots import FRONT, LinkShape, Position, SlotLayout, new_slots
from ppstream.observe.run_folder import Run, boot_id
from ppstream.pipeline.bringup import bring_up
from ppstream.pipeline.host_executor import HostExecutor
from ppstream.pipeline.loop import Executor, Rank0Loop
from ppstream.pipeline.mesh_faults import MeshFaults
from ppstream.pipeline.policy_rank_peer import PolicyRankPeer
from ppstream.pipeline.replica_losses import ReplicaLosses
from ppstream.pipeline.service import Service
from ppstream.pipeline.split_executor import SplitExecutor
from ppstream.pipeline.stage_a import LONG_FRONT_MS, FrontParts, StageA
from ppstream.policy.compatibility import build_parts, places_of
from ppstream.policy.compiled import RecompileMeter
from ppstream.policy.fingerprint import shared_weights
from ppstream.policy.parts import Place, blind_reads, load, part_times_of, specs_of
from ppstream.policy.protocol import Policy
from ppstream.policy.unwritten import policy_fault
from ppstream.wire.rank_messages import Drain, PhaseChange

logger = logging.getLogger("ppstream")

GOODBYE_LIMIT_NS: Final = 3 * NS_PER_S


Build = Callable[[PipelineConfig, torch.device], tuple[Policy, ...]]


def run_front(
    config: PipelineConfig,
    end: rank_exit.RankEnd,
    run: Run,
    world_size: int,
    build: Build = build_parts,
) -> str:
    """A whole run on rank 0; returns why it drained.

    Args:
        config: of the run.
        end: of this rank.
        run: its folder.
        world_size: 1: this thread runs all stages, in turn.
        build: makes the policy then.

    Raises:
        PpstreamError: what ended the run otherwise; the policy rank was told, if it is there.
    """
    set_switch_interval()
    torch.set_grad_enabled(False)  # else graphs of all calls would hang on the outputs
    torch.set_num_threads(1)
    begin_run(run, config)
    end.run = run
    placement = device_ranks.place_here(config, world_size)  # what it refuses is recorded
    describe_topology(run, config, placement)
    course = Course(config, end.thread)
    with ExitStack() as stack, end.closing():
        launcher = None
        if not placement.is_inline:
            launcher = open_store(timeout_s=config.liveness.handshake_s)
            end.generation = begin_generation(launcher, end.generation)
        elif end.takes_signals:  # a process of its own
            held_rank.watch_from_outside(config, end, stack)
        stack.callback(start_watchdog(config, course, end).stop)
        stack.enter_context(Progress(WayToReady(course), "rank 0"))
        run.describe(weights_sha256=handshake.hash_weights(config, course, launcher))
        met = None if launcher is None else _connect(config, launcher, course, end, run, stack)
        with handshake.saying_goodbye(*met[0]) if met is not None else nullcontext():
            if met is not None:
                config = auto_cut.choose_cut(config, met[0], course, run)
                placement = device_ranks.place_here(config, world_size)
            return _serve(config, placement, course, end, run, met, build, stack)


Met = tuple[tuple[Peer, ...], LauncherStore]  # the policy ranks, in order


def _connect(
    config: PipelineConfig,
    launcher: LauncherStore,
    course: Course,
    end: rank_exit.RankEnd,
    run: Run,
    stack: ExitStack,
) -> Met:
    """The policy ranks; before anything is built that may take its time."""
    store = launcher.of_generation(end.generation)
    listener = handshake.listen(store, _own_address(store.world_size))
    stack.callback(listener.close)
    logger.info("handshake")

    def finished() -> int:
        return course.loop.finished if isinstance(course.loop, Rank0Loop) else 0

    peers: list[Peer] = []
    facts: dict[int, Mapping[str, Any]] = {}
    for rank in range(1, store.world_size):
        with handshake.saying_goodbye(*peers):
            handshake.invite(config, launcher, end.generation, rank)
            peer = handshake.admit(config, store, listener, run, rank, facts)
        stack.callback(peer.close)
        peers.append(peer)
        with handshake.saying_goodbye(*peers):
            process = end.met(rank, peer)
            handshake.start_heartbeat(config, peer, finished, end.leave_when_lost, process, stack)
    listener.close()
    return tuple(peers), store


def _serve(
    config: PipelineConfig,
    placement: Placement,
    course: Course,
    end: rank_exit.RankEnd,
    run: Run,
    met: Met | None,
    build: Build,
    stack: ExitStack,
) -> str:
    """Build, prove, serve and drain; returns why it drained."""
    with course.step("the build of stages A and C"):
        intake = build_intake(config)  # bring-up's; service has its own
        recording = served_recording(config)  # one that cannot be is refused before bring-up
        parts = rank0_parts(config, run, end.generation, stack)
    watching = Monitoring(
        config,
        run,
        parts.log,
        stack,
        rank=0,
        generation=end.generation,
        credit_ledger=parts.credit_ledger,
        takes_signals=end.takes_signals,
    )
    rank0: Rank0Loop
    if met is None:
        with course.step(f"the build of {config.policy.target}"):
            rank0 = _inline(config, parts, intake.cutter.inputs, end.generation, build)
    else:
        rank0 = _pipelined(config, run, parts, placement, intake, course, end, met, stack)
        if end.lookout is not None:
            rank0.on_phase.append(end.lookout.on_phase)
    stack.callback(rank0.run_delay.close)
    course.loop = rank0
    rank0.on_phase += (watching.on_phase, lambda phase: logger.info("%s", phase))
    end.on_stop = rank0.request_stop
    end.pass_stops_to(rank0.request_stop)
    end.pass_cuts_to(rank0.request_cut)
    try:
        with Service(config, run, rank0, recording) as service:
            watching.show_robots(service.sessions)
            bring_up(rank0, intake, service.sessions, run)
            if rank0.stop_reason is not None:
                rank0.change_phase("draining")  # nothing was proven
            elif config.mode == "throughput":
                service.run()
        _check_ledgers(intake, service.intake)
        rank0.log.flush()
    except PpstreamError as error:
        end.save_nccl_dump(error.exit_code)
        raise
    end.is_drained = True
    _release_policy_ranks(rank0)
    return rank0.stop_reason or "the recording has ended"


def _pipelined(
    config: PipelineConfig,
    run: Run,
    parts: Rank0Parts,
    placement: Placement,
    intake: Intake,
    course: Course,
    end: rank_exit.RankEnd,
    met: Met,
    stack: ExitStack,
) -> Rank0Loop:
    peers, store = met
    built = _build_front(config, course)
    shared = {} if built is None else shared_weights(built, built[: config.placement.cut.count(0)])
    places, ahead, blind = handshake.agree_on_parts(config, peers, intake.cutter.inputs, shared)
    describe_topology(run, config, placement, places)
    run_id, front = parts.log.run_id, None
    device = torch.device(config.placement.rank0)
    if built is not None:
        front = device_ranks.policy_at(places[0], built, config, device, run_id)
    shape = link_shape(config, places[0].outputs, places[-1].outputs, store.generation, ahead)
    policy_ranks, members = _policy_ranks(config, placement, peers)
    bearing_losses = partial(ReplicaLosses.of, config.placement, policy_ranks, members, end)
    executor: Executor
    with course.step("the link, its slots and the first calls of parts here"):
        if placement.is_device_ordered:
            at_place_0 = None
            if front is not None:
                prepared = device_ranks.prepare_policy(front, config, device, run_id, "a")
                at_place_0 = places[0], prepared
            stage_a, executor = device_ranks.open_rank0(
                parts, placement, policy_ranks, store, shape, at_place_0, bearing_losses
            )
            stack.callback(executor.link.close)
            parts = parts._replace(stage_a=stage_a)
        else:
            assert placement.link is not None
            assert isinstance(parts.stage_a, StageA), "placed so"
            hops = _open_hops(config, placement.link, policy_ranks, store, shape)
            stack.callback(hops.close)
            losses = bearing_losses(hops.into) if isinstance(hops.into, ReplicasIn) else None
            logger.info("link %s: %s", hops.name, placement.why)
            if front is not None:
                parts.stage_a.front = _front_parts(config, front, places[0], run_id)
            config = _with_threads(config, parts.stage_a.front, hops)
            describe_topology(run, config, placement, places)
            parts = parts._replace(config=config)
            executor = (SplitExecutor if config.threads == "split" else HostExecutor)(
                hops, policy_ranks, members, losses
            )
    rank0 = Rank0Loop(*parts, executor=executor)
    rank0.blind_reads = blind

    def send_phase(phase: str) -> None:
        for policy_rank in executor.all_ranks:
            policy_rank.tell(PhaseChange(phase))

    rank0.on_phase.append(send_phase)
    _watch_policy(rank0)
    return rank0


def _open_hops(
    config: PipelineConfig,
    link: str,
    policy_ranks: Sequence[PolicyRankPeer],
    store: LauncherStore,
    shape: LinkShape,
) -> Hops:
    """Rank 0's hops: to the first policy rank and from the last one; or to replicas and back."""
    limit_s, peers = config.liveness.start_s, [found.peer for found in policy_ranks]
    if config.placement.replicas == 1:
        ends = Neighbours(peers[-1], peers[0], Position(0, len(peers)))
        return open_hops(link, ends, store, shape, timeout_s=limit_s)
    with ExitStack() as opened:
        hops: list[Hops] = []
        for rank, peer in enumerate(peers, 1):
            here = store.within(replica_folder(rank))
            ends = Neighbours.pair(FRONT, peer)
            hops.append(open_hops(link, ends, here, shape, timeout_s=limit_s))
            opened.callback(hops[-1].close)
        opened.pop_all()
    return in_turn(hops, shape)


def _watch_policy(rank0: Rank0Loop) -> None:
    """Has faults of front parts reported, and what compilers did compared and refused."""
    config, front = rank0.config, rank0.stage_a.front
    if config.policy.compile and config.placement.mesh > 1:
        rank0.on_warm.append(lambda: _compare_compilers(rank0))
    if front is not None:
        front.on_fault = rank0.report_policy_fault
        _meter_compiler(rank0, front)


def _policy_ranks(
    config: PipelineConfig, placement: Placement, peers: Sequence[Peer]
) -> tuple[tuple[PolicyRankPeer, ...], tuple[PolicyRankPeer, ...]]:
    """The policy ranks that envelopes come to, in order, and the other members of meshes."""
    leaders, leader_of = range(1, len(placement.ranks)), config.placement.leader_of
    meshes: dict[int, MeshFaults] = {}
    if placement.members:
        meshes = {leader: MeshFaults(config.placement.mesh_of(leader)) for leader in leaders}
    found = tuple(
        PolicyRankPeer(peer, config, k, meshes.get(leader_of(k))) for k, peer in enumerate(peers, 1)
    )
    return found[: len(leaders)], found[len(leaders) :]


def _compare_compilers(rank0: Rank0Loop) -> None:
    """Refuses a mesh whose ranks compiled different graphs: their collectives may not match.

    Raises:
        HandshakeError: names part, count and both ranks.
    """
    counts = {found.rank: _flat_counts(found) for found in rank0.executor.all_ranks}
    for rank, found in counts.items():
        leader = rank0.config.placement.leader_of(rank)
        handshake.refuse(handshake.difference(counts[leader], found, leader, rank))


def _flat_counts(policy_rank: PolicyRankPeer) -> dict[str, int]:
    return {
        f"compiled.{part}.{name}": count
        for part, counts in policy_rank.compiler_counts().items()
        for name, count in counts.items()
    }


def _meter_compiler(rank0: Rank0Loop, runs: object) -> None:
    """Logs what the compiler does in parts that run here, and refuses too many graph breaks."""
    if meter := RecompileMeter.of(rank0.config.policy, runs):
        rank0.on_warm.append(lambda: meter.warm_up_is_over(rank0.log.event))
        rank0.on_phase.append(lambda phase: meter.phase(phase, rank0.log.event))


def _build_front(config: PipelineConfig, course: Course) -> tuple[Policy, ...] | None:
    """All parts of the policy, those of rank 0 loaded; None: it has none."""
    if 0 not in config.placement.cut:
        return None
    with course.step(f"the build of {config.policy.target}"):
        device = torch.device(config.placement.rank0)
        if device.type == "cuda":
            startup.start(device)
        built = build_parts(config, device)
        load(built[: config.placement.cut.count(0)], config.policy.target)
    return built


def _front_parts(config: PipelineConfig, policy: Policy, place: Place, run_id: str) -> FrontParts:
    """The parts at place 0, behind a window of this process alone."""
    device, rows = torch.device(config.placement.rank0), config.batch.rows
    stage = device_ranks.stage_b_on_host_slots(policy, config, device, run_id)
    (window,) = new_slots(SlotLayout(ENVELOPE_HEADER, place.inputs, rows), 1)
    return FrontParts(stage, window, part_times_of(policy))


def _with_threads(config: PipelineConfig, front: FrontParts | None, hops: Hops) -> PipelineConfig:
    """Decides what ``pipeline.threads = "auto"`` is here, and says so where there was a choice."""
    if config.pipeline.threads != "auto":
        return config
    threads = "serial"
    if front is not None:
        try:
            took_ms = front.shortest_ns(hops.out.slot(0)) / NS_PER_MS
        except Exception as error:  # noqa: BLE001 - user code: a run may never give it zeros
            logger.info("threads serial: front parts raised on zeros: %s", policy_fault(error).line)
        else:
            threads = "split" if took_ms > LONG_FRONT_MS else "serial"
            text = "threads %s: front parts take %.2f ms, split above %g ms"
            logger.info(text, threads, took_ms, LONG_FRONT_MS)
    shape = msgspec.structs.replace(config.pipeline, threads=threads)
    return msgspec.structs.replace(config, pipeline=shape)


def _own_address(world_size: int) -> str | None:
    """This host's address for policy ranks elsewhere; None: all ranks are on this host."""
    if handshake.ranks_on_this_host(world_size) >= world_size:
        return None
    return os.environ.get("MASTER_ADDR", "127.0.0.1")


def _inline(
    config: PipelineConfig,
    parts: Rank0Parts,
    inputs: tuple[TensorSpec, ...],
    generation: int,
    build: Build,
) -> Rank0Loop:
    device = torch.device(config.placement.policy[0])
    if device.type == "cuda":
        startup.start(device)
    built = build(config, device)
    _, place = places_of(config, specs_of(built), inputs, inline=True)
    load(built, config.policy.target)
    policy = device_ranks.policy_at(place, built, config, device, parts.log.run_id)
    shape = link_shape(config, inputs, policy.outputs, generation)
    parts, executor = device_ranks.open_inline(parts, policy, shape, device)
    rank0 = Rank0Loop(*parts, executor=executor)
    rank0.blind_reads = blind_reads(specs_of(built))
    _meter_compiler(rank0, executor)
    return rank0


def _check_ledgers(*intakes: Intake) -> None:
    """Every sample is accounted for, in every run: raises AssertionError with the numbers."""
    for intake in intakes:
        for row in intake.rows:
            for ring in row.rings.values():
                ring.check()


def _release_policy_ranks(rank0: Rank0Loop) -> None:
    """Nothing is in flight: let the policy ranks go, and wait until they say goodbye.

    One may be busy first, as with a text, for as long as its own watchdog lets it be.
    """
    limit_ns = GOODBYE_LIMIT_NS + round(rank0.config.liveness.watchdog_s * NS_PER_S)
    for policy_rank in rank0.executor.all_ranks:
        policy_rank.tell(Drain(rank0.stop_reason or "the recording has ended"))
    for policy_rank in rank0.executor.all_ranks:
        with suppress(PeerLostError if policy_rank.bears_loss() else PeerLeftError):
            while True:  # what it had been asked is answered first
                policy_rank.peer.receive(limit_ns, "its goodbye")


def begin_run(run: Run, config: PipelineConfig) -> None:
    effective = msgspec.json.encode(config, order="sorted")
    run.begin(
        config=msgspec.to_builtins(config),
        config_sha256=hashlib.sha256(effective).hexdigest(),
        versions={
            "ppstream": VERSION,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
    )


def describe_topology(
    run: Run, config: PipelineConfig, placement: Placement, places: Sequence[Place] = ()
) -> None:
    """Ranks, bounds and link into run.json; the policy's parts once they are known."""
    host, boot = platform.node(), boot_id()
    names = [list(place.names) for place in places]
    shape = config.pipeline
    place_of = config.placement.place_of
    run.describe(
        topology={
            # on GPUs A and C have streams of their own
            "threads": "split" if placement.is_device_ordered else config.threads,
            "order": "send_first",
            "credit": shape.credit,
            "pacing": shape.pacing,
            "replicas": 1 if placement.is_inline else config.placement.replicas,
            "mesh": 1 if placement.is_inline else config.placement.mesh,
            "members": [
                {
                    "rank": plan.rank,
                    "device": plan.device,
                    "leader": config.placement.leader_of(plan.rank),
                }
                for plan in placement.members
            ],
            "world_size": len(placement.ranks),
            "d_in": shape.d_in,
            "d_out": shape.d_out,
            "ranks": [
                {
                    "rank": plan.rank,
                    "host": host,
                    "boot_id": boot,
                    "pid": os.getpid() if plan.rank == 0 else None,
                    "device": plan.device,
                    "parts": names[place_of(plan.rank)] if names else [],
                    "link": placement.link,
                    "stamp_source": "device" if placement.is_device_ordered else "host",
                }
                for plan in placement.ranks
            ],
        }
    )
