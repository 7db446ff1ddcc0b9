"""Settings of a rank with a GPU before CUDA starts, and facts about its devices after.

With the default number of connections a stream that waits for another rank can hold up streams that
do not: measured, with as few as one. The number counts when CUDA starts, so it is set first here,
and a smaller one that somebody else set is refused.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import resource
from collections.abc import Callable, Iterator, MutableMapping
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from ppstream.core.errors import ConfigError
from ppstream.cuda import nvml
from ppstream.cuda.streams import stream

if TYPE_CHECKING:
    from ppstream.config.schema import PipelineConfig

CONNECTIONS: Final = "CUDA_DEVICE_MAX_CONNECTIONS"
CONNECTIONS_MIN: Final = 32

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
RELEASE_BYTES: Final = 80  # as NVML wants at least

_cuda: Final[Any] = torch.cuda  # torch does not annotate its methods
_started: Final[list[torch.device]] = []  # one process, one device; empty before
_watched: Final[list[nvml.GpuWatch | None]] = []


class DeviceFacts(NamedTuple):
    """One GPU, for people."""

    name: str
    memory_bytes: int
    capability: str


def settle_connections(environment: MutableMapping[str, str] = os.environ) -> None:
    """Ask for enough connections; to be called before anything starts CUDA in this process.

    Raises:
        ConfigError: somebody asked for too few, or CUDA started without.
    """
    asked = environment.get(CONNECTIONS)
    if asked is None:
        if _cuda.is_initialized():
            raise ConfigError(
                [f"{CONNECTIONS}: not set, and CUDA has started already; set it to 32 before"]
            )
        environment[CONNECTIONS] = str(CONNECTIONS_MIN)
    elif not asked.isdigit() or int(asked) < CONNECTIONS_MIN:
        raise ConfigError(
            [
                f"{CONNECTIONS}: got {asked!r}, want {CONNECTIONS_MIN} or not set at all: a stream "
                "that waits for the other rank would hold up others"
            ]
        )


def start(device: torch.device) -> None:
    """Make ``device`` this thread's, and start CUDA on it.

    Raises:
        ConfigError: there is no such device, or the connections are too few.
    """
    settle_connections()
    if not torch.cuda.is_available():
        raise ConfigError([f"placement: got {device}, but torch finds no CUDA device here"])
    index, count = device.index or 0, torch.cuda.device_count()
    if index >= count:
        raise ConfigError([f"placement: got {device}, but there are {count} CUDA devices here"])
    _watched[:] = [nvml.watch(index)]  # before there is a context of ours
    torch.cuda.set_device(index)
    _cuda.init()
    torch.zeros(1, device=device)  # makes the context
    stream("receiving")  # and with it all of ours, before any other
    _started[:] = [torch.device("cuda", index)]


def started() -> torch.device | None:
    """The device that ``start`` started CUDA on; None: CUDA is not in use by this process."""
    return _started[0] if _started else None


def watched() -> nvml.GpuWatch | None:
    """The view of other programs on that device; None: there is none."""
    return _watched[0] if _watched else None


def has_peer_access(device: str, other: str) -> bool:
    """True when two devices can reach each other's memory; False where either is not there."""
    if not torch.cuda.is_available():
        return False
    first, second = (torch.device(name).index or 0 for name in (device, other))
    if max(first, second) >= torch.cuda.device_count():
        return False
    if first == second:  # another process's memory, too
        return True
    return all(map(torch.cuda.can_device_access_peer, (first, second), (second, first)))


def peer_access(config: PipelineConfig) -> bool:
    """True when neighbours among the devices that the configuration names reach each other.

    Raises:
        ConfigError: as ``settle_connections``.
    """
    devices = config.placement
    chain = [devices.rank0, *devices.policy]
    if "cpu" in chain:
        return False
    settle_connections()
    pairs = [*pairwise([*chain, chain[0]])]
    if devices.replicas > 1:
        pairs = [*product(chain[:1], devices.policy)]
    return all(has_peer_access(one, other) for one, other in pairs)


def missing(config: PipelineConfig, *, is_inline: bool, is_quick: bool = False) -> list[str]:
    """Devices that the ranks of a run need and this machine has not, as problems.

    ``is_quick``: by the driver's count alone, in 15 ms; to start CUDA on an H200 takes 200 more.
    """
    if is_inline:
        named = [("policy", config.placement.policy[0])]
    else:
        named = [("rank0", config.placement.rank0)]
        named += (("policy", device) for device in config.placement.policy)
    hidden = os.environ.get(VISIBLE)
    why = "" if hidden is None else f" ({VISIBLE} is {hidden!r})"
    return [
        f"placement.{rank}: got {device}, but this machine has {_count_text()}{why}"
        for rank, device in dict.fromkeys(named)
        if device != "cpu" and not _is_there(device, is_quick=is_quick)
    ]


def _is_there(device: str, *, is_quick: bool = False) -> bool:
    index = torch.device(device).index or 0
    return (is_quick or torch.cuda.is_available()) and index < torch.cuda.device_count()


def device_to_build_on(config: PipelineConfig) -> torch.device:
    """Returns the device on which ``--check`` builds the policy: its own if it is there."""
    device = config.placement.policy[-1]
    return torch.device(device if device == "cpu" or device_facts(device) is not None else "cpu")


def versions() -> Iterator[tuple[str, str]]:
    """Returns versions of what drives the GPUs here; and how much memory may be page-locked."""
    yield "torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}"
    yield "driver", _or_why(_driver_version)
    yield "NVRTC", _or_why(_nvrtc_version)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft >> 10} KiB"
    yield "lockable memory", limit
    yield CONNECTIONS, os.environ.get(CONNECTIONS, f"{CONNECTIONS_MIN}, set at start")


def _or_why(text: Callable[[], str]) -> str:
    try:
        return text()
    except (ImportError, RuntimeError) as error:
        return f"not usable: {error}"


def _driver_version() -> str:
    version: int = importlib.import_module("cuda.bindings.driver").cuDriverGetVersion()[1]
    return f"{_driver_release()}for CUDA {version // 1000}.{version % 1000 // 10}"


def _driver_release() -> str:
    """As ``nvidia-smi`` says it, and a comma; empty where the driver's library is missing."""
    try:
        library = ctypes.CDLL(nvml.LIBRARY)
    except OSError:
        return ""
    text = ctypes.create_string_buffer(RELEASE_BYTES)
    if library.nvmlInit_v2() or library.nvmlSystemGetDriverVersion(text, RELEASE_BYTES):
        return ""
    library.nvmlShutdown()
    return f"{text.value.decode()}, "


def _nvrtc_version() -> str:
    _, major, minor = importlib.import_module("cuda.bindings.nvrtc").nvrtcVersion()
    return f"{major}.{minor}"


def _count_text() -> str:
    return f"{torch.cuda.device_count()} CUDA devices"


def device_facts(device: str) -> DeviceFacts | None:
    """Returns what is known of a device; None when it is not there."""
    if not _is_there(device):
        return None
    about = torch.cuda.get_device_properties(torch.device(device).index or 0)
    return DeviceFacts(about.name, about.total_memory, f"sm_{about.major}{about.minor}")
