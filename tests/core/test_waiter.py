from __future__ import annotations

import mmap
import os
import resource
import select
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import ppstream.core.waiter
from ppstream import native
from ppstream.core.clock import NS_PER_MS, NS_PER_S, now_ns
from ppstream.core.waiter import PythonWaiter, Waiter
from ppstream.links.doorbell import SLEEPS, WORD_BYTES, Doorbell, PythonDoorbell, doorbell_bytes

LONG_NS = 10 * NS_PER_S
SPIN_NS = 2 * NS_PER_MS
ROUNDS = 8_000


@pytest.fixture(params=["select", "poll", "compiled"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[PythonWaiter]:
    """Both ways of Python to wait, since descriptors above FD_SETSIZE leave only poll; and C's."""
    if request.param == "compiled":
        if not native.is_used:
            pytest.skip(f"no compiled core: {native.why_not}")
        return Waiter
    if request.param == "poll":
        monkeypatch.setattr(ppstream.core.waiter, "FD_SETSIZE", 0)
    return PythonWaiter


@pytest.fixture(params=[0, SPIN_NS], ids=["sleeps", "spins"])
def waiter(kind: type[PythonWaiter], request: pytest.FixtureRequest) -> Iterator[PythonWaiter]:
    waiter = kind(request.param)
    yield waiter
    waiter.close()


def test_the_compiled_core_waits_where_there_is_one() -> None:
    compiled = native.Waiter.__dict__.get("wait")
    assert (Waiter.wait is compiled) == native.is_used


@pytest.mark.parametrize("timeout_ns", [300_000, 2_500_000])
def test_it_never_returns_before_the_timeout(waiter: PythonWaiter, timeout_ns: int) -> None:
    for _ in range(20):
        began = now_ns()
        assert not waiter.wait(timeout_ns)
        assert now_ns() - began >= timeout_ns


@pytest.mark.parametrize(
    ("spin_ns", "sleeps"), [(0, True), (5 * NS_PER_MS, True), (LONG_NS, False)]
)
def test_it_sleeps_only_once_it_has_looked_for_so_long(
    kind: type[PythonWaiter], spin_ns: int, *, sleeps: bool
) -> None:
    """Whoever gives up the CPU to nobody in particular has slept."""
    waiter = kind(spin_ns)
    times = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    assert not waiter.wait(50 * NS_PER_MS)
    assert (resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw > times) == sleeps
    waiter.close()


@pytest.mark.parametrize("timeout_ns", [None, LONG_NS])
def test_a_wake_before_the_wait_ends_it_and_only_it(
    waiter: PythonWaiter, timeout_ns: int | None
) -> None:
    waiter.wake()
    waiter.wake()
    began = now_ns()
    waiter.wait(timeout_ns)
    assert now_ns() - began < NS_PER_S
    began = now_ns()
    waiter.wait(5 * NS_PER_MS)
    assert now_ns() - began >= 5 * NS_PER_MS


@pytest.mark.parametrize("timeout_ns", [None, LONG_NS])
def test_another_thread_ends_a_wait(waiter: PythonWaiter, timeout_ns: int | None) -> None:
    wakes = threading.Event()

    def wake() -> None:
        wakes.set()
        waiter.wake()

    timer = threading.Timer(0.02, wake)
    timer.start()
    began = now_ns()
    assert not waiter.wait(timeout_ns)
    assert wakes.is_set()
    assert now_ns() - began < 5 * NS_PER_S
    assert waiter.woken
    timer.join()
    waiter.wait(0)  # the wake may have come between the wait's end and the last look at its flag
    assert not waiter.wait(0)
    assert not waiter.woken


def test_no_wake_is_slept_over_between_two_threads(waiter: PythonWaiter) -> None:
    posted, seen = [0], threading.Semaphore(0)

    def post() -> None:
        for _ in range(ROUNDS):
            posted[0] += 1
            waiter.wake()
            seen.acquire()

    thread = threading.Thread(target=post, daemon=True)
    thread.start()
    for number in range(ROUNDS):
        while posted[0] <= number:
            waiter.wait(LONG_NS)
            assert waiter.woken, "a wake was slept over"
        seen.release()
    thread.join()


def test_a_readable_or_hung_up_descriptor_ends_a_wait(waiter: PythonWaiter) -> None:
    near, far = socket.socketpair()
    with near, far:
        waiter.register(near.fileno())
        far.send(b"x")
        began = now_ns()
        assert waiter.wait(LONG_NS) == [near.fileno()]
        near.recv(1)
        far.close()
        assert waiter.wait(LONG_NS) == [near.fileno()]
        assert waiter.wait(None) == [near.fileno()]
        assert now_ns() - began < 5 * NS_PER_S
        waiter.unregister(near.fileno())
        began = now_ns()
        assert not waiter.wait(3 * NS_PER_MS)
        assert now_ns() - began >= 3 * NS_PER_MS


def test_a_wake_beside_readable_descriptors_says_that_anything_may_be(waiter: PythonWaiter) -> None:
    fd = os.eventfd(1)
    waiter.register(fd)
    waiter.wake()
    assert not waiter.wait(0)
    assert waiter.wait(0) == [fd]
    os.close(fd)


def test_only_looking_does_not_wait(waiter: PythonWaiter) -> None:
    began = now_ns()
    for _ in range(100):
        waiter.wait(0)
        waiter.wait(-5)
    assert now_ns() - began < NS_PER_S


def test_a_wake_that_only_looking_finds_is_told_apart_from_nothing(waiter: PythonWaiter) -> None:
    waiter.wake()
    assert not waiter.wait(0)
    assert waiter.woken
    assert not waiter.wait(0)
    assert not waiter.woken


@pytest.mark.parametrize("timeout_ns", [None, LONG_NS])
def test_a_descriptor_closed_while_registered_is_an_error_not_a_busy_loop(
    waiter: PythonWaiter, timeout_ns: int | None
) -> None:
    fd = os.eventfd(0)
    waiter.register(fd)
    os.close(fd)
    with pytest.raises(OSError, match=r"closed|Bad file"):
        waiter.wait(timeout_ns)


def test_the_same_descriptor_twice_is_refused(waiter: PythonWaiter) -> None:
    near, far = socket.socketpair()
    with near, far:
        waiter.register(near.fileno())
        with pytest.raises(ValueError, match="already"):
            waiter.register(near.fileno())


# ---- signals -------------------------------------------------------------------------------------


class Stop(Exception):
    """Raised by a signal's handler."""


class SleepFlag:
    """A doorbell of a waiter: in its memory stands whether a thread is inside the wait."""

    def __init__(self, waiter: PythonWaiter) -> None:
        bell = Doorbell if isinstance(waiter, Waiter) else PythonDoorbell
        self._memory = mmap.mmap(-1, doorbell_bytes(1))
        self._bell = bell(self._memory, 1, os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
        waiter.register_bell(self._bell)
        self.fd = self._bell.fileno()

    def ring(self) -> None:
        self._bell.ring(0, 1, 0)

    def is_set(self) -> bool:
        return bool(self._memory[SLEEPS * WORD_BYTES])

    def close(self) -> None:
        self._bell.close()


@pytest.fixture
def flag(waiter: PythonWaiter) -> Iterator[SleepFlag]:
    flag = SleepFlag(waiter)
    yield flag
    flag.close()


def is_readable(fd: int) -> bool:
    return bool(select.select([fd], [], [], 0)[0])


@pytest.mark.parametrize("kind", ["poll", "compiled"], indirect=True)
def test_a_wait_awake_sees_a_bell_that_rings_for_nobody_who_sleeps(
    kind: type[PythonWaiter], monkeypatch: pytest.MonkeyPatch
) -> None:
    waiter = kind()
    flag, looks = SleepFlag(waiter), list[int]()

    def rings_at_the_third_look() -> int:
        looks.append(now_ns())
        if len(looks) == 3:
            flag.ring()
        return looks[-1]

    monkeypatch.setattr(ppstream.core.waiter, "now_ns", rings_at_the_third_look)
    assert waiter.wait_awake(LONG_NS) == [flag.fd]
    assert len(looks) < 10  # one in the loop, and those of a wait that only looks
    assert not is_readable(flag.fd)
    flag.close()
    waiter.close()


def test_a_wait_awake_ends_with_its_time_or_a_wake_and_looks_at_all_then(
    kind: type[PythonWaiter],
) -> None:
    waiter = kind()
    flag, (here, there) = SleepFlag(waiter), socket.socketpair()
    waiter.register(here.fileno())
    sleeps = []  # of each wait: a page or a lock may cost one of them a sleep
    for _ in range(5):
        before, began_ns = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw, now_ns()
        assert not waiter.wait_awake(20 * NS_PER_MS)
        assert now_ns() - began_ns >= 20 * NS_PER_MS
        sleeps.append(resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before)
    assert min(sleeps) == 0
    assert not waiter.woken
    there.send(b"1")
    assert waiter.wait_awake(NS_PER_MS) == [here.fileno()]
    began_ns = now_ns()
    waiter.wake()
    assert not waiter.wait_awake(LONG_NS)
    assert waiter.woken
    assert now_ns() - began_ns < NS_PER_S
    for end in (here, there, flag, waiter):
        end.close()


def test_a_wait_awake_that_looks_sees_other_descriptors_without_a_sleep(
    kind: type[PythonWaiter],
) -> None:
    waiter, (here, there) = kind(), socket.socketpair()
    waiter.register(here.fileno())
    sleeps = []
    for _ in range(5):
        began_ns = now_ns()
        threading.Timer(0.01, there.send, [b"1"]).start()
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        assert waiter.wait_awake(LONG_NS, 20_000) == [here.fileno()]
        sleeps.append(resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before)
        assert now_ns() - began_ns < NS_PER_S
        here.recv(1)
    assert not waiter.wait_awake(NS_PER_MS, 20_000)
    assert min(sleeps) <= 3  # a few for the GIL, which the sender takes
    for end in (here, there, waiter):
        end.close()


def test_without_a_bell_a_wait_awake_is_a_wait(kind: type[PythonWaiter]) -> None:
    waiter, (here, there) = kind(), socket.socketpair()
    waiter.register(here.fileno())
    threading.Timer(0.01, there.send, [b"1"]).start()
    began_ns = now_ns()
    assert waiter.wait_awake(LONG_NS) == [here.fileno()]
    assert now_ns() - began_ns < NS_PER_S
    for end in (here, there, waiter):
        end.close()


@contextmanager
def signals(handler: signal.Handlers | object, flag: SleepFlag) -> Iterator[None]:
    """SIGUSR1 for this thread, again and again while it waits."""
    before = signal.signal(signal.SIGUSR1, handler)  # type: ignore[arg-type]
    ended, here = threading.Event(), threading.get_ident()

    def send() -> None:
        while not ended.wait(0.002):
            if flag.is_set():
                signal.pthread_kill(here, signal.SIGUSR1)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        signal.signal(signal.SIGUSR1, before)


def test_a_signal_s_handler_runs_at_once_and_may_wake(
    waiter: PythonWaiter, flag: SleepFlag
) -> None:
    with signals(lambda *_: waiter.wake(), flag):
        assert not waiter.wait(LONG_NS)
    assert waiter.woken


def test_after_a_signal_the_rest_of_the_time_is_waited_for(
    waiter: PythonWaiter, flag: SleepFlag
) -> None:
    heard: list[int] = []
    with signals(lambda number, _: heard.append(number), flag):
        began = now_ns()
        assert not waiter.wait(50 * NS_PER_MS)
    assert now_ns() - began >= 50 * NS_PER_MS
    assert not waiter.woken
    assert heard


def test_what_a_handler_raises_ends_the_wait_and_loses_no_wake(
    waiter: PythonWaiter, flag: SleepFlag
) -> None:
    def stop(*_: object) -> None:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        waiter.wake()
        raise Stop

    with signals(stop, flag), pytest.raises(Stop):
        waiter.wait(LONG_NS)
    waiter.wait(LONG_NS)
    assert waiter.woken


def test_closing_twice_leaks_nothing_and_a_late_wake_writes_nowhere(
    kind: type[PythonWaiter],
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    waiter = kind()
    flag = SleepFlag(waiter)
    strangers: list[int] = []

    def close_and_wake(*_: object) -> None:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        waiter.close()
        waiter.close()
        strangers.append(os.eventfd(0, os.EFD_NONBLOCK))  # takes the number that was freed
        waiter.wake()
        raise Stop

    with signals(close_and_wake, flag), pytest.raises(Stop):
        waiter.wait(LONG_NS)
    assert not select.select(strangers, (), (), 0)[0]
    os.close(strangers[0])
    flag.close()
    assert len(os.listdir("/proc/self/fd")) <= before  # others of this process may close theirs
