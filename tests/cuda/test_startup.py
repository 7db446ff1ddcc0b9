"""CUDA starts with enough connections, or not at all."""

from __future__ import annotations

import pytest

from ppstream.config import load
from ppstream.core.errors import ConfigError
from ppstream.cuda import startup


def test_connections_are_asked_for_where_nobody_did() -> None:
    environment: dict[str, str] = {}
    startup.settle_connections(environment)
    assert environment == {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    startup.settle_connections(environment)  # and again, by the other door


@pytest.mark.parametrize("asked", ["1", "8", "31", "many", ""])
def test_too_few_connections_are_refused(asked: str) -> None:
    with pytest.raises(ConfigError, match=r"CUDA_DEVICE_MAX_CONNECTIONS.*want 32"):
        startup.settle_connections({"CUDA_DEVICE_MAX_CONNECTIONS": asked})


def test_connections_are_refused_when_cuda_is_ahead_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    with pytest.raises(ConfigError, match="CUDA has started already"):
        startup.settle_connections({})


def test_devices_that_are_not_there_are_those_of_the_ranks_that_a_run_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    places = "placement.rank0=cuda:98", 'placement.policy=["cuda:99", "cuda:99"]'
    config = load.read("two_gpus", (*places, "placement.parts=[1, 2]"))
    lines = [
        f"placement.{name}, but this machine has 0 CUDA devices (CUDA_VISIBLE_DEVICES is '')"
        for name in ("rank0: got cuda:98", "policy: got cuda:99")
    ]
    for is_quick in (False, True):
        assert startup.missing(config, is_inline=False, is_quick=is_quick) == lines
        assert startup.missing(config, is_inline=True, is_quick=is_quick) == lines[1:]
