"""Compares lines and cubics on a recorded arm: error against held-out samples, and time.

    python tools/bench/resample_recording.py franka_fr3_1khz.npy [--rounds 15] [--json FILE]

The recording, one row a sample, nanoseconds first, is thinned to lower rates; the samples left out
are predicted from those kept. Its sampler was faster than the arm and repeats rows: repeated ones
are left out of both. The error is the root of the mean square and the largest, over the values'
own standard deviation, of joint angles, velocities and torques. Holding the last value, which most
code does, stands beside. Times are one call for all held-out samples of a stream on one thread of
the CPU, float32, in turn; a ratio is of two medians.
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
from claimed_numbers import Claim, ratio, write_audited

from ppstream_kernels import resample

STREAMS = {"q": slice(1, 8), "dq": slice(8, 15), "tau": slice(15, 22)}  # columns
RATES_HZ = (100, 50, 20)
MODES = ("previous", "linear", "cubic")


def main() -> None:
    arguments = _parse()
    torch.set_num_threads(1)
    table = np.load(arguments.recording, allow_pickle=False)
    about = {
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "recording": arguments.recording.name,
        "samples": len(table),
    }
    print("  ".join(f"{name} {value}" for name, value in about.items()))
    print(f"{'stream':7}{'Hz':>4}{'kept':>6}{'held out':>9}", end="")
    print("".join(f"{f'{mode} rms, max':>22}" for mode in MODES), end="")
    print(f"{'cubic / linear: rms':>21}{'time':>6}")
    rows = [
        _measure(name, table[:, columns], table[:, 0], rate_hz, arguments.rounds)
        for name, columns in STREAMS.items()
        for rate_hz in RATES_HZ
    ]
    write_audited(arguments.json, {"about": about, "rows": rows}, _claims(rows))


def _measure(
    name: str, values: np.ndarray, stamps: np.ndarray, rate_hz: int, rounds: int
) -> dict[str, Any]:
    is_new = np.append(True, (np.diff(values, axis=0) != 0).any(1))
    values, stamps_ns = values[is_new], stamps[is_new].astype(np.int64)
    kept = _thinned(stamps_ns, round(1e9 / rate_hz))
    is_held_out = np.ones(len(stamps_ns), np.bool_)
    is_held_out[kept] = False
    is_held_out[: kept[0]] = is_held_out[kept[-1] :] = False  # nothing on one side of it
    src = torch.from_numpy(values[kept].astype(np.float32))[None]
    src_ns = torch.from_numpy(stamps_ns[kept])[None]
    tgt_ns = torch.from_numpy(stamps_ns[is_held_out])[None]
    unit = values.std(0)
    errors, times_us = {}, {mode: np.empty(rounds) for mode in MODES}
    for mode in MODES:
        predicted = resample(src, src_ns, tgt_ns, mode=mode).values[0].double().numpy()
        apart = np.abs(predicted - values[is_held_out]) / unit
        errors[mode] = {"rms": float(np.sqrt((apart**2).mean())), "max": float(apart.max())}
    for each in range(rounds):
        for mode in MODES:
            start_ns = time.perf_counter_ns()
            resample(src, src_ns, tgt_ns, mode=mode)
            times_us[mode][each] = (time.perf_counter_ns() - start_ns) / 1e3
    us = {mode: float(np.median(times)) for mode, times in times_us.items()}
    row = {
        "stream": name,
        "rate_hz": rate_hz,
        "kept": len(kept),
        "held_out": int(is_held_out.sum()),
        "errors": errors,
        "us": us,
        "rms_over_linear": errors["cubic"]["rms"] / errors["linear"]["rms"],
        "time_over_linear": us["cubic"] / us["linear"],
    }
    shown = "".join(f"{one['rms']:12.5f} {one['max']:9.4f}" for one in errors.values())
    print(
        f"{name:7}{rate_hz:4}{row['kept']:6}{row['held_out']:9}{shown}"
        f"{row['rms_over_linear']:21.2f}{row['time_over_linear']:6.1f}",
        flush=True,
    )
    return row


def _thinned(stamps_ns: np.ndarray, period_ns: int) -> np.ndarray:
    """Numbers of the first sample of each period."""
    periods = (stamps_ns - stamps_ns[0]) // period_ns
    return np.unique(periods, return_index=True)[1]


def _claims(rows: list[dict[str, Any]]) -> list[Claim]:
    claims = []
    for row in rows:
        what, errors, us = f"{row['stream']} at {row['rate_hz']} Hz", row["errors"], row["us"]
        of, over = errors["cubic"]["rms"], errors["linear"]["rms"]
        claims += [
            ratio(f"{what}: error, cubic / linear", of, over, row["rms_over_linear"]),
            ratio(
                f"{what}: time, cubic / linear", us["cubic"], us["linear"], row["time_over_linear"]
            ),
        ]
    return claims


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recording", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
