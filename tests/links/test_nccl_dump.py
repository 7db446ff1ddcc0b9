"""torch's flight recorder by stand-ins for its two functions: there is no NCCL on a CPU."""

import importlib
import json
import stat
import threading
import time

import pytest
from pipeline_in_process import small_config

from ppstream.control.watchdog import ProgressMark
from ppstream.core.errors import ExitCode
from ppstream.launch.course import start_watchdog
from ppstream.launch.rank_exit import RankEnd
from ppstream.links import nccl_dump
from ppstream.observe.run_folder import Run

TRACE = b'{"entries": [{"p2p_seq_id": 7, "state": "scheduled"}], "version": "2.10"}'
OLD, NEW = nccl_dump.DUMPS
ON = {"TORCH_FR_BUFFER_SIZE": "256"}


class Library:
    """As much of torch's library as is used."""

    def __init__(self, **functions):
        self.__dict__.update(functions)


def with_torch(monkeypatch, **functions):
    monkeypatch.setattr(importlib, "import_module", lambda name: Library(**functions))


@pytest.mark.parametrize("name", nccl_dump.DUMPS)
def test_what_torch_kept_is_written_as_json(monkeypatch, tmp_path, name):
    with_torch(monkeypatch, **{name: lambda: TRACE})
    path = tmp_path / "rank1.gen0.nccl.json"
    assert nccl_dump.write(path, ON)
    assert json.loads(path.read_bytes())["entries"][0]["p2p_seq_id"] == 7
    assert stat.S_IMODE(path.stat().st_mode) & ~nccl_dump.FILE_MODE == 0


def refuse():
    raise RuntimeError("no communicator")


@pytest.mark.parametrize(
    ("environment", "functions"),
    [
        ({}, {NEW: lambda: TRACE}),  # no NCCL link was opened
        (ON, {}),  # torch without it
        (ON, {NEW: lambda: b'{"version": "2.10"}'}),  # nothing was sent
        (ON, {OLD: refuse}),
    ],
)
def test_where_there_is_none_nothing_is_written_or_said(
    monkeypatch, tmp_path, capfd, environment, functions
):
    with_torch(monkeypatch, **functions)
    assert not nccl_dump.write(tmp_path / "trace.json", environment)
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")


def test_a_recorder_that_hangs_does_not_hold_up_the_end(monkeypatch, tmp_path):
    released = threading.Event()
    with_torch(monkeypatch, **{OLD: released.wait})
    monkeypatch.setattr(nccl_dump, "LIMIT_S", 0.05)
    began = time.monotonic()
    assert not nccl_dump.write(tmp_path / "trace.json", ON)
    assert time.monotonic() - began < 2.0
    released.set()


def test_it_is_switched_on_unless_somebody_asked_for_a_size():
    environment = {}
    nccl_dump.switch_on(environment)
    assert environment == {"TORCH_FR_BUFFER_SIZE": nccl_dump.KEPT}
    asked = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}
    nccl_dump.switch_on(asked)
    assert asked == {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}


def test_a_stuck_rank_leaves_it_in_the_folder_of_its_run_and_others_do_not(monkeypatch, tmp_path):
    with_torch(monkeypatch, **{OLD: lambda: TRACE})
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "256")
    end = RankEnd(1, generation=2)
    end.save_nccl_dump(ExitCode.WATCHDOG)  # a run that has not begun has no folder
    end.run = Run(tmp_path)
    end.save_nccl_dump(ExitCode.PEER_LOST)
    assert list(tmp_path.iterdir()) == []
    end.save_nccl_dump(ExitCode.WATCHDOG)
    assert [path.name for path in tmp_path.iterdir()] == ["rank1.gen2.nccl.json"]


class Stuck:
    """A loop that does not turn."""

    def __init__(self):
        self.mark = ProgressMark("stage B")
        self.marks = (self.mark,)
        self.standstill_ns = 0


def test_a_watchdog_has_it_written_before_its_rank_leaves(monkeypatch, tmp_path):
    with_torch(monkeypatch, **{OLD: lambda: TRACE})
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "256")
    end, loop, left = RankEnd(1), Stuck(), threading.Event()
    end.run = Run(tmp_path)
    monkeypatch.setattr(end, "leave", lambda code, reason: left.set())
    with loop.mark:
        watchdog = start_watchdog(small_config(), loop, end)
        assert left.wait(10)
    assert (tmp_path / "rank1.gen0.nccl.json").read_bytes() == TRACE
    watchdog.stop()
