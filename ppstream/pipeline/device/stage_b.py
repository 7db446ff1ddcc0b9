"""Stage B on a GPU: the policy behind one call that only queues.

The host does not know whose rows an envelope carries until it is over, so a policy with a memory is
told on the device which rows begin a new episode: its ``reset`` gets the mask before every call. A
policy that says ``stateless = True`` is never told, and pays nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from ppstream.cuda.linear_graph import CapturedPart, captured
from ppstream.links.headers import EPOCH
from ppstream.policy.batch_sizes import rows_call
from ppstream.policy.compiled import compiled_parts
from ppstream.policy.protocol import instruct

if TYPE_CHECKING:
    from ppstream.cuda.linear_graph import GraphPart
    from ppstream.links.device_link import DeviceSlot
    from ppstream.policy.protocol import Policy

EPISODE: Final = slice(0, 2)  # session, session_epoch: the columns of ``rows`` that name an episode


class StageGraphs(NamedTuple):
    """A call of stage B as parts of graphs.

    Attributes:
        find_new: in front of the policy's ``reset``, which stays a call; None: it has no memory.
        rest: behind it, in order.
    """

    find_new: GraphPart | None
    rest: tuple[GraphPart, ...]


class DeviceStageB:
    """Queues the policy on the current stream; owned by the thread that owns the stream."""

    def __init__(
        self, policy: Policy, rows: int, device: torch.device, *, is_stateless: bool
    ) -> None:
        self.compiled_parts = compiled_parts(policy)
        self._policy, self._call = policy, rows_call(policy)
        self._inputs = [spec.name for spec in policy.inputs]
        self._is_stateless = is_stateless
        # epoch, session, session_epoch of each row, now and in the previous call; none at first
        self._now, self._seen = torch.full((2, rows, 3), -1, dtype=torch.int64, device=device)
        self._epoch, self._episode = self._now[:, 0], self._now[:, 1:]
        self._differs = torch.empty(rows, 3, dtype=torch.bool, device=device)
        self._is_new = torch.empty(rows, dtype=torch.bool, device=device)

    def __call__(self, envelope: DeviceSlot, result: DeviceSlot, rows: int | None = None) -> None:
        """Write every output of the policy into ``result``, of the first ``rows`` or of all.

        Raises what the policy raises.
        """
        if not self._is_stateless:
            self._reset(envelope)
        tensors = envelope.tensors
        self._call({name: tensors[name] for name in self._inputs}, result.tensors, rows)

    def instruct(self, number: int, text: str) -> str:
        """Have the policy take in a text that rows will name by ``number``; the fault, or ''."""
        return instruct(self._policy, number, text)

    def graphs(self, envelope: DeviceSlot, result: DeviceSlot) -> StageGraphs | None:
        """Returns a call on these slots as parts of larger graphs; None: torch gives none away, or
        the policy is not replayed from graphs. It has run on them; waits for the GPU.
        """
        recorded = getattr(self._policy, "recorded", None)
        if recorded is None:
            return None
        tensors = envelope.tensors
        handle = recorded({name: tensors[name] for name in self._inputs}, result.tensors)
        if handle is None:
            return None
        policy = CapturedPart(handle, self._policy)
        if self._is_stateless:
            return StageGraphs(None, (policy,))
        find = captured(lambda: self._find_new(envelope))
        remember = captured(self._remember)
        if find is None or remember is None:
            return None
        return StageGraphs(find, (remember, policy))

    def reset(self) -> None:
        """The policy's ``reset`` alone, of a call whose other parts are in graphs."""
        if not self._is_stateless:
            self._policy.reset(self._is_new)

    def _reset(self, envelope: DeviceSlot) -> None:
        self._find_new(envelope)
        self._policy.reset(self._is_new)
        self._remember()

    def _find_new(self, envelope: DeviceSlot) -> None:
        self._epoch.copy_(envelope.header[EPOCH])
        self._episode.copy_(envelope.tensors["rows"][:, EPISODE])
        torch.ne(self._now, self._seen, out=self._differs)
        torch.any(self._differs, dim=1, out=self._is_new)

    def _remember(self) -> None:
        self._seen.copy_(self._now)
