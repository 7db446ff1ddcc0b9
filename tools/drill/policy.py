"""The drill's policy: it moves the robot gently, and fails in the way it is told to.

Orders come through a file that ``policy.options.orders`` names: a kind and for how many envelopes.
The file is looked at once per envelope; without one nothing ever goes wrong here. On a GPU stage B
is work for that GPU; replayed from a graph it takes no orders, because no Python runs then.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from ppstream.core.specs import TensorSpec
from ppstream.cuda.busy_kernel import GpuWork
from ppstream.cuda.driver import DeviceError
from ppstream.links.host import HostOut

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

OUTLIER_S: Final = 0.8  # longer than the drill's lease, shorter than its watchdog
LATER_S: Final = 0.02  # some envelopes later
FOR_EVER_S: Final = 3600
FOR_EVER_CYCLES: Final = 10**13  # of a GPU: more than an hour
FAR: Final = 1 << 30  # beyond the end of any tensor here
KEPT_BYTES: Final = 64 << 20  # given back, and kept by torch for the next one who asks
TOO_MANY_BYTES: Final = 1 << 30  # beyond what is free on a GPU

ROWS_SUMMED: Final = 4  # by the ranks of a mesh

_cuda: Final[Any] = torch.cuda  # torch does not annotate its methods


class DrillPolicy:
    """Actions are a slow sine, the share of the imu's values that were valid, and a count.

    The count is the first joint's newest value: the robot knows when it sent that.
    """

    name = "policy"

    def __init__(self, options: Mapping[str, Any], device: torch.device) -> None:
        steps = options["steps"]
        self.inputs: tuple[TensorSpec, ...] = (
            TensorSpec("state.values", (steps, options["dim"])),
            TensorSpec("state.valid", (steps, 2), "bool"),
        )
        self.outputs = (TensorSpec("actions", (options["horizon"], options["action_dim"])),)
        self._spend = _stage_b(options["b_ms"], device)
        self._orders = Path(options.get("orders", "/nowhere"))
        self._left = 0
        self._kind = ""
        self._calls = 0

    def reset(self, rows: Tensor) -> None:
        """Nothing to forget."""

    def __call__(self, window: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        self._spend()
        self._calls += 1
        self._read_order()  # a new one ends the one before
        kind = self._kind if self._left else ""
        self._left = max(0, self._left - 1)
        if kind in CARELESS:
            wanted = torch.empty_like(out["actions"])
            self._write(window, wanted)
            CARELESS[kind](out, wanted)
            return
        actions = out["actions"]
        self._write(window, actions)
        if kind:
            FAULTS[kind](actions)

    def _write(self, window: Mapping[str, Tensor], actions: Tensor) -> None:
        actions[..., 0] = math.sin(self._calls / 100)
        actions[..., 1] = window["state.valid"][..., 1].float().mean()
        actions[..., 2] = window["state.values"][:, -1:, 0]

    def _read_order(self) -> None:
        try:
            self._kind, count = self._orders.read_text().split()
        except (OSError, ValueError):
            return
        self._orders.unlink()
        self._left = int(count)


def _stage_b(b_ms: float, device: torch.device) -> Callable[[], None]:
    """Takes so long on ``device``; loads what faults need there, before anything waits on it."""
    if device.type != "cuda":
        return partial(time.sleep, b_ms / 1000)
    _cuda._sleep(1)
    _read_beyond(torch.zeros(2, device=device), at=0)
    return GpuWork(b_ms, device).queue


def _raise(_actions: Tensor) -> None:
    raise RuntimeError("the drill told this policy to fail")


class _OddError(BaseException):
    """Neither an Exception, nor one that can say what it is."""

    def __str__(self) -> str:
        raise KeyboardInterrupt


def _raise_oddly(_actions: Tensor) -> None:
    raise _OddError


def _exit(_actions: Tensor) -> None:
    sys.exit(3)


def _not_a_number(actions: Tensor) -> None:
    actions[..., 0] = math.nan


def _wrong_shape(actions: Tensor) -> None:
    actions.copy_(torch.zeros(7, 7, 7))


def _no_memory(actions: Tensor) -> None:
    """More than there is; on a GPU while torch keeps some, as it does after any larger policy."""
    size = 1 << 60
    if actions.is_cuda:
        torch.empty(KEPT_BYTES, dtype=torch.uint8, device=actions.device)
        size = _cuda.mem_get_info()[0] + TOO_MANY_BYTES
    torch.empty(size, dtype=torch.uint8, device=actions.device)


def _too_slow(_actions: Tensor) -> None:
    time.sleep(OUTLIER_S)


def _endless(_actions: Tensor) -> None:
    while True:
        time.sleep(0)


def _hold_interpreter(_actions: Tensor) -> None:
    """A call into C that does not let other threads run."""
    ctypes.PyDLL(None).sleep(FOR_EVER_S)


def _crash(_actions: Tensor) -> None:
    os.abort()


def _refuse_link(_actions: Tensor) -> None:
    """The next result cannot be sent, as when a GPU's driver refuses: this link asks no driver."""

    def refuse(_hop: HostOut, index: int) -> None:
        raise DeviceError(f"result {index} was refused, by the drill")

    HostOut.commit = refuse  # type: ignore[method-assign, assignment]


def _never_end_on_gpu(_actions: Tensor) -> None:
    """Queued at once; the GPU is not done with it before the hour is over."""
    _cuda._sleep(FOR_EVER_CYCLES)


def _wait_for_gpu(_actions: Tensor) -> None:
    """For all its streams, also those that wait for rank 0."""
    _cuda.synchronize()


