"""The policy rank of a run: meets rank 0, builds the policy, serves until told to drain."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Final

import torch

from ppstream.config.schema import PipelineConfig
from ppstream.control.generation import ask_generation
from ppstream.control.launcher_store import LauncherStore, open_store
from ppstream.control.peer import Peer
from ppstream.core.clock import NS_PER_MS, NS_PER_S, now_ns
from ppstream.core.errors import ConfigError, ExitCode
from ppstream.core.interpreter import set_switch_interval
from ppstream.core.waiter import Waiter
from ppstream.cuda import startup
from ppstream.ingest.window import input_specs
from ppstream.launch import auto_cut, device_ranks, guard, handshake, rank_exit
from ppstream.launch.course import Course, start_watchdog
from ppstream.launch.mesh import Mesh, open_mesh
from ppstream.launch.monitoring import Monitoring
from ppstream.launch.placement import Placement
from ppstream.launch.progress import Progress, Wait
from ppstream.links.factory import open_hops
from ppstream.links.headers import link_shape
from ppstream.links.protocol import Neighbours
from ppstream.links.replicas import replica_folder
from ppstream.links.slots import LinkShape
from ppstream.observe.log_writer import PolicyRecord, TimestampLog
from ppstream.observe.run_folder import Run
from ppstream.pipeline.host_policy_rank import HostPolicyRank
from ppstream.pipeline.policy_rank import PolicyRank
from ppstream.policy.compatibility import build_parts, places_of
from ppstream.policy.fingerprint import shared_weights, weights_fingerprint
from ppstream.policy.parts import PartSpecs, Place, load, part_times_of, specs_of
from ppstream.policy.protocol import Policy
from ppstream.wire.rank_messages import Goodbye

OUTLIVE_DRAIN_S: Final = 2.0  # rank 0 says drain within drain_s; alone, this rank leaves later


class Patience:
    """A signal asks this rank to stop: it waits for rank 0 to say drain, but not for ever."""

    def __init__(self, limit_s: float) -> None:
        self._limit_ns = round(limit_s * NS_PER_S)
        self._asked_ns: int | None = None

    def on_signal(self, _signal: str) -> None:
        if self._asked_ns is None:
            self._asked_ns = now_ns()

    def is_over(self) -> bool:
        return self._asked_ns is not None and now_ns() - self._asked_ns > self._limit_ns


def run_back(config: PipelineConfig, end: rank_exit.RankEnd, world_size: int) -> str:
    """A whole run on a policy rank, one of ``world_size`` in all; returns why it drained.

    Raises:
        PpstreamError: what ended it otherwise; rank 0 was told, if it is there.
    """
    set_switch_interval()
    torch.set_grad_enabled(False)  # else graphs of all calls would hang on the outputs
    placement = device_ranks.place_here(config, world_size)  # rank 0 that refuses hosts no store
    with ExitStack() as stack, end.closing():
        course = Course(config)
        stack.enter_context(Progress(lambda _now: _wait(course), f"rank {end.rank}"))
        store = _join(config, course)
        end.generation = store.generation
        peer, end.run = handshake.introduce(config, store)
        stack.callback(peer.close)
        process = end.met(0, peer)
        patience = Patience(config.liveness.drain_s + OUTLIVE_DRAIN_S)
        end.pass_stops_to(patience.on_signal)
        met: list[PolicyRank] = []  # this loop, once it exists
        handshake.start_heartbeat(
            config, peer, lambda: met[0].progress if met else 0, end.leave_when_lost, process, stack
        )
        stack.callback(start_watchdog(config, course, end).stop)
        with handshake.saying_goodbye(peer):
            at = config.placement.place_of(store.rank)
            connect = handshake.connect_neighbours
            ends = None if placement.is_member(store.rank) else connect(config, store, peer, stack)
            device = torch.device(placement.device_of(store.rank))
            config = auto_cut.follow_cut(config, store.rank, device, peer, course)
            placement = device_ranks.place_here(config, world_size)
            with course.step("the meeting of the mesh's ranks"):
                mesh = open_mesh(config, store, peer, device)
            on_gpu: device_ranks.PreparedPolicy | None = None
            with course.step(f"the build of {config.policy.target}"):
                run_id = end.run.run_id
                specs, place, policy, *prints = _build_place(config, at, device, peer, run_id, mesh)
                if placement.is_device_ordered:
                    on_gpu = device_ranks.prepare_policy(policy, config, device, run_id, "b")
            handshake.offer_parts(peer, specs, on_gpu.ahead(config) if on_gpu else 0, *prints)
            ahead = handshake.wait_accepted(config, peer)
            shape = link_shape(config, place.inputs, place.outputs, store.generation, ahead, at)
            log, watching = _watched_log(config, end.run, store, stack)
            waiter = Waiter(round(config.pipeline.spin_ms * NS_PER_MS))
            stack.callback(waiter.close)
            with course.step("the link and the policy's first calls"):
                built = on_gpu or policy
                loop = _open(config, built, placement, ends, peer, store, shape, log, waiter, mesh)
            stack.callback(loop.close)
            met.append(loop)
            course.loop = loop
            loop.on_phase.append(watching.on_phase)
            end.on_stop = patience.on_signal
            _look_out(end, loop, None if mesh is None else peer)
            guard.tell_linked()
            reason = loop.run(patience.is_over)
            log.flush()
        end.is_drained = True
        peer.send(Goodbye(int(ExitCode.DRAINED), reason))
        return reason


def _join(config: PipelineConfig, course: Course) -> LauncherStore:
    limit_s = config.liveness.handshake_s
    whole = open_store(timeout_s=limit_s)
    handshake.hash_weights(config, course, whole)
    return ask_generation(whole, limit_s)


def _look_out(end: rank_exit.RankEnd, loop: PolicyRank, rank0: Peer | None) -> None:
    """Has the lookout know the phases, and listen to ``rank0`` where the loop may not get to."""
    if end.lookout is not None:
        loop.on_phase.append(end.lookout.on_phase)
        if rank0 is not None:
            end.lookout.listen_to(rank0)


def _wait(course: Course) -> Wait | None:
    """Returns what this rank waits for on its way; StopIteration: its loop runs."""
    if course.loop is not None:
        raise StopIteration
    return Wait(course.step_name) if course.step_name else None


def _build_place(
    config: PipelineConfig,
    at: int,
    device: torch.device,
    peer: Peer,
    run_id: str,
    mesh: Mesh | None,
) -> tuple[tuple[PartSpecs, ...], Place, Policy, dict[str, str], dict[str, str]]:
    """All parts' specs, this rank's place, what runs there, loaded, and two fingerprints.

    One is of all weights, on ranks of a mesh and on replicas alone; one of those that parts of
    other ranks have, too.

    Raises:
        PeerLeftError: rank 0 refuses the policy, with every reason.
    """
    if device.type == "cuda":
        startup.start(device)
    parts = build_parts(config, device, mesh=None if mesh is None else mesh.devices)
    specs = specs_of(parts)
    try:
        place = places_of(config, specs, input_specs(config))[at]
    except ConfigError:
        handshake.offer_parts(peer, specs)
        handshake.wait_accepted(config, peer)  # rank 0 finds the same, and is the one to tell
        raise
    mine = place.of(parts)
    load(mine, config.policy.target)
    is_one_of_many = config.placement.mesh * config.placement.replicas > 1
    weights = weights_fingerprint(mine, whole=mesh is None) if is_one_of_many else {}
    policy = device_ranks.policy_at(place, parts, config, device, run_id)
    return specs, place, policy, weights, shared_weights(parts, mine)


def _open(
    config: PipelineConfig,
    policy: Policy | device_ranks.PreparedPolicy,
    placement: Placement,
    ends: Neighbours | None,
    peer: Peer,
    store: LauncherStore,
    shape: LinkShape,
    log: TimestampLog,
    waiter: Waiter,
    mesh: Mesh | None,
) -> PolicyRank:
    """This rank's loop, over a link that is open; ``ends`` is None on a member of a mesh."""
    if isinstance(policy, device_ranks.PreparedPolicy):
        assert ends is not None
        return device_ranks.open_policy_rank(
            config, policy, placement, ends.position, peer, store, shape, log, waiter
        )
    assert placement.link is not None
    device = torch.device(placement.device_of(store.rank))
    stage_b = device_ranks.stage_b_on_host_slots(policy, config, device, log.run_id)
    part_times, limit_s = part_times_of(policy), config.liveness.start_s
    if config.placement.replicas > 1:
        store = store.within(replica_folder(store.rank))
    if ends is not None:
        hops = open_hops(placement.link, ends, store, shape, timeout_s=limit_s)
    if mesh is not None:
        hops = mesh.follow(peer, shape) if ends is None else mesh.lead(hops, shape)
    return HostPolicyRank(config, stage_b, hops, peer, log, waiter, store.rank, part_times)


def _watched_log(
    config: PipelineConfig, run: Run, store: LauncherStore, stack: ExitStack
) -> tuple[TimestampLog, Monitoring]:
    rank, generation = store.rank, store.generation
    path = run.log_path(rank, generation)
    log = TimestampLog(
        path, PolicyRecord, config.log.ring, run_id=run.run_id, generation=generation
    )
    stack.callback(log.close)
    return log, Monitoring(config, run, log, stack, rank=rank, generation=generation)
