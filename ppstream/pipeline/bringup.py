"""Bring-up: warm up, time the stages alone, run saturated, time them again, let the gate decide.

Everything runs through the real rings, stage A, link, policy and stage C up to, not including,
emit. *Ready* is reached only past this file.

A run in attribution mode times blocks of the saturated pipeline instead, and what timing them
costs: throughput, attribution, throughput in turn, so that a machine that slows down meanwhile is
not taken for that cost. Such a run never becomes *ready* and emits nothing. On a device-ordered
link A and C are timed by their own events as always: the host waits in B alone.
"""

from __future__ import annotations

import logging
import math
import os
import statistics
from contextlib import suppress
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import msgspec
import torch

from ppstream.analysis.judge import judge
from ppstream.analysis.lease import lease_notes, lease_of_one_rank, steps_of
from ppstream.analysis.log_reader import read_run
from ppstream.analysis.requests import has_streaming_robots, window_period_ns
from ppstream.analysis.scores import resource_title
from ppstream.analysis.segments import ALONE
from ppstream.analysis.verdict import N_MIN, Verdict
from ppstream.config.to_toml import as_tables
from ppstream.control.peer_process import HeldProcess, everybody, of_ranks
from ppstream.core.clock import NS_PER_S, now_ns
from ppstream.core.cpus import MachineMeter
from ppstream.core.errors import ConfigError, GateFailedError, GateInconclusiveError, LogError
from ppstream.core.interpreter import freeze_garbage
from ppstream.core.phases import BRING_UP
from ppstream.ingest.sources import RecordedSource
from ppstream.ingest.synthetic import SyntheticRobots
from ppstream.observe.attribution import Attribution, end_of_stream
from ppstream.pipeline.loop import MADE
from ppstream.pipeline.pacing import Saturated

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ppstream.analysis.lease import LeaseNeed
    from ppstream.analysis.run_report import RunReport
    from ppstream.config.schema import PipelineConfig
    from ppstream.ingest.intake import Intake
    from ppstream.ingest.sources import Source
    from ppstream.observe.run_folder import Run
    from ppstream.pipeline.loop import Rank0Loop

logger = logging.getLogger("ppstream")

WARM_BLOCK: Final = 20  # envelopes timed together while warming
WARM_SPREAD: Final = 0.10  # of the period, between the last WARM_BLOCKS blocks
WARM_BLOCKS: Final = 3
WARMUP_SKIP_MIN: Final = 10  # the gate skips this many, or what may be in the system plus two
SPARE: Final = 50  # further ones, for a period that settles late
IN_STAGES: Final = 3  # in the system besides the queues: one each in A, the send queue, and C
LATE_MIN: Final = N_MIN + IN_STAGES  # chunks: those at the edges are not judged
LATE_NS: Final = 5 * NS_PER_S  # a stall of the machine may be shorter
TOGETHER: Final = 50  # envelopes timed as one; of such times the median is taken
STOP_REASON: Final = "the blocks are timed; a run in attribution mode never becomes ready"


