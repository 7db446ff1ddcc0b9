from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # torch asks once; tests run beside each other
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no pool of interpreters beside a compiler
# What it prepares before its first kernel costs ten seconds, and serves kernels to come.
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "0"
os.environ["TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"] = "0"
# A shell that starts them with & has them ignore Ctrl-C, and so would all that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(params=["tcp", "unix"])
def either_socket(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Robots of the rig connect by each kind of socket in turn, unless a test names an endpoint."""
    if request.param == "unix":
        monkeypatch.setattr("robot_rig.default_endpoint", f"unix://{tmp_path}/robot")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start ranks come first: they take longest, and wait for most of that time."""
    long = {item.path for item in items if item.get_closest_marker("multirank")}
    items.sort(key=lambda item: item.path not in long)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Takes what is imported out of the garbage collector's sight, at once."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
