"""How long a hand-off between two GPUs takes, by size and link: ``peer``, ``pinned`` and ``nccl``.

Two processes throw one slot back and forth, everything queued beforehand: one way is half a round
trip between events of one device, and no host is on the path. The hop from the receiving to the
sending stream, which a stage has too, is in it. CPU is what queueing one message, its receipt and
the events between costs this process. Needs two GPUs; prints a table, writes JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench_claims import Claim, bandwidth, ratio
from bench_runs import (
    Target,
    free_port,
    print_environment,
    print_targets,
    rank_environment,
    write_json,
)

SIZES: Final = {"1 KB": 1 << 10, "64 KB": 1 << 16, "1 MB": 1 << 20, "16 MB": 1 << 24}
LINKS: Final = ("peer", "pinned", "nccl")
ROUNDS: Final = 9
TRIPS: Final = 100  # queued together: far below what a stream takes
LIMIT_S: Final = 120
WAIT_S: Final = 20.0
HEADER: Final = ("index", "generation")
ONE_WAY_US: Final = {"1 KB": 4.0, "64 KB": 6.0, "1 MB": 9.0, "16 MB": 55.0}
CPU_US: Final = 4.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--links", default=",".join(LINKS), help="default: %(default)s")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    links = arguments.links.split(",")
    if arguments.child is not None:
        return child(links, arguments.child)
    print_environment("everything queued beforehand")
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "rows.json"
        command = [sys.executable, *sys.argv, "--child", str(output)]
        ranks = [subprocess.Popen(command, env=rank_environment(n, port)) for n in range(2)]
        try:
            codes = [rank.wait(LIMIT_S) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        rows = json.loads(output.read_text()) if output.exists() else []
    targets = [
        Target(f"peer, {row['size']}: one way in us", ONE_WAY_US[row["size"]], row["p50_us"])
        for row in rows
        if row["link"] == "peer"
    ]
    targets += [
        Target(f"peer, {row['size']}: CPU us per message", CPU_US, row["cpu_us"])
        for row in rows
        if row["link"] == "peer"
    ]
    print_targets(targets)
    write_json(arguments.json, "queued", targets, claims=claims_of(rows), rows=rows)
    return max(codes)


def claims_of(rows: list[dict[str, Any]]) -> list[Claim]:
    """Bytes a second at the median one way, and the CPU time of one message."""
    claims = []
    for row in rows:
        what, size = f"{row['link']}, {row['size']}", SIZES[row["size"]]
        cpu_us = row["cpu_s"] * 1e6
        claims += [
            bandwidth(f"{what}: one way", size, row["p50_us"] / 1e6, row["gb_s"] * 1e9),
            ratio(f"{what}: CPU us per message", cpu_us, row["messages"], row["cpu_us"]),
        ]
    return claims


def child(links: list[str], output: Path) -> int:
    """One rank; leaves without Python's own end, which a stream that waits could hold up."""
    import torch

    from ppstream import cuda_start
    from ppstream.links import BACK, FRONT, join_store, open_device

    store = join_store()
    is_front = store.rank == 0
    device = torch.device("cuda", store.rank)
    cuda_start.start(device)
    rows: list[dict[str, Any]] = []
    if is_front:
        print(
            f"{'link':7} {'size':>6} {'p50 us':>8} {'min':>8} {'max':>8} {'GB/s':>7} {'CPU us':>7}"
        )
    for name, size in SIZES.items():
        for kind in links:
            here = _store_of(store, f"{kind}/{size}")
            side = FRONT if is_front else BACK
            link = open_device(kind, side, here, _shape(size), device)
            trips = min(TRIPS, max(10, (1 << 30) // size))
            one_way_us, cpu_s = throw(link, here, trips, is_front=is_front)
            link.close()
            if is_front:
                one_way_us.sort()
                p50_us = one_way_us[len(one_way_us) // 2]
                row: dict[str, Any] = {"link": kind, "size": name, "p50_us": p50_us}
                row |= {"min_us": one_way_us[0], "max_us": one_way_us[-1]}
                row |= costs_of(size, p50_us, cpu_s, ROUNDS * trips)
                rows.append(row)
                print(
                    f"{kind:7} {name:>6} {row['p50_us']:8.2f} {row['min_us']:8.2f}"
                    f" {row['max_us']:8.2f} {row['gb_s']:7.2f} {row['cpu_us']:7.2f}",
                    flush=True,
                )
    if is_front:
        output.write_text(json.dumps(rows))
        store.get("gone", WAIT_S)
    else:
        store.set("gone", "1")
    sys.stdout.flush()
    os._exit(0)


def costs_of(size: int, one_way_us: float, cpu_s: float, messages: int) -> dict[str, float]:
    """Gigabytes a second one way; CPU time of all messages, and of one."""
    return {
        "gb_s": size / one_way_us / 1e3,
        "cpu_s": cpu_s,
        "messages": messages,
        "cpu_us": cpu_s * 1e6 / messages,
    }


def throw(link: Any, store: Any, trips: int, *, is_front: bool) -> tuple[list[float], float]:
    """One way in µs, by round, and this process's CPU time of all rounds in s."""
    from ppstream.memops import Event

    events = [Event() for _ in range(trips + 1)]
    one_way_us: list[float] = []
    cpu_ns = index = 0
    for round_ in range(ROUNDS + 1):
        store.set(f"{int(is_front)}/{round_}", "1")
        store.get(f"{int(not is_front)}/{round_}", WAIT_S)
        begun_ns = time.thread_time_ns()
        link.sending.record(events[0])
        for trip in range(trips):
            if is_front:
                link.sending.wait_for(events[trip])
                link.queue_send(index)
            link.queue_receive(index)
            link.receiving.record(events[trip + 1])
            if not is_front:
                link.sending.wait_for(events[trip + 1])
                link.queue_send(index)
            index += 1
        spent_ns = time.thread_time_ns() - begun_ns
        events[trips].wait()
        if round_:  # the first one warms
            cpu_ns += spent_ns
            # the first trip waits until the other end has queued its part
            span_ns = events[trips].ns_since(events[1])
            one_way_us.append(span_ns / (trips - 1) / 2e3)
    return one_way_us, cpu_ns / 1e9


def _shape(size: int) -> Any:
    from ppstream.slots import LinkShape
    from ppstream.specs import SlotLayout, TensorSpec

    layout = SlotLayout(HEADER, (TensorSpec("bytes", (size,), "uint8"),), 1)
    return LinkShape(layout, layout, 2, 2)


def _store_of(store: Any, prefix: str) -> Any:
    import torch.distributed as dist

    from ppstream.links import LauncherStore

    raw = dist.PrefixStore(prefix, store.raw)  # type: ignore[attr-defined]
    return LauncherStore(raw, store.rank, store.world_size, store.generation)


if __name__ == "__main__":
    sys.exit(main())
