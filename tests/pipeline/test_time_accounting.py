"""Where a thread's time goes, and that the loops leave none of it that nobody claims."""

import json
import time

import pytest
from golden_runs import GoldenRun, PipelineForm, simulate
from pipeline_in_process import NewestValues, PipelineInProcess, small_config

from ppstream.analysis.segments import select_window
from ppstream.analysis.thread_time import Threads
from ppstream.core.clock import NS_PER_MS
from ppstream.core.cpus import ONE_OF
from ppstream.links.host import HostIn, HostOut
from ppstream.pipeline import time_accounting
from ppstream.pipeline.stage_c import StageC
from ppstream.pipeline.time_accounting import LINK, TimeAccount

LOST_S = 0.002


@pytest.fixture
def book(monkeypatch):
    readings = iter((0, 100, 130, 150, 190, 200))
    monkeypatch.setattr(time_accounting, "now_ns", lambda: next(readings))
    return TimeAccount()


def test_what_is_neither_stage_nor_wait_is_the_link_s(book):
    assert (book.begin(), book.end("credit")) == (100, 130)
    assert (book.begin(), book.end()) == (150, 190)
    book.begin()
    assert [book.pop_ns(cause) for cause in ("credit", "input", LINK)] == [30, 0, 130]
    assert [book.pop_ns(cause) for cause in ("credit", LINK)] == [0, 0]


def test_a_stage_that_claims_a_wait_takes_nothing_back_from_it(book):
    book.begin()
    book.end("input")  # 100 to 130
    book.stage(110, 140)
    assert (book.pop_ns("input"), book.pop_ns(LINK)) == (30, 100)
    book.begin()  # 150
    assert book.pop_ns(LINK) == 10


def losing(call):
    """As ``call``, after this thread was kept from running."""

    def late(*args, **kwargs):
        time.sleep(LOST_S)
        return call(*args, **kwargs)

    return late


@pytest.mark.parametrize("threads", ["serial", "split"])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (HostOut, "slot"),  # before A, and behind the envelope's on the policy rank
        (HostOut, "commit"),
        (HostIn, "slot"),  # before C, and before B
        (StageC, "count"),  # behind the emit
    ],
)
def test_no_time_is_left_that_nobody_claims(threads, owner, name, monkeypatch, tmp_path):
    monkeypatch.setattr(owner, name, losing(getattr(owner, name)))
    config = small_config(
        f"pipeline.threads={threads}", "simulate.a_ms=1", "simulate.c_ms=1", "pipeline.d_in=2"
    )
    check_residuals(config, tmp_path)


@pytest.mark.parametrize("threads", ["serial", "split"])
def test_a_decode_that_ends_in_a_drop_is_claimed_too(threads, monkeypatch, tmp_path):
    emit = StageC.emit

    def emit_some(self, flight, *others):
        return "expired" if flight.seq % 2 else emit(self, flight, *others)

    monkeypatch.setattr(StageC, "emit", emit_some)
    check_residuals(small_config(f"pipeline.threads={threads}", "simulate.c_ms=4"), tmp_path)


def check_residuals(config, tmp_path):
    threads = config.pipeline.threads
    with PipelineInProcess(config, NewestValues(), tmp_path) as pipeline:
        pipeline.saturate()
        pipeline.rank0.run(60)
        pipeline.policy_log.flush()
        lines = pipeline.envelopes()
    policy_log = (tmp_path / "rank1.gen0.jsonl").read_text()
    policy_lines = [json.loads(line) for line in policy_log.splitlines()]
    manifest = simulate(form=PipelineForm(threads, d_in=2, d_out=2)).manifest
    run = GoldenRun(manifest | {"run_id": lines[0]["run_id"]}, lines, policy_lines).parse()
    window = select_window(run)
    for thread, residual_ns in Threads(run, window).residuals_ns().items():
        assert abs(residual_ns) < 0.05 * LOST_S * 1e3 * NS_PER_MS * window.n, thread


@pytest.mark.parametrize("threads", ["serial", "split"])
def test_lines_tell_the_cpu_time_of_stages_and_the_wait_for_a_cpu(threads, tmp_path):
    config = small_config(f"pipeline.threads={threads}", "simulate.a_ms=4", "simulate.c_ms=4")
    with PipelineInProcess(config, NewestValues(), tmp_path) as pipeline:
        pipeline.saturate()
        pipeline.rank0.run(30)
        pipeline.policy_log.flush()
        lines = pipeline.envelopes()
    policy_log = (tmp_path / "rank1.gen0.jsonl").read_text()
    policy_lines = [json.loads(line) for line in policy_log.splitlines()]
    # a thread that sleeps takes no CPU time, however long it sleeps
    for stage, ns in (
        ("a", [line["tA1"] - line["tA0"] for line in lines]),
        ("c", [line["tEmit"] - line["tDecode"] for line in lines]),
    ):
        assert 0 < sum(line[f"cpu_{stage}_ns"] for line in lines) < sum(ns) / 2
    known = [line["cpu_b_ns"] for line in policy_lines if "cpu_b_ns" in line]
    assert len(known) >= len(policy_lines) // ONE_OF  # of a stage as short as this, now and then
    assert min(known) > 0
    delays = ["run_delay_ns"] + (["run_delay_c_ns"] if threads == "split" else [])
    assert all(line[name] >= 0 for line in lines for name in delays)
    assert all(line["run_delay_ns"] >= 0 for line in policy_lines)
