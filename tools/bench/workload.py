"""Measures an inference step whose preprocessing is resampling, and what share resampling has.

    python tools/bench/workload.py [--quick] [--json FILE]

Batch 32; two streams of 256 and 14 values, 500 samples each, resampled to 250 steps side by side;
then a policy of 3 layers in bfloat16, eager unless said otherwise. In a step the new samples are
copied in, stage A cuts the window, and the policy runs. Two policies: an MLP 270-512-256-7 at every
step of the window, which is the one of the report that this workload is taken from, and, because
that report draws a transformer, one of 3 layers (d = 512, 8 heads) over the window.

*runtime* takes stage A as the runtime runs it: float32 rings on the GPU, new samples through
pinned memory, one graph replay per window, age and validity with it; *kernel* is the bare
resampling of bfloat16 samples that lie on the GPU already, one launch.

A's GPU time is set against three things, since "of an inference step" may mean each. ``share``: the
GPU time of copy in, A and policy, each the sum of its kernels and copies in a profile of separate
steps; the strictest, and eager or not makes no difference to it. ``share_as_run``: the same, but
the policy's forward by the clock, as an eager one takes. ``share_of_step``: the whole step by the
clock, the host's own work for A and for copying in with it, as that report reckons its 10.7 %.
``busy`` is the union of all kernels and
copies of those steps, over the wall time of as many steps run without a profiler: what the profiler
slows does not count, and overlapping work counts once.
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
from bench.workload_policies import ACTIONS, WorkloadPolicy, mlp, transformer
from bench.workload_profile import Step, kernel_us, wall_us
from claimed_numbers import Claim, ratio, shares, write_audited

from ppstream.config.schema import (
    ActionConfig,
    BatchConfig,
    PipelineConfig,
    PolicyConfig,
    StreamConfig,
    WindowConfig,
)
from ppstream.ingest.device.window import DeviceWindow
from ppstream.ingest.ring import RingBank
from ppstream.ingest.rows import RowInput
from ppstream.links.slots import SlotLayout
from ppstream.policy.graphed import GraphedPolicy
from ppstream_kernels import ResamplePlan, StreamSource

BATCH, SAMPLES, STEPS = 32, 500, 250
RATE_HZ = 500.0
NEW_SAMPLES = 10  # of each stream and row in one step: a policy at 50 Hz
STREAMS = (
    StreamConfig(name="vision", dim=256, rate_hz=RATE_HZ, max_gap_ms=20.0, max_age_ms=20.0),
    StreamConfig(name="proprio", dim=14, rate_hz=RATE_HZ, max_gap_ms=20.0, max_age_ms=20.0),
)
WIDTH = sum(stream.dim for stream in STREAMS)
DEVICE = torch.device("cuda", 0)
OUR_KERNELS = ("resample", "begin", "scatter")


class Runtime:
    """Stage A as the runtime runs it, its rings filled."""

    def __init__(self) -> None:
        config = PipelineConfig(
            name="workload",
            streams=STREAMS,
            window=WindowConfig(steps=STEPS, dt_ms=SAMPLES / RATE_HZ * 1000 / STEPS),
            actions=ActionConfig(
                names=("a",), horizon=1, dt_ms=10.0, low=(-1.0,), high=(1.0,), lease_ms=200.0
            ),
            policy=PolicyConfig(target="nobody:build"),
            batch=BatchConfig(rows=BATCH),
        )
        banks = {s.name: RingBank(s, BATCH, config.ring_samples(s)) for s in STREAMS}
        self.rows = [RowInput(banks, row, "vision") for row in range(BATCH)]
        for number, row in enumerate(self.rows):
            row.open(number + 1, is_real_time=False)
        self.window = DeviceWindow(config, self.rows, banks, DEVICE)
        layout = SlotLayout(("index",), self.window.inputs, BATCH)
        self.slot = layout.views(torch.zeros(layout.slot_bytes, dtype=torch.uint8, device=DEVICE))
        self.window.prepare(self.slot)
        self.stream = torch.cuda.current_stream(DEVICE)
        self._samples = 0
        self._values = {
            s.name: np.random.default_rng(0).normal(size=(SAMPLES, s.dim)).astype(np.float32)
            for s in STREAMS
        }
        self._queued = 0
        self.feed(SAMPLES)
        while not self.window.ingest(0):
            torch.cuda.synchronize()

    def feed(self, samples: int) -> None:
        numbers = np.arange(self._samples + 1, self._samples + samples + 1)
        stamps_ns = (numbers * round(1e9 / RATE_HZ)).astype(np.int64)
        self._samples += samples
        for row in self.rows:
            for name, ring in row.rings.items():
                ring.append(stamps_ns, self._values[name][:samples], 0)

    def copy_in(self) -> None:
        while not self.window.ingest(0):
            pass

    def cut(self) -> None:
        self.window.enqueue(self.slot, self.stream)
        self._queued += 1

    def settle(self) -> None:
        """Settles what the host learns of windows late."""
        torch.cuda.synchronize()
        for _ in range(self._queued):
            self.window.pop()
        self._queued = 0


def bare_kernel() -> Step:
    """One launch for both streams, samples and window in bfloat16."""
    sources, out = (
        [],
        (
            torch.empty(BATCH, STEPS, WIDTH, dtype=torch.bfloat16, device=DEVICE),
            torch.empty(BATCH, STEPS, len(STREAMS), dtype=torch.bool, device=DEVICE),
            torch.empty(BATCH, STEPS, len(STREAMS), device=DEVICE),
        ),
    )
    period_ns = round(1e9 / RATE_HZ)
    stamps_ns = (torch.arange(SAMPLES, device=DEVICE) * period_ns).repeat(BATCH, 1)
    for stream in STREAMS:
        values = torch.randn(BATCH, SAMPLES, stream.dim, dtype=torch.bfloat16, device=DEVICE)
        sources.append(StreamSource(values, stamps_ns))
    tgt_ns = (torch.arange(STEPS, device=DEVICE) * 2 * period_ns + 7).repeat(BATCH, 1)
    plan = ResamplePlan(sources, STEPS)
    return lambda: plan(tgt_ns, out)


def measure(name: str, policy: Any, repeats: int) -> dict[str, float]:
    """One row: the whole step, and A's share of it."""
    runtime = Runtime()
    out = {"actions": torch.zeros(BATCH, STEPS, ACTIONS, device=DEVICE)}

    def step() -> None:
        runtime.copy_in()
        runtime.cut()
        policy(runtime.slot, out)

    def fed() -> None:
        runtime.feed(NEW_SAMPLES)
        step()

    fed()
    runtime.settle()
    totals = kernel_us(fed, min(repeats, 20))
    runtime.settle()
    walls = []
    for _ in range(repeats):  # the robots' part, writing the host's rings, is not the step's
        runtime.feed(NEW_SAMPLES)
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        walls.append((time.perf_counter() - began) * 1e6)
        runtime.settle()
    ours = {key: us for key, us in totals.items() if key.startswith(OUR_KERNELS)}
    a_us = sum(us for key, us in ours.items() if not key.startswith("scatter"))
    copies_us = sum(us for key, us in totals.items() if "HtoD" in key) + ours.get("scatter", 0.0)
    everything_us = sum(us for key, us in totals.items() if key != "union")
    p50, p99 = np.percentile(walls, (50, 99))
    forward_us = wall_us(lambda: policy(runtime.slot, out), repeats)
    row = {
        "step_p50_us": float(p50),
        "step_p99_us": float(p99),
        "a_us": a_us,
        "copy_in_us": copies_us,
        "policy_us": everything_us - a_us - copies_us,
        "share": a_us / everything_us,
        "share_as_run": a_us / (a_us + copies_us + forward_us),
        "share_of_step": a_us / float(p50),
        "preprocessing_share": (a_us + copies_us) / everything_us,
        "gpu_us": totals["union"],
        "busy": totals["union"] / float(p50),
        "forward_us": forward_us,
    }
    parts = "  ".join(f"{key.split('(')[0]} {us:.2f}" for key, us in ours.items())
    print(
        f"{name:28} step {p50:7.1f} p99 {p99:7.1f} µs   GPU: copy in {copies_us:6.1f}  "
        f"A {a_us:5.2f}  policy {row['policy_us']:7.1f} µs   by the clock {forward_us:6.1f}\n"
        f"{'':28} A's share {row['share']:6.2%} of the GPU's time "
        f"({row['preprocessing_share']:6.2%} with copy in), "
        f"{row['share_as_run']:6.2%} beside the forward as it runs, "
        f"{row['share_of_step']:6.2%} of the step\n"
        f"{'':28} busy {row['busy']:4.0%}   ({parts})"
    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the steps")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    repeats = 30 if arguments.quick else 300
    about = {
        "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    print("  ".join(f"{name} {value}" for name, value in about.items()))
    torch.manual_seed(0)
    rows: dict[str, Any] = {}
    for name, network in (("mlp", mlp), ("transformer", transformer)):
        policy = WorkloadPolicy(network(WIDTH), STEPS, WIDTH, DEVICE)
        rows[f"{name}, eager"] = measure(f"runtime, {name}, eager", policy, repeats)
        graphed = GraphedPolicy(policy)
        rows[f"{name}, graphs"] = measure(f"runtime, {name}, graphs", graphed, repeats)
    kernel = bare_kernel()
    bare_us = kernel_us(kernel, 20)["union"]
    for name in ("mlp", "transformer"):
        policy_us = rows[f"{name}, eager"]["policy_us"]
        share = bare_us / (bare_us + policy_us)
        rows[f"{name}, kernel"] = {"a_us": bare_us, "policy_us": policy_us, "share": share}
        print(f"kernel,  {name:18} A {bare_us:5.2f} µs of bfloat16   A's share {share:6.2%}")
    write_audited(arguments.json, {"about": about, "rows": rows}, claims_of(rows))


def claims_of(rows: dict[str, Any]) -> list[Claim]:
    """Every printed share from the GPU's times and the step's that stand in its row."""
    claims = []
    for name, row in rows.items():
        parts_us = [row[part] for part in ("a_us", "copy_in_us", "policy_us") if part in row]
        all_us = sum(parts_us)
        claims.append(ratio(f"{name}: A's share", row["a_us"], all_us, row["share"]))
        if "copy_in_us" not in row:  # the bare kernel beside a policy
            continue
        prepared_us, step_us = row["a_us"] + row["copy_in_us"], row["step_p50_us"]
        others = [us / all_us for us in parts_us[1:]]
        claims += [
            shares(f"{name}: A, copy in, policy", [row["share"], *others]),
            ratio(f"{name}: with copy in", prepared_us, all_us, row["preprocessing_share"]),
            ratio(
                f"{name}: beside the forward as it runs",
                row["a_us"],
                prepared_us + row["forward_us"],
                row["share_as_run"],
            ),
            ratio(f"{name}: of the step", row["a_us"], step_us, row["share_of_step"]),
            ratio(f"{name}: busy", row["gpu_us"], step_us, row["busy"]),
        ]
    return claims


if __name__ == "__main__":
    main()
