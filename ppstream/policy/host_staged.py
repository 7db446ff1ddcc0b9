"""A policy on a GPU behind slots in host memory: copied over, run, copied back, waited for.

For a policy rank with a GPU beside a rank 0 without one, and for the unpipelined twin, whose window
may lie on the GPU already. The loop waits for each envelope: what overlaps then is the two ranks,
not the copies.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from ppstream.policy.batch_sizes import ALWAYS, rows_call
from ppstream.policy.compiled import compiled_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from ppstream.core.specs import TensorSpec
    from ppstream.policy.protocol import Policy

_cuda: Final[Any] = torch.cuda  # torch does not annotate its methods


class Busy(Protocol):
    """Work of a device, as a ``torch.cuda.Stream`` tells of it."""

    def query(self) -> bool:
        """True when it is done."""

    def synchronize(self) -> None:
        """Return when it is done."""


class StagedPolicy:
    """Runs like ``policy``, which lives on ``device``, on tensors that live in host memory.

    Args:
        policy: its ``inputs`` and ``outputs`` are this one's.
        device: a CUDA device.
        rows: the batch B of every slot.
        reads_host: False: the inputs of a call are on the device, as its stream comes to them.

    Attributes:
        wait: called in each call, once the device has all its work; returns when that is done.
    """

    takes_rows = True
    copies_from_gpu = True  # into page-locked memory without the driver's own in between

    def __init__(
        self, policy: Policy, device: torch.device, rows: int, *, reads_host: bool = True
    ) -> None:
        self.wait: Callable[[Busy], None] = _synchronize
        self.inputs, self.outputs = policy.inputs, policy.outputs
        self.compiled_parts = compiled_parts(policy)
        self._policy, self._call = policy, rows_call(policy)
        self._device = device
        self._window = zeros(policy.inputs if reads_host else (), rows, device)
        self._out = zeros(policy.outputs, rows, device)
        if (take := getattr(policy, "instruct", None)) is not None:
            self.instruct: Callable[[int, str], None] = take

    def reset(self, rows: Tensor) -> None:
        """As the policy does; its rows are named on its device."""
        self._policy.reset(rows.to(self._device))

    def __call__(
        self, window: Mapping[str, Tensor], out: Mapping[str, Tensor], rows: int | None = None
    ) -> None:
        for name, tensor in self._window.items():
            first = None if name in ALWAYS else rows
            tensor[:first].copy_(window[name][:first], non_blocking=True)
        self._call(self._window or window, self._out, rows)
        for name, tensor in self._out.items():
            out[name].copy_(tensor, non_blocking=True)
        self.wait(_cuda.current_stream(self._device))


def _synchronize(device: Busy) -> None:
    device.synchronize()


def zeros(specs: Sequence[TensorSpec], rows: int, device: torch.device) -> Mapping[str, Tensor]:
    """Returns a tensor ``[rows, *shape]`` on ``device`` for each input or output of a policy.

    No name can be bound to another.
    """
    return MappingProxyType(
        {
            spec.name: torch.zeros(
                rows, *spec.shape, dtype=getattr(torch, spec.dtype), device=device
            )
            for spec in specs
        }
    )
