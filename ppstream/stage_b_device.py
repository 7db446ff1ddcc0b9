"""Stage B on a GPU: the policy behind one call that only queues.

The host does not know whose rows an envelope carries until it is over, so a policy with a memory is
told on the device which rows begin a new episode: its ``reset`` gets the mask before every call. A
policy that says ``stateless = True`` is never told, and pays nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from ppstream.stage import told

if TYPE_CHECKING:
    from ppstream.link_device import DeviceSlot
    from ppstream.stage import Policy

EPISODE: Final = slice(0, 2)  # session, session_epoch: the columns of ``rows`` that name an episode
EPOCH_FIELD: Final = 2  # of the envelope's header


class DeviceStageB:
    """Queues the policy on the current stream; owned by the thread that owns the stream."""

    def __init__(
        self, policy: Policy, rows: int, device: torch.device, *, is_stateless: bool
    ) -> None:
        self._policy = policy
        self._inputs = [spec.name for spec in policy.inputs]
        self._is_stateless = is_stateless
        # of the previous call: epoch, session, session_epoch of each row; none at first
        self._seen = torch.full((rows, 3), -1, dtype=torch.int64, device=device)

    def __call__(self, envelope: DeviceSlot, result: DeviceSlot) -> None:
        """Write every output of the policy into ``result``. Raises what the policy raises."""
        if not self._is_stateless:
            self._reset(envelope)
        tensors = envelope.tensors
        self._policy({name: tensors[name] for name in self._inputs}, result.tensors)

    def instruct(self, number: int, text: str) -> str:
        """Have the policy take in a text that rows will name by ``number``; the fault, or ''."""
        return told(self._policy, number, text)

    def _reset(self, envelope: DeviceSlot) -> None:
        rows = envelope.tensors["rows"]
        epoch = envelope.header[EPOCH_FIELD].expand(rows.shape[0], 1)
        now = torch.cat((epoch, rows[:, EPISODE]), dim=1)
        self._policy.reset((now != self._seen).any(dim=1))
        self._seen.copy_(now)
