"""Memory in the log: a line a second from a thread of its own, and what a reader makes of it."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from robot_rig import wait_until

from ppstream.analysis.log_parser import LogLine, parse_run
from ppstream.observe import memory as gpu_memory
from ppstream.observe import memory as memory_lines
from ppstream.observe.log_writer import EnvelopeRecord, TimestampLog
from ppstream.observe.memory import MemoryLines
from ppstream.observe.metrics import gpu_families

MIB = 1 << 20


def lines_of(folder: Path, interval_s: float = 60.0) -> list[dict[str, Any]]:
    """What a rank that lives for a moment writes."""
    log = TimestampLog(folder / "log.jsonl", EnvelopeRecord, 8, run_id="r", generation=3)
    MemoryLines(log, interval_s).close()
    log.close()
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_a_rank_writes_its_memory_at_once_and_when_it_ends(tmp_path: Path) -> None:
    first, last = lines_of(tmp_path)
    for line in (first, last):
        assert (line["kind"], line["generation"]) == ("memory", 3)
        assert 10 * MIB < line["resident_bytes"] < 100_000 * MIB
        assert "device" not in line  # a process without CUDA says nothing of one
    assert first["t"] < last["t"]


def test_a_rank_writes_its_memory_as_the_run_becomes_ready(tmp_path: Path) -> None:
    log = TimestampLog(tmp_path / "log.jsonl", EnvelopeRecord, 8, run_id="r", generation=3)
    lines = MemoryLines(log, 60.0)
    for phase in ("warming", "ready", "draining"):
        log.event("phase", phase=phase)
        lines.on_phase(phase)
    lines.close()
    log.close()
    found = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    said = [line.get("phase", line["kind"]) for line in sorted(found, key=lambda line: line["t"])]
    assert said[said.index("ready") + 1] == "memory"
    assert said.count("memory") == 3


def test_resident_memory_is_that_of_the_operating_system() -> None:
    said = Path("/proc/self/status").read_text()
    (kib,) = [line.split()[1] for line in said.splitlines() if line.startswith("VmRSS")]
    assert memory_lines.resident_bytes() == pytest.approx(1024 * int(kib), rel=0.05)


def test_a_gpus_memory_stands_in_the_line_and_is_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {"allocated_bytes": {"all": {"current": 5 * MIB}}, "num_alloc_retries": 2}
    now = gpu_memory.memory(said, 60 * MIB, 100 * MIB)
    monkeypatch.setattr(gpu_memory, "newest", lambda: (torch.device("cuda:1"), now))
    first, _ = lines_of(tmp_path)
    assert first["device"] == "cuda:1"
    manifest = {"schema": "ppstream.log/1", "topology": {"d_in": 2, "d_out": 2}}
    (memory,) = parse_run(manifest, [LogLine(1, 0, "rank1:1", first)]).memory
    assert (memory.rank, memory.t) == (1, first["t"])
    assert (memory.allocated_bytes, memory.non_torch_bytes) == (5 * MIB, 40 * MIB)
    assert (memory.alloc_retries, memory.total_bytes) == (2, 100 * MIB)


def test_only_the_thread_that_begins_envelopes_asks_the_allocator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def counters(_device: torch.device) -> dict[str, Any]:
        asked.append(threading.current_thread().name)
        return {"allocated_bytes": {"all": {"current": 7}}}

    monkeypatch.setattr(gpu_memory, "started", lambda: torch.device("cuda:1"))
    monkeypatch.setattr(gpu_memory, "noted", gpu_memory.Noted())
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", counters)
    monkeypatch.setattr(torch.cuda, "memory_stats", counters)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (60, 100))
    log = TimestampLog(tmp_path / "log.jsonl", EnvelopeRecord, 8, run_id="r", generation=0)
    lines = MemoryLines(log, 0.01)
    wait_until(lambda: log.on_next_acquire is not None)
    assert list(gpu_families()) == []  # nothing is known yet, and a scrape asks for nothing
    assert asked == []
    log.commit(log.acquire())
    lines.close()
    log.close()
    assert list(gpu_families()) != []
    assert asked == [threading.current_thread().name]
    written = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    said = [line.get("allocated_bytes") for line in written if line["kind"] == "memory"]
    assert (said[0], said[-1]) == (None, 7)
