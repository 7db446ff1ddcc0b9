from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(params=["tcp", "unix"])
def either_socket(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Robots of the rig connect by each kind of socket in turn, unless a test names an endpoint."""
    if request.param == "unix":
        monkeypatch.setattr("robot_rig.default_endpoint", f"unix://{tmp_path}/robot")
