"""StageB: one call of the policy for one envelope, with resets, instructions and the row masks."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from ppstream.policy.batch_sizes import BatchSizes, rows_call
from ppstream.policy.compiled import compiled_parts
from ppstream.policy.protocol import instruct
from ppstream.policy.unwritten import INTEGERS, Outputs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ppstream.links.slots import Slot
    from ppstream.policy.protocol import Policy


EPISODE: Final = slice(0, 2)  # session, session_epoch: the columns of ``rows`` that name an episode


class _Known(NamedTuple):
    """One envelope's slot, read again and again; held, so that its identity stays its own."""

    envelope: Slot
    window: dict[str, torch.Tensor]
    episodes: memoryview  # int64 [B, 2]
    present: memoryview  # bool [B]


class _Zeros:
    """Outputs as a slot has them, in memory of their own."""

    def __init__(self, slot: Slot) -> None:
        self.tensors = {name: torch.zeros_like(found) for name, found in slot.tensors.items()}


class StageB:
    """The policy behind one call; resets rows whose episode, or the run's epoch, changed.

    Args:
        policy: writes into host memory.
        rows: the batch B.
        integers: what integer outputs are filled with before each call.
        sizes: of the batches that the policy is called with; None: the whole one alone.

    Attributes:
        computed: rows of the newest call.
    """

    def __init__(
        self,
        policy: Policy,
        rows: int,
        integers: int = INTEGERS,
        sizes: BatchSizes | None = None,
    ) -> None:
        self.compiled_parts = compiled_parts(policy)
        self._policy, self._call = policy, rows_call(policy)
        self._sizes = sizes or BatchSizes((rows,))
        self.computed = rows
        self._inputs = [spec.name for spec in policy.inputs]
        self._episodes: list[list[int]] | None = None
        self._epoch = -1
        self._rows = rows
        self._integers = integers
        self._outputs: dict[int, Outputs] = {}  # of each slot
        self._known: dict[int, _Known] = {}  # as many
        self._newest: tuple[Slot, Slot] | None = None  # envelope and result
        self._called: Outputs | None = None  # by the newest call, until it is settled
        self._scratch: Mapping[str, torch.Tensor] = {}  # outputs of dry runs
        self._dry: Outputs | None = None  # of calls without the policy

    def __call__(self, epoch: int, envelope: Slot, result: Slot) -> None:
        """Have the policy write every output of ``result``. Raises whatever the policy raises.

        Raises:
            UnwrittenError: the policy left an output, or a part of one, as it was.
        """
        known = self._known.get(id(envelope)) or self._know(envelope)
        # a list of numbers is compared at a tenth of what comparing tensors costs
        episodes: Any = known.episodes.tolist()  # [[session, session_epoch], ...]
        if self._episodes is None:
            self._warm_up(known.window, result)
        if self._episodes is None or epoch != self._epoch:
            self._reset([True] * self._rows)
        elif episodes != self._episodes:
            pairs = zip(episodes, self._episodes, strict=True)
            self._reset([new != old for new, old in pairs])
        self._episodes, self._epoch = episodes, epoch
        outputs = self._outputs.get(id(result)) or self._outputs_of(result)
        window, present = {**known.window}, bytes(known.present)  # the call's own
        asked = self._sizes.rows_for(present)
        self.computed = asked or self._rows
        self._called = outputs
        outputs.prove(lambda: self._call(window, outputs.given, asked), present)
        self._newest = envelope, result

    def settle(self) -> None:
        """Do what a result need not wait for; else the next call does it."""
        if self._called is not None:
            self._called.settle()
            self._called = None

    def get_ready(self) -> None:
        """Do what a call on the newest envelope would, but for the policy: for nobody."""
        if self._newest is None:
            return
        envelope, result = self._newest
        known = self._known[id(envelope)]
        known.episodes.tolist()
        for name, tensor in known.window.items():
            if name in envelope.arrays:
                tensor.numpy()  # a policy's first step on a CPU; much of torch stands behind it
        self._sizes.rows_for(bytes(known.present))
        if self._dry is None:
            self._dry = Outputs(_Zeros(result), self._integers)
        self._dry.rehearse()

    def _warm_up(self, window: Mapping[str, torch.Tensor], result: Slot) -> None:
        """Calls the policy with each smaller size, before the first envelope and its reset."""
        for size in self._sizes.smaller:
            self._call({**window}, self._scratch_like(result), size)

    def _scratch_like(self, result: Slot) -> Mapping[str, torch.Tensor]:
        if not self._scratch:
            copies = {name: tensor.clone() for name, tensor in result.tensors.items()}
            self._scratch = MappingProxyType(copies)
        return self._scratch

    def instruct(self, number: int, text: str) -> str:
        """Have the policy take in a text that rows will name by ``number``; the fault, or ''."""
        return instruct(self._policy, number, text)

    def _outputs_of(self, result: Slot) -> Outputs:
        is_locked = getattr(self._policy, "copies_from_gpu", False)
        outputs = Outputs(result, self._integers, is_locked=is_locked)
        self._outputs[id(result)] = outputs
        return outputs

    def _know(self, envelope: Slot) -> _Known:
        window = {name: envelope.tensors[name] for name in self._inputs}
        episodes = envelope.arrays["rows"][:, EPISODE].data
        known = _Known(envelope, window, episodes, envelope.arrays["present"].data)
        self._known[id(envelope)] = known
        return known

    def _reset(self, rows: list[bool]) -> None:
        self._policy.reset(torch.tensor(rows))
