"""Prometheus metrics of one rank: names, units and labels; families are made only for a scrape.

A scrape reads the live counters and every ``statistics()`` on the health server's thread, in
pieces; the loops take no part. Families of a GPU's memory appear where this process uses CUDA,
families of robots on rank 0. Durations are seconds; labels are bounded.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from ppstream.core.phases import PHASES
from ppstream.core.version import VERSION
from ppstream.observe import memory as gpu_memory
from ppstream.observe import metric_families as show
from ppstream.observe.live_class import CLASSES, LiveBottleneck
from ppstream.observe.live_counters import LiveCounters, PolicyCounters, Rank0Counters

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from ppstream.analysis.records import GpuMemory
    from ppstream.observe.log_writer import TimestampLog
    from ppstream.observe.statistics import CreditStatistics, SessionStatistics

VERDICTS: Final = ("PASS", "FAIL", "INCONCLUSIVE")
S: Final = show.S
KINDS: Final = ("allocated", "allocated_max", "reserved", "non_torch", "free", "total")


class Queues(Protocol):
    """The credit ledger."""

    @property
    def d_in(self) -> int: ...

    @property
    def d_out(self) -> int: ...

    def statistics(self) -> CreditStatistics: ...


class Robots(Protocol):
    """The sessions of robots."""

    def statistics(self) -> SessionStatistics: ...


def gpu_families() -> Iterator[Metric]:
    """Of this rank's device, as noted last, some second ago; asks neither CUDA nor torch."""
    found = gpu_memory.newest()
    if found is not None:
        yield from memory_families(found[1])


def memory_families(now: GpuMemory) -> Iterator[Metric]:
    bytes_of = {kind: getattr(now, f"{kind}_bytes") for kind in KINDS}
    yield show.gauges("ppstream_gpu_memory_bytes", "Memory of the GPU.", "kind", bytes_of)
    yield show.counter(
        "ppstream_gpu_allocations",
        "Blocks asked of torch's allocator; flat once a run is warm.",
        now.allocations or 0,
    )
    yield show.counter(
        "ppstream_gpu_segments",
        "Segments asked of CUDA: each one may stall the device.",
        now.segments or 0,
    )
    yield show.counter(
        "ppstream_gpu_alloc_retries",
        "Caches emptied because memory ran short.",
        now.alloc_retries or 0,
    )
    yield show.counter("ppstream_gpu_ooms", "Allocations refused.", now.ooms or 0)


def robot_families(sessions: SessionStatistics) -> Iterator[Metric]:
    """Sessions, frames and chunks; what was dropped stands in ``ppstream_dropped_total``."""
    yield show.gauge("ppstream_robots", "Robots with a session.", sessions.open)
    yield show.counter("ppstream_sessions_opened", "Sessions that began.", sessions.opened)
    yield show.counters(
        "ppstream_sessions_closed", "Sessions that ended, by reason.", "reason", sessions.closed
    )
    yield show.counters(
        "ppstream_sessions_refused", "Hellos refused, by reason.", "reason", sessions.refused
    )
    yield show.counters(
        "ppstream_connections_refused",
        "What never came to speak, by reason.",
        "reason",
        sessions.connections_refused,
    )
    yield show.counter("ppstream_frames_received", "Frames from robots.", sessions.frames_received)
    yield show.counter("ppstream_episodes_reset", "Episodes that robots began.", sessions.resets)
    yield show.counter("ppstream_chunks_sent", "Action chunks sent.", sessions.chunks_sent)


