"""Measures stage A on a GPU: what it costs the host and the GPU, plain and with three cameras.

    python tools/bench/device_window.py [--quick] [--json FILE]

A robot of three streams (1 kHz x 14, 333 Hz x 14, 100 Hz x 64) fills real rings; the cameras are
three of 224 x 224 at 30 Hz. *paced*: a window per tick of 100 Hz in real time. *saturated*: windows
back to back, each after 10 new samples of the fastest stream, with a new frame of every camera in
every one. Host times are wall clock on the calling thread, GPU times from events around one window,
p50 / p99 / max. *graph* is the GPU time per window of replays back to back: no gaps between.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tools/


import numpy as np
import torch
from claimed_numbers import Claim, product, throughput, write_audited

from ppstream.config.schema import (
    ActionConfig,
    BatchConfig,
    ImageConfig,
    PipelineConfig,
    PolicyConfig,
    StreamConfig,
    WindowConfig,
)
from ppstream.core.clock import NS_PER_MS
from ppstream.ingest.device.window import DeviceWindow
from ppstream.ingest.ring import RingBank
from ppstream.ingest.rows import RowInput
from ppstream.links.slots import SlotLayout

SLOTS = 3
PLAIN = (
    StreamConfig(name="imu", dim=14, rate_hz=1000.0, reference=True),
    StreamConfig(name="joints", dim=14, rate_hz=333.0),
    StreamConfig(name="touch", dim=64, rate_hz=100.0),
)
IMAGE = ImageConfig(
    height=224, width=224, frames=2, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)
)
CAMERAS = tuple(
    StreamConfig(name=name, rate_hz=30.0, image=IMAGE) for name in ("left", "right", "wrist")
)
PACED_HZ = 100
BACK_TO_BACK = 200


class FilledRows:
    """Rows filled alike, a slot for each window in turn, and what each step cost."""

    def __init__(self, streams: tuple[StreamConfig, ...], rows: int) -> None:
        self.config = PipelineConfig(
            name="bench",
            streams=streams,
            window=WindowConfig(steps=32, dt_ms=5.0),
            actions=ActionConfig(
                names=("a",), horizon=1, dt_ms=10.0, low=(-1.0,), high=(1.0,), lease_ms=200.0
            ),
            policy=PolicyConfig(target="nobody:build"),
            batch=BatchConfig(rows=rows),
        )
        banks = {s.name: RingBank(s, rows, self.config.ring_samples(s)) for s in streams}
        self.rows = [RowInput(banks, row, "imu") for row in range(rows)]
        for number, row in enumerate(self.rows):
            row.open(number + 1, is_real_time=False)
        device = torch.device("cuda", 0)
        self.window = DeviceWindow(self.config, self.rows, banks, device)
        self.stream = torch.cuda.Stream(device)
        layout = SlotLayout(("index",), self.window.inputs, rows)
        memory = torch.zeros(SLOTS, layout.slot_bytes, dtype=torch.uint8, device=device)
        self.slots = [layout.views(slot) for slot in memory]
        for slot in self.slots:
            self.window.prepare(slot)
        self._sent = dict.fromkeys(banks, 0)
        self._values = {
            s.name: np.random.default_rng(0).integers(0, 200, (64, s.dim)).astype(s.dtype)
            for s in streams
        }
        self.frames = 0

    def feed(self, until_ns: int, *, frames: bool) -> None:
        """Everything due by then; with ``frames`` one more of each camera, due or not."""
        for stream in self.config.streams:
            period_ns = round(1e9 / stream.rate_hz)
            first = self._sent[stream.name]
            n = until_ns // period_ns - first
            stamps_ns = (first + np.arange(1, n + 1)) * period_ns
            if stream.image is not None and frames:
                n, stamps_ns = 1, np.array([until_ns])
            if n <= 0:
                continue
            self._sent[stream.name] = int(stamps_ns[-1]) // period_ns
            values = self._values[stream.name][:n]
            for row in self.rows:
                row.rings[stream.name].append(stamps_ns[-len(values) :], values, until_ns)
            self.frames += n if stream.image is not None else 0


def run(robot: FilledRows, windows: int, *, paced: bool) -> dict[str, Any]:
    """One mode; returns its row."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    costs: dict[str, list[float]] = {"ingest_us": [], "enqueue_us": [], "gpu_us": [], "take_us": []}
    period_ns = round(1e9 / PACED_HZ) if paced else 10 * NS_PER_MS
    robot.frames = 0
    began = time.perf_counter()
    for turn in range(1, windows + 1):
        if paced:
            time.sleep(max(0.0, began + turn * period_ns / 1e9 - time.perf_counter()))
        robot.feed(robot_time(robot) + period_ns, frames=not paced)
        at = [time.perf_counter_ns()]
        while not robot.window.ingest(0):
            pass
        at.append(time.perf_counter_ns())
        start.record(robot.stream)
        before = time.perf_counter_ns()
        robot.window.enqueue(robot.slots[turn % SLOTS], robot.stream)
        at.append(time.perf_counter_ns() - before + at[-1])
        stop.record(robot.stream)
        stop.synchronize()
        before = time.perf_counter_ns()
        robot.window.pop()
        at.append(time.perf_counter_ns() - before + at[-1])
        costs["gpu_us"].append(start.elapsed_time(stop) * 1e3)
        for name, taken_ns in zip(("ingest_us", "enqueue_us", "take_us"), np.diff(at), strict=True):
            costs[name].append(float(taken_ns) / 1e3)
    elapsed_s = time.perf_counter() - began
    row: dict[str, Any] = {name: summary(us) for name, us in costs.items()}
    return row | {
        "windows": windows,
        "elapsed_s": elapsed_s,
        "windows_per_s": windows / elapsed_s,
        "frames": robot.frames,
        "graph_us": back_to_back_us(robot),
        "refused": robot.window.statistics().refused,
    }


