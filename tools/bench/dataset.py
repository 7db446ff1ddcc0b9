"""Trajectories a second, resampled from memory, safetensors and MCAP, on one GPU and several.

    python tools/bench/dataset.py [--gpus 1 2 4] [--parts device pinned ...] [--lerobot [PYTHON]]
        [--rounds 5] [--scale 1.0] [--cold] [--folder DIR] [--json FILE]

120 -> 100 x 14 and 100 -> 50 x 32 (samples -> targets x values) in bfloat16 and float32; one
process a GPU, all of which begin each round together: a rate is all trajectories over the slowest
process's time, the median of rounds that go through all ways in turn. The parts:

``device``       in the GPU's memory: single calls of 300 MB and of 256 trajectories in CUDA graphs,
                 beside a copy of as many bytes, index_select and torch.compile
``pinned``       from page-locked memory of the host, chunk by chunk, with and without results back
``safetensors``  from files, and results into files, beside a plain read of the same files
``mcap``         from a recording of ppstream's own form, whose decoder's share is named
``frames``       a camera's in ROS 2's MCAP, 224 x 224 and 640 x 480, JPEG and raw: frames/s into
                 safetensors and ``Windows``'s batches, beside Pillow (of raw ones a copy) alone
``rtx``          10^6 trajectories of 120 x 14, in chunks that fit memory
``loop``         a training step of 180 ms beside the loader: how long the step waits for its input
``peers``        numpy; and LeRobot's loader where PYTHON has it, beside ours on the same folder

Files are read warm, from the page cache, unless ``--cold`` drops them from it before each round.
Without a GPU everything runs once on the CPU with tiny sizes, and says so: no target is judged.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import queue
import statistics
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tools/

import torch
from bench import dataset_parts, dataset_peers, peers_environments
from bench.dataset_parts import PARTS
from bench.dataset_rounds import Settings, Taken
from claimed_numbers import Claim, ratio, throughput
from real_runs import Target, print_environment, print_targets, write_json

LIMIT_S: Final = 900.0
DOCUMENTED_RATE: Final = 31_200  # trajectories/s a GPU that datasets are preprocessed at elsewhere
TIMES: Final = 1_000  # that, of single calls
CALL: Final = "100->50x32"
CALL_ROWS: Final = 256
SHARE_OF_COPY: Final = 0.95
SHARE_OF_PINNED: Final = 0.85
SHARE_OF_READ: Final = 0.80
EFFICIENCY: Final = 0.95
EFFICIENCY_GPUS: Final = 4
MOST_WAIT: Final = 0.02
LEROBOT_EPISODES: Final = 20
LEROBOT_BATCHES: Final = 100


class DatasetRate(NamedTuple):
    """One way's figure: the median round."""

    part: str
    case: str  # shape and dtype
    way: str
    gpus: int
    trajectories: int  # of all GPUs in a round
    seconds: float  # of the slowest
    moved_bytes: int  # of all GPUs in a round
    note: str

    @property
    def rate(self) -> float:
        return self.trajectories / self.seconds


def main() -> int:
    arguments = _parse()
    found = torch.cuda.device_count()
    numbers = [n for n in arguments.gpus if n <= found] if found else [1]
    scale = arguments.scale if found else dataset_parts.CPU_SCALE
    mode = f"{found} GPUs" if found else "NO GPU: tiny sizes on the CPU, which prove nothing"
    print_environment(f"{mode}, files {'cold' if arguments.cold else 'warm'}")
    if found:
        print(", ".join(torch.cuda.get_device_name(n) for n in range(found)))
    rows: list[DatasetRate] = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        settings = Settings(folder, arguments.rounds, scale, bool(found), arguments.cold)
        for part in arguments.parts:
            for gpus in numbers if part in dataset_parts.SCALING else numbers[:1]:
                rows += _measured(part, gpus, settings)
        if "peers" in arguments.parts:
            python = arguments.lerobot
            if python == "":
                python = str(peers_environments.python_with("datasets"))
            rows += _lerobot_rows(settings, python)
    targets, missing = targets_of(rows) if found else ([], [])
    print_targets(targets)
    for what in missing:
        print(f"  not measured: {what}")
    results = [row._asdict() | {"rate": row.rate} for row in rows]
    write_json(arguments.json, mode, targets, claims=claims_of(rows), rows=results, missing=missing)
    return 0


def _measured(part: str, gpus: int, settings: Settings) -> list[DatasetRate]:
    """In processes of their own, so that each has its GPU and its interpreter; else in this one."""
    if not settings.is_gpu:
        alone: queue.SimpleQueue[Any] = queue.SimpleQueue()
        dataset_parts.run(part, 0, settings, threading.Barrier(1), alone)
        return _rows(part, [alone.get()])
    context = multiprocessing.get_context("spawn")
    gate, answers = context.Barrier(gpus), context.Queue()
    ranks = [
        context.Process(target=dataset_parts.run, args=(part, rank, settings, gate, answers))
        for rank in range(gpus)
    ]
    for rank in ranks:
        rank.start()
    try:
        taken = [answers.get(timeout=LIMIT_S) for _ in ranks]
    finally:
        for rank in ranks:
            rank.join(5)
            rank.kill()
    return _rows(part, taken)


def _rows(part: str, of_ranks: Sequence[list[Taken] | str]) -> list[DatasetRate]:
    if broken := [one for one in of_ranks if isinstance(one, str)]:
        raise SystemExit(f"{part} on {len(of_ranks)} GPUs: {broken[0]}")
    return [_row(part, len(of_ranks), ways) for ways in zip(*of_ranks, strict=True)]


