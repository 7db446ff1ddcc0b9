"""The same pipeline by hand, for comparison: two processes, shared memory, a UNIX socket, no more.

One thread each, two envelopes in flight, the same sleeps, the same bytes written and read: no
header, no checks, no time-stamp log, nobody who watches. ``measure`` starts the second process,
which is this file run by itself.
"""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

LEAD: Final = 2  # envelopes in flight, so also the slots: double-buffered
TOKEN_BYTES: Final = 8
END_LIMIT_S: Final = 20.0
WARM: Final = 30  # envelopes left out at the start
NS_PER_MS: Final = 1_000_000

Array = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class BareRun:
    """Means in ms per envelope; the stages as each timed itself."""

    period_ms: float
    stage0_ms: float
    stage1_ms: float

    @property
    def max_stage_ms(self) -> float:
        return max(self.stage0_ms, self.stage1_ms)


def measure(
    a_ms: float,
    b_ms: float,
    c_ms: float,
    payload: int,
    envelopes: int,
    cpus: Sequence[int] = (),
) -> BareRun:
    """Run ``envelopes`` through both processes, each with ``payload`` bytes (0: a token only).

    With ``cpus`` this thread and the second process run on the first and on the second of them.
    """
    before = os.sched_getaffinity(0)
    memory = os.memfd_create("bare_pipeline")
    os.ftruncate(memory, max(1, LEAD * payload))
    ours, theirs = socket.socketpair()
    command = [sys.executable, __file__, str(memory), str(theirs.fileno()), str(payload), str(b_ms)]
    second = subprocess.Popen(command, pass_fds=[memory, theirs.fileno()])
    try:
        for pid, cpu in zip((0, second.pid), cpus, strict=False):
            os.sched_setaffinity(pid, {cpu})
        theirs.close()
        ours.settimeout(END_LIMIT_S)
        _receive(ours)  # it is up
        return front(ours, _slots(memory, payload), (a_ms / 1e3, c_ms / 1e3), envelopes)
    finally:
        os.sched_setaffinity(0, before)
        ours.close()
        os.close(memory)
        try:
            second.wait(END_LIMIT_S)
        finally:
            second.kill()
            second.wait()


def front(
    link: socket.socket, slots: list[Array], sleeps_s: tuple[float, float], envelopes: int
) -> BareRun:
    """Stages A and C on one thread: fill the slots, then decode and refill in turn."""
    source = np.ones_like(slots[0])
    total = envelopes + WARM
    sent = answered = busy_ns = stage1_ns = began_ns = emitted_ns = 0
    while answered < total:
        while sent < total and sent - answered < LEAD:
            began = time.monotonic_ns()
            slots[sent % LEAD][:] = source
            _sleep(sleeps_s[0])
            busy_ns += time.monotonic_ns() - began
            link.sendall(sent.to_bytes(TOKEN_BYTES, "little"))
            sent += 1
        stage1_ns += _receive(link)
        began = time.monotonic_ns()
        _sleep(sleeps_s[1])
        emitted_ns = time.monotonic_ns()
        busy_ns += emitted_ns - began
        answered += 1
        if answered == WARM:
            began_ns, busy_ns, stage1_ns = emitted_ns, 0, 0
    spans_ns = (emitted_ns - began_ns, busy_ns, stage1_ns)
    return BareRun(*(span / envelopes / NS_PER_MS for span in spans_ns))


def back(memory: int, link: socket.socket, payload: int, b_s: float) -> None:
    """Stage B: read the slot, sleep, answer with how long that took."""
    slots, own = _slots(memory, payload), np.zeros(payload, np.uint8)
    link.sendall(bytes(TOKEN_BYTES))
    while token := link.recv(TOKEN_BYTES, socket.MSG_WAITALL):
        began = time.monotonic_ns()
        own[:] = slots[int.from_bytes(token, "little") % LEAD]
        _sleep(b_s)
        took_ns = time.monotonic_ns() - began
        link.sendall(took_ns.to_bytes(TOKEN_BYTES, "little"))


def _slots(memory: int, payload: int) -> list[Array]:
    shared = mmap.mmap(memory, max(1, LEAD * payload))
    return [np.frombuffer(shared, np.uint8, payload, slot * payload) for slot in range(LEAD)]


def _sleep(seconds: float) -> None:
    if seconds:
        time.sleep(seconds)


def _receive(link: socket.socket) -> int:
    token = link.recv(TOKEN_BYTES, socket.MSG_WAITALL)
    if len(token) < TOKEN_BYTES:
        raise SystemExit("the second process of the bare pipeline is gone")
    return int.from_bytes(token, "little")


if __name__ == "__main__":
    back(
        int(sys.argv[1]),
        socket.socket(fileno=int(sys.argv[2])),
        int(sys.argv[3]),
        float(sys.argv[4]) / 1e3,
    )
