"""Puts what can be watched onto one rank: metrics and health, memory, profiles, attribution."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ppstream.analysis.log_reader import read_manifest
from ppstream.core.clock import NS_PER_MS, NS_PER_S
from ppstream.observe import profiler
from ppstream.observe.attribution import Attribution, end_of_stream
from ppstream.observe.live_counters import LiveCounters, PolicyCounters, Rank0Counters
from ppstream.observe.memory import MemoryLines
from ppstream.observe.profiler import Profiler

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

    from ppstream.config.schema import PipelineConfig
    from ppstream.observe.log_writer import TimestampLog
    from ppstream.observe.metrics import Rank0Collector
    from ppstream.observe.run_folder import Run
    from ppstream.pipeline.credits import CreditLedger
    from ppstream.sessions.server import Sessions

logger = logging.getLogger("ppstream")


class Monitoring:
    """Monitoring of one rank until ``stack`` closes: its memory, and what is configured.

    Raises:
        ConfigError: the port of the metrics is taken.
    """

    def __init__(
        self,
        config: PipelineConfig,
        run: Run,
        log: TimestampLog,
        stack: ExitStack,
        *,
        rank: int,
        generation: int,
        credit_ledger: CreditLedger | None = None,
        takes_signals: bool = True,
    ) -> None:
        self.collector: Rank0Collector | None = None
        self._who = {"run_id": run.run_id, "rank": str(rank), "generation": str(generation)}
        self._who |= {"name": config.name, "mode": config.mode}
        self._lease_ns = round(config.actions.lease_ms * NS_PER_MS)
        self._on_request = {s.name: float(s.is_on_request) for s in config.streams}
        memory = MemoryLines(log)
        stack.callback(memory.close)
        self.on_phase = memory.on_phase  # for the thread that begins envelopes
        if config.mode == "throughput":
            own = Profiler(config.profile, log, run.directory, rank, generation)
            own.listen(takes_signals=takes_signals)
        else:
            if takes_signals:  # a profile would disturb what is timed
                profiler.ignore_signal()
            if rank > 0:  # rank 0 times its blocks where it runs the phases: block_timing.py
                device = torch.device(config.placement.policy[rank - 1])
                log.watchers.append(Attribution(log, end_of_stream(device)))
        if config.metrics.port is not None:
            port = config.metrics.port and config.metrics.port + rank
            self._serve(port, run.directory, log, stack, credit_ledger)

    def show_robots(self, sessions: Sessions | None) -> None:
        """Robots' counts are in the metrics, too."""
        if self.collector is not None:
            self.collector.sessions = sessions

    def _serve(
        self,
        port: int,
        directory: Path,
        log: TimestampLog,
        stack: ExitStack,
        credit_ledger: CreditLedger | None,
    ) -> None:
        # imported here: the client costs 60 ms, and a run without metrics does not need it
        from ppstream.observe.health_server import HealthServer
        from ppstream.observe.live_class import LiveBottleneck
        from ppstream.observe.metrics import PolicyCollector, Rank0Collector

        counters: LiveCounters
        collector: Collector
        if credit_ledger is None:
            counters = policy_counters = PolicyCounters()
            collector = PolicyCollector(policy_counters, log, self._who)
        else:
            counters = rank0_counters = Rank0Counters(self._lease_ns)
            live = LiveBottleneck(lambda: read_manifest(directory))
            collector = self.collector = Rank0Collector(
                rank0_counters,
                log,
                self._who,
                credit_ledger=credit_ledger,
                live_class=live,
                lease_s=self._lease_ns / NS_PER_S,
                on_request=self._on_request,
            )
        log.watchers.append(counters)
        server = HealthServer(port, collector, lambda: self._health(counters))
        stack.callback(server.close)
        log.event("metrics", port=server.port)
        logger.info("metrics of rank %s: http://127.0.0.1:%d", self._who["rank"], server.port)

    def _health(self, counters: LiveCounters) -> dict[str, Any]:
        counters.count()
        return {
            **self._who,
            "phase": counters.phase,
            "verdict": counters.verdict,
            "pid": os.getpid(),
            "envelopes": counters.envelopes,
        }
