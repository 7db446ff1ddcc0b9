from __future__ import annotations

import gc
import logging
import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol

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
    """Takes what is imported out of the garbage collector's sight, at once.

    pytest adds and removes handlers six times a test at each logger whose records do not reach the
    root: torch has dozens. They do here.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        for logger in logging.root.manager.loggerDict.values():
            if isinstance(logger, logging.Logger):
                logger.propagate = True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None, item: pytest.Item) -> Generator[None]:
    """Behind a file: collects, and takes what is left out of the collector's sight, too."""
    yield
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """In a worker: tells the controller of a set-up or a teardown only what did not pass."""
    if not hasattr(item.config, "workerinput") or item.get_closest_marker("flaky"):
        return None
    hook, place = item.ihook, {"nodeid": item.nodeid, "location": item.location}
    hook.pytest_runtest_logstart(**place)
    for report in runtestprotocol(item, log=False, nextitem=nextitem):
        if report.when == "call" or not report.passed:
            hook.pytest_runtest_logreport(report=report)
    hook.pytest_runtest_logfinish(**place)
    return True
