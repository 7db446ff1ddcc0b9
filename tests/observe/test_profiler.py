import json
import os
import signal
import timeit
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from pipeline_in_process import NewestValues, PipelineInProcess, small_config
from robot_rig import wait_until

from ppstream.config.schema import ProfileConfig
from ppstream.observe import nvtx_ranges
from ppstream.observe import profiler as profiling
from ppstream.observe.attribution import block
from ppstream.observe.log_writer import EnvelopeRecord, TimestampLog
from ppstream.observe.profiler import Profiler
from ppstream.report.kernels import cli
from ppstream.report.kernels.findings import findings

SHORT = ProfileConfig(wait=2, warmup=2, active=5)


class Named(NewestValues):
    def __call__(self, window: Any, out: Any) -> None:
        with block("newest"):
            super().__call__(window, out)


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR2)
    yield
    signal.signal(signal.SIGUSR2, before)


def profiled(folder: Path, config: ProfileConfig, start: Any) -> tuple[list[dict[str, Any]], Any]:
    """An inline pipeline; ``start`` is called with the profiler after 10 envelopes."""
    with PipelineInProcess(small_config(), Named(), folder, inline=True) as pipeline:
        profiler = Profiler(config, pipeline.rank0.log, folder, 0, 0)
        profiler.listen()
        pipeline.saturate()
        pipeline.rank0.run(10)
        pipeline.rank0.log.flush()
        start(profiler)
        wait_until(lambda: pipeline.rank0.log.on_acquire is not None, seconds=30)
        pipeline.rank0.run(40)
        return pipeline.envelopes(), pipeline.lines()


@pytest.mark.parametrize("after", [None, 100])
def test_the_profiler_is_loaded_before_a_run_that_will_need_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int | None
) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(profiling.importlib, "import_module", loaded.append)
    log = TimestampLog(tmp_path / "log", EnvelopeRecord, 8, run_id="r", generation=0)
    Profiler(ProfileConfig(after=after), log, tmp_path, 0, 0).listen()
    log.close()
    assert bool(loaded) is (after is not None)


def test_signal_profiles_a_live_run_and_says_so_in_every_record(tmp_path: Path) -> None:
    envelopes, lines = profiled(tmp_path, SHORT, lambda _: os.kill(os.getpid(), signal.SIGUSR2))
    modes = [line["mode"] for line in envelopes]
    assert modes == ["throughput"] * 10 + ["trace"] * 9 + ["throughput"] * 31
    states = [line["state"] for line in lines if line.get("name") == "profile"]
    assert states == ["begins", "written", "ended"]
    found = findings(cli.read_trace(tmp_path / "profile.rank0.gen0.0.json"))
    assert {s.name for s in found.stages} == {"B", "newest"}
    calls = {s.name: s.calls for s in found.ranges}
    assert all(calls[name] == 5 for name in ("A", "B", "newest", "C"))
    assert (found.pass_name, found.passes) == ("B", 5)
    assert not nvtx_ranges.on
    assert block("a") is block("b")


def test_each_cycle_writes_a_trace_and_a_later_profile_counts_on(tmp_path: Path) -> None:
    config = ProfileConfig(wait=1, warmup=1, active=2, repeat=3)
    profiled(tmp_path, config, lambda profiler: profiler.request())
    names = [f"profile.rank0.gen0.{number}.json" for number in range(3)]
    assert sorted(path.name for path in tmp_path.glob("profile.*")) == names


def test_a_trace_that_is_cut_or_missing_is_not_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    written = iter([b'{"traceEvents": [{"na', None, b'{"traceEvents": []\n}\n', b""])

    def export(_: Any, path: str) -> None:
        if (trace := next(written)) is not None:
            Path(path).write_bytes(trace)

    monkeypatch.setattr(profiling.profile, "export_chrome_trace", export)
    config = ProfileConfig(wait=0, warmup=1, active=1, repeat=4)
    _, lines = profiled(tmp_path, config, lambda profiler: profiler.request())
    states = [line["state"] for line in lines if line.get("name") == "profile"]
    assert states == ["begins", "failed", "failed", "written", "failed", "ended"]
    assert [path.name for path in tmp_path.glob("profile.*")] == ["profile.rank0.gen0.2.json"]
    assert "cannot be written whole: make room" in caplog.text


