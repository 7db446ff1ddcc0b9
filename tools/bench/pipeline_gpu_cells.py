"""The cells of ``pipeline_gpu.py`` and what one pair of ranks does with them. Not a benchmark.

Both ranks go through the same cells in order, in one pair of processes: for each a new link and new
loops over the same control socket. A cell is a bring-up of the product: warmed up, stages timed
alone, saturated, logged, and judged by the report's own function.
"""

from __future__ import annotations

import os
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

_ROOT: Final = Path(__file__).resolve().parents[2]
for _room in (str(_ROOT / room) for room in ("", "kernels", "stages")):
    if _room not in sys.path:
        sys.path.append(_room)

import msgspec
import torch
import torch.distributed as dist

from ppstream.analysis.judge import judge
from ppstream.analysis.log_reader import read_run
from ppstream.analysis.run_report import RunReport
from ppstream.config import load
from ppstream.config.schema import PipelineConfig
from ppstream.control.heartbeat import HeartbeatThread
from ppstream.control.launcher_store import LauncherStore, join_store
from ppstream.control.rendezvous import Listener, connect
from ppstream.core.clock import now_ns
from ppstream.core.interpreter import set_switch_interval
from ppstream.core.waiter import Waiter
from ppstream.cuda import startup
from ppstream.ingest.intake import build_intake
from ppstream.ingest.synthetic import SyntheticSource
from ppstream.launch import device_ranks, handshake
from ppstream.launch.rank0_parts import rank0_parts
from ppstream.launch.run_rank0 import begin_run, describe_topology
from ppstream.links.headers import link_shape
from ppstream.links.slots import BACK
from ppstream.observe.log_writer import PolicyRecord, TimestampLog
from ppstream.observe.run_folder import Run
from ppstream.pipeline.bringup import run_saturated, time_isolated_stages, warm_up
from ppstream.pipeline.device.policy_rank import DevicePolicyRank
from ppstream.pipeline.loop import Rank0Loop
from ppstream.pipeline.policy_rank_peer import PolicyRankPeer
from ppstream.policy.compatibility import build_parts
from ppstream.wire.rank_messages import Drain, Measure, PhaseChange, Ready

BASE: Final = _ROOT / "stages" / "ppstream_stages" / "bench_gpus.toml"
STEPS: Final = 125  # x 270 values: 135 KB a row, 4.3 MB with 32
LIMIT_S: Final = 30.0
US: Final = 1e-3  # ms
CELL_US: Final = 500_000.0  # a few stalls of the host would set mean and p99 of a shorter cell
LEAST_PERIOD_US: Final = 200.0  # no cell's is much shorter, whatever its stages are


class GpuCell(NamedTuple):
    """One configuration; times in microseconds."""

    name: str
    a_us: float
    b_us: float
    rows: int
    depth: int
    link: str
    credit: str = "before_window"
    stamps: str = "auto"
    shares: bool = False  # both ranks are on the first GPU
    where: bool = False  # the loop's calls are timed one by one: slower, and it tells which

    def device(self, rank: int) -> torch.device:
        return torch.device("cuda", 0 if self.shares else rank)


class CellResult(NamedTuple):
    """Measurements of a cell; times in microseconds."""

    cell: GpuCell
    n: int
    period_us: float
    alone_us: tuple[float, float, float]  # A, B, C
    strict: float
    overhead_us: float
    compat: float | None
    primary: float | None
    p50_us: float
    p99_us: float
    in_run: float  # period over the slowest stage in the run
    latency_us: float  # from the start of A to the end of C on the device; p50
    picked_us: tuple[float, float]  # from there until the host has the actions; p50, p99
    age_us: float  # from the start of A until the host has the actions; p50
    age_periods: float
    cpu_us: tuple[float, float]  # of rank 0 and the policy rank, per envelope
    cpu0_parts: dict[str, float]  # of rank 0, per envelope: see ``LoopCpu``
    bad_audits: list[str]
    verdict: str


def envelopes_of(cell: GpuCell, least: int) -> int:
    """So many that the cell lasts for some ``CELL_US``; two ranks of one GPU take turns of ms."""
    if cell.shares:
        return least
    return max(least, round(CELL_US / max(cell.a_us, cell.b_us, LEAST_PERIOD_US)))


def configure(cell: GpuCell, least: int, root: str) -> PipelineConfig:
    settings = (
        f"log.root={root}",
        f"window.steps={STEPS}",
        f"batch.rows={cell.rows}",
        f"simulate.a_ms={cell.a_us * US}",
        "simulate.c_ms=0.0",
        f"policy.options.b_ms={cell.b_us * US}",
        f"pipeline.d_in={cell.depth}",
        f"pipeline.d_out={cell.depth}",
        f"pipeline.credit={cell.credit}",
        f"link.kind={cell.link}",
        f"link.stamps={cell.stamps}",
        f"placement.policy={cell.device(1)}",
        f"bringup.envelopes={envelopes_of(cell, least)}",
        "bringup.warmup_max=120",
        "log.keep=1000",
    )
    return load.read(str(BASE), settings)


