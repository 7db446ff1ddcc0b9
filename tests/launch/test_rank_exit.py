import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress

import pytest
import torch
from pipeline_in_process import small_config

from ppstream.config.rules import problems
from ppstream.control.peer import Peer
from ppstream.control.peer_process import HeldProcess
from ppstream.control.watchdog import ProgressMark, Watchdog
from ppstream.core.clock import NS_PER_S
from ppstream.core.errors import (
    ExitCode,
    PeerFrozenError,
    PeerLeftError,
    PeerLostError,
    PolicyError,
    StoppedEarlyError,
)
from ppstream.core.user_code import how_it_ends
from ppstream.launch.course import Course
from ppstream.launch.handshake import saying_goodbye
from ppstream.launch.rank_exit import RankEnd
from ppstream.observe.run_folder import Run
from ppstream.wire.rank_messages import Goodbye
from ppstream_kernels.kernel_launch import checked


class OtherProcess(HeldProcess):
    """A process that leaves, or does not."""

    def __init__(self, *, leaves):
        super().__init__(4242, -1)
        self.leaves, self.waited_s, self.ended = leaves, [], False

    def wait_gone(self, limit_s):
        self.waited_s.append(limit_s)
        return self.leaves

    def state(self):
        return "T"

    def end(self):
        self.ended = True


@pytest.mark.parametrize(
    ("rank", "limit_s", "leaves", "ended"),
    [
        (0, 0, False, True),
        (0, 2, False, True),
        (0, 2, True, False),
        (1, 0, False, True),
        (1, 2, False, False),  # rank 0 may have a robot to end
    ],
)
def test_a_frozen_or_stuck_process_is_ended_and_a_leaving_one_is_not(rank, limit_s, leaves, ended):
    end = RankEnd(rank)
    end.processes[1 - rank] = other = OtherProcess(leaves=leaves)
    text = end.end_other_ranks(limit_s)
    assert other.ended is ended
    assert ("process 4242 (state T) was ended" in text) is ended
    if ended:
        assert other.waited_s[0] == pytest.approx(limit_s, abs=0.1)


def failing(tmp_path, rank, capfd, **said):
    end = RankEnd(rank)
    end.run = Run(tmp_path)
    end.peer_reason = said.get("peer_reason")
    end.print_first_failure(said.get("code", ExitCode.PEER_LOST))
    return capfd.readouterr().err


def test_the_rank_that_failed_first_is_named(tmp_path, capfd):
    run = Run(tmp_path)
    run.record_exit(1, ExitCode.PEER_LOST, "rank 0 is gone")
    run.record_exit(0, ExitCode.WATCHDOG, "the decode thread")
    said = failing(tmp_path, 1, capfd)
    assert said == "ppstream: first to fail: rank 0: exit 21 WATCHDOG the decode thread\n"
    assert failing(tmp_path, 0, capfd, code=ExitCode.WATCHDOG) == ""  # its own line says it


def test_ranks_of_a_host_name_the_first_failure_once_and_say_behind_it_no_more_than_its_code(
    tmp_path, capfd
):
    why = "policy.target: it raised\nand more"
    run = Run(tmp_path)
    run.record_exit(2, ExitCode.CONFIG, why)
    passed_on = PeerLeftError(11, str(PeerLeftError(11, why)))
    assert str(passed_on) == f"the other rank left with 11 CONFIG: {why}"
    for rank in (0, 1, 3):
        end = RankEnd(rank)
        end.run = run
        assert end.print_first_failure(ExitCode.CONFIG) == why
    said = "ppstream: first to fail: rank 2: exit 11 CONFIG policy.target: it raised\n"
    assert capfd.readouterr().err == said
    run.record_exit(2, ExitCode.CONFIG, why, generation=1)
    end = RankEnd(0, generation=1)
    end.run = run
    end.print_first_failure(ExitCode.CONFIG)
    assert capfd.readouterr().err == said


