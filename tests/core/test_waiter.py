from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Iterator

import pytest

import ppstream.core.waiter
from ppstream.core.clock import NS_PER_MS, NS_PER_S, now_ns
from ppstream.core.waiter import Waiter

LONG_NS = 10 * NS_PER_S


@pytest.fixture
def waiter() -> Iterator[Waiter]:
    waiter = Waiter()
    yield waiter
    waiter.close()


@pytest.fixture(params=["select", "poll"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to wait: descriptors above FD_SETSIZE leave only poll."""
    if request.param == "poll":
        monkeypatch.setattr(ppstream.core.waiter, "FD_SETSIZE", 0)


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("timeout_ns", [300_000, 2_500_000])
def test_it_never_returns_before_the_timeout(waiter: Waiter, timeout_ns: int) -> None:
    for _ in range(20):
        began = now_ns()
        waiter.wait(timeout_ns)
        assert now_ns() - began >= timeout_ns


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("timeout_ns", [None, LONG_NS])
def test_a_wake_before_the_wait_ends_it_and_only_it(waiter: Waiter, timeout_ns: int | None) -> None:
    waiter.wake()
    waiter.wake()
    began = now_ns()
    waiter.wait(timeout_ns)
    assert now_ns() - began < NS_PER_S
    began = now_ns()
    waiter.wait(5 * NS_PER_MS)
    assert now_ns() - began >= 5 * NS_PER_MS


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("timeout_ns", [None, LONG_NS])
def test_another_thread_ends_a_wait(waiter: Waiter, timeout_ns: int | None) -> None:
    timer = threading.Timer(0.02, waiter.wake)
    timer.start()
    began = now_ns()
    waiter.wait(timeout_ns)
    assert 10 * NS_PER_MS < now_ns() - began < 5 * NS_PER_S
    timer.join()


@pytest.mark.usefixtures("either")
def test_a_readable_or_hung_up_descriptor_ends_a_wait(waiter: Waiter) -> None:
    near, far = socket.socketpair()
    with near, far:
        waiter.register(near.fileno())
        far.send(b"x")
        began = now_ns()
        waiter.wait(LONG_NS)
        near.recv(1)
        far.close()
        waiter.wait(LONG_NS)
        waiter.wait(None)
        assert now_ns() - began < 5 * NS_PER_S
        waiter.unregister(near.fileno())
        began = now_ns()
        waiter.wait(3 * NS_PER_MS)
        assert now_ns() - began >= 3 * NS_PER_MS


def test_only_looking_does_not_wait(waiter: Waiter) -> None:
    began = now_ns()
    for _ in range(100):
        waiter.wait(0)
        waiter.wait(-5)
    assert now_ns() - began < NS_PER_S


@pytest.mark.usefixtures("either")
def test_a_wake_that_only_looking_finds_is_told_apart_from_nothing(waiter: Waiter) -> None:
    waiter.wake()
    assert not waiter.wait(0)
    assert waiter.woken
    assert not waiter.wait(0)
    assert not waiter.woken


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("timeout_ns", [None, LONG_NS])
def test_a_descriptor_closed_while_registered_is_an_error_not_a_busy_loop(
    waiter: Waiter, timeout_ns: int | None
) -> None:
    fd = os.eventfd(0)
    waiter.register(fd)
    os.close(fd)
    with pytest.raises(OSError, match=r"closed|Bad file"):
        waiter.wait(timeout_ns)


def test_the_same_descriptor_twice_is_refused(waiter: Waiter) -> None:
    near, far = socket.socketpair()
    with near, far:
        waiter.register(near.fileno())
        with pytest.raises(ValueError, match="already"):
            waiter.register(near.fileno())


def test_closing_twice_leaks_nothing_and_a_late_wake_writes_nowhere() -> None:
    before = len(os.listdir("/proc/self/fd"))
    waiter = Waiter()
    waiter.close()
    waiter.close()
    stranger = os.eventfd(0, os.EFD_NONBLOCK)  # takes the number that was freed
    waiter.wake()
    assert not select.select([stranger], (), (), 0)[0]
    os.close(stranger)
    assert len(os.listdir("/proc/self/fd")) == before
