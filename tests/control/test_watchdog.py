import os
import re
import signal
import threading

import pytest
from robot_rig import wait_until

from ppstream.control.watchdog import (
    INTERVAL_NS,
    ProgressMark,
    Watchdog,
    is_patient,
    overdue_ns,
    stage_b_limit_ns,
    with_watchdog,
)
from ppstream.core.clock import NS_PER_S, now_ns

LIMIT_NS = NS_PER_S


class Clocked:
    """A watchdog that looks when the test says so."""

    def __init__(self, path, *marks):
        self.now_ns = 0
        self.told = []
        self.watchdog = Watchdog(
            lambda: marks,
            lambda: LIMIT_NS,
            self.told.append,
            path / "stacks.txt",
            clock=lambda: self.now_ns,
        )

    def check(self, times=1, each_ns=INTERVAL_NS):
        for _ in range(times):
            self.now_ns += each_ns
            self.watchdog.check()


def test_a_loop_that_stands_still_is_named_with_what_it_does_and_where(tmp_path):
    mark = ProgressMark("stage B", lambda: "epoch 1, seq 7")
    clocked = Clocked(tmp_path, mark)
    runs, done = threading.Event(), threading.Event()

    def stand_still():
        with mark:
            runs.set()
            done.wait(30)

    thread = threading.Thread(target=stand_still, name="decode")
    thread.start()
    runs.wait(30)
    clocked.check(5)
    assert not clocked.told
    clocked.check(1)
    done.set()
    thread.join()
    assert "stage B made no progress for 1.2 s, limit 1.0 s at epoch 1, seq 7" in clocked.told[0]
    assert re.search(r"; decode is in .*stand_still > threading\.py", clocked.told[0])
    assert "Current thread" in (tmp_path / "stacks.txt").read_text()


def test_a_loop_that_turns_or_does_not_run_is_left_alone(tmp_path):
    turning, resting = ProgressMark("turning"), ProgressMark("resting")
    clocked = Clocked(tmp_path, turning, resting)
    with turning:
        for _ in range(40):
            turning.turns += 1
            clocked.check()
    assert not clocked.told


def test_time_in_which_the_process_was_stopped_does_not_count(tmp_path):
    mark = ProgressMark("loop")
    clocked = Clocked(tmp_path, mark)
    with mark:
        clocked.check(2)
        clocked.check(1, each_ns=3600 * NS_PER_S)
        assert not clocked.told


def test_a_slow_policy_is_given_five_times_its_usual_time():
    assert stage_b_limit_ns(5 * NS_PER_S, NS_PER_S // 100) == 5 * NS_PER_S
    assert stage_b_limit_ns(5 * NS_PER_S, 2 * NS_PER_S) == 10 * NS_PER_S


def test_patience_while_it_warms_up_or_is_profiled():
    assert is_patient("warming", "throughput")
    assert is_patient("ready", "trace")
    assert not is_patient("ready", "throughput")


def test_watched_runs_the_mark_while_the_loop_does(tmp_path):
    class Loop:
        mark = ProgressMark("loop")

        @with_watchdog
        def run(self, fails):
            assert self.mark.is_running
            assert self.mark.thread_id == threading.get_ident()
            if fails:
                raise ValueError("told to")

    Loop().run(False)
    with pytest.raises(ValueError, match="told to"):
        Loop().run(True)
    assert not Loop.mark.is_running


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals")
def test_sigquit_writes_all_stacks_and_a_quiet_run_leaves_no_file(tmp_path):
    clocked = Clocked(tmp_path)
    clocked.watchdog.start()
    os.kill(os.getpid(), signal.SIGQUIT)
    clocked.watchdog.stop()
    assert "test_sigquit_writes_all_stacks" in (tmp_path / "stacks.txt").read_text()
    (tmp_path / "quiet").mkdir()
    quiet = Clocked(tmp_path / "quiet")
    quiet.watchdog.start()
    quiet.watchdog.stop()
    quiet.watchdog.stop()
    assert not (tmp_path / "quiet" / "stacks.txt").exists()


def test_the_thread_tells_once_of_a_real_standstill(tmp_path):
    mark, told = ProgressMark("loop"), threading.Event()
    texts = []

    def tell(text):
        texts.append(text)
        told.set()

    limit_ns = NS_PER_S // 10
    watchdog = Watchdog(lambda: [mark], lambda: limit_ns, tell, tmp_path / "stacks.txt")
    watchdog.start()
    with mark:
        assert told.wait(60)
        wait_until(lambda: "watchdog" not in {thread.name for thread in threading.enumerate()})
    watchdog.stop()
    assert len(texts) == 1


def test_the_stacks_file_says_by_when_the_watchdog_looks_again_until_it_stops(tmp_path):
    stacks = tmp_path / "stacks.txt"
    assert overdue_ns(stacks, now_ns()) <= 0, "it has not begun"
    stacks.write_text("of a generation before: the file stays")
    watchdog = Watchdog(list, lambda: NS_PER_S * 3600, print, stacks, takes_signals=False)
    hour_ns = 3601 * NS_PER_S
    assert overdue_ns(stacks, now_ns() + hour_ns) <= 0, "it has promised nothing"
    watchdog.start()
    assert overdue_ns(stacks, now_ns() + hour_ns) > 0
    assert overdue_ns(stacks, now_ns()) <= 0
    watchdog.stop()
    assert overdue_ns(stacks, now_ns() + hour_ns) <= 0