def test_of_another_host_s_failure_all_lines_stay_with_the_rank_that_was_told(tmp_path, capfd):
    end = RankEnd(0)
    end.run = Run(tmp_path)
    end.peer_reason = "exit 11 CONFIG one\ntwo"
    assert end.print_first_failure(ExitCode.CONFIG) == ""
    end.peer_reason = "exit 11 CONFIG one"
    assert end.print_first_failure(ExitCode.CONFIG) == "one"
    assert capfd.readouterr().err == "ppstream: first to fail: rank 1: exit 11 CONFIG one\n"


def test_a_rank_that_did_not_come_is_named_and_one_that_said_why_is_quoted(tmp_path, capfd):
    assert "rank 1: no handshake; read its output (killed, crashed, " in failing(tmp_path, 0, capfd)
    said = failing(tmp_path, 0, capfd, peer_reason="exit 26 POLICY_OUTPUT why")
    assert said == "ppstream: first to fail: rank 1: exit 26 POLICY_OUTPUT why\n"


def test_a_rank_that_left_no_exit_code_is_told_with_what_its_process_left(peers, capfd):
    child = subprocess.Popen([sys.executable, "-c", "import os; os.abort()"])
    end = RankEnd(0)
    end.met(1, peers[0])
    end.processes[1] = process = HeldProcess.of(child.pid)
    assert process.wait_gone(30)
    child.wait()
    told = end.end_of_main_thread(ExitCode.PEER_LOST, "it died")
    assert told == (ExitCode.PEER_LOST, "it died; it ended with signal 6 SIGABRT")
    end.print_first_failure(ExitCode.PEER_LOST)
    said = "ppstream: first to fail: rank 1: it left no exit code (signal 6 SIGABRT)\n"
    assert capfd.readouterr().err == said
    process.close()


def test_a_rank_that_was_told_of_a_failure_is_not_the_first_to_fail(tmp_path):
    run = Run(tmp_path)
    run.record_exit(1, ExitCode.GATE_FAIL, str(PeerLeftError(30, "LOW_OVERLAP")))
    assert run.first_to_fail(0) is None
    run.record_exit(0, ExitCode.GATE_FAIL, "LOW_OVERLAP")
    assert run.first_to_fail(0)[0] == 0


def test_a_replica_without_which_the_run_went_on_is_not_the_first_to_fail(tmp_path):
    end = RankEnd(0)
    end.run = Run(tmp_path)
    end.run.record_exit(1, ExitCode.POLICY_OUTPUT, "user code called sys.exit()")
    with subprocess.Popen(["sleep", "60"]) as replica:
        end.processes[1] = HeldProcess.of(replica.pid)
        assert "was ended" in end.let_go(1)
    assert end.run.first_to_fail(0) is None
    assert end.run.ends()["1"]["code"] == ExitCode.POLICY_OUTPUT
    end.run.record_exit(2, ExitCode.WATCHDOG, "stuck")
    assert end.run.first_to_fail(0)[0] == 2


def test_ends_of_an_earlier_generation_blame_nobody(tmp_path):
    run = Run(tmp_path)
    run.record_exit(1, ExitCode.WATCHDOG, "stuck", generation=0)
    assert run.first_to_fail(1) is None
    assert run.first_to_fail(0)[0] == 1


@pytest.fixture
def peers():
    (ours, theirs), hearts = ([Peer(end) for end in socket.socketpair()] for _ in range(2))
    ours.heart, theirs.heart = hearts
    yield ours, theirs
    ours.close()
    theirs.close()


def test_a_rank_that_lost_its_neighbour_waits_for_the_rank_that_hears_why(peers):
    ours, theirs = peers
    words = threading.Timer(0.1, theirs.send, [Goodbye(26, "rank 2 called sys.exit()")])
    words.start()
    with pytest.raises(PeerLeftError, match=r"rank 2 called sys\.exit"), saying_goodbye(ours):
        raise PeerLostError("policy rank 2 is gone: Broken pipe")
    words.join()


