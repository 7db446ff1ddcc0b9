"""The other rank and the launcher, seen from a rank that has a main thread which may do anything.

For most tests this process is the launcher; the rank that looks is in this process, too.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from peers import two_peers
from ranks import Ranks, free_port
from robot_rig import wait_until

from ppstream.control.heartbeat import HeartbeatThread
from ppstream.control.peer_process import HeldProcess, children, of_rank, of_ranks
from ppstream.core.clock import NS_PER_S
from ppstream.core.errors import ExitCode, PeerLostError, StoppedEarlyError
from ppstream.launch import lookout
from ppstream.launch.lookout import Lookout
from ppstream.launch.rank_exit import RankEnd
from ppstream.wire.rank_messages import Heartbeat

RUN = {
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": str(free_port()),
    "TORCHELASTIC_RESTART_COUNT": "0",
}
LAUNCHED = RUN | {"WORLD_SIZE": "2", "RANK": "0"}


class End(RankEnd):
    """Rank 0's, which does not end this process."""

    def __init__(self) -> None:
        super().__init__(0)
        self.left = threading.Event()
        self.code = ExitCode.DRAINED
        self.reason = ""

    def leave(self, code: ExitCode, reason: str) -> Any:
        self.code, self.reason = code, reason
        self.left.set()
        threading.Event().wait()  # as of whoever leaves, nothing follows


@contextmanager
def looking(environment: dict[str, str] = LAUNCHED, frozen_ms: float = 200) -> Iterator[End]:
    end = End()
    watch = Lookout(end, environment, frozen_ms)
    watch.start()
    try:
        yield end
    finally:
        watch.leave_by(0)
        assert end.left.wait(10)


