from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from device_in_process import GPUS, DevicePipeline
from pipeline_in_process import NewestValues, small_config


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(*overrides: str, policy: NewestValues | None = None, **more: Any) -> DevicePipeline:
        config = small_config(*GPUS, *overrides)
        return DevicePipeline(config, policy or NewestValues(), tmp_path, monkeypatch, **more)

    return make