def test_the_last_words_of_a_lost_rank_are_the_reason(peers):
    ours, theirs = peers
    theirs.send(Goodbye(int(ExitCode.POLICY_OUTPUT), "NaN for ever"))
    theirs.close()
    with pytest.raises(PeerLeftError, match="26 POLICY_OUTPUT: NaN for ever"), saying_goodbye(ours):
        raise PeerLostError("Broken pipe")
    assert ours.last_words() is not None  # it stays readable


def test_an_error_is_told_to_the_other_rank_and_survives_its_absence(peers):
    ours, theirs = peers
    with pytest.raises(PolicyError), saying_goodbye(ours):
        raise PolicyError("five in a row")
    with pytest.raises(PeerLeftError, match="26 POLICY_OUTPUT: five in a row"):
        theirs.receive(10**9)
    theirs.close()
    with pytest.raises(ZeroDivisionError), saying_goodbye(ours):
        raise ZeroDivisionError


def test_a_run_that_is_stopped_early_stops_the_other_rank_without_a_failure(peers):
    ours, theirs = peers
    with pytest.raises(StoppedEarlyError), saying_goodbye(ours):
        raise StoppedEarlyError("SIGTERM before the run was ready")
    with pytest.raises(PeerLeftError) as left:
        theirs.receive(10**9)
    assert left.value.exit_code is ExitCode.DRAINED


def test_an_error_whose_text_cannot_be_shown_is_told_all_the_same(peers):
    class Mute(Exception):
        def __str__(self):
            raise ValueError("no text")

    ours, theirs = peers
    with pytest.raises(Mute), saying_goodbye(ours):
        raise Mute
    with pytest.raises(
        PeerLeftError, match="1 INTERNAL: Mute: <its text cannot be shown: ValueErr"
    ):
        theirs.receive(10**9)


def test_silence_is_frozen_and_a_sign_of_life_by_another_way_counts(peers):
    ours, _ = peers
    now_ns = ours.last_heard_ns + 3 * 10**9
    with pytest.raises(PeerFrozenError, match=r"silent for 3\.00 s, limit 2\.00 s: it is stopped"):
        ours.check_alive(now_ns, 2 * 10**9)
    ours.last_heard_ns = now_ns  # a result came over the link
    ours.check_alive(now_ns, 2 * 10**9)


def test_silence_of_another_host_may_be_the_network_s():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peer = Peer(socket.create_connection(listener.getsockname()))
        with pytest.raises(PeerFrozenError, match="its host, the network between"):
            peer.check_alive(peer.last_heard_ns + 3 * 10**9, 2 * 10**9)
        peer.close()


def test_heartbeat_watchdog_and_start_are_one_set():
    for setting in (
        "liveness.heartbeat_ms=500",
        "liveness.watchdog_s=1.5",
        "liveness={start_s = 4.9}",
    ):
        path = setting.partition("=")[0]
        with pytest.raises(Exception, match=path.replace(".", r"\.")):
            small_config(setting)
    assert problems(small_config("liveness.watchdog_s=1.6")) == []


def test_a_run_s_folder_is_private_on_every_host(tmp_path):
    for run in (Run.create(tmp_path, keep=3), Run.joined(tmp_path / "far" / "run", keep=3)):
        assert run.directory.stat().st_mode & 0o777 == 0o750


def test_a_rank_with_a_stacks_file_keeps_it_private(tmp_path):
    run = Run.create(tmp_path, keep=3)
    path = run.stacks_path(0, 1)
    assert path.name == "rank0.gen1.stacks.txt"
    watchdog = Watchdog(list, lambda: 1, lambda text: None, path)
    assert path.stat().st_mode & 0o777 == 0o640
    watchdog.stop()


