"""The devices every resampling test runs on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ppstream_kernels import ops


@pytest.fixture(
    params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)],
    scope="session",
)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    name: str = request.param
    if name == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
        if not ops.is_implemented("CUDA"):
            pytest.skip("no CUDA implementation is registered")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield name
    torch.set_num_threads(threads)
