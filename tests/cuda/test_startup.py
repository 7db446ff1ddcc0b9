"""CUDA starts with enough connections, or not at all."""

from __future__ import annotations

import pytest

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