# ---- a start that stands ------------------------------------------------------------------------


def test_each_step_of_a_start_has_its_time_and_a_wait_between_them_a_little_more():
    course = Course(small_config("liveness.start_s=7"))
    (mark,) = course.marks
    assert mark.is_running
    assert mark.thread_id == threading.get_ident()
    seen = [(mark.turns, course.standstill_ns)]
    for name in ("the build of a:b", "the link"):
        with course.step(name):
            assert list(course.marks) == [mark]
            assert mark.busy_with() == name
            assert course.standstill_ns == 7 * NS_PER_S
            seen.append((mark.turns, 0))
        assert list(course.marks) == [mark]
        seen.append((mark.turns, course.standstill_ns))
    turns, waits = zip(*seen, strict=True)
    assert sorted(set(turns)) == list(turns), "each step, and each wait, is progress"
    assert {waits[0], waits[2], waits[4]} == {11 * NS_PER_S}


def test_a_loop_is_watched_while_it_runs_and_the_thread_between_two_of_its_runs():
    class Loop:
        mark = ProgressMark("stage B")
        marks = (mark,)
        standstill_ns = 5

    course = Course(small_config("liveness.start_s=7"))
    course.loop = Loop()
    with Loop.mark:
        assert (list(course.marks), course.standstill_ns) == ([Loop.mark], 5)
    (thread,) = course.marks
    assert (thread.name, course.standstill_ns) == ("the main thread", 11 * NS_PER_S)
    before = thread.turns
    Loop.mark.turns += 3
    assert course.marks[0].turns == before + 3, "its time begins when the loop's ends"


# ---- who decides --------------------------------------------------------------------------------


def decided_by(error):
    end = RankEnd(0)
    with pytest.raises(type(error)), end.closing():
        raise error
    return end


def test_an_error_of_closing_changes_no_end_but_a_good_one(capfd):
    cause = PolicyError("five in a row")
    end = decided_by(cause)
    assert end.because_of(cause) == (ExitCode.POLICY_OUTPUT, "five in a row")
    assert end.because_of(OSError(28, "No space"))[0] is ExitCode.POLICY_OUTPUT
    assert end.because_of(AssertionError("state"))[0] is ExitCode.POLICY_OUTPUT
    assert capfd.readouterr().err.count("closing failed") == 2
    drained = RankEnd(0)
    with drained.closing():
        pass
    assert drained.because_of(OSError(30, "Read-only file system"))[0] is ExitCode.DRAINED
    assert drained.because_of(AssertionError("a bug"))[0] is ExitCode.INTERNAL


def test_without_a_launcher_a_good_end_and_a_lost_peer_say_so():
    end = RankEnd(1)
    assert end.end_of_main_thread(ExitCode.DRAINED, "SIGTERM") == (ExitCode.DRAINED, "SIGTERM")
    asked = []
    assert not end.on_launcher_lost("LAUNCHER_LOST: process 7 is gone")
    end.on_stop = asked.append
    assert end.on_launcher_lost("LAUNCHER_LOST: process 7 is gone")
    assert asked == ["LAUNCHER_LOST: process 7 is gone"]
    for code in (ExitCode.DRAINED, ExitCode.PEER_LOST):
        assert end.end_of_main_thread(code, "") == (
            ExitCode.PEER_LOST,
            "LAUNCHER_LOST: process 7 is gone",
        )
    assert end.end_of_main_thread(ExitCode.WATCHDOG, "stuck")[0] is ExitCode.WATCHDOG


def test_what_was_seen_of_the_other_rank_says_more_than_its_socket():
    end = RankEnd(0)
    end.peer_lost = "rank 1 was stopped before it served"
    assert (
        end.end_of_main_thread(ExitCode.PEER_LOST, "Connection reset by peer")[1] == end.peer_lost
    )
    assert end.end_of_main_thread(ExitCode.WATCHDOG, "stuck") == (ExitCode.WATCHDOG, "stuck")


