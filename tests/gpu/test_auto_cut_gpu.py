"""Parts of a policy timed alone on a GPU, as a run does that chooses its cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pipeline_in_process import small_config

from ppstream.core.errors import ConfigError
from ppstream.launch.auto_cut import time_parts
from ppstream_stages.simulated import SimulatedPolicy

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
SETTINGS = (
    "placement.policy=cuda:0",
    "placement.parts=auto",
    'policy.options={kind="gpu", parts_ms=[1, 4], horizon=4, action_dim=2}',
)


@pytest.mark.parametrize("graph", ["true", "false"])
def test_a_longer_part_is_seen_to_be_longer_and_no_memory_stays(graph: str) -> None:
    config = small_config(*SETTINGS, f"policy.graph={graph}")
    time_parts(config, CUDA)  # kernels are loaded, libraries have their workspace
    before = torch.cuda.memory_allocated()
    short_ns, long_ns = time_parts(config, CUDA).parts_ns
    assert long_ns > 2 * short_ns
    assert torch.cuda.memory_allocated() == before


def test_a_part_that_cannot_be_recorded_is_a_configuration_error(monkeypatch: Any) -> None:
    def wait(_policy: object, _window: object, out: dict[str, torch.Tensor]) -> None:
        next(iter(out.values())).sum().item()

    monkeypatch.setattr(SimulatedPolicy, "__call__", wait)
    with pytest.raises(ConfigError, match=r"policy\.graph: part_1 cannot be recorded"):
        time_parts(small_config(*SETTINGS), CUDA)
