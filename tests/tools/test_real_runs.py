from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from bench import bare_pipeline
from bench.latency import PARTS, Answer, parts_of
from real_runs import RankPair, Target, ending_cleanly, spread, write_json

TOOLS = Path(__file__).resolve().parents[2] / "tools"


def test_quantiles_are_values_that_were_seen() -> None:
    found = spread([float(value) for value in range(200, 0, -1)])
    assert (found.n, found.p50, found.p99, found.max) == (200, 100.0, 198.0, 200.0)
    assert found.mean == 100.5
    assert spread([3.0]).p99 == 3.0


def test_target_is_met_up_to_its_limit() -> None:
    assert Target("x", 1.04, 1.04).met
    assert not Target("x", 1.04, 1.0401).met
    assert "MISSED" in str(Target("x", 1.04, 1.05))


def test_json_says_what_was_measured_where(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", "mode", [Target("x", 1.0, 2.0)], rows=[1])
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["targets"] == [{"what": "x", "limit": 1.0, "reached": 2.0, "met": False}]
    assert {"cpu", "cpus", "kernel", "python", "torch"} <= found["environment"].keys()
    assert found["rows"] == [1]


@pytest.mark.multirank
def test_no_rank_outlives_the_block_that_an_error_leaves(tmp_path: Path) -> None:
    ranks = RankPair(tmp_path, "bench", ["service.endpoint=none", "service.duration_s=600"])

    def interrupted() -> None:
        with ranks:
            assert all(process.poll() is None for process in ranks.processes)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert all(process.poll() is not None for process in ranks.processes)


@pytest.mark.multirank
def test_ranks_that_do_not_end_in_time_are_named_with_their_output(tmp_path: Path) -> None:
    with (
        RankPair(tmp_path, "bench", ["service.endpoint=none"]) as ranks,
        pytest.raises(SystemExit, match=r"no end within 0.1 s"),
    ):
        ranks.wait(0.1)


def test_sigterm_leaves_with_blocks_as_ctrl_c_does() -> None:
    left = []

    def terminated() -> None:
        with ending_cleanly():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                signal.pause()
            finally:
                left.append(True)

    with pytest.raises(SystemExit) as ended:
        terminated()
    assert left
    assert ended.value.code == 130
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_bare_pipeline_overlaps_its_two_processes() -> None:
    found = bare_pipeline.measure(2.0, 4.0, 2.0, 1000, 20)
    assert found.stage1_ms >= 4.0
    assert found.stage0_ms >= 4.0 - 2 * 2.0 / 20  # the last envelopes are not followed by an A
    assert found.period_ms < 0.9 * (found.stage0_ms + found.stage1_ms)


def test_bare_pipeline_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def remember(*args: object, **options: object) -> subprocess.Popen[bytes]:
        started.append(popen(*args, **options))  # type: ignore[call-overload]
        return started[-1]

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bare_pipeline.subprocess, "Popen", remember)
    monkeypatch.setattr(bare_pipeline, "front", fail)
    with pytest.raises(KeyboardInterrupt):
        bare_pipeline.measure(0, 0, 0, 0, 10)
    assert [process.poll() is not None for process in started] == [True]


def test_parts_of_the_way_add_up_to_the_whole(tmp_path: Path) -> None:
    stamps = {"tRx": 20, "tA0": 30, "tA1": 50, "tSend": 55, "tRecv": 95, "tDecode": 97}
    ours = {"kind": "envelope", "phase": "ready", "epoch": 1, "seq": 0, "window_end_ns": 10_000}
    ours |= {name: value * 1000 for name, value in (stamps | {"tEmit": 99}).items()}
    theirs = {"kind": "stage1", "epoch": 1, "seq": 0, "tB0": 70_000, "tB1": 80_000}
    (tmp_path / "rank0.gen0.jsonl").write_text(json.dumps(ours) + "\n")
    (tmp_path / "rank1.gen0.jsonl").write_text(json.dumps(theirs) + "\n")
    unknown = Answer(11_000, 12_000)
    found = parts_of([Answer(10_000, 105_000), unknown], tmp_path)
    assert list(found) == list(PARTS)
    assert {len(values) for values in found.values()} == {1}
    assert sum(values[0] for values in found.values()) == pytest.approx(95.0)