def test_a_policy_rank_believes_what_rank_0_recorded_before_it_was_gone(tmp_path):
    end = RankEnd(1, generation=2)
    end.run = Run(tmp_path)
    end.run.record_exit(0, ExitCode.DRAINED, "SIGTERM", generation=1)
    assert end.end_of_main_thread(ExitCode.PEER_LOST, "gone") == (ExitCode.PEER_LOST, "gone")
    end.run.record_exit(0, ExitCode.DRAINED, "SIGTERM", generation=2)
    assert end.end_of_main_thread(ExitCode.PEER_LOST, "gone")[0] is ExitCode.DRAINED
    assert end.end_without_main_thread() == (
        ExitCode.DRAINED,
        "the other rank left with 0 DRAINED: SIGTERM",
    )
    assert end.end_of_main_thread(ExitCode.WATCHDOG, "stuck")[0] is ExitCode.WATCHDOG
    end.rank = 0
    assert end.end_of_main_thread(ExitCode.PEER_LOST, "gone")[0] is ExitCode.PEER_LOST


def test_what_the_other_rank_s_heart_said_is_the_reason_of_a_rank_whose_loop_stands(peers):
    ours, theirs = peers
    end = RankEnd(0)
    end.met(1, ours)
    assert "the other rank's process exited without a message" in end.end_without_main_thread()[1]
    assert (
        "test_rank_exit.py" in end.end_without_main_thread()[1]
    )  # where this rank's main thread is
    theirs.send(Goodbye(21, "stage B made no progress for 5.1 s; MainThread is in my.py:7 f"))
    ours.heart.pump()
    code, reason = end.end_without_main_thread()
    assert code is ExitCode.PEER_LOST
    assert "left with 21 WATCHDOG: stage B made no progress" in reason
    assert "my.py:7 f" in reason


def test_a_stop_signal_behind_a_dead_rank_is_no_stop():
    end = RankEnd(0)
    with pytest.raises(StoppedEarlyError, match="SIGTERM"):
        end.stop_early("SIGTERM")
    end.processes[1] = OtherProcess(leaves=False)
    with pytest.raises(StoppedEarlyError):
        end.stop_early("SIGTERM")
    end.processes[1] = OtherProcess(leaves=True)
    with pytest.raises(
        StoppedEarlyError, match="rank 1 ended before its handshake with this rank"
    ) as told:
        end.stop_early("SIGTERM")
    assert how_it_ends(told.value)[0] is ExitCode.PEER_LOST


def test_a_stop_signal_behind_a_rank_that_recorded_why_it_left_has_its_code(tmp_path):
    """The launcher's signal may be faster than the other rank's goodbye is read, or its process
    is seen.
    """
    end = RankEnd(0)
    end.run = Run(tmp_path)
    end.run.record_exit(1, ExitCode.CONFIG, "no such module", generation=end.generation)
    with pytest.raises(StoppedEarlyError, match="left with 11 CONFIG: no such module") as told:
        end.stop_early("SIGTERM")
    assert how_it_ends(told.value)[0] is ExitCode.CONFIG


def test_a_policy_rank_that_never_met_rank_0_records_its_end_and_reads_rank_0_s(tmp_path):
    run = Run.create(tmp_path, keep=2)
    run.begin(config={}, config_sha256="", versions={})
    end = RankEnd(1)
    end.log_root = tmp_path
    assert end.end_of_main_thread(ExitCode.PEER_LOST, "no rank 0")[1] == "no rank 0"
    end.record(ExitCode.CONFIG, "world size: got 3")
    assert run.ends()["1"]["code"] == 11
    run.record_exit(0, ExitCode.CONFIG, "no such device")
    other = RankEnd(2)
    other.log_root = tmp_path
    told = other.end_of_main_thread(ExitCode.PEER_LOST, "no rank 0")
    assert told == (ExitCode.CONFIG, "the other rank left with 11 CONFIG: world size: got 3")