@pytest.fixture
def sibling(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """Rank 1; this process stands for its launcher, and for rank 0."""
    monkeypatch.setattr(os, "getppid", os.getpid)
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(command, env=os.environ | RUN | {"RANK": "1"}) as child:
        # an exec closes descriptors, which Popen waits for, before the environment is there
        wait_until(lambda: Path(f"/proc/{child.pid}/environ").read_bytes() != b"")
        yield child
        child.kill()


# ---- the other rank -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank", "other"),
    [(1, {}), (0, {}), (1, {"MASTER_PORT": "1"}), (1, {"TORCHELASTIC_RESTART_COUNT": "1"})],
)
def test_a_rank_is_found_by_what_its_launcher_gave_it(
    sibling: subprocess.Popen[bytes], rank: int, other: dict[str, str]
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    found = list(of_rank(rank, RUN | other, children(os.getpid())))
    assert [one.pid for one in found] == ([sibling.pid] if rank == 1 and not other else [])
    for one in found:
        one.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(("ranks", "count"), [(range(3), 1), ((0, 2), 0)])
def test_several_ranks_are_looked_for_in_one_pass(
    sibling: subprocess.Popen[bytes], ranks: Sequence[int], count: int
) -> None:
    pids = iter((sibling.pid, os.getpid()))
    assert list(of_ranks(ranks, RUN, pids)) == [sibling.pid] * count
    assert next(pids, None) is None


def test_without_a_launcher_s_variables_nobody_is_taken_for_a_rank(
    sibling: subprocess.Popen[bytes],
) -> None:
    assert list(of_rank(1, {}, [sibling.pid])) == []


def test_a_stopped_one_is_ended_and_the_reason_says_so(sibling: subprocess.Popen[bytes]) -> None:
    with looking() as end:
        assert not end.left.wait(0.6)  # it runs: however long it takes
        sibling.send_signal(signal.SIGSTOP)
        assert end.left.wait(5)
    assert sibling.wait(5) == -signal.SIGKILL
    assert end.code is ExitCode.PEER_LOST
    assert end.reason == (
        f"rank 1 was stopped before it served; its process {sibling.pid} (state T) was ended"
    )


@pytest.mark.parametrize("is_asked", [False, True])
def test_a_stopped_one_is_no_reason_for_a_rank_that_leaves_already(
    sibling: subprocess.Popen[bytes], is_asked: bool
) -> None:
    with looking() as end:
        if is_asked:
            with pytest.raises(StoppedEarlyError):
                end.stop_early("SIGTERM")
        else:
            with end.closing():
                pass
        sibling.send_signal(signal.SIGSTOP)
        assert not end.left.wait(0.6)
    assert sibling.poll() is None


def test_short_stops_do_not_add_up(sibling: subprocess.Popen[bytes]) -> None:
    with looking(frozen_ms=1000) as end:
        for _ in range(4):
            sibling.send_signal(signal.SIGSTOP)
            assert not end.left.wait(0.4)
            sibling.send_signal(signal.SIGCONT)
            assert not end.left.wait(0.3)
    assert sibling.poll() is None


def test_the_watch_of_a_stopped_rank_lasts_until_the_run_is_warm(
    sibling: subprocess.Popen[bytes],
) -> None:
    with looking() as end:
        assert end.lookout is not None
        for phase in ("warming", "bring-up", "ready"):
            end.lookout.on_phase(phase)
        sibling.send_signal(signal.SIGSTOP)
        assert not end.left.wait(0.6)
    with looking() as end:
        assert end.lookout is not None
        end.lookout.on_phase("warming")
        assert end.left.wait(5)


def test_a_rank_that_ends_before_ranks_have_met_is_the_reason(
    sibling: subprocess.Popen[bytes],
) -> None:
    with looking() as end:
        wait_until(lambda: bool(end.processes))
        sibling.kill()
        assert end.left.wait(5)
    assert end.code is ExitCode.PEER_LOST
    assert "rank 1 ended before its handshake with this rank; read its output" in end.reason


@pytest.mark.multirank
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_rank_stopped_while_warming_is_ended_by_the_other(tmp_path: Path, stopped: int) -> None:
    slow = ("policy.options.b_ms=400", "liveness.frozen_ms=1000")
    with Ranks(tmp_path, *slow) as run:
        run.wait_for_event("phase", phase="warming")
        run.processes[stopped].send_signal(signal.SIGSTOP)
        assert run.processes[1 - stopped].wait(10) == 20, run.output()
        assert run.processes[stopped].wait(1) == -signal.SIGKILL
        assert f"rank {stopped} was stopped before it served" in run.output()


# ---- the launcher -------------------------------------------------------------------------------


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """A process that this one takes for its parent."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        monkeypatch.setattr(os, "getppid", lambda: process.pid)
        yield process
        process.kill()


@pytest.mark.parametrize("environment", [LAUNCHED, {"TORCHELASTIC_RUN_ID": "x"}])
def test_a_rank_leaves_with_20_when_its_launcher_is_killed_whatever_its_main_thread_does(
    launcher: subprocess.Popen[bytes], environment: dict[str, str]
) -> None:
    with looking(environment) as end:
        assert not end.left.wait(0.3)
        launcher.send_signal(signal.SIGSTOP)
        assert not end.left.wait(0.5)
        launcher.send_signal(signal.SIGCONT)
        assert not end.left.wait(0.3)
        launcher.kill()
        assert end.left.wait(1), "there is no loop that could drain: at once"
    assert end.code is ExitCode.PEER_LOST
    assert end.reason.startswith(f"LAUNCHER_LOST: process {launcher.pid}, which started this rank")


def test_a_loop_is_asked_to_drain_first_and_has_a_moment_for_it(
    launcher: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookout, "LAUNCHER_GRACE_S", 0.5)
    asked = threading.Event()
    with looking() as end:
        end.on_stop = lambda reason: asked.set()
        launcher.kill()
        assert asked.wait(60)
        assert not end.left.wait(0.2)
        assert end.left.wait(5)


@pytest.mark.parametrize("code", [ExitCode.PEER_LOST, ExitCode.DRAINED])
def test_a_rank_that_another_tells_of_its_end_first_leaves_for_the_launcher_s_all_the_same(
    launcher: subprocess.Popen[bytes], code: ExitCode
) -> None:
    end = End()
    Lookout(end, LAUNCHED, 200)  # which is never the first to look
    assert end.end_of_main_thread(code, "rank 1 left") == (code, "rank 1 left")
    launcher.kill()
    wait_until(lambda: end.end_of_main_thread(code, "rank 1 left")[1] != "rank 1 left")
    why = f"LAUNCHER_LOST: process {launcher.pid}, which started this rank, is gone"
    assert end.end_of_main_thread(code, "rank 1 left") == (ExitCode.PEER_LOST, why)


def test_a_launcher_that_was_gone_before_is_an_error_and_not_whoever_adopted_this_process(
    launcher: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([launcher.pid, 1])
    monkeypatch.setattr(os, "getppid", lambda: next(answers))
    with pytest.raises(PeerLostError, match="LAUNCHER_LOST"):
        lookout.parent_launcher(LAUNCHED)


@pytest.mark.parametrize("environment", [{}, {"WORLD_SIZE": "1"}])
def test_a_rank_that_nobody_launched_outlives_the_shell_that_started_it(
    launcher: subprocess.Popen[bytes], environment: dict[str, str]
) -> None:
    with looking(environment) as end:
        launcher.kill()
        launcher.wait()
        assert not end.left.wait(0.3)


def test_a_parent_outside_of_this_namespace_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getppid", lambda: 0)
    assert lookout.parent_launcher(LAUNCHED) is None


# ---- who is listened to -------------------------------------------------------------------------


def test_a_rank_whose_main_thread_stands_leaves_when_rank_0_is_silent_in_a_warm_run() -> None:
    near, far = two_peers(name="rank 0")
    with closing(near), closing(far), looking({}) as end:
        end.met(0, near)
        assert end.lookout is not None
        end.lookout.listen_to(near)
        end.lookout.on_phase("warming")
        assert not end.left.wait(0.6)  # its frozen_ms are 200
        end.lookout.on_phase("bring-up")
        assert end.left.wait(60)
        assert near.lost_ns is not None
    assert end.code is ExitCode.PEER_LOST
    assert re.match(r"rank 0 was silent for [\d.]+ s, limit 0\.20 s, while this rank", end.reason)


def test_what_was_said_while_this_process_stood_still_is_heard_first() -> None:
    near, far = two_peers(name="rank 0")
    with closing(near), closing(far), ExitStack() as stack, looking({}, frozen_ms=5000) as end:
        end.met(0, near)
        assert end.lookout is not None
        beat = HeartbeatThread(near, NS_PER_S, lambda: 0)
        stack.callback(beat.stop)
        assert far.heart is not None
        far.heart.send(Heartbeat(1))
        near.last_heard_ns -= 60 * NS_PER_S
        end.lookout.on_phase("bring-up")
        end.lookout.listen_to(near)
        wait_until(lambda: near.peer_progress == 1)
        assert not end.left.wait(0.6)


# ---- moments ------------------------------------------------------------------------------------


def test_the_earliest_moment_counts_and_may_be_taken_back() -> None:
    with looking({}) as end:
        assert end.lookout is not None
        end.lookout.leave_by(60)
        end.lookout.leave_by(0.3)
        end.lookout.leave_by(60)
        end.lookout.clear_deadline()
        assert not end.left.wait(0.6)
        end.lookout.leave_by(0.1)
        end.lookout.leave_by(60)
        assert end.left.wait(5)


def test_a_rank_leaves_in_time_also_when_why_cannot_be_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_memory() -> Any:
        raise MemoryError

    with looking({}) as end:
        monkeypatch.setattr(end, "end_without_main_thread", no_memory)
        assert end.lookout is not None
        end.lookout.leave_by(0.1)
        assert end.left.wait(5)
    assert (end.code, "did not leave in time" in end.reason) == (ExitCode.PEER_LOST, True)


def test_a_lookout_that_fails_begins_anew(
    sibling: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    answers = iter([MemoryError(), OSError(24, "Too many open files")])

    def failing(*args: Any) -> Any:
        if error := next(answers, None):
            raise error
        return of_rank(*args)

    monkeypatch.setattr(lookout, "of_rank", failing)
    with looking() as end:
        wait_until(lambda: bool(end.processes))
        sibling.kill()
        assert end.left.wait(5)
    assert capfd.readouterr().err.count("its lookout begins anew") == 2


def test_a_rank_that_has_decided_keeps_its_code_and_is_given_time_to_close(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ppstream.launch.rank_exit.LOST_GRACE_S", 0.2)
    monkeypatch.setattr("ppstream.launch.rank_exit.CLOSE_GRACE_S", 1.0)
    with looking({}) as end:
        end.leave_when_lost()
        with pytest.raises(PeerLostError), end.closing():
            raise PeerLostError("it closed its control socket")
        end.leave_when_lost()
        assert not end.left.wait(0.5), "it has decided: it is closing"
        assert end.left.wait(5)
    assert end.code is ExitCode.PEER_LOST
    assert end.reason.startswith("it closed its control socket; this rank's main thread is in")


# ---- what a rank has started --------------------------------------------------------------------

#: Rank 0: starts a robot that says where it is, and is killed.
STARTER = """
import os, subprocess, sys
from ppstream.control.peer_process import bound_command
subprocess.Popen(bound_command("lookout_robot", "--endpoint", "x"))
sys.stdin.read()
"""
ROBOT = """
import os, signal, sys, time
def leave(number, frame):
    print("leaves", flush=True)
    time.sleep({leaves_s})
    sys.exit()
signal.signal(signal.SIGTERM, leave)
print(os.getpid(), sys.argv[1:], __name__, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("leaves_s", [0, 60])
def test_a_robot_ends_with_the_rank_that_started_it_also_when_that_is_killed(
    tmp_path: Path, leaves_s: int
) -> None:
    (tmp_path / "lookout_robot.py").write_text(ROBOT.format(leaves_s=leaves_s))
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    with subprocess.Popen(
        [sys.executable, "-c", STARTER],
        env=os.environ | {"PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as rank:
        assert rank.stdout is not None
        pid, *said = rank.stdout.readline().split(maxsplit=1)
        assert said == ["['--endpoint', 'x'] __main__\n"]
        robot = HeldProcess.of(int(pid))
        assert robot is not None
        began = time.monotonic()
        rank.kill()
        assert rank.stdout.readline() == "leaves\n"
        assert robot.wait_gone(10)
        assert time.monotonic() - began < 5
        robot.close()


def test_what_a_dead_rank_has_forked_is_ended_by_the_other_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forks = "import os, time; pid = os.fork(); pid and print(pid, flush=True); time.sleep(60)"
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    with subprocess.Popen(
        [sys.executable, "-c", forks],
        env=os.environ | {"RANK": "1"},
        stdout=subprocess.PIPE,
        text=True,
    ) as rank:
        assert rank.stdout is not None
        child = HeldProcess.of(int(rank.stdout.readline()))
        assert child is not None
        end = RankEnd(0)
        end.processes[1] = HeldProcess.of(rank.pid)
        assert end.end_other_ranks(0.1) != "", "a living one is ended with what it had started"
        assert child.wait_gone(5)
        child.close()
