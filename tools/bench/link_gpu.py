"""Time of a hand-off between two GPUs, by size and way: ``peer``, ``pinned`` and ``nccl``.

Two processes throw one slot back and forth; one way is half of a round trip, and everything was
queued before a gate opened, so no host is on the path. The ways: ``put`` and ``copy`` are the
``peer`` link's: with D_in = 1 always the first, else for small slots and for bulk. The modes:
``graph``, all trips in one CUDA graph; ``queued``, call by call in one stream; ``hops``, received
by a stage's stream and sent behind it by the link's, as in the loops. CPU is what queueing one
message and one receipt costs. Needs two GPUs; prints a table, writes JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tools/


from claimed_numbers import Claim, bandwidth, ratio
from real_runs import (
    Target,
    free_port,
    print_environment,
    print_targets,
    rank_environment,
    write_json,
)

if TYPE_CHECKING:
    from bench.link_gpu_rounds import LinkRun

SIZES: Final = {
    "1 KB": 1 << 10,
    "16 KB": 1 << 14,
    "64 KB": 1 << 16,
    "256 KB": 1 << 18,
    "1 MB": 1 << 20,
    "16 MB": 1 << 24,
}
WAYS: Final = ("put", "copy", "pinned", "nccl")
LIMIT_S: Final = 240
WAIT_S: Final = 20.0
ONE_WAY_US: Final = {"1 KB": 4.0, "64 KB": 6.0, "1 MB": 9.0, "16 MB": 55.0}
CPU_US: Final = 4.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ways", default=",".join(WAYS), help="default: %(default)s")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    ways = arguments.ways.split(",")
    if arguments.child is not None:
        return child(ways, arguments.child)
    print_environment("everything queued beforehand")
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "rows.json"
        command = [sys.executable, *sys.argv, "--child", str(output)]
        ranks = [subprocess.Popen(command, env=rank_environment(n, port)) for n in range(2)]
        try:
            codes = [rank.wait(LIMIT_S) for rank in ranks]
        except subprocess.TimeoutExpired:
            print(f"no end within {LIMIT_S} s: what follows is what was measured until then")
            codes = [1]
        finally:
            for rank in ranks:
                rank.kill()
        rows = json.loads(output.read_text()) if output.exists() else []
    print_crossing(rows)
    targets = targets_of(rows)
    print_targets(targets)
    write_json(arguments.json, "queued", targets, claims=claims_of(rows), rows=rows)
    return max(abs(code) for code in codes)


def runs_of(ways: list[str]) -> Iterator[LinkRun]:
    """All rows; graphs come last. NCCL has none: behind one its link was seen not to close."""
    from bench.link_gpu_rounds import LinkRun

    for size in SIZES.values():
        for way in ways:
            yield LinkRun(way, size, "queued")
            yield LinkRun(way, size, "hops")
    for size in SIZES.values():
        for way in ways:
            if way != "nccl":
                yield LinkRun(way, size, "graph")


def child(ways: list[str], output: Path) -> int:
    """One rank; leaves without Python's own end, which a stream that waits could hold up."""
    import torch
    from bench.link_gpu_rounds import throw

    from ppstream.control.launcher_store import join_store
    from ppstream.cuda import startup

    store = join_store()
    is_front = store.rank == 0
    device = torch.device("cuda", store.rank)
    startup.start(device)
    rows: list[dict[str, Any]] = []
    names = {size: name for name, size in SIZES.items()}
    if is_front:
        print_head()
    for run in runs_of(ways):
        thrown = throw(run, store, device)
        if not is_front:
            continue
        p50_us = statistics.median(thrown.one_way_us)
        row: dict[str, Any] = {"way": run.way, "mode": run.mode, "size": names[run.size]}
        row |= {"p50_us": p50_us, "min_us": min(thrown.one_way_us)}
        row |= {"max_us": max(thrown.one_way_us)}
        row |= costs_of(run.size, p50_us, thrown.cpu_s, thrown.messages)
        rows.append(row)
        print_row(row)
        output.write_text(json.dumps(rows))
    if is_front:
        store.get("gone", WAIT_S)
    else:
        store.set("gone", "1")
    sys.stdout.flush()
    os._exit(0)


def print_head() -> None:
    print(
        f"{'way':7} {'mode':7} {'size':>6} {'p50 us':>8} {'min':>8} {'max':>8} {'GB/s':>7}"
        f" {'CPU us':>7}",
        flush=True,
    )


def print_row(row: dict[str, Any]) -> None:
    print(
        f"{row['way']:7} {row['mode']:7} {row['size']:>6} {row['p50_us']:8.2f}"
        f" {row['min_us']:8.2f} {row['max_us']:8.2f} {row['gb_s']:7.2f} {row['cpu_us']:7.2f}",
        flush=True,
    )


def costs_of(size: int, one_way_us: float, cpu_s: float, messages: int) -> dict[str, float]:
    """Gigabytes a second one way; CPU time of all messages, and of one."""
    return {
        "gb_s": size / one_way_us / 1e3,
        "cpu_s": cpu_s,
        "messages": messages,
        "cpu_us": cpu_s * 1e6 / messages,
    }


def print_crossing(rows: list[dict[str, Any]]) -> None:
    """Prints where the kernel stops being quicker than the copy engine."""
    p50_us = {(row["way"], row["mode"], row["size"]): row["p50_us"] for row in rows}
    for mode in ("graph", "queued", "hops"):
        both = [size for size in SIZES if {("put", mode, size), ("copy", mode, size)} <= {*p50_us}]
        quicker = [s for s in both if p50_us["put", mode, s] < p50_us["copy", mode, s]]
        print(f"{mode}: put is quicker than copy at {', '.join(quicker) or 'no size'}")


def targets_of(rows: list[dict[str, Any]]) -> list[Target]:
    """Of the ways that the ``peer`` link takes at that size: one with D_in = 1, one with more."""
    from ppstream.links.peer_memory import put_limit

    targets = []
    for row in rows:
        size = SIZES[row["size"]]
        depths = {
            name: "put" if size <= put_limit(d_in, size) else "copy"
            for name, d_in in (("D_in = 1", 1), ("D_in > 1", 2))
        }
        taken = [name for name, way in depths.items() if way == row["way"]]
        if not taken:
            continue
        what = f"peer by {row['way']} ({', '.join(taken)}), {row['size']}"
        limit_us = ONE_WAY_US.get(row["size"])
        if limit_us is not None and row["mode"] == "graph":
            targets.append(Target(f"{what}: one way in us", limit_us, row["p50_us"]))
        if row["mode"] in ("graph", "queued"):
            name = f"{what}, {row['mode']}: CPU us per message"
            targets.append(Target(name, CPU_US, row["cpu_us"]))
    return targets


def claims_of(rows: list[dict[str, Any]]) -> list[Claim]:
    """Bytes a second at the median one way, and the CPU time of one message."""
    claims = []
    for row in rows:
        what, size = f"{row['way']}, {row['mode']}, {row['size']}", SIZES[row["size"]]
        cpu_us = row["cpu_s"] * 1e6
        claims += [
            bandwidth(f"{what}: one way", size, row["p50_us"] / 1e6, row["gb_s"] * 1e9),
            ratio(f"{what}: CPU us per message", cpu_us, row["messages"], row["cpu_us"]),
        ]
    return claims


if __name__ == "__main__":
    sys.exit(main())
