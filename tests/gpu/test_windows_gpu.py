"""Batches of ``Windows`` on a GPU, with cameras: near those on the CPU, from pinned memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from camera_files import two_cameras, write_cameras

from ppstream.data import Windows

CUDA = torch.device("cuda", 0)
NEAR = {torch.float32: 1e-5, torch.bfloat16: 2**-6}  # of pixels less mean, over std: up to 4

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]


@pytest.mark.parametrize("workers", [0, 2])
def test_frames_on_a_gpu_are_those_on_the_cpu_within_rounding(tmp_path: Path, workers: int) -> None:
    path = tmp_path / "run.mcap"
    write_cameras(path, damaged=(0, 1, 5))
    on_cpu = Windows(path, two_cameras(), 8).batches()
    on_gpu = Windows(path, two_cameras(), 8).batches(CUDA, workers=workers)
    missing = 0
    for expected, found in zip(on_cpu, on_gpu, strict=True):
        assert expected.keys() == found.keys()
        for name, tensor in expected.items():
            other = found[name]
            assert (other.dtype, other.device.type) == (tensor.dtype, "cuda"), name
            if tensor.is_floating_point():
                atol = NEAR[tensor.dtype]
                assert torch.allclose(other.cpu().float(), tensor.float(), rtol=1e-5, atol=atol)
            else:
                assert torch.equal(other.cpu(), tensor), name
        for camera in ("top", "wrist"):
            absent = found[f"{camera}.frame_index"] < 0
            assert not found[f"{camera}.frames"][absent].any()
            missing += int(absent.sum())
    assert missing, "a window without a frame was among them"
