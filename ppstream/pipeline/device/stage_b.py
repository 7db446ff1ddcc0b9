"""Stage B on a GPU: the policy behind one call that only queues.

The host does not know whose rows an envelope carries until it is over, so a policy with a memory is
told on the device which rows begin a new episode: its ``reset`` gets the mask before every call. A
policy that says ``stateless = True`` is never told, and pays nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from ppstream.cuda.linear_graph import CapturedPart
from ppstream.links.headers import EPOCH
from ppstream.policy.protocol import instruct

if TYPE_CHECKING:
    from ppstream.cuda.linear_graph import GraphPart
    from ppstream.links.device_link import DeviceSlot
    from ppstream.policy.protocol import Policy

EPISODE: Final = slice(0, 2)  # session, session_epoch: the columns of ``rows`` that name an episode


class DeviceStageB:
    """Queues the policy on the current stream; owned by the thread that owns the stream."""

    def __init__(
        self, policy: Policy, rows: int, device: torch.device, *, is_stateless: bool
    ) -> None:
        self._policy = policy
        self._inputs = [spec.name for spec in policy.inputs]
        self._is_stateless = is_stateless
        # epoch, session, session_epoch of each row, now and in the previous call; none at first
        self._now, self._seen = torch.full((2, rows, 3), -1, dtype=torch.int64, device=device)
        self._epoch, self._episode = self._now[:, 0], self._now[:, 1:]
        self._differs = torch.empty(rows, 3, dtype=torch.bool, device=device)
        self._is_new = torch.empty(rows, dtype=torch.bool, device=device)

    def __call__(self, envelope: DeviceSlot, result: DeviceSlot) -> None:
        """Write every output of the policy into ``result``. Raises what the policy raises."""
        if not self._is_stateless:
            self._reset(envelope)
        tensors = envelope.tensors
        self._policy({name: tensors[name] for name in self._inputs}, result.tensors)

    def instruct(self, number: int, text: str) -> str:
        """Have the policy take in a text that rows will name by ``number``; the fault, or ''."""
        return instruct(self._policy, number, text)

    def graph(self, envelope: DeviceSlot, result: DeviceSlot) -> GraphPart | None:
        """Returns a whole call on these slots as a part of a larger graph; None: some of it is
        queued by calls, such as the ``reset`` of a policy with a memory.
        """
        recorded = getattr(self._policy, "recorded", None)
        if not self._is_stateless or recorded is None:
            return None
        tensors = envelope.tensors
        handle = recorded({name: tensors[name] for name in self._inputs}, result.tensors)
        return None if handle is None else CapturedPart(handle)

    def _reset(self, envelope: DeviceSlot) -> None:
        self._epoch.copy_(envelope.header[EPOCH])
        self._episode.copy_(envelope.tensors["rows"][:, EPISODE])
        torch.ne(self._now, self._seen, out=self._differs)
        torch.any(self._differs, dim=1, out=self._is_new)
        self._policy.reset(self._is_new)
        self._seen.copy_(self._now)