class RankCollector(Collector):
    """Metrics of any rank: build, run, phase, stages, waits, drops, faults, log, memory."""

    def __init__(self, counters: LiveCounters, log: TimestampLog, run: Mapping[str, str]) -> None:
        self._counters = counters
        self._log = log
        self._run = run

    def collect(self) -> Iterator[Metric]:
        self._counters.count()
        return show.in_pieces(self.families())

    def families(self) -> Iterator[Metric]:
        """Made one by one, as they are asked for."""
        yield from self.identity()
        yield from self.work()
        yield from self.trouble()
        yield from gpu_families()

    def identity(self) -> Iterator[Metric]:
        yield show.info(
            "ppstream_build_info",
            "Versions that this rank runs.",
            version=VERSION,
            torch=str(torch.__version__),
            python=platform.python_version(),
        )
        yield show.info("ppstream_run_info", "The run this rank belongs to.", **self._run)
        yield show.state(
            "ppstream_phase", "Phase of the run.", "phase", PHASES, self._counters.phase
        )

    def work(self) -> Iterator[Metric]:
        counters = self._counters
        yield show.histograms(
            "ppstream_stage_duration_seconds",
            "Time a stage is busy.",
            "stage",
            counters.histograms.of("stage"),
        )
        yield show.recent(
            "ppstream_stage_duration_recent_seconds",
            "Quantiles of a stage's newest 1000 durations.",
            "stage",
            counters.recent.copy(),
        )
        waits = {cause: waited_ns * S for cause, waited_ns in dict(counters.waits_ns).items()}
        yield show.counters(
            "ppstream_wait_seconds", "Time a thread waited, by cause.", "cause", waits
        )
        yield show.counter(
            "ppstream_link_busy_seconds",
            "Time between stages and waits: the links' calls and the loop's own work.",
            counters.link_ns * S,
        )
        yield show.counter("ppstream_envelopes", "Envelopes that ended here.", counters.envelopes)

    def trouble(self) -> Iterator[Metric]:
        counters, log = self._counters, self._log.statistics()
        yield show.dropped(self.drops())
        yield show.counters(
            "ppstream_faults", "Faults of stages, by kind.", "kind", dict(counters.faults)
        )
        yield show.counters(
            "ppstream_events", "Rare things that happened.", "name", dict(counters.events)
        )
        yield show.counter("ppstream_log_records", "Lines in the log.", log.written)
        yield show.counter("ppstream_log_lost", "Lines that never got there.", log.lost)
        yield show.counter("ppstream_log_write_errors", "Writes refused.", log.write_errors)

    def drops(self) -> dict[str, Mapping[str, float]]:
        """By where and why."""
        return {"envelope": dict(self._counters.drops)}


class PolicyCollector(RankCollector):
    """A policy rank's own: residence, idle time, and recompiles once warm."""

    def __init__(self, counters: PolicyCounters, log: TimestampLog, run: Mapping[str, str]) -> None:
        super().__init__(counters, log, run)
        self._policy = counters

    def work(self) -> Iterator[Metric]:
        yield from super().work()
        counters = self._policy
        yield show.histogram(
            "ppstream_residence_seconds",
            "Envelope complete to result committed.",
            counters.histograms.one("residence"),
        )
        yield show.counter("ppstream_idle_seconds", "Stage B without work.", counters.idle_ns * S)
        yield show.counter(
            "ppstream_recompiles", "Graphs compiled in stage B.", counters.recompiles
        )