def robot_time(robot: FilledRows) -> int:
    newest = robot.rows[0].reference.newest_ns
    return max(0, newest)


def back_to_back_us(robot: FilledRows) -> float:
    """The GPU's time of one window: replays without a gap, taken afterwards."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    with torch.cuda.stream(robot.stream):
        torch.cuda._sleep(4_000_000)  # the host queues all of them meanwhile
    start.record(robot.stream)
    for turn in range(BACK_TO_BACK // 2):
        robot.window.enqueue(robot.slots[turn % SLOTS], robot.stream)
    stop.record(robot.stream)
    stop.synchronize()
    for _ in range(BACK_TO_BACK // 2):
        robot.window.pop()
    return start.elapsed_time(stop) * 1e3 / (BACK_TO_BACK // 2)


def summary(us: list[float]) -> dict[str, float]:
    p50, p99 = np.percentile(us[len(us) // 10 :], (50, 99))
    return {"p50": float(p50), "p99": float(p99), "max": float(max(us[len(us) // 10 :]))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a second a mode")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    about = {
        "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    print("  ".join(f"{name} {value}" for name, value in about.items()))
    rows = {}
    windows = 100 if arguments.quick else 500
    for name, streams, batch in (
        ("plain, B = 1", PLAIN, 1),
        ("plain, B = 32", PLAIN, 32),
        ("3 cameras, B = 1", PLAIN + CAMERAS, 1),
    ):
        robot = FilledRows(streams, batch)
        run(robot, 60, paced=False)
        for mode in ("paced", "saturated"):
            row = rows[f"{name}, {mode}"] = run(robot, windows, paced=mode == "paced")
            costs = "  ".join(
                f"{cost} {row[cost]['p50']:.1f}/{row[cost]['p99']:.1f}/{row[cost]['max']:.1f}"
                for cost in ("ingest_us", "enqueue_us", "gpu_us", "take_us")
            )
            print(
                f"{name}, {mode:9} {costs}  graph_us {row['graph_us']:.2f}  "
                f"windows/s {row['windows_per_s']:.0f}  frames {row['frames']}"
            )
    write_audited(arguments.json, {"about": about, "rows": rows}, claims_of(rows))


def claims_of(rows: dict[str, dict[str, Any]]) -> list[Claim]:
    """Windows a second, and that saturated windows each found a new frame of every camera."""
    claims = [
        throughput(f"{name}: windows/s", row["windows"], row["elapsed_s"], row["windows_per_s"])
        for name, row in rows.items()
    ]
    claims += [
        product(f"{name}: frames", (row["windows"], len(CAMERAS)), row["frames"])
        for name, row in rows.items()
        if row["frames"] and "saturated" in name
    ]
    return claims


if __name__ == "__main__":
    main()
