"""A robot is safe within the lease whatever happens to the other side: real signals, one process.

``tools/bench/robots.py`` measures the same against a whole run, fault by fault.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from forked_process import ForkedProcess
from robot_rig import LEASE_NS, MS, make_client, make_config, serving, wait_until

from ppstream.core.clock import now_ns
from ppstream.robot.client import RobotClient
from ppstream.robot.control_loop import ControlLoop

RATE_HZ = 200.0
SLACK_NS = 500 * MS  # a loaded machine runs the loop's thread late; it is not what is tested


class Body:
    """What a robot was told, and when, on a control loop of its own thread."""

    def __init__(self, client: RobotClient) -> None:
        self.executed_ns = 0
        self.held_ns = 0
        self.loop = ControlLoop(
            RATE_HZ, lambda at_ns: {"joints": [0, 0, 0]}, self._write, client, hold=self._hold
        )

    def _write(self, action: Any) -> None:
        self.executed_ns = now_ns()

    def _hold(self) -> None:
        self.held_ns = now_ns()

    def assert_safe_within_the_lease(self, fault_ns: int, reason: str = "lease") -> None:
        """It held soon after what it had been given expired, and executed nothing behind that."""
        wait_until(lambda: self.loop.fault is not None)
        fault = self.loop.fault
        assert fault is not None
        assert fault.reason == reason
        assert fault.expired_ns is not None
        assert fault.expired_ns <= fault_ns + LEASE_NS
        assert self.executed_ns <= fault.expired_ns + SLACK_NS
        assert fault.at_ns <= fault_ns + LEASE_NS + SLACK_NS
        wait_until(lambda: self.held_ns >= fault.at_ns)

    def assert_moving(self) -> None:
        began_ns = now_ns()
        wait_until(lambda: self.executed_ns > began_ns)


def freeze(pid: int) -> None:
    """Returns once each thread stands: until the one that takes it has a CPU, others run on."""
    os.kill(pid, signal.SIGSTOP)
    threads = Path(f"/proc/{pid}/task")
    wait_until(lambda: {_state(thread) for thread in threads.iterdir()} == {"T"})


def _state(thread: Path) -> str:
    return (thread / "stat").read_text().rsplit(")", 1)[1].split()[0]


@contextmanager
def running(client: RobotClient) -> Iterator[Body]:
    body = Body(client)
    thread = threading.Thread(target=body.loop.run)
    thread.start()
    try:
        yield body
    finally:
        body.loop.end()
        thread.join(10)


@pytest.mark.multirank
def test_a_frozen_and_then_a_killed_server_leave_the_robot_safe(tmp_path: Path) -> None:
    endpoint = f"unix://{tmp_path}/robots"
    server = ForkedProcess(["answering_server", endpoint], os.environ, tmp_path / "output")
    try:
        with make_client(endpoint) as client:
            client.connect(60)
            with running(client) as body:
                body.assert_moving()
                freeze(server.pid)
                body.assert_safe_within_the_lease(now_ns() + SLACK_NS // 10)
                os.kill(server.pid, signal.SIGCONT)
                received = client.timeline.statistics().received
                wait_until(lambda: client.timeline.statistics().received > received + 2)
                executed = body.loop.statistics().executed
                wait_until(lambda: client.timeline.statistics().received > received + 4)
                assert body.loop.statistics().executed == executed, "it resumed by itself"
                body.loop.clear_fault()
                body.assert_moving()
                server.kill()
                body.assert_safe_within_the_lease(now_ns() + SLACK_NS // 10)
    finally:
        server.kill()
        server.wait()


@pytest.mark.parametrize(("what", "reason"), [("blocked", "lease"), ("dead", "client")])
def test_a_receiving_thread_that_is_lost_leaves_the_robot_safe(what: str, reason: str) -> None:
    lost_ns: list[int] = []
    lost, release = threading.Event(), threading.Event()

    def on_chunk(chunk: Any) -> None:
        if not lost.is_set():
            return
        lost_ns.append(now_ns())
        if what == "dead":
            raise KeyError("user code")
        release.wait(60)

    with serving(make_config(), answers=True) as server:
        client = make_client(server.sessions.endpoint, on_chunk=on_chunk)
        client.connect()
        with running(client) as body:
            body.assert_moving()
            lost.set()
            wait_until(lambda: lost_ns)
            body.assert_safe_within_the_lease(lost_ns[0], reason)
            ticks = body.loop.statistics().ticks
            wait_until(lambda: body.loop.statistics().ticks > ticks + 20)  # it ticks on
        release.set()
        client.close()