class Rank0Collector(RankCollector):
    """Rank 0's own: period, latency, queues, ages, deadlines, ledger, class, verdict, robots.

    ``sessions`` is set once there are any.
    """

    def __init__(
        self,
        counters: Rank0Counters,
        log: TimestampLog,
        run: Mapping[str, str],
        *,
        credit_ledger: Queues,
        live_class: LiveBottleneck,
        lease_s: float,
        on_request: Mapping[str, float],
    ) -> None:
        super().__init__(counters, log, run)
        self.sessions: Robots | None = None
        self._rank0 = counters
        self._credits = credit_ledger
        self._live = live_class
        self._lease_s = lease_s
        self._on_request = on_request

    def families(self) -> Iterator[Metric]:
        yield from super().families()
        yield from self.live_bottleneck()
        yield from self.queues()
        yield from self.ages()
        yield from self.ledger()
        yield from self.rules()
        if self.sessions is not None:
            yield from robot_families(self.sessions.statistics())

    def live_bottleneck(self) -> Iterator[Metric]:
        counters, found = self._rank0, self._live.now(self._rank0)
        yield show.state(
            "ppstream_bringup_verdict", "Bring-up's verdict.", "verdict", VERDICTS, counters.verdict
        )
        if counters.overlap is not None:
            yield show.gauge(
                "ppstream_overlap_score", "S of bring-up: the overlap proven.", counters.overlap
            )
        yield show.state(
            "ppstream_run_class", "What limits the newest envelopes.", "class", CLASSES, found.name
        )
        yield show.gauges(
            "ppstream_utilisation_ratio",
            "Share of the newest envelopes' time that a resource was busy.",
            "resource",
            found.utilisation,
        )
        for span, text in (
            ("period", "From one emit to the next of an epoch."),
            ("latency", "From the start of A until the host has the actions."),
            ("link", "Both transfers of an envelope."),
        ):
            yield show.histogram(f"ppstream_{span}_seconds", text, counters.histograms.one(span))

    def queues(self) -> Iterator[Metric]:
        now = self._credits.statistics()
        depth = {"d_in": now.outstanding, "d_out": now.q_decode}
        yield show.gauges("ppstream_queue_depth", "Envelopes in a queue.", "queue", depth)
        bound = {"d_in": self._credits.d_in, "d_out": self._credits.d_out}
        yield show.gauges("ppstream_queue_bound", "A queue's bound.", "queue", bound)
        yield show.gauge("ppstream_in_system", "Envelopes begun and not ended.", now.in_system)
        yield show.histograms(
            "ppstream_queue_wait_seconds",
            "Time in a queue: d_in before stage B, d_out before stage C.",
            "queue",
            self._rank0.histograms.of("queue"),
        )

    def ages(self) -> Iterator[Metric]:
        counters = self._rank0
        yield show.histograms(
            "ppstream_observation_age_seconds",
            "Age of a stream's newest sample at the end of its window.",
            "stream",
            counters.histograms.of("observation_age"),
        )
        yield show.histogram(
            "ppstream_emit_age_seconds",
            "Since the newest sample used arrived.",
            counters.histograms.one("emit_age"),
        )
        yield show.histogram(
            "ppstream_action_age_seconds",
            "Of executed chunks, observation to action; the robots' own measure.",
            counters.histograms.one("action_age"),
        )
        yield show.gauge("ppstream_lease_seconds", "Age at which actions expire.", self._lease_s)
        yield show.counter(
            "ppstream_deadline_missed",
            "Envelopes past their lease on leaving, or when a robot had their chunk.",
            counters.misses,
        )

    def ledger(self) -> Iterator[Metric]:
        streams, envelopes = dict(self._rank0.streams), self._rank0.ledger
        for what, text in (("received", "came in"), ("used", "reached a window")):
            found = {name: balance[what] for name, balance in streams.items()}
            yield show.counters(
                f"ppstream_samples_{what}", f"Samples that {text}.", "stream", found
            )
        yield show.gauges(
            "ppstream_stream_on_request",
            "1: samples come with a robot's requests.",
            "stream",
            self._on_request,
        )
        lost = {name: imbalance(balance) for name, balance in streams.items()}
        if envelopes:
            lost["envelopes"] = imbalance(envelopes)
        yield show.gauges(
            "ppstream_ledger_imbalance", "Received and not accounted for; 0.", "ledger", lost
        )

    def rules(self) -> Iterator[Metric]:
        """Counts of chunks for robots that ``[actions]`` judged, as of the newest ledger line."""
        found = self._rank0.actions
        for name, key, text in (
            ("chunks_checked", "chunks", "Chunks for robots, held to the rules of [actions]."),
            ("chunks_clipped", "clipped_chunks", "Chunks with values clipped to their limits."),
            ("values_clipped", "clipped_values", "Values of chunks, clipped to their limits."),
        ):
            yield show.counter(f"ppstream_{name}", text, found.get(key, 0))
        yield show.counters(
            "ppstream_chunks_refused",
            "Chunks that broke a rule of [actions], by rule.",
            "rule",
            found.get("refused", {}),
        )

    def drops(self) -> dict[str, Mapping[str, float]]:
        samples: dict[str, float] = {}
        for balance in self._rank0.streams.values():
            for reason, count in balance["dropped"].items():
                samples[reason] = samples.get(reason, 0) + count
        found: dict[str, Mapping[str, float]] = super().drops()
        found["sample"] = samples
        if self.sessions is not None:
            given = self.sessions.statistics()
            found |= {"frame": given.frames_dropped, "chunk": given.chunks_dropped}
        return found


def imbalance(balance: Mapping[str, Any]) -> int:
    """Counts what a ledger line does not account for."""
    accounted: int = balance["used"] + balance["in_flight"] + sum(balance["dropped"].values())
    return int(balance["received"]) - accounted