def time_blocks(rank0: Rank0Loop, intake: Intake, source: Source) -> None:
    """Log event ``attribution`` has both periods and their ratio, the perturbation; then stop."""
    # where the policy runs elsewhere, blocks here are a decoder's, on the host
    runs_policy = not rank0.executor.policy_ranks
    device = torch.device(rank0.config.placement.policy[0] if runs_policy else "cpu")
    attribution = Attribution(rank0.log, end_of_stream(device))
    envelopes = rank0.config.bringup.envelopes
    plain_ns = _periods_ns(rank0, intake, source, "warming", envelopes // 2)
    attribution.start()
    try:
        period_ns = median(_periods_ns(rank0, intake, source, "bring-up", envelopes))
    finally:
        attribution.stop()
    plain_ns += _periods_ns(rank0, intake, source, "warming", envelopes // 2)
    throughput_ns = median(plain_ns)
    perturbation = period_ns / throughput_ns
    rank0.log.event(
        "attribution",
        period_ns=round(period_ns),
        throughput_period_ns=round(throughput_ns),
        perturbation=perturbation,
    )
    logger.info("attribution: period x %.3f of throughput mode", perturbation)
    rank0.request_stop(STOP_REASON)


def _periods_ns(
    rank0: Rank0Loop, intake: Intake, source: Source, phase: str, envelopes: int
) -> list[float]:
    """Mean period of every ``TOGETHER``; a policy rank times its blocks in ``bring-up`` alone."""
    rank0.enter(phase, intake=intake, source=source, pacing=Saturated(intake.rows))
    found = []
    for _ in range(envelopes // TOGETHER):
        began = now_ns()
        rank0.run(TOGETHER)
        found.append((now_ns() - began) / TOGETHER)
    return found


def bring_up(rank0: Rank0Loop, intake: Intake, robots: Source | None, run: Run) -> None:
    """Earn *ready*. Inline there is no overlap to prove: it warms up, and the lease must suffice.

    Args:
        rank0: enters ``warming`` and ``bring-up``, and has nothing in flight afterwards.
        intake: rings that only bring-up fills.
        robots: admitted meanwhile, and told the phase.
        run: gets the standalone stage times, and is read back for the verdict.

    Raises:
        GateFailedError, GateInconclusiveError: not ready, and why.
    """
    meter = machine_meter(rank0)
    log_machine(rank0, meter)
    made_up = _source(rank0.config, intake)
    source = Beside(made_up, robots)
    warm_up(rank0, intake, source)
    for check in rank0.on_warm:
        check()
    if rank0.stop_reason is None:
        durations = _durations_alone(rank0, rank0.config.bringup.standalone)
        run.describe(standalone=_times_alone(rank0, durations))
        if not rank0.executor.policy_ranks:
            check_lease(rank0.config, durations)
    if rank0.config.mode == "attribution" and rank0.stop_reason is None:
        time_blocks(rank0, intake, source)
    if not rank0.executor.policy_ranks or rank0.stop_reason is not None:
        made_up.close()
        return
    meter.restart()
    run_saturated(rank0, intake, source)
    log_machine(rank0, meter)
    if rank0.stop_reason is None:
        after = time_isolated_stages(rank0, rank0.config.bringup.standalone)
        run.describe(standalone_after=after)
    made_up.close()
    if rank0.stop_reason is None:
        gate(rank0, run)


def machine_meter(rank0: Rank0Loop) -> MachineMeter:
    """Of this host, with the threads of the run that work here at the same time."""
    policy_ranks = rank0.executor.policy_ranks

    def of_this_run() -> Iterator[int]:
        """The ranks here, and all that they have started."""
        return of_ranks(range(1 + len(policy_ranks)), os.environ, everybody())

    if not policy_ranks:
        return MachineMeter(1, family=of_this_run)
    threads = 2 if rank0.config.threads == "split" else 1
    pids = []
    for policy_rank in policy_ranks:
        process = HeldProcess.at_end_of(policy_rank.peer.fileno())
        if process is not None:  # else it has a host of its own
            pids.append(process.pid)
            process.close()
    return MachineMeter(threads + len(pids), tuple(pids), of_this_run)


def log_machine(rank0: Rank0Loop, meter: MachineMeter) -> None:
    """Log how busy the host is, and say it where threads have to share a CPU."""
    machine = meter.read(rank0.thread_cpus())
    rank0.log.event("machine", **machine._asdict())
    if machine.is_short and rank0.phase == "starting":
        logger.warning("%s", machine.text(resource_title))


def gate(rank0: Rank0Loop, run: Run) -> None:
    """Judge what this start has logged so far, with the function that the report uses.

    Hours of service before a restart stand in the same folder: robots hold while this reads.
    """
    rank0.log.flush()
    try:
        found = read_run(run.directory, rank0.log.generation)
        report = judge(found, profile="bringup")
    except LogError:
        check_disk(rank0, run)
        raise
    overlap = None if report.primary is None else report.primary.s
    rank0.log.event(
        "verdict",
        verdict=report.verdict.name,
        reasons=list(report.reasons),
        overlap=overlap,
        accepted=report.accepted,
    )
    logger.info("bring-up %s", report.headline)
    _warn_of_holds(report.lease, found.config)
    if report.exit_code:
        check_disk(rank0, run)
    pass_or_raise(report)


def check_disk(rank0: Rank0Loop, run: Run) -> None:
    """Refuses a run whose disk lost records: they cannot be judged.

    Raises:
        ConfigError: the log of a rank lacks lines for that; they are lost, whatever there is now.
    """
    refused = {0: rank0.log.statistics().refused}
    refused |= {found.rank: found.log_refused for found in rank0.executor.policy_ranks}
    problems = [
        f"log.root: cannot write to {run.log_path(rank, rank0.log.generation)}: {why}; lines of "
        "bring-up are lost, so it cannot be judged; make room, or set log.root elsewhere"
        for rank, why in refused.items()
        if why
    ]
    if problems:
        raise ConfigError(problems)


def _source(config: PipelineConfig, intake: Intake) -> SyntheticRobots | RecordedSource:
    bringup = config.bringup
    if bringup.source == "recording":
        assert bringup.recording is not None, "checked with the configuration"
        live = msgspec.structs.replace(
            config, pipeline=msgspec.structs.replace(config.pipeline, windows="live")
        )
        return RecordedSource(bringup.recording, live, intake.rows, 1.0, repeat=True)
    return SyntheticRobots(config, intake.rows, seed=0, start_ns=now_ns())


def warm_up(rank0: Rank0Loop, intake: Intake, source: Source) -> None:
    """Run production shapes through the real path until the period is steady."""
    most = -(-rank0.config.bringup.warmup_max // WARM_BLOCK) * WARM_BLOCK
    pacing = Saturated(intake.rows)
    rank0.enter("warming", intake=intake, source=source, pacing=pacing, envelopes=most)
    periods_ns: list[float] = []
    while rank0.finished < most and rank0.stop_reason is None:
        began = now_ns()
        rank0.run(WARM_BLOCK)
        periods_ns.append((now_ns() - began) / WARM_BLOCK)
        newest = periods_ns[-WARM_BLOCKS:]
        if len(newest) == WARM_BLOCKS and max(newest) - min(newest) < WARM_SPREAD * newest[-1]:
            break
    if periods_ns:  # else a stop was asked for before
        rank0.log.event("warm", envelopes=rank0.finished, period_ns=round(periods_ns[-1]))
    freeze_garbage()


def time_isolated_stages(rank0: Rank0Loop, repeats: int) -> dict[str, Any]:
    """Durations of each stage while nothing else runs: ``A_ns`` is a median, ``A_mean_ns`` a mean.

    In a chain ``places_ns`` has the mean of each place, and B is the slowest one's. Of replicas B
    is that of all, and ``replicas_ns`` has the mean of each.

    The mean is what the run's own times are compared with: a stage may be slow now and then. Empty
    where no envelope came through.
    """
    return _times_alone(rank0, _durations_alone(rank0, repeats))


def _durations_alone(rank0: Rank0Loop, repeats: int) -> dict[str, Sequence[int]]:
    """By stage and place; {}: no envelope came through."""
    rank0.log.apart = ALONE  # none of these envelopes is to be judged
    durations = rank0.measure(repeats)
    rank0.log.apart = ""
    return durations if all(durations.values()) else {}


def _times_alone(rank0: Rank0Loop, durations: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """As run.json has them."""
    if not durations:
        return {}
    stages = {name: durations[name] for name in "ABC"}
    fields: dict[str, Any] = {f"{k}_ns": round(statistics.median(v)) for k, v in stages.items()}
    fields |= {f"{k}_mean_ns": round(statistics.fmean(v)) for k, v in stages.items()}
    for kind in ("place", "replica"):
        if found := [v for k, v in durations.items() if k.startswith(kind)]:
            fields[f"{kind}s_ns"] = [round(statistics.fmean(v)) for v in found]
    front = rank0.stage_a.front
    parts_ns = {} if front is None else front.part_times(len(durations["A"]))
    for policy_rank in rank0.executor.policy_ranks:
        parts_ns |= policy_rank.parts_ns
    return fields | ({"parts_ns": parts_ns} if parts_ns else {})


def check_lease(config: PipelineConfig, durations: Mapping[str, Sequence[int]]) -> None:
    """Refuse a lease that ends between two chunks of one rank; of several the gate judges.

    Raises:
        GateFailedError: robots would hold.
    """
    settings = as_tables(config)
    need = lease_of_one_rank([durations.get(name, ()) for name in "ABC"], settings)
    if need is not None and need.is_short and has_streaming_robots(settings):
        raise GateFailedError(f"SHORT_LEASE: {need.refusal(None, 0)}")
    _warn_of_holds(need, settings)


def _warn_of_holds(need: LeaseNeed | None, config: Mapping[str, Any]) -> None:
    for note in lease_notes(need, config):
        logger.warning("%s", note)


def run_saturated(rank0: Rank0Loop, intake: Intake, source: Source) -> None:
    """The envelopes that the gate will judge, behind the ones it will skip."""
    shape = rank0.config.pipeline
    skipped = max(WARMUP_SKIP_MIN, shape.d_in + shape.d_out + IN_STAGES + 2)
    total = skipped + rank0.config.bringup.envelopes + SPARE
    pacing = Saturated(intake.rows)
    late = AllLate(as_tables(rank0.config), skipped, rank0.begin_no_more)
    rank0.log.watchers.append(late)
    rank0.enter("bring-up", intake=intake, source=source, pacing=pacing, envelopes=total)
    rank0.run(total)
    rank0.write_ledger()
    rank0.log.flush()  # it has seen all
    with suppress(ValueError):  # the log leaves out a watcher that fails
        rank0.log.watchers.remove(late)


class AllLate:
    """Ends a bring-up that the gate must refuse: its chunks come too late, and none comes in time.

    Sees what the log writes, on the log's thread. A chunk is too late behind its lease, and where
    robots stream when all of its steps are past, if it is not the sensors that set the pace.

    Args:
        settings: of the run.
        skipped: chunks at the begin that nobody judges: the first one waits for no other.
        end: called once, when as many were too late as the gate asks for, for ``LATE_NS``.
    """

    def __init__(self, settings: Mapping[str, Any], skipped: int, end: Callable[[], None]) -> None:
        steps = steps_of(settings) if has_streaming_robots(settings) else None
        self._last_ns = math.inf if steps is None else steps.last_ns
        self._paced_ns = window_period_ns(settings)
        self._skipped, self._end = skipped, end
        self._late = self._expired = self._began_ns = 0
        self._is_open = True

    def line(self, line: Mapping[str, Any]) -> None:
        """Nothing to see."""

    def record(self, record: Any) -> None:
        """One envelope has ended."""
        if not self._is_open or record.phase != BRING_UP or record.drop not in MADE:
            return
        if self._skipped:
            self._skipped -= 1
            return
        is_expired, ended_ns = record.drop == "expired", record.tPick or record.tEmit
        if not is_expired and ended_ns - record.tA0 <= self._last_ns:
            self._is_open = False
            return
        self._late += 1
        self._expired += is_expired
        self._began_ns = self._began_ns or record.tA0
        took_ns = record.tA0 - self._began_ns
        if self._late < LATE_MIN or took_ns < LATE_NS:
            return
        if self._expired == self._late or took_ns >= self._paced_ns * (self._late - 1):
            self._is_open = False
            logger.info("bring-up ends: %d chunks came too late, and none in time", self._late)
            self._end()


def pass_or_raise(report: RunReport) -> None:
    """Return when the run may become ready.

    Raises:
        GateFailedError: overlap or a safety count says no.
        GateInconclusiveError: overlap is not proven, for a reason that ``accept`` does not name.
    """
    if report.exit_code == 0:
        return
    text = f"bring-up verdict {report.verdict.name}: {', '.join(report.reasons)}"
    if report.machine is not None:
        text += f"; {report.machine.text(resource_title)}"
    if report.verdict is Verdict.FAIL:
        raise GateFailedError(text)
    raise GateInconclusiveError(text)


class Beside:
    """A source to use, and another whose robots are only admitted meanwhile."""

    def __init__(self, used: Source, admitted: Source | None) -> None:
        self._used = used
        self._admitted = admitted
        self.fds = used.fds if admitted is None else (*used.fds, *admitted.fds)

    @property
    def exhausted(self) -> bool:
        return self._used.exhausted

    def drain(self, now_ns: int) -> int:
        if self._admitted is not None:
            self._admitted.drain(now_ns)
        return self._used.drain(now_ns)

    def next_due_ns(self) -> int | None:
        return self._used.next_due_ns()