def test_a_stop_signal_inside_the_start_of_a_thread_breaks_neither(monkeypatch):
    ignored = []
    began = threading.Event()

    def wait(event, limit_s=None):
        RankEnd(0).stop_early("SIGTERM")  # where a signal may come: the thread is not awaited yet

    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    thread = threading.Thread(target=began.set, daemon=True)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Event, "wait", wait)
        with pytest.raises(StoppedEarlyError):
            thread.start()
    assert began.wait(60)
    thread.join()
    assert not ignored


def test_a_stop_signal_inside_a_lock_that_is_let_go_meanwhile_is_a_stop():
    def awaited(lock):
        with lock:
            lock.release()  # as a wait for a thread's start does
            RankEnd(0).stop_early("SIGTERM")

    with pytest.raises(RuntimeError, match="unlocked") as told:
        awaited(threading.Lock())
    assert how_it_ends(told.value) == (ExitCode.DRAINED, "SIGTERM before the run was ready")


def test_user_code_that_catches_all_its_failures_does_not_swallow_a_stop():
    with pytest.raises(StoppedEarlyError), suppress(Exception):
        RankEnd(0).stop_early("SIGTERM")


def test_user_code_that_exits_is_an_end_with_a_reason():
    assert how_it_ends(SystemExit(3)) == (
        ExitCode.POLICY_OUTPUT,
        "code of this rank called sys.exit(3)",
    )
    assert how_it_ends(MemoryError())[0] is ExitCode.OUT_OF_MEMORY
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert how_it_ends(raised.value)[0] is ExitCode.OUT_OF_MEMORY


def test_a_device_that_refuses_work_is_no_bug_of_ours():
    with pytest.raises(RuntimeError) as refused:
        checked((719,))
    for error in (refused.value, torch.AcceleratorError("device-side assert")):
        assert how_it_ends(error)[0] is ExitCode.POISONED
    assert how_it_ends(RuntimeError("else"))[0] is ExitCode.INTERNAL


# ---- the way out, without what it would need ----------------------------------------------------

#: A rank in a process of its own that leaves; ``BREAK`` takes something away before.
LEAVING = """
import os, resource, shutil, signal, sys, threading, time
from pathlib import Path
from ppstream.launch import rank_exit as ends; from ppstream.observe import run_folder as runs
from ppstream.core.errors import ExitCode
from ppstream.observe.run_folder import Run

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
folder = Path(sys.argv[1])
end = ends.RankEnd(0)
end.run = Run.create(folder / "logs", 3)
end.run.begin(config={}, config_sha256="0", versions={})
exec(sys.argv[2])
end.leave(ExitCode.PEER_LOST, "the other rank is gone")
"""
OUT_OF_MEMORY = """
def no_memory(*args, **kwargs):
    raise MemoryError
"""
WITHOUT = {
    "everything there": ("", ""),
    "no folder": ("shutil.rmtree(end.run.directory)", "No such file or directory"),
    "a full disk": (
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))",
        "File too large",
    ),
    "no descriptors": (
        "resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))",
        "Too many open files",
    ),
    "no memory for what is recorded": (
        OUT_OF_MEMORY + "Run.record_exit = no_memory",
        "MemoryError",
    ),
    "no memory for who failed first": (
        OUT_OF_MEMORY + "Run.first_to_fail = no_memory",
        "MemoryError",
    ),
    "no memory for a thread": (
        OUT_OF_MEMORY + "threading.Thread.start = no_memory",
        "",
    ),
    "a handler that raises meanwhile": (
        "signal.signal(signal.SIGALRM, lambda *_: 1 / 0); signal.setitimer(signal.ITIMER_REAL, 0.1)"
        "; record = Run.record_exit; "
        "Run.record_exit = lambda *args: (time.sleep(0.5), record(*args))",
        None,
    ),
    "a lock that a stopped rank holds": (
        "import fcntl; held = (end.run.directory / '.exit.lock').open('w');"
        "fcntl.flock(held, fcntl.LOCK_EX)",
        "",
    ),
    "nobody on standard error": ("os.close(2)", None),
}