def _row(part: str, gpus: int, of_ranks: Sequence[Taken]) -> DatasetRate:
    """Of one way, measured in each process in the same rounds; printed."""
    first = of_ranks[0]
    slowest = [max(times) for times in zip(*(one.seconds for one in of_ranks), strict=True)]
    row = DatasetRate(
        part,
        first.case,
        first.way,
        gpus,
        sum(one.trajectories for one in of_ranks),
        statistics.median_low(slowest),
        sum(one.moved_bytes for one in of_ranks),
        first.note,
    )
    print(
        f"{part:12}{row.case:42}{row.way:22}{gpus} x  {row.rate:14,.0f}/s  "
        f"{row.moved_bytes / row.seconds / 1e9:9.2f} GB/s  {row.note}",
        flush=True,
    )
    return row


def _lerobot_rows(settings: Settings, python: str | None) -> list[DatasetRate]:
    """LeRobot's loader on a folder of one rate, and ours on the same one.

    LeRobot holds no stamps: its windows are frames, as they lie.
    """
    if python is None:
        print("peers       LeRobot is not installed here, and --lerobot names no interpreter")
        return []
    rows = []
    for shape in dataset_parts.SHAPES:
        with tempfile.TemporaryDirectory(dir=settings.folder) as folder:
            given = shape, LEROBOT_EPISODES, LEROBOT_BATCHES, f"{folder}/made"
            found = dataset_peers.by_lerobot(python, *given)
            if isinstance(found, str):
                print(f"peers       LeRobot: {found}")
                continue
            ours = dataset_peers.by_windows(shape, *given[2:])
        case = str(dataset_parts.Case(*shape, torch.float32))
        for way, one, what in (
            ("LeRobot's loader", found, "frames as they lie"),
            ("Windows", ours, "resampled"),
        ):
            note = f"{dataset_peers.WORKERS} workers on the CPU, {what}"
            rows.append(_row("peers", 1, [Taken(case, way, one[0], 0, [one[1]], note)]))
    return rows


def targets_of(rows: Sequence[DatasetRate]) -> tuple[list[Target], list[str]]:
    """Targets as times over the times they are measured against, and those without a figure."""
    targets: list[Target] = []
    missing: list[str] = []
    pairs = (
        ("device", "one call", "copy", SHARE_OF_COPY, "on the device >= 300 MB: time / a copy's"),
        ("pinned", "resampled", "copy", SHARE_OF_PINNED, "pinned memory: time / a plain copy's"),
        ("safetensors", "resampled", "plain read", SHARE_OF_READ, "safetensors: time / a read's"),
    )
    for part, way, against, share, what in pairs:
        found = [
            Target(f"{what} ({one.case})", 1 / share, other.rate / one.rate)
            for one in rows
            for other in rows
            if (one.part, one.way, other.way) == (part, way, against)
            and (one.part, one.case, one.gpus) == (other.part, other.case, other.gpus)
            and one.gpus == 1
        ]
        targets += found
        if not found:
            missing.append(what)
    calls = [row for row in rows if row.way == f"{CALL_ROWS} a call" and CALL in row.case]
    for row in calls[:2]:
        limit = CALL_ROWS / (TIMES * DOCUMENTED_RATE) * 1e6
        reached = CALL_ROWS / row.rate * 1e6
        targets.append(Target(f"{row.case}, {CALL_ROWS} a call: us a call", limit, reached))
    missing += [] if calls else [f"{CALL_ROWS} x {CALL} a call"]
    found = [
        Target(
            f"{many.case} pinned, {many.gpus} GPUs: 1 / efficiency",
            1 / EFFICIENCY,
            many.gpus * one.rate / many.rate,
        )
        for one in rows
        for many in rows
        if one.part == many.part == "pinned"
        and one.way == many.way == "resampled"
        and one.case == many.case
        and (one.gpus, many.gpus) == (1, EFFICIENCY_GPUS)
    ]
    targets += found
    missing += [] if found else [f"efficiency on {EFFICIENCY_GPUS} GPUs: there are fewer"]
    waits = [row for row in rows if row.part == "loop" and row.way == "wait"]
    steps = [row for row in rows if row.part == "loop" and row.way == "step"]
    for wait, step in zip(waits, steps, strict=True):
        share = wait.seconds / step.seconds
        targets.append(Target(f"{wait.case}: wait for input / step", MOST_WAIT, share))
    missing += [] if waits else ["training loop"]
    return targets, missing


def claims_of(rows: Sequence[DatasetRate]) -> list[Claim]:
    """Each rate, and each way over the plain copy or read beside it."""
    claims = []
    for row in rows:
        what = f"{row.part} {row.case} {row.way} on {row.gpus}"
        claims.append(throughput(what, row.trajectories, row.seconds, row.rate))
        for other in rows:
            is_beside = row[:2] == other[:2] and row.gpus == other.gpus
            if is_beside and other.way in ("copy", "plain read") and other is not row:
                share = row.rate / other.rate
                claims.append(ratio(f"{what} / {other.way}", row.rate, other.rate, share))
    return claims


def _parse() -> argparse.Namespace:
    own = sys.executable if importlib.util.find_spec("lerobot") else None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--lerobot",
        metavar="PYTHON",
        nargs="?",
        default=own,
        const="",
        help="that has LeRobot; without PYTHON one is made by pip, or was",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="of all sizes on GPUs")
    parser.add_argument("--cold", action="store_true", help="drop files from the page cache")
    parser.add_argument("--folder", help="where the files are written for the run")
    parser.add_argument("--json", type=Path)
    arguments: Any = parser.parse_args()
    return arguments


if __name__ == "__main__":
    sys.exit(main())
