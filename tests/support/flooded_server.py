"""Prints what becomes of a server with more connections than descriptors, and a robot that is in.

Imports neither torch nor the rig: that takes two seconds.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import stat
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress

from ppstream.core.clock import now_ns
from ppstream.wire.transports import bind_server, connect_client

DESCRIPTORS = 64
LOOK_S = 0.1  # between two looks of its owner
LIMIT_NS = 60 * 10**9


def main() -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, most))
    statm = os.open("/proc/self/statm", os.O_RDONLY)

    def resident_mib() -> float:
        return int(os.pread(statm, 100, 0).split()[1]) * resource.getpagesize() / (1 << 20)

    def connections() -> int:
        count = 0
        for descriptor in range(DESCRIPTORS):
            with suppress(OSError):
                count += stat.S_ISSOCK(os.fstat(descriptor).st_mode)
        return count

    server = bind_server("tcp://127.0.0.1:0")
    client = connect_client(server.endpoint)
    wait_until(lambda: client.send(b"first") and server.drain())
    port = server.endpoint.rpartition(":")[2]
    before = connections()
    script = (
        "import resource, socket, sys\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, (1024, {most}))\n"
        f"held = [socket.create_connection(('127.0.0.1', {port})) for _ in range(150)]\n"
        "print('open', flush=True)\n"
        "sys.stdin.read()\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    flood = subprocess.Popen([sys.executable, "-c", script], **pipes)
    assert flood.stdin is not None
    assert flood.stdout is not None
    flood.stdout.readline()
    wait_until(lambda: server.refused().get("accept"))
    before_mib, grown_mib = resident_mib(), 0.0
    for _ in range(10):
        time.sleep(LOOK_S)  # the owner is at other work; what comes meanwhile is all that may wait
        refused = server.refused()
        grown_mib = max(grown_mib, resident_mib() - before_mib)
    wait_until(lambda: client.send(b"still here"))
    wait_until(server.drain)
    flood.stdin.close()
    flood.wait()
    flood.stdout.close()
    behind = connect_client(server.endpoint)  # connections are accepted in their order
    wait_until(lambda: behind.send(b"behind them") and server.drain())
    behind.close()
    wait_until(lambda: connections() == before)  # so all were accepted, and ended
    looks = [server.refused()]
    wait_until(lambda: looks.append(server.refused()) or looks[-1] == looks[-2])
    last = looks[-1]
    backlog = sum(last.values()) - sum(refused.values())
    raw = socket.create_connection(("127.0.0.1", int(port)))
    raw.sendall(b"no ZeroMQ at all" * 8)
    raw.close()
    wait_until(lambda: server.refused() != last)
    now = server.refused()
    print(
        json.dumps(
            {
                "refused": refused,
                "backlog": backlog,
                "grown_mib": grown_mib,
                "counted_behind_it": now.get("handshake", 0) - last.get("handshake", 0),
            }
        )
    )
    client.close()
    server.close()


def wait_until(condition: Callable[[], object]) -> None:
    deadline_ns = now_ns() + LIMIT_NS
    while not condition():
        assert now_ns() < deadline_ns, "it did not happen in time"
        time.sleep(0.002)


if __name__ == "__main__":
    try:
        main()
    except AssertionError:
        traceback.print_exc()
        os._exit(1)  # ending its context would wait for sockets that are open
