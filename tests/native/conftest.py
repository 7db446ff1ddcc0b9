from __future__ import annotations

import pytest

from ppstream import native


@pytest.fixture(autouse=True)
def _core() -> None:
    if not native.is_used:
        pytest.skip(f"no compiled core: {native.why_not}")