def leave(tmp_path, without, **more):
    command = [sys.executable, "-c", LEAVING, str(tmp_path), without]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, **more)


@pytest.mark.parametrize("what", WITHOUT)
def test_leaving_needs_nothing_that_can_be_gone(tmp_path, what):
    without, complaint = WITHOUT[what]
    left = leave(tmp_path, without)
    assert left.returncode == 20, left.stderr
    if complaint is None:
        return
    *above, last = left.stderr.splitlines()
    assert last == "ppstream: exit 20 PEER_LOST the other rank is gone"
    complaints = [line for line in above if "first to fail" not in line]
    assert len(complaints) == bool(complaint), left.stderr
    assert complaint in "".join(complaints)
    recorded = (tmp_path / "logs" / "latest" / "exit.json").exists()
    assert recorded == (not complaint or "first" in what)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
@pytest.mark.parametrize("how", ["full", "read-only"])
def test_a_rank_leaves_a_real_disk_that_is_full_or_read_only(tmp_path, how):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)])
    if mounted.returncode:
        pytest.skip("no tmpfs is to be had here")
    without = "os.system(f'mount -o remount,ro {folder}')"
    if how == "full":
        fill = "(folder / 'filler').write_bytes(b'0' * (1 << 20))"
        without = f"try: {fill}\nexcept OSError: pass"
    try:
        left = leave(disk, without)
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    assert left.returncode == 20, left.stderr
    complaint, _, last = left.stderr.splitlines()
    assert last == "ppstream: exit 20 PEER_LOST the other rank is gone"
    assert "the end is not recorded" in complaint


def test_two_threads_that_leave_end_the_process_once(tmp_path):
    """Whoever comes second waits; what fails for the first one gives nobody's lock away."""
    other = "threading.Thread(target=end.leave, args=(ExitCode.WATCHDOG, 'stuck')).start()"
    left = leave(tmp_path, f"shutil.rmtree(end.run.directory); {other}; time.sleep(5)")
    assert left.returncode == 21, left.stderr
    assert left.stderr.count("ppstream: exit") == 1


def test_a_disk_that_never_answers_does_not_hold_up_the_end(tmp_path):
    left = leave(tmp_path, "ends.TELL_LIMIT_S = 0.2; Run.record_exit = lambda *_: time.sleep(60)")
    assert left.returncode == 20, left.stderr


def test_a_rank_ends_what_it_has_started(tmp_path):
    forked = "pid = os.fork() or time.sleep(60); print(pid, flush=True)"
    left = leave(tmp_path, forked)
    assert left.returncode == 20, left.stderr
    child = HeldProcess.of(int(left.stdout))
    assert child is None or child.wait_gone(10)


def test_a_stop_that_was_caught_while_a_rank_starts_stops_it_all_the_same() -> None:
    end, asked = RankEnd(0), []
    with suppress(BaseException):  # as some of what a rank imports does
        end.stop_early("SIGTERM")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        end.pass_stops_to(asked.append)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert asked == ["SIGTERM"]


CONNECTS = """
import socket, sys
connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[1])
sys.stdin.read()
"""


def test_the_process_that_a_rank_met_counts_and_not_one_that_has_become_its_guard(tmp_path):
    end = RankEnd(0)
    end.processes[1] = OtherProcess(leaves=False)  # as the lookout held it while it started
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        command = [sys.executable, "-c", CONNECTS, str(tmp_path / "socket")]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as rank:
            peer = Peer(listener.accept()[0])
            assert end.met(1, peer).pid == end.processes[1].pid == rank.pid
            peer.close()