def run_cells(cells: Sequence[GpuCell], least: int, report: Any) -> None:
    """This process's part in all cells; rank 0 calls ``report`` with what each has found.

    A cell has ``least`` envelopes, or more, so that it lasts long enough.
    """
    set_switch_interval()
    torch.set_num_threads(1)
    store = join_store()
    startup.settle_connections()
    startup.start(cells[0].device(store.rank))
    root = _shared_folder(store)
    with ExitStack() as stack:
        if store.rank == 0:
            listener = Listener(store)
            stack.callback(listener.close)
            peer = listener.accept(LIMIT_S)
            peer.heart = listener.accept(LIMIT_S)
        else:
            peer = connect(store, LIMIT_S)
            peer.heart = connect(store, LIMIT_S, expects_fds=False)
        first = configure(cells[0], least, root)
        leave = partial(os._exit, 20)
        beat = handshake.start_heartbeat(first, peer, lambda: 0, leave, None, stack)
        for number, cell in enumerate(cells):
            config = configure(cell, least, root)
            here = LauncherStore(
                dist.PrefixStore(f"cell/{number}", store.raw),  # type: ignore[attr-defined]
                store.rank,
                store.world_size,
                store.generation,
            )
            if store.rank == 0:
                report(_run_rank0(config, cell, peer, here, Path(root)))
            else:
                _run_policy_rank(config, cell.device(1), peer, here)
        _part(store, beat)


def _part(store: LauncherStore, beat: HeartbeatThread) -> None:
    """Neither leaves while its heart is listened to; rank 0, which has the store, goes last."""
    if store.rank == 0:
        beat.stop()
        store.set("over", "1")
        store.get("gone", LIMIT_S)
    else:
        store.get("over", LIMIT_S)
        beat.stop()
        store.set("gone", "1")


def _run_rank0(
    config: PipelineConfig, cell: GpuCell, peer: Any, store: LauncherStore, root: Path
) -> CellResult:
    placement = device_ranks.place_here(config, 2)
    run = Run.create(root, config.log.keep)
    store.set("run", str(run.directory))
    begin_run(run, config)
    describe_topology(run, config, placement)
    with ExitStack() as stack:
        intake = build_intake(config)
        parts = rank0_parts(config, run, 0, stack)
        shape = link_shape(
            config,
            intake.cutter.inputs,
            msgspec.convert(*_outputs(config)),
            store.generation,
            int(store.get("ahead", LIMIT_S)),
        )
        policy_ranks = (PolicyRankPeer(peer, config),)
        stage_a, executor = device_ranks.open_rank0(
            parts, placement, policy_ranks, store, shape, front=None, bearing_losses=_no_replicas
        )
        rank0 = Rank0Loop(*parts._replace(stage_a=stage_a), executor=executor)
        rank0.on_phase.append(lambda phase: peer.send(PhaseChange(phase)))
        source = SyntheticSource(config, intake.rows[0], seed=0, start_ns=now_ns())
        warm_up(rank0, intake, source)
        before = time_isolated_stages(rank0, config.bringup.standalone)
        run.describe(standalone=before)
        loop_cpu = LoopCpu(executor, is_parted=cell.where)
        begun, cpu_ns = rank0.finished, time.process_time_ns()
        run_saturated(rank0, intake, source)
        cpu_ns = time.process_time_ns() - cpu_ns
        parts = loop_cpu.stop(rank0.finished - begun, cpu_ns)
        cpu_ns //= rank0.finished - begun
        after = time_isolated_stages(rank0, config.bringup.standalone)
        run.describe(standalone_after=after)
        source.close()
        rank0.log.flush()
        peer.send(Drain("cell over"))
        answer = peer.receive(round(LIMIT_S * 1e9))
        assert isinstance(answer, Ready), answer
        assert executor.link.close(), "a stream still waits"
        torch.cuda.synchronize()
        report = judge(read_run(run.directory), profile="bringup")
    stages_ns = tuple((before[f"{k}_ns"] + after[f"{k}_ns"]) / 2 for k in "ABC")
    return _found(cell, report, stages_ns, (cpu_ns, answer.facts["cpu_ns"]), parts)


def _no_replicas(_: object) -> NoReturn:
    raise AssertionError("a cell has one policy rank")


def _outputs(config: PipelineConfig) -> tuple[Any, Any]:
    from ppstream.core.specs import TensorSpec

    actions = config.actions
    spec = {"name": "actions", "shape": (actions.horizon, len(actions.names))}
    return [spec], tuple[TensorSpec, ...]


