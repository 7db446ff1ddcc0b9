"""Time of a hand-off between two ranks, by size: ``host`` and ``gloo`` links, bare socket.

Two processes on one host throw one envelope back and forth: the payload travels both ways, written
in place beforehand. One way is measured with the clock that both share (CLOCK_MONOTONIC), from just
before the commit to the moment the other side has the index. The bare socket is the same ping-pong
of the same bytes over a blocking UNIX socket without framing, checks or slots. CPU per message is
that of both processes together. Needs torch; prints a table, writes JSON with ``--json FILE``.
"""

from __future__ import annotations

import argparse
import os
import platform
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tools/


import numpy as np
import torch
from claimed_numbers import Claim, ratio, write_audited
from real_runs import free_port

from ppstream.control.launcher_store import join_store
from ppstream.control.peer import Peer
from ppstream.control.rendezvous import Listener, connect
from ppstream.core.interpreter import set_switch_interval
from ppstream.core.specs import TensorSpec
from ppstream.core.waiter import Waiter
from ppstream.links.factory import open_hops
from ppstream.links.protocol import Neighbours
from ppstream.links.slots import BACK, FRONT, LinkShape, SlotLayout

SIZES: Final = {"1 KB": 1 << 10, "64 KB": 1 << 16, "1 MB": 1 << 20, "8 MB": 8 << 20}
KINDS: Final = ("host", "gloo", "socket")
HEADER: Final = ("index", "generation", "sent_ns", "cpu_ns")
SENT: Final = 2
CPU: Final = 3
BARE_HEADER_BYTES: Final = 32
PAUSE_S: Final = 0.0002  # between round trips, so that each one wakes a sleeping process


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--messages", type=int, default=2000, help="round trips of the small sizes")
    parser.add_argument("--repeats", type=int, default=2, help="interleaved repetitions of it all")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    set_switch_interval()
    if arguments.child is not None:
        child(arguments.child)
        return
    rows = measure_all(arguments.messages, arguments.repeats)
    print_table(rows)
    report = {"environment": environment(), "rows": rows}
    write_audited(arguments.json, report, claims_of(rows))


