from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading

import pytest

from ppstream.core.realtime import (
    PR_GET_TIMERSLACK,
    NotPermittedError,
    RealTime,
    RealTimeScope,
    end_timeouts_on_time,
    timeouts_on_time,
)

#: What a user without any privilege is told; a process of its own, since there is no way back.
UNPRIVILEGED = """
import os, resource, sys
from ppstream.core.realtime import NotPermittedError, RealTime, RealTimeScope
resource.setrlimit(resource.RLIMIT_MEMLOCK, (4096, 4096))
resource.setrlimit(resource.RLIMIT_RTPRIO, (0, 0))
if os.getuid() == 0:
    os.setuid(65534)
scope = RealTimeScope(RealTime(fifo_priority=50, lock_memory=True))
with scope:
    print(*scope.refused, sep="\\n")
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
try:
    RealTimeScope(RealTime(fifo_priority=50, required=True)).__enter__()
except NotPermittedError as error:
    print("required:", error)
"""


def test_what_is_not_permitted_is_said_with_its_remedy() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", UNPRIVILEGED], check=True, capture_output=True, text=True, timeout=60
    )
    memory, fifo, required = ended.stdout.splitlines()
    assert "locking memory was refused" in memory
    assert "memlock unlimited" in memory
    assert "SCHED_FIFO priority 50 was refused" in fifo
    assert "'rtprio 50'" in fifo
    assert required.startswith("required: thread MainThread: SCHED_FIFO")


def test_processors_are_chosen_and_given_back() -> None:
    before = os.sched_getaffinity(0)
    one = frozenset({min(before)})
    with RealTimeScope(RealTime(cpus=one)) as scope:
        assert scope.refused == ()
        assert os.sched_getaffinity(0) == one
    assert os.sched_getaffinity(0) == before


def test_a_processor_that_is_not_there_is_refused() -> None:
    before = os.sched_getaffinity(0)
    with pytest.raises(NotPermittedError, match=r"processors \[999\] were refused"):
        RealTimeScope(RealTime(cpus=frozenset({999}), required=True)).__enter__()
    assert os.sched_getaffinity(0) == before


def test_a_priority_is_given_back_where_it_is_permitted() -> None:
    with RealTimeScope(RealTime(fifo_priority=1)) as scope:
        expected = os.SCHED_OTHER if scope.refused else os.SCHED_FIFO
        assert os.sched_getscheduler(0) & 7 == expected
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_nothing_wanted_is_nothing_asked() -> None:
    with RealTimeScope(RealTime()) as scope:
        assert scope.refused == ()


def test_a_threads_timeouts_end_on_time_once_it_asks() -> None:
    slack_ns: list[int] = []

    def look() -> None:
        slack_ns.append(ctypes.CDLL(None).prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0))

    def ask() -> None:
        assert end_timeouts_on_time()
        look()

    def ask_for_a_while() -> None:
        with timeouts_on_time():
            look()
        look()

    for work in (ask, look, ask_for_a_while):  # only who asks
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert slack_ns == [1, 50_000, 1, 50_000]