def _run_policy_rank(
    config: PipelineConfig, device: torch.device, peer: Any, store: LauncherStore
) -> None:
    placement = device_ranks.place_here(config, 2)
    (policy,) = build_parts(config, device)
    intake = build_intake(config)
    run = Run(Path(store.get("run", LIMIT_S)))
    prepared = device_ranks.prepare_policy(policy, config, device, run.run_id, "b")
    ahead = prepared.ahead(config)
    store.set("ahead", str(ahead))
    shape = link_shape(config, intake.cutter.inputs, policy.outputs, store.generation, ahead)
    log = TimestampLog(
        run.log_path(1, 0), PolicyRecord, config.log.ring, run_id=run.run_id, generation=0
    )
    waiter = Waiter()
    stage1 = device_ranks.open_policy_rank(
        config, prepared, placement, BACK, peer, store, shape, log, waiter
    )
    watched = PolicyCpuTime(stage1)
    stage1.run(lambda: False)
    assert stage1.link.close(), "a stream still waits"
    torch.cuda.synchronize()
    log.close()
    waiter.close()
    peer.send(Ready({"cpu_ns": watched.cpu_ns}))


class LoopCpu:
    """CPU time of rank 0 by what it is for, in us per envelope, from now until ``stop``.

    ``loop`` is the loop's thread, ``others`` all other threads of the process, ``sleeps`` how often
    the loop's thread gave up its CPU. Parted, ``launch`` and ``wait`` are the loop's calls of
    ``executor.begin`` and ``executor.wait``, ``waits`` the number of the latter.
    """

    def __init__(self, executor: Any, *, is_parted: bool) -> None:
        self._executor = executor
        self._ns = {"launch": 0, "wait": 0}
        self._waits = 0
        if is_parted:
            executor.begin = self._timed("launch", executor.begin)
            executor.wait = self._timed("wait", executor.wait)
        self._began_ns = time.thread_time_ns()
        self._began_sleeps = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw

    def stop(self, envelopes: int, process_ns: int) -> dict[str, float]:
        """Returns the parts, of a process that took ``process_ns`` since the start."""
        loop_ns = time.thread_time_ns() - self._began_ns
        sleeps = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - self._began_sleeps
        found_ns = {"loop": loop_ns, "others": process_ns - loop_ns}
        found = {"sleeps": sleeps / envelopes}
        if self._waits:
            del self._executor.begin, self._executor.wait
            found_ns |= self._ns | {"rest": loop_ns - sum(self._ns.values())}
            found["waits"] = self._waits / envelopes
        return {name: ns * 1e-3 / envelopes for name, ns in found_ns.items()} | found

    def _timed(self, name: str, call: Any) -> Any:
        def timed(*given: Any, **named: Any) -> Any:
            began_ns = time.thread_time_ns()
            found = call(*given, **named)
            self._ns[name] += time.thread_time_ns() - began_ns
            self._waits += name == "wait"
            return found

        return timed


class PolicyCpuTime:
    """CPU time of the saturated phase on the policy rank, per envelope."""

    def __init__(self, stage1: DevicePolicyRank) -> None:
        self.cpu_ns = 0
        self._stage1 = stage1
        self._begun = 0
        self._take = stage1.on_control_frame
        stage1.on_control_frame = self.on_frame  # type: ignore[method-assign]

    def on_frame(self, frame: object) -> None:
        if isinstance(frame, PhaseChange) and frame.phase == "bring-up":
            self._begun, self.cpu_ns = self._stage1.progress, time.process_time_ns()
        elif isinstance(frame, Measure) and not frame.repeats:
            spent_ns = time.process_time_ns() - self.cpu_ns
            self.cpu_ns = spent_ns // max(1, self._stage1.progress - self._begun)
        self._take(frame)


def _found(
    cell: GpuCell,
    report: RunReport,
    alone: Sequence[float],
    cpu_ns: tuple[int, int],
    cpu0_parts: dict[str, float],
) -> CellResult:
    primary = report.primary
    assert primary is not None
    periods_us = sorted(
        ns * 1e-3 for segment in report.window.segments for ns in segment.periods_ns
    )
    whole = [(e.tA0 or 0, e.tEmit or 0, e.tPick or 0) for e in report.window.emitted]
    latency_us = sorted((emit - begin) * 1e-3 for begin, emit, _ in whole)
    picked_us = sorted((pick - emit) * 1e-3 for _, emit, pick in whole)
    age_us = sorted((pick - begin) * 1e-3 for begin, _, pick in whole)[len(whole) // 2]
    period_us = primary.period_ns * 1e-3
    slowest_us = max(alone) * 1e-3
    return CellResult(
        cell,
        primary.n,
        period_us,
        (alone[0] * 1e-3, alone[1] * 1e-3, alone[2] * 1e-3),
        period_us / slowest_us,
        period_us - slowest_us,
        report.compat.score if report.compat else None,
        primary.s,
        periods_us[len(periods_us) // 2],
        periods_us[int(len(periods_us) * 0.99)],
        primary.span_ns / primary.max_ns,
        latency_us[len(whole) // 2],
        (picked_us[len(whole) // 2], picked_us[int(len(whole) * 0.99)]),
        age_us,
        age_us / period_us,
        (cpu_ns[0] * 1e-3, cpu_ns[1] * 1e-3),
        cpu0_parts,
        [name for name, audit in report.audits.items() if audit.ok is False],
        report.verdict.name,
    )


def _shared_folder(store: LauncherStore) -> str:
    if store.rank == 0:
        store.set("folder", tempfile.mkdtemp(prefix="ppstream-bench-"))
    return store.get("folder", LIMIT_S)
