"""The guard of a replica that may be lost: who has one, and how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from ranks import CONFIG, environment_without_ranks, free_port
from robot_rig import wait_until

from ppstream.config import load
from ppstream.control.peer_process import HeldProcess, children, ranks_started_by
from ppstream.launch import guard

SPARE = ("placement.replicas=3", "placement.replicas_min=2")


@pytest.mark.parametrize(
    ("rank", "settings", "wanted"),
    [
        (1, SPARE, True),
        (3, SPARE, True),
        (0, SPARE, False),
        (1, SPARE[:1], False),
        (1, (), False),
    ],
)
def test_replicas_that_may_be_lost_have_one(
    rank: int, settings: tuple[str, ...], wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load.read(str(CONFIG), settings)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert not guard.is_wanted(config, rank), "no launcher has started it"
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert guard.is_wanted(config, rank) == wanted
    monkeypatch.setenv(guard.LINKED_FD, "9")
    assert not guard.is_wanted(config, rank), "it has one"


def environment_of_rank_1() -> dict[str, str]:
    ranks = {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return environment_without_ranks() | ranks | {guard.RANK: "1"}


#: A guard that is asked to stop between the start of its rank and its next step.
ASKED = """
import os, signal, subprocess, sys
from ppstream.launch import guard
start = subprocess.Popen
def started(*arguments, **more):
    rank = start(*arguments, **more)
    print(rank.pid, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    return rank
subprocess.Popen = started
sys.exit(guard.main(sys.argv[1:]))
"""


@contextmanager
def guarded(*by: str) -> Iterator[subprocess.Popen[str]]:
    """The guard of rank 1 of four, which looks for a store that nobody serves."""
    environment = environment_of_rank_1()
    heard = ["env", "--default-signal=HUP"]  # nohup may have started these tests
    command = [*heard, *by, sys.executable, "-m", guard.__name__, "--config", str(CONFIG)]
    pipes: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        try:
            wait_until(lambda: [*children(process.pid)])
            yield process
        finally:
            process.kill()


def test_its_launcher_finds_it_as_the_rank_that_it_guards() -> None:
    with guarded() as process:
        assert ranks_started_by(os.getpid())[1] == process.pid


@pytest.mark.parametrize(("by", "is_heard"), [((), True), (("nohup",), False)])
def test_a_terminal_that_closes_is_passed_on_unless_nohup_says_otherwise(
    by: tuple[str, ...], is_heard: bool
) -> None:
    with guarded(*by) as process:

        def is_caught(number: signal.Signals) -> bool:
            status = Path(f"/proc/{process.pid}/status").read_text()
            caught = int(status.partition("SigCgt:")[2].split()[0], 16)
            return bool(caught >> number - 1 & 1)

        wait_until(lambda: is_caught(signal.SIGTERM))  # they are set in this order:
        wait_until(lambda: is_caught(signal.SIGINT) and is_caught(signal.SIGHUP) >= is_heard)
        assert is_caught(signal.SIGHUP) == is_heard


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGUSR2])
def test_a_rank_that_a_signal_ends_before_rank_0_can_see_it_ends_its_guard_so(
    how: signal.Signals,
) -> None:
    with guarded() as process:
        (rank,) = children(process.pid)
        os.kill(rank, how)
        _, said = process.communicate(timeout=60)
        assert process.returncode == -how, said
        assert "Traceback" not in said


def test_a_rank_that_ends_before_rank_0_can_see_it_ends_its_guard_so() -> None:
    command = [sys.executable, "-m", guard.__name__, "--config", str(CONFIG)]
    ranks = {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    environment = os.environ | ranks | {guard.RANK: "1"}
    refused = [*command, "--set", "placement.replicas=0"]
    assert subprocess.run(refused, env=environment, timeout=60).returncode == 11


def test_a_stop_while_its_rank_starts_is_passed_on_to_it() -> None:
    """Ended by it, the guard left the rank behind, which took nobody for its launcher."""
    spare = [word for setting in SPARE for word in ("--set", setting)]
    command = [sys.executable, "-c", ASKED, "--config", str(CONFIG), *spare]
    pipes: Any = {"stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment_of_rank_1(), **pipes) as process:
        assert process.stdout is not None
        rank = HeldProcess.of(int(process.stdout.readline()))
        try:
            assert process.wait(60) == -signal.SIGTERM
            assert rank is None or rank.wait_gone(0)
        finally:
            if rank is not None:
                rank.end()
                rank.close()


class BriefRank:
    """In the place of ``Popen``: a rank that leaves at the third look."""

    returncode = 0

    def __init__(self, *_: object, **__: object) -> None:
        self.looks = 0

    def poll(self) -> int | None:
        self.looks += 1
        return 0 if self.looks > 2 else None

    def wait(self, limit_s: float) -> int:
        raise subprocess.TimeoutExpired("rank", limit_s)


def test_a_stop_at_any_line_of_the_guard_is_passed_on_once(monkeypatch: pytest.MonkeyPatch) -> None:
    code = guard.main.__code__
    monkeypatch.setenv(guard.RANK, "1")
    monkeypatch.setattr(guard.subprocess, "Popen", BriefRank)
    counts = {}
    for at in sorted({line for *_, line in code.co_lines() if line}):
        passed: list[int] = []
        monkeypatch.setattr(
            BriefRank, "send_signal", lambda _, number, to=passed: to.append(number), raising=False
        )
        left = [at]

        def trace(frame: Any, event: str, _: Any, left: list[int] = left) -> Any:
            if frame.f_code is not code:
                return None
            if event == "line" and frame.f_lineno in left:
                left.remove(frame.f_lineno)
                signal.raise_signal(signal.SIGTERM)
            return trace

        before = [(number, signal.signal(number, lambda *_: None)) for number in guard.STOP_SIGNALS]
        traced = sys.gettrace()
        sys.settrace(trace)
        try:
            guard.main([])
        finally:
            sys.settrace(traced)
            for number, handler in before:
                signal.signal(number, handler)
        counts[at] = len(passed)
    assert set(counts.values()) == {0, 1}, counts
    assert list(counts.values()).count(1) > 5, counts