def _read_beyond(actions: Tensor, at: int = FAR) -> None:
    """A kernel with a bad address: the GPU gives up everything this process has there."""
    actions.view(-1)[torch.full((1,), at, dtype=torch.int64, device=actions.device)]


def _rebind(out: Any, wanted: Tensor) -> None:
    """Rebinds a name, as nearly everybody writes first."""
    out["actions"] = wanted


def _write_nothing(_out: Any, _wanted: Tensor) -> None:
    """An early return."""


def _write_half(out: Any, wanted: Tensor) -> None:
    half = wanted.shape[1] // 2
    out["actions"][:, :half].copy_(wanted[:, :half])


def _write_later(out: Any, wanted: Tensor) -> None:
    threading.Timer(LATER_S, out["actions"].copy_, (wanted,)).start()


#: How what a call computed does not come into its outputs, or not before it returns.
CARELESS: Final[dict[str, Callable[[Any, Tensor], None]]] = {
    "rebind": _rebind,
    "nothing": _write_nothing,
    "half": _write_half,
    "later": _write_later,
}
FAULTS: Final[dict[str, Callable[[Tensor], None]]] = {
    "raise": _raise,
    "raise-oddly": _raise_oddly,
    "exit": _exit,
    "nan": _not_a_number,
    "shape": _wrong_shape,
    "memory": _no_memory,
    "slow": _too_slow,
    "endless": _endless,
    "hold": _hold_interpreter,
    "crash": _crash,
    "refuse": _refuse_link,
    "spin": _never_end_on_gpu,
    "synchronize": _wait_for_gpu,
    "beyond": _read_beyond,
}


class Relay:
    """A part in front of a DrillPolicy: hands a number on, takes its time and orders of its own."""

    stateless = True

    def __init__(self, options: Mapping[str, Any], number: int, device: torch.device) -> None:
        self.name = f"relay_{number}"
        self.inputs = (TensorSpec(f"relayed_{number - 1}", (1,)),) if number else ()
        self.outputs = (TensorSpec(f"relayed_{number}", (1,)),)
        self._spend = _stage_b(options["b_ms"], device)
        self._orders = Path(f"{options.get('orders', '/nowhere')}.{self.name}")

    def reset(self, rows: Tensor) -> None:
        """Nothing to forget."""

    def __call__(self, window: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        self._spend()
        for tensor in out.values():
            tensor.fill_(1.0)
        if self._orders.exists():
            kind = self._orders.read_text().split()[0]
            self._orders.unlink()
            FAULTS[kind](next(iter(out.values())))


def build_chain(config: Mapping[str, Any], device: torch.device) -> list[Any]:
    """A DrillPolicy behind ``relays`` parts, which it reads the last one of."""
    relays = [Relay(config, number, device) for number in range(config["relays"])]
    last = DrillPolicy(config, device)
    last.name = "act"
    last.inputs = (*last.inputs, *relays[-1].outputs)
    return [*relays, last]


class MeshPolicy(DrillPolicy):
    """A DrillPolicy whose ranks sum something; each rank of its mesh takes orders of its own."""

    def __init__(
        self, options: Mapping[str, Any], device: torch.device, mesh: DeviceMesh | None
    ) -> None:
        super().__init__(options, device)
        self._mesh = mesh
        self._orders = Path(f"{options.get('orders', '/nowhere')}.rank_{os.environ.get('RANK')}")
        self._layer = torch.nn.Linear(ROWS_SUMMED, 1).requires_grad_(requires_grad=False)
        self._ones = torch.ones(1, ROWS_SUMMED)

    def load(self) -> None:
        """Has every rank sum its rows."""
        if self._mesh is not None:
            style = RowwiseParallel(input_layouts=Replicate())
            parallelize_module(self._layer, self._mesh, style)

    def __call__(self, window: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        super().__call__(window, out)
        out["actions"][..., 1] += 0.0 * self._layer(self._ones).item()


def build_mesh(
    config: Mapping[str, Any], device: torch.device, mesh: DeviceMesh | None = None
) -> MeshPolicy:
    """A MeshPolicy; its actions are those of a DrillPolicy."""
    return MeshPolicy(config, device, mesh)


def build_stateless_mesh(
    config: Mapping[str, Any], device: torch.device, mesh: DeviceMesh | None = None
) -> MeshPolicy:
    """A MeshPolicy for replicas that are meshes."""
    policy = MeshPolicy(config, device, mesh)
    policy.stateless = True
    return policy


def build(config: Mapping[str, Any], device: torch.device) -> DrillPolicy:
    """A DrillPolicy with ``config``'s shapes, duration and orders file."""
    return DrillPolicy(config, device)


def build_stateless(config: Mapping[str, Any], device: torch.device) -> DrillPolicy:
    """A DrillPolicy for replicas: nothing but its sine knows of calls before."""
    policy = DrillPolicy(config, device)
    policy.stateless = True
    return policy


class EndlessDecoder:
    """Copies actions until the file ``orders`` is there; then it leaves, or never comes back."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._orders = Path(options["orders"])

    def reset(self, row: int) -> None:
        """Nothing to forget."""

    def __call__(self, row: int, result: Mapping[str, Any], out: Any) -> None:
        out[:] = result["actions"]
        while self._orders.exists():
            if self._orders.read_text() == "exit":
                sys.exit(3)
            time.sleep(0)


def build_decoder(options: Mapping[str, Any], actions: object) -> EndlessDecoder:
    """An EndlessDecoder; ``options.orders`` names its file."""
    return EndlessDecoder(options)