def test_configuration_starts_it_behind_ready_alone(tmp_path: Path) -> None:
    config = ProfileConfig(after=3, wait=0, warmup=1, active=2)
    with PipelineInProcess(small_config(), Named(), tmp_path, inline=True) as pipeline:
        profiler = Profiler(config, pipeline.rank0.log, tmp_path, 0, 0)
        profiler.listen()
        pipeline.rank0.log.event("phase", phase="bring-up")
        pipeline.rank0.log.flush()
        assert pipeline.rank0.log.on_acquire is None
        pipeline.saturate()  # enters ready
        pipeline.rank0.log.flush()
        pipeline.rank0.run(4)  # the fourth asks for it
        wait_until(lambda: pipeline.rank0.log.on_acquire is not None, seconds=30)
        pipeline.rank0.run(16)
        modes = [line["mode"] for line in pipeline.envelopes()]
    assert modes == ["throughput"] * 4 + ["trace"] * 3 + ["throughput"] * 13


def test_signal_during_a_profile_starts_no_second_one(tmp_path: Path) -> None:
    with PipelineInProcess(small_config(), Named(), tmp_path, inline=True) as pipeline:
        profiler = Profiler(SHORT, pipeline.rank0.log, tmp_path, 0, 0)
        pipeline.saturate()
        profiler.request()
        wait_until(lambda: pipeline.rank0.log.on_acquire is not None, seconds=30)
        pipeline.rank0.run(4)
        profiler.request()
        pipeline.rank0.run(30)
        modes = [line["mode"] for line in pipeline.envelopes()]
    assert modes == ["trace"] * 9 + ["throughput"] * 25
    assert len(list(tmp_path.glob("profile.*"))) == 1


def test_without_a_profile_it_costs_the_log_one_question(tmp_path: Path) -> None:
    log = TimestampLog(tmp_path / "log", EnvelopeRecord, 64, run_id="r", generation=0)
    Profiler(ProfileConfig(), log, tmp_path, 0, 0).listen()
    log.close()
    assert log.on_acquire is None
    assert log.watchers == []
    cost_s = min(
        timeit.repeat("if log.on_acquire is not None: pass", globals={"log": log}, number=20_000)
    )
    assert cost_s / 20_000 < 2e-6  # 0.02 us measured; the bound is for a machine that is busy
    assert json.loads((tmp_path / "log").read_text() or "{}") == {}


def test_a_run_that_becomes_ready_while_it_is_profiled_goes_back_to_normal(tmp_path: Path) -> None:
    log = TimestampLog(tmp_path / "log", EnvelopeRecord, 64, run_id="r", generation=0)
    profiler = Profiler(ProfileConfig(wait=2, warmup=2, active=3, after=5), log, tmp_path, 0, 0)
    log.watchers.append(profiler)
    profiler.request()
    wait_until(lambda: log.on_acquire is not None, seconds=30)
    for number in range(40):
        if number == 2:
            log.event("phase", phase="ready")
            assert log.flush()
        log.commit(log.acquire())
    log.close()
    assert log.mode == "throughput"
    assert len(list(tmp_path.glob("profile*"))) == 1


@pytest.mark.parametrize("begins_first", [True, False])
def test_envelopes_apart_leave_the_mode_to_the_profile(tmp_path: Path, begins_first: bool) -> None:
    """It may begin while stages are timed alone, or end: what it perturbs is a trace's, no more."""
    log = TimestampLog(tmp_path / "log", EnvelopeRecord, 64, run_id="r", generation=0)
    profiler = Profiler(ProfileConfig(wait=2, warmup=2, active=3), log, tmp_path, 0, 0)

    def request() -> None:
        profiler.request()
        wait_until(lambda: log.on_acquire is not None, seconds=30)

    if begins_first:
        request()
        log.commit(log.acquire())
    log.apart = "alone"
    for number in range(20 if begins_first else 4):
        if number == 2 and not begins_first:
            request()
        log.commit(log.acquire())
    log.apart = ""
    for _ in range(12):
        log.commit(log.acquire())
    log.close()
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    modes = [line["mode"] for line in lines if line["kind"] == "envelope"]
    profiled = ["trace", "alone"] if begins_first else ["alone", "trace"]
    assert [mode for mode, _ in groupby(modes)] == [*profiled, "throughput"]
    assert modes.count("trace") >= 5
    assert log.mode == "throughput"


def test_a_profiler_that_cannot_be_loaded_can_be_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def fail(name: str) -> None:
        asked.append(name)
        raise ImportError(name)

    log = TimestampLog(tmp_path / "log", EnvelopeRecord, 8, run_id="r", generation=0)
    profiler = Profiler(SHORT, log, tmp_path, 0, 0)
    monkeypatch.setattr(profiling.importlib, "import_module", fail)
    wait_until(lambda: profiler.request() or len(asked) > 1)
    log.close()
