"""A profile of the device-ordered loops: its every change finds nothing queued."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from device_in_process import GPUS, DevicePipeline
from pipeline_in_process import NewestValues, small_config
from robot_rig import wait_until

from ppstream.config.schema import ProfileConfig
from ppstream.links.device_link import most_queued
from ppstream.observe import nvtx_ranges
from ppstream.observe import profiler as profiling
from ppstream.observe.log_writer import TimestampLog
from ppstream.observe.profiler import Profiler
from ppstream.report.kernels import cli
from ppstream.report.kernels.findings import findings

pytestmark = pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # torch 2.11, of any
SHORT = ProfileConfig(wait=2, warmup=2, active=5)
CHANGES = 4  # begin, warm up, record, stop


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(*, runs_ahead: bool) -> DevicePipeline:
        config = small_config(*GPUS)
        return DevicePipeline(config, NewestValues(), tmp_path, monkeypatch, runs_ahead=runs_ahead)

    return make


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Of each change of the profiler's state: streams of that rank which have something queued."""
    seen: list[list[str]] = []
    when_idle = TimestampLog.when_idle

    def watched(log: TimestampLog, act: Any) -> None:
        streams = act.__self__.streams  # of the profiler, whose method it is

        def look() -> None:
            seen.append([role for role, stream in streams.items() if not stream.is_idle()])
            act()

        when_idle(log, look)

    monkeypatch.setattr(TimestampLog, "when_idle", watched)
    return seen


def profiler_of(pipeline: DevicePipeline, rank: int, folder: Path) -> Any:
    loop: Any = (pipeline.rank0, pipeline.policy_rank)[rank]
    profiler: Any = Profiler(SHORT, loop.log, folder, rank, 0)
    link = (pipeline.executor, pipeline.policy_rank)[rank].link
    profiler.streams = {"sending": link.sending, "receiving": link.receiving}
    profiler.streams["stage"] = pipeline.c if rank == 0 else pipeline.b
    return profiler


def only_ranges_of(rank: int, patch: pytest.MonkeyPatch) -> None:
    """Ranges are a process's: the other rank's, on its thread, stay silent."""
    steps = ("A", "SEND", "RECV", "C") if rank == 0 else ("B",)
    for step in ("A", "SEND", "B", "RECV", "C"):
        patch.setattr(nvtx_ranges, step, Silent())
    patch.setattr(nvtx_ranges, "on", True)

    def annotate(make: Any) -> None:
        for step in steps:
            name = step if len(step) == 1 else step.lower()
            setattr(nvtx_ranges, step, Silent() if make is None else make(name))

    patch.setattr(nvtx_ranges, "annotate", annotate)


def run_until_written(pipeline: DevicePipeline, *profilers: Any) -> None:
    deadline = time.monotonic() + 60
    while any(profiler.is_wanted for profiler in profilers):
        assert time.monotonic() < deadline, "the profile did not end"
        pipeline.rank0.run(5)


@pytest.mark.parametrize("runs_ahead", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_profiler_changes_its_state_only_where_nothing_is_queued(
    build: Any,
    busy: list[list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rank: int,
    runs_ahead: bool,
) -> None:
    only_ranges_of(rank, monkeypatch)
    with build(runs_ahead=runs_ahead) as pipeline:
        profiler = profiler_of(pipeline, rank, tmp_path)
        pipeline.saturate()
        pipeline.rank0.run(10)
        profiler.request()
        run_until_written(pipeline, profiler)
        pipeline.rank0.run(10)
        (ended,) = [line for line in pipeline.lines(rank) if line.get("state") == "ended"]
        modes = [
            line["mode"] for line in pipeline.lines(rank) if line["kind"] in ("envelope", "stage1")
        ]
    assert busy == [[]] * CHANGES
    assert ended["held_ms"] > 0
    assert modes[0] == modes[-1] == "throughput"
    found = findings(cli.read_trace(tmp_path / f"profile.rank{rank}.gen0.0.json"))
    calls = {s.name: s.calls for s in found.ranges}
    names = ("A", "send", "recv", "C") if rank == 0 else ("B",)
    assert set(names) <= set(calls)
    assert len({calls[name] for name in names}) == 1  # whole envelopes, and no halves
    assert SHORT.active <= calls[names[0]] <= SHORT.active + most_queued(pipeline.shape)


def test_while_traced_only_receipts_stand_queued_that_come_without_this_rank(
    build: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_ranges_of(1, monkeypatch)
    with build(runs_ahead=True) as pipeline:
        stage1 = pipeline.policy_rank
        most = {"throughput": 0, "trace": 0}
        queue_receive = stage1.link.queue_receive

        def counted(index: int) -> None:
            queue_receive(index)
            most[stage1.log.mode] = max(most[stage1.log.mode], index + 1 - stage1.progress)

        monkeypatch.setattr(stage1.link, "queue_receive", counted)
        profiler = profiler_of(pipeline, 1, tmp_path)
        pipeline.saturate()
        pipeline.rank0.run(30)
        profiler.request()
        run_until_written(pipeline, profiler)
        pipeline.rank0.run(30)
    assert most == {
        "throughput": most_queued(pipeline.shape),
        "trace": pipeline.config.pipeline.d_in,
    }


def test_both_ranks_at_once_do_not_wait_for_each_other(
    build: Any, busy: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_ranges_of(1, monkeypatch)
    monkeypatch.setattr(profiling, "profile", NoProfile)  # torch's, too, is a process's
    with build(runs_ahead=False) as pipeline:
        profilers = [profiler_of(pipeline, rank, tmp_path) for rank in (0, 1)]
        pipeline.saturate()
        pipeline.rank0.run(10)
        for profiler in profilers:
            profiler.request()
        run_until_written(pipeline, *profilers)
        seqs = [line["seq"] for line in pipeline.envelopes()]
    assert busy == [[]] * CHANGES * 2
    assert seqs == list(range(len(seqs)))


def test_an_idle_policy_rank_goes_on_waiting_for_envelopes(
    build: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_ranges_of(1, monkeypatch)
    with build(runs_ahead=True) as pipeline:
        profiler = profiler_of(pipeline, 1, tmp_path)
        pipeline.saturate()
        pipeline.rank0.run(10)
        profiler.request()
        log = pipeline.policy_rank.log
        # it may be asked before this looks
        wait_until(lambda: log.on_acquire is not None or log.on_idle is not None)
        if log.on_idle is None:
            pipeline.rank0.run(1)  # asked for now; its receipts stand queued
        wait_until(lambda: log.on_idle is not None)
        turns = pipeline.policy_rank.mark.turns
        # the loop is not held up
        wait_until(lambda: pipeline.policy_rank.mark.turns > turns + 1)
        pipeline.rank0.run(most_queued(pipeline.shape))
        run_until_written(pipeline, profiler)


class Silent:
    def push(self, epoch: int, seq: int) -> None: ...

    def pop(self) -> None: ...


class NoProfile:
    """torch's profiler, which waits for its device when it stops."""

    def __init__(self, **_: object) -> None:
        """Takes what it is given."""

    def start(self) -> None: ...

    def step(self) -> None: ...

    def stop(self) -> None: ...
