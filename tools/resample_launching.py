"""What a resampling call on a GPU costs the host, and how long the very first one takes."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from typing import Final

import gpu_timing
import torch
from resample_inputs import make_inputs

from ppstream_kernels import StreamSource, ops, resample, resample_streams
from ppstream_kernels.cuda_plan import CudaPlan
from ppstream_kernels.cuda_rings import Recorded
from ppstream_kernels.source import to_columns


def measure_launching() -> dict[str, float]:
    """Host time of a call, and of the very first one."""
    one = make_inputs((1, 64, 16, 14), torch.bfloat16)
    source = StreamSource(one.src, one.src_ns)
    checked = functools.partial(resample, one.src, one.src_ns, one.tgt_ns, out=one.out)
    plan = CudaPlan(to_columns([source]), 16)
    many = tuple(resample_streams([source], one.tgt_ns))
    plan.run(one.tgt_ns, *many)
    checked()
    single = torch.cuda.CUDAGraph()
    with torch.cuda.graph(single):
        checked()
    recorded = Recorded(lambda _: plan.run(one.tgt_ns, *many), torch.device("cuda", 0))
    stream = torch.cuda.current_stream().cuda_stream
    arguments = (one.src, one.src_ns, one.tgt_ns)
    row = {
        "graph_replay_us": gpu_timing.host_us(single.replay),
        "recorded_replay_us": gpu_timing.host_us(lambda: recorded.queue(stream)),
        "plan_us": gpu_timing.host_us(lambda: plan.run(one.tgt_ns, *many)),
        "out_op_us": gpu_timing.host_us(lambda: ops.resample_out(*arguments, *one.out)),
        "op_us": gpu_timing.host_us(lambda: ops.resample(*arguments)),
        "checked_out_us": gpu_timing.host_us(checked),
    }
    with tempfile.TemporaryDirectory() as folder:
        row |= {name: _first_use_s(folder) for name in ("cold_first_use_s", "kept_first_use_s")}
    print("  ".join(f"{name} {value:.2f}" for name, value in row.items()))
    return row


_FIRST_USE: Final = """
import time, torch
from ppstream_kernels import resample
src, ns = torch.randn(1, 64, 14, device="cuda"), torch.arange(64, device="cuda")[None]
torch.cuda.synchronize()
start = time.perf_counter()
resample(src, ns, ns)
torch.cuda.synchronize()
print(time.perf_counter() - start)
"""


def _first_use_s(cache_folder: str) -> float:
    """In a fresh process with torch and CUDA up; the second one finds the first one's cubin."""
    environment = os.environ | {"XDG_CACHE_HOME": cache_folder, "PYTHONPATH": ":".join(sys.path)}
    ran = subprocess.run(
        [sys.executable, "-c", _FIRST_USE], env=environment, check=True, capture_output=True
    )
    return float(ran.stdout)
