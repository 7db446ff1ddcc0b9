"""``--check`` on a machine with GPUs, which are made up here: all that it says of them."""

from __future__ import annotations

import ctypes
import resource
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from test_check import TABLE, config, given, row  # noqa: F401 - a fixture

from ppstream.config.schema import PipelineConfig
from ppstream.core.errors import ConfigError
from ppstream.cuda import startup
from ppstream.launch.dry_run import describe

GPUS = {"rank0": "cuda:0", "policy": "cuda:1"}


class Machine:
    """What torch and the driver answer; a test may change it before it asks."""

    def __init__(self) -> None:
        self.gpus = 2
        self.reaches = {(0, 1), (1, 0)}  # peer access, from one to the other
        self.release = b"580.159.04"

    def nvmlInit_v2(self) -> int:
        return 0 if self.release else 9

    def nvmlSystemGetDriverVersion(self, text: Any, size: int) -> int:
        assert size >= 80
        text.value = self.release
        return 0

    def nvmlShutdown(self) -> int:
        return 0


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine()
    about = SimpleNamespace(name="NVIDIA H200", total_memory=140 << 30, major=9, minor=0)
    answers: dict[str, Any] = {
        "is_available": lambda: found.gpus > 0,
        "device_count": lambda: found.gpus,
        "get_device_properties": lambda index: about,
        "can_device_access_peer": lambda *pair: pair in found.reaches,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    driver, nvrtc = ModuleType("driver"), ModuleType("nvrtc")
    driver.cuDriverGetVersion = lambda: (0, 13010)  # type: ignore[attr-defined]
    nvrtc.nvrtcVersion = lambda: (0, 13, 0)  # type: ignore[attr-defined]
    for name, module in (("driver", driver), ("nvrtc", nvrtc)):
        monkeypatch.setitem(sys.modules, f"cuda.bindings.{name}", module)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: found)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64 << 10, 64 << 10))
    monkeypatch.setenv(startup.CONNECTIONS, "32")
    return found


def on_gpus(**changes: Any) -> PipelineConfig:
    return config(**{"placement": GPUS, "simulate": {"kind": "gpu"}, **changes})


@pytest.mark.usefixtures("given", "machine")
def test_each_rank_has_its_device_and_the_link_its_reason() -> None:
    text = describe(on_gpus(), 2)
    assert row(text, "cuda:0") == "cuda:0 NVIDIA H200, 140.0 GiB, sm_90, for rank 0"
    assert row(text, "cuda:1") == "cuda:1 NVIDIA H200, 140.0 GiB, sm_90, for rank 1"
    assert "rank 0 stage A + C (streams of their own) on cuda:0" in " ".join(text.split())
    assert "rank 1 stage B (given_policy:build) on cuda:1" in " ".join(text.split())
    assert row(text, "peer") == "peer access yes, both ways"
    link = "link peer: both GPUs are in one host and reach each other's memory"
    assert row(text, "link") == link
    assert sys.modules["given_policy"].received[0][1] == "cuda:1"  # where it will run


@pytest.mark.usefixtures("given", "machine")
def test_what_drives_the_gpus_is_named_by_version() -> None:
    text = describe(on_gpus(), 2)
    assert row(text, "torch") == f"torch {torch.__version__}, CUDA 13.0"
    assert row(text, "driver") == "driver 580.159.04, for CUDA 13.1"
    assert row(text, "NVRTC") == "NVRTC 13.0"
    assert row(text, "lockable") == "lockable memory 64 KiB"
    assert row(text, startup.CONNECTIONS) == f"{startup.CONNECTIONS} 32"


@pytest.mark.parametrize("reaches", [set(), {(0, 1)}, {(1, 0)}])
@pytest.mark.usefixtures("given")
def test_peer_access_counts_only_both_ways(machine: Machine, reaches: set[tuple[int, int]]) -> None:
    machine.reaches = reaches
    text = describe(on_gpus(), 2)
    assert row(text, "peer") == "peer access no"
    assert row(text, "link").startswith("link pinned: both GPUs are in one host, but do not reach")


@pytest.mark.usefixtures("given")
def test_a_driver_whose_library_is_missing_still_says_its_cuda(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.release = b""
    assert row(describe(on_gpus(), 2), "driver") == "driver for CUDA 13.1"

    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert row(describe(on_gpus(), 2), "driver") == "driver for CUDA 13.1"


@pytest.mark.usefixtures("given")
def test_what_cannot_be_loaded_is_said_in_its_row(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    assert row(describe(on_gpus(), 2), "NVRTC").startswith("NVRTC not usable: ")


@pytest.mark.usefixtures("given")
def test_a_gpu_that_is_named_and_not_there_is_a_problem(machine: Machine) -> None:
    machine.gpus = 1
    with pytest.raises(ConfigError) as caught:
        describe(on_gpus(), 2)
    assert (
        "placement.policy: got cuda:1, but this machine has 1 CUDA devices" in caught.value.problems
    )


@pytest.mark.usefixtures("given", "machine")
def test_the_twin_on_one_gpu_has_no_peer_to_reach() -> None:
    text = describe(on_gpus(), 1)
    assert row(text, "cuda:1").endswith("for rank 0")
    assert "peer access" not in text


@pytest.mark.usefixtures("given", "machine")
def test_nothing_is_said_of_gpus_where_none_is_used() -> None:
    assert "NVRTC" not in describe(config(**TABLE), 2)