def environment() -> dict[str, Any]:
    return {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def claims_of(rows: list[dict[str, Any]]) -> list[Claim]:
    """Every kind over the bare socket of the same size, as the table's last column."""
    bare = {row["size"]: row["p50_us"] for row in rows if row["kind"] == "socket"}
    return [
        ratio(
            f"{row['kind']} link, {row['size']}: p50 / socket",
            row["p50_us"],
            bare[row["size"]],
            row["vs_socket"],
        )
        for row in rows
        if row["kind"] != "socket"
    ]


def measure_all(messages: int, repeats: int) -> list[dict[str, Any]]:
    """One row per kind and size; repetitions are interleaved, so a slow moment hits all."""
    rows: list[dict[str, Any]] = []
    other = Other()
    for name, size in SIZES.items():
        count = max(100, min(messages, (1 << 28) // size))
        one_way: dict[str, list[int]] = {kind: [] for kind in KINDS}
        cpu_ns = dict.fromkeys(KINDS, 0)
        for _ in range(repeats):
            for kind in KINDS:
                durations, cpu = measure(other, kind, size, count)
                one_way[kind] += durations
                cpu_ns[kind] += cpu
        for kind in KINDS:
            p50, p99, highest = np.percentile(one_way[kind], (50, 99, 100)) / 1e3
            rows.append(
                {
                    "kind": kind,
                    "size": name,
                    "n": len(one_way[kind]),
                    "p50_us": round(float(p50), 1),
                    "p99_us": round(float(p99), 1),
                    "max_us": round(float(highest), 1),
                    "cpu_us_per_message": round(cpu_ns[kind] / len(one_way[kind]) / 1e3, 1),
                }
            )
    other.end()
    bare = {row["size"]: row["p50_us"] for row in rows if row["kind"] == "socket"}
    return [row | {"vs_socket": row["p50_us"] / bare[row["size"]]} for row in rows]


class Other:
    """The second process: imports once, then takes part in one measurement after the other."""

    def __init__(self) -> None:
        self.bare, far = socket.socketpair()
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--child", str(far.fileno())],
            pass_fds=[far.fileno()],
            stdin=subprocess.PIPE,
            text=True,
        )
        far.close()

    def begin(self, kind: str, size: int, count: int, port: int) -> None:
        assert self.process.stdin is not None
        print(kind, size, count, port, file=self.process.stdin, flush=True)

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        if self.process.wait(20):
            raise SystemExit(f"the second process ended with {self.process.returncode}")


def measure(other: Other, kind: str, size: int, count: int) -> tuple[list[int], int]:
    """One-way durations of ``2 * count`` messages and the CPU time both processes took, in ns."""
    port = free_port()
    other.begin(kind, size, count, port)
    end = open_end(kind, size, other.bare, port, front=True)
    durations: list[int] = []
    for index in range(count + 1):
        time.sleep(PAUSE_S)
        if index == 1:  # the first one warms up
            durations.clear()
            cpu_ns = time.process_time_ns() + end.far_cpu_ns
        end.send(index)
        durations += [end.receive(index), end.far_duration_ns]
    total_ns = time.process_time_ns() + end.far_cpu_ns - cpu_ns
    end.close()
    return durations, total_ns


def child(fd: int) -> None:
    bare = socket.socket(fileno=fd)
    for line in sys.stdin:
        kind, *numbers = line.split()
        size, count, port = map(int, numbers)
        end = open_end(kind, size, bare, port, front=False)
        for index in range(count + 1):
            end.send(index, end.receive(index))
        end.close()


def open_end(
    kind: str, size: int, bare: socket.socket, port: int, *, front: bool
) -> LinkEnd | BareEnd:
    return BareEnd(bare, size) if kind == "socket" else LinkEnd(kind, size, port, front=front)


class LinkEnd:
    """One end of a real link, between processes that found each other as ranks do."""

    def __init__(self, kind: str, size: int, port: int, *, front: bool) -> None:
        rank = "0" if front else "1"
        store = join_store({"RANK": rank, "WORLD_SIZE": "2", "MASTER_PORT": str(port)})
        layout = SlotLayout(HEADER, (TensorSpec("x", (size,), "uint8"),), 1)
        shape = LinkShape(layout, layout, 2, 2)
        if front:
            listener = Listener(store)
            self.peer: Peer = listener.accept(20.0)
            listener.close()
        else:
            self.peer = connect(store, 20.0)
        self.hops = open_hops(
            kind,
            Neighbours.pair(FRONT if front else BACK, self.peer),
            store,
            shape,
            timeout_s=20.0,
        )
        self.outgoing, self.incoming = self.hops.out.slot, self.hops.into.slot
        self.commit = self.hops.out.commit
        self.waiter = Waiter()
        self.waiter.register(self.peer.fileno())
        self.hops.into.register_with(self.waiter)
        self.far_duration_ns = self.far_cpu_ns = 0

    def send(self, index: int, extra_ns: int = 0) -> None:
        slot = self.outgoing(index)
        slot.tensors["x"][0, :8].view(torch.int64)[0] = extra_ns
        slot.header[CPU] = time.process_time_ns()
        slot.header[SENT] = time.monotonic_ns()
        self.commit(index)

    def receive(self, index: int) -> int:
        while self.hops.into.receive_nowait() is None:
            self.hops.into.on_ready(self.waiter.wait(None))
        arrived_ns = time.monotonic_ns()
        slot = self.incoming(index)
        self.far_cpu_ns = int(slot.header[CPU])
        self.far_duration_ns = int(slot.tensors["x"][0, :8].view(torch.int64)[0])
        return arrived_ns - int(slot.header[SENT])

    def close(self) -> None:
        self.hops.close()
        self.waiter.close()
        self.peer.close()


class BareEnd:
    """The same bytes over a blocking UNIX socket."""

    def __init__(self, sock: socket.socket, size: int) -> None:
        self.socket = sock
        self.out = bytearray(BARE_HEADER_BYTES + size)
        self.into = bytearray(BARE_HEADER_BYTES + size)
        self.far_duration_ns = self.far_cpu_ns = 0

    def send(self, index: int, extra_ns: int = 0) -> None:
        header = np.frombuffer(self.out, dtype=np.int64, count=4)
        header[:] = (index, time.monotonic_ns(), time.process_time_ns(), extra_ns)
        self.socket.sendall(self.out)

    def receive(self, index: int) -> int:
        view, filled = memoryview(self.into), 0
        while filled < len(view):
            filled += self.socket.recv_into(view[filled:])
        arrived_ns = time.monotonic_ns()
        found, sent_ns, self.far_cpu_ns, self.far_duration_ns = np.frombuffer(
            self.into, dtype=np.int64, count=4
        ).tolist()
        assert found == index
        return int(arrived_ns - sent_ns)

    def close(self) -> None:
        """The socket serves the next size, too."""


def print_table(rows: list[dict[str, Any]]) -> None:
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}")
    print("size   link     one way p50     p99       max µs   CPU µs per message   p50 / socket")
    for row in rows:
        print(
            f"{row['size']:6} {row['kind']:8} {row['p50_us']:10.1f} {row['p99_us']:9.1f} "
            f"{row['max_us']:9.1f} {row['cpu_us_per_message']:15.1f} "
            f"{row['vs_socket']:18.2f}"
        )


if __name__ == "__main__":
    main()
