import datetime
import json
import os
import resource
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from ppstream.observe.log_writer import EnvelopeRecord, PolicyRecord, TimestampLog


@pytest.fixture
def log(tmp_path):
    log = TimestampLog(tmp_path / "rank0.gen0.jsonl", EnvelopeRecord, 8, run_id="r", generation=2)
    yield log
    log.close()


def lines(log: TimestampLog) -> list[dict]:
    return [json.loads(line) for line in log.path.read_text().splitlines()]


def write_one(log: TimestampLog, seq: int) -> None:
    record = log.acquire()
    record.epoch, record.seq, record.phase, record.tA0 = 0, seq, "ready", seq * 10
    log.commit(record)


def test_committed_record_is_one_line_with_its_constants_and_without_absent_fields(log):
    write_one(log, 0)
    assert log.flush()
    assert lines(log) == [
        {
            "kind": "envelope",
            "run_id": "r",
            "generation": 2,
            "epoch": 0,
            "lane": 0,
            "seq": 0,
            "mode": "throughput",
            "phase": "ready",
            "tA0": 0,
        }
    ]


def test_reused_record_carries_nothing_of_the_one_before(log):
    first = log.acquire()
    first.seq, first.drop = 0, "stale"
    log.commit(first)
    assert log.flush()
    for seq in range(1, 20):  # wraps the ring of 8 twice
        write_one(log, seq)
        assert log.flush()
    assert [line["seq"] for line in lines(log)] == list(range(20))
    assert [line.get("drop") for line in lines(log)] == ["stale"] + [None] * 19


def test_lines_appear_in_order_of_taking_though_a_later_one_is_complete_first(log):
    first, second = log.acquire(), log.acquire()
    first.seq, second.seq = 0, 1
    log.commit(second)
    assert log.flush()
    assert lines(log) == []
    log.commit(first)
    assert log.flush()
    assert [line["seq"] for line in lines(log)] == [0, 1]


def test_full_ring_loses_records_and_counts_them_but_never_waits(log):
    kept = [log.acquire() for _ in range(8)]
    for seq in range(5):
        spare = log.acquire()
        spare.seq = 100 + seq
        log.commit(spare)
    assert log.statistics().lost == 5
    for seq, record in enumerate(kept):
        record.seq = seq
        log.commit(record)
    assert log.flush()
    assert [line["seq"] for line in lines(log)] == list(range(8))


def test_events_and_other_lines_are_stamped_and_written(log):
    log.event("phase", phase="ready")
    log.line("ledger", streams={"imu": {"received": 3}})
    assert log.flush()
    event, ledger = lines(log)
    assert (event["kind"], event["name"], event["phase"]) == ("event", "phase", "ready")
    assert ledger["streams"]["imu"] == {"received": 3}
    assert event["t"] <= ledger["t"]


class Kept(list):
    """A watcher of ``TimestampLog``."""

    line = record = list.append


def test_a_line_that_is_no_json_is_lost_alone_and_no_watcher_gets_it(log):
    log.watchers.append(kept := Kept())
    log.event("before")
    log.event("fault", text="caf\udce9.npz")
    log.event("fault", text=object())
    write_one(log, 0)
    assert log.flush()
    log.event("behind")
    assert log.flush()
    assert [line.get("name") for line in lines(log)] == ["before", None, "behind"]
    assert (log.statistics().written, log.statistics().lost) == (3, 2)
    assert [one["name"] if isinstance(one, dict) else one.seq for one in kept] == [
        "before",
        0,
        "behind",
    ]


class Changing(datetime.tzinfo):
    """Another thread changes what is written: each second look at it fails."""

    looks = 0

    def utcoffset(self, _: object) -> datetime.timedelta:
        self.looks += 1
        if self.looks % 2:
            raise RuntimeError("dictionary changed size during iteration")
        return datetime.timedelta(0)


def test_a_line_that_changes_while_it_is_written_does_not_end_the_log(log):
    log.event("fault", at=datetime.datetime(2026, 1, 1, tzinfo=Changing()))
    assert log.flush()
    log.event("behind")
    assert log.flush()
    assert [line["name"] for line in lines(log)] == ["fault", "behind"]
    assert (log.statistics().written, log.statistics().lost) == (2, 0)


def test_log_on_a_full_disk_counts_the_loss_and_the_run_goes_on(tmp_path):
    path = tmp_path / "small.jsonl"
    pid = os.fork()
    if pid == 0:  # the limit holds for a whole process, so a child takes it
        code = 1
        try:
            import signal

            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))
            log = TimestampLog(path, EnvelopeRecord, 64, run_id="r", generation=0)
            for seq in range(20):
                write_one(log, seq)
            log.flush()
            statistics = log.statistics()
            whole = path.read_bytes().count(b"\n")
            counted = statistics.written == whole > 0 and statistics.lost == 20 - whole
            code = 0 if statistics.write_errors and counted else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert path.stat().st_size == 300


def test_a_disk_that_refuses_lines_is_told_once_and_at_the_end_what_is_lost(tmp_path):
    path = tmp_path / "small.jsonl"
    code = (
        "import logging, resource, sys; from pathlib import Path\n"
        "from ppstream.observe.log_writer import EnvelopeRecord, TimestampLog\n"
        "logging.basicConfig()\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))\n"
        "log = TimestampLog(Path(sys.argv[1]), EnvelopeRecord, 64, run_id='r', generation=0)\n"
        "for n in range(9):\n    log.event('one', number=n)\n    log.flush()\n"
        "log.close()\n"
    )
    command = [sys.executable, "-c", code, str(path)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60).stderr.splitlines()
    whole = path.read_bytes().count(b"\n")
    first, last = told
    assert f"cannot write to {path}: File too large; its lines are lost until it can" in first
    assert last.endswith(f"{path} lacks {9 - whole} of 9 lines: File too large")


def test_what_was_committed_before_a_kill_is_on_disk(tmp_path):
    path = tmp_path / "killed.jsonl"
    pid = os.fork()
    if pid == 0:
        log = TimestampLog(path, PolicyRecord, 64, run_id="r", generation=0)
        for seq in range(3):
            write_one_stage1(log, seq)
        log.flush()
        os.kill(os.getpid(), 9)
    os.waitpid(pid, 0)
    assert [json.loads(line)["seq"] for line in path.read_text().splitlines()] == [0, 1, 2]


def write_one_stage1(log: TimestampLog, seq: int) -> None:
    record = log.acquire()
    record.epoch, record.seq = 0, seq
    log.commit(record)


def test_log_file_is_not_readable_by_others(log):
    assert Path(log.path).stat().st_mode & 0o007 == 0


def test_nothing_is_left_behind_of_what_was_written(log):
    def write(batches: int) -> None:
        for number in range(batches):
            log.event("beat", number=number)
            log.flush()

    write(50)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        write(400)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 400 * 24  # of each batch the encoder once kept 48 bytes
