"""Peers of ``dataset.py``: how others go from trajectories at their own stamps to uniform ones."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
from bench.resample_numpy import by_numpy as by_numpy
from torch import Tensor

Formula = Callable[[Tensor, Tensor, Tensor], Tensor]
SQUARE: Final = 8192  # side of the matrices that a training step multiplies
BATCH: Final = 32  # windows
WORKERS: Final = 2
LEROBOT_LIMIT_S: Final = 240
SUPPORT: Final = Path(__file__).resolve().parents[2] / "tests" / "support"


def formulas(device: torch.device) -> Iterator[tuple[str, Formula]]:
    """searchsorted, index_select and lerp, as they are, and through torch.compile on a GPU."""
    if device.type == "cpu":
        from bench.resample import formula

        yield "index_select", lambda src, *stamps: formula(src.float(), *stamps).to(src.dtype)
        return
    from bench import resample_gpu_peers

    torch._dynamo.reset()  # or it gives up specialising at the ninth shape
    yield "index_select", resample_gpu_peers.formula
    yield "torch.compile", resample_gpu_peers.compiled_formula


def training_step(seconds: float, device: torch.device) -> Callable[[Any], None]:
    """About so long on the device: matrices are multiplied; it returns when they are done."""
    if device.type == "cpu":
        return lambda batch: time.sleep(seconds)
    left, right = (torch.randn(SQUARE, SQUARE, device=device).bfloat16() for _ in range(2))
    out = torch.empty_like(left)

    def multiply(times: int) -> None:
        for _ in range(times):
            torch.mm(left, right, out=out)
        torch.cuda.current_stream().synchronize()

    multiply(20)
    began = time.perf_counter()
    multiply(50)
    times = max(1, round(seconds / (time.perf_counter() - began) * 50))
    return lambda batch: multiply(times)


_LEROBOT: Final = """
import json, sys, time
import numpy as np, torch
sys.path.insert(0, sys.argv[2])
from importlib.util import find_spec
from stand_ins import stand_in_for
unused = ("accelerate", "av", "cv2", "gymnasium", "imageio", "torchcodec", "torchvision")
stand_in_for({name for name in unused if find_spec(name) is None})
from torch.utils.data import DataLoader
from lerobot.datasets.lerobot_dataset import LeRobotDataset

episodes, frames, targets, dim, batches, size, workers, root = json.loads(sys.argv[1])
features = {"observation.state": {"dtype": "float32", "shape": (dim,), "names": None}}
made = LeRobotDataset.create("bench/made", 100, features, root=root, use_videos=False)
for episode in range(episodes):
    for row in np.random.default_rng(episode).normal(size=(frames, dim)).astype(np.float32):
        made.add_frame({"observation.state": row, "task": "none"})
    made.save_episode()
if hasattr(made, "finalize"):
    made.finalize()
stamps = {"observation.state": [k / 100 for k in range(1 - targets, 1)]}
data = LeRobotDataset("bench/made", root=root, delta_timestamps=stamps)
loader = iter(DataLoader(data, batch_size=size, shuffle=True, num_workers=workers))
next(loader)
began, count = time.perf_counter(), 0
for _, batch in zip(range(batches), loader):
    count += len(batch["observation.state"])
print(json.dumps([count, time.perf_counter() - began]))
"""


_OURS: Final = """
name = "bench"
window = {{ steps = {targets}, dt_ms = 10 }}
actions = {{ names = ["a"], horizon = 4, dt_ms = 10, low = [-1], high = [1], lease_ms = 100 }}
policy = {{ target = "nobody:build" }}

[[streams]]
name = "arm"
dim = {dim}
rate_hz = 100
recorded = {{ topic = "observation.state", fields = ["observation.state"] }}
"""


def by_lerobot(
    python: str, case: tuple[int, int, int], episodes: int, batches: int, folder: str
) -> tuple[int, float] | str:
    """Windows loaded and seconds, or why there are none.

    Args:
        python: an interpreter that has LeRobot.
        case: frames of an episode, targets of a window, values of a frame.
        episodes: of the data set, which is made first.
        batches: of ``BATCH`` windows each.
        folder: that the data set is made in, and stays in; it must not exist.
    """
    given = json.dumps([episodes, *case, batches, BATCH, WORKERS, folder])
    command = [python, "-c", _LEROBOT, given, str(SUPPORT)]
    try:
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=LEROBOT_LIMIT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode:
        return done.stderr.strip().rpartition("\n")[2]
    count, seconds = json.loads(done.stdout.strip().rpartition("\n")[2])
    return count, seconds


def by_windows(case: tuple[int, int, int], batches: int, folder: str) -> tuple[int, float]:
    """Windows that ``ppstream.data.Windows`` resamples of the same folder, and seconds."""
    from ppstream.config.load import read
    from ppstream.data import Windows

    _, targets, dim = case
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(_OURS.format(targets=targets, dim=dim))
        file.flush()
        config = read(file.name)
    loader = iter(Windows(folder, config, BATCH, cut="grid").batches("cpu", workers=WORKERS))
    next(loader)
    began, count = time.perf_counter(), 0
    for _, batch in zip(range(batches), loader, strict=False):
        count += len(batch["state.values"])
    return count, time.perf_counter() - began
