"""Proof that a call of the policy wrote its outputs: nothing of what stood there before is left.

Memory is used again and again, so what a call leaves out is an old result. Every output is
therefore filled before each call, and looked at behind it. Up to ``WHOLE_BYTES`` that is all of it;
of a larger one ``SAMPLE_BYTES`` or little more in each ``STRIDE_BYTES`` of every row, its first and
last bytes among them. Rows of absent robots are not looked at.

    float         a NaN with a payload that no arithmetic makes: a NaN of the policy's is no match
    int32, int64  a large number drawn for the run
    uint8         the same, 8 bytes of it in a row (``compatibility.py`` wants a multiple of 8)
    bool          a byte that is neither 0 nor 1

The host fills and checks its own memory (``Outputs``). On a GPU the fill is queued in front of
the policy, in its graph (``FilledPolicy``); rank 0 checks its copy of the result (``Results``).
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import numpy as np
import torch

from ppstream.core.errors import PolicyError
from ppstream.core.interpreter import collect_garbage
from ppstream.core.user_code import Fault, fault_of, is_a, message_of
from ppstream.policy.batch_sizes import rows_call
from ppstream.policy.protocol import POLICY

if TYPE_CHECKING:
    from torch import Tensor

    from ppstream.core.specs import TensorSpec
    from ppstream.policy.protocol import Policy

RAISED, UNWRITTEN = (
    1,
    2,
)  # a policy's failure in a result's header: an index of ``headers.FAILURES``
WHOLE_BYTES: Final = 64 << 10
STRIDE_BYTES: Final = 64 << 10
SAMPLE_BYTES: Final = 64  # one line of a cache
SEARCHED_BYTES: Final = 1024  # of an output: above that numpy finds a word sooner
FLOATS: Final = 0x7FFD_7FFD  # a quiet NaN as float16, bfloat16, float32, and twice as float64
BOOLS: Final = 0x7D7D_7D7D
INTEGERS: Final = 0x5EAF_1E55  # where no run draws one
UINT8_BYTES: Final = 8  # that are compared as one
BYTES: Final = (torch.uint8, torch.int8, torch.float8_e4m3fn)

HOW_TO_WRITE: Final = (
    "out['actions'] = x only binds a name: write out['actions'].copy_(x); an early return, a "
    "thread that writes after the call, or a use of what out held before, ends here, too"
)
REBINDING: Final = frozenset({TypeError, AttributeError})  # what a mapping that is read-only raises

_storage_references: Final[Any] = torch._C._storage_Use_Count  # torch does not annotate it


class HasTensors(Protocol):
    """A slot of a link."""

    @property
    def tensors(self) -> Mapping[str, Tensor]: ...


Rows = bytes | Sequence[bool] | np.ndarray[Any, np.dtype[np.bool_]]


class UnwrittenError(PolicyError):
    """A call of the policy left an output, or a part of one, as it was before."""


def failure(error: BaseException) -> int:
    """Returns the code of a result's header for an exception in stage B."""
    return UNWRITTEN if is_a(error, UnwrittenError) else RAISED


def policy_fault(error: BaseException) -> Fault:
    """Describes what a policy raised: ``unwritten``, ``memory``, ``exception``.

    Raises:
        UserExitError: it called ``sys.exit()``.
    """
    kind = "unwritten" if is_a(error, UnwrittenError) else ""
    return fault_of(error, POLICY, kind)


def drawn_for(run_id: str) -> int:
    """Draws the fill of a run's integers: the same on all its ranks, 31 bits, above 2^30."""
    return zlib.crc32(run_id.encode()) >> 2 | 1 << 30


def rebinding(error: BaseException) -> UnwrittenError | None:
    """Words the remedy for a policy that put tensors of its own into ``out``; else None."""
    if type(error) in REBINDING and "mappingproxy" in message_of(error):
        return UnwrittenError(f"out is read-only: {HOW_TO_WRITE}")
    return None


class _Layout(NamedTuple):
    """Which words of an output ``[B, *shape]`` are filled and looked at, and with what."""

    pattern: bytes  # of four bytes, repeated
    word_bytes: int
    shape: tuple[int, int, int]  # rows, samples of a row, words of a sample
    strides: tuple[int, int]  # bytes from row to row, and from sample to sample
    is_whole: bool  # each row is one sample

    @classmethod
    def of(cls, tensor: Tensor, integers: int) -> _Layout:
        if tensor.is_floating_point():
            filling = FLOATS
        else:
            filling = BOOLS if tensor.dtype is torch.bool else integers
        pattern = filling.to_bytes(4, "little")
        size = UINT8_BYTES if tensor.dtype in BYTES else tensor.element_size()
        rows = tensor.shape[0]
        row_bytes = tensor.nbytes // rows
        if tensor.nbytes <= WHOLE_BYTES:
            shape = (rows, 1, row_bytes // size)
            return cls(pattern, size, shape, (row_bytes, row_bytes), is_whole=True)
        size = size if row_bytes % 8 else 8  # the fewer words the better
        behind = max(0, row_bytes - SAMPLE_BYTES) // size  # words behind the first sample
        least = max(1, -(-behind * size // STRIDE_BYTES))
        steps = min(range(least, 2 * least + 1), key=lambda n: behind % n)
        step_bytes = behind // steps * size
        sample_bytes = row_bytes - steps * step_bytes  # the last one ends where the row does
        shape = (rows, steps + 1, sample_bytes // size)
        return cls(pattern, size, shape, (row_bytes, step_bytes), is_whole=False)


class _Probe:
    """Checks one output in host memory; its calls are few, since each finds cold caches."""

    def __init__(self, name: str, tensor: Tensor, integers: int) -> None:
        layout, memory = _Layout.of(tensor, integers), _bytes(tensor)
        dtype = np.dtype(f"u{layout.word_bytes}")
        sample = np.dtype((np.void, layout.shape[2] * layout.word_bytes))
        filling = layout.pattern * (sample.itemsize // 4 + 1)
        self.name = name
        word = np.frombuffer(filling[:4] * 2, dtype, 1)
        self._is_whole = layout.is_whole
        self._samples = np.ndarray(layout.shape[:2], sample, memory, 0, layout.strides)
        self._filling = np.frombuffer(filling, sample, 1)
        self._word = word.reshape(())  # an array: compared without conversion
        self._seen = self._samples if layout.is_whole else np.empty(layout.shape[:2], sample)
        self._words = self._seen.view(dtype).reshape(layout.shape)
        self._hit_bytes = bytearray(self._words.size)
        self._hits = np.frombuffer(self._hit_bytes, dtype=np.bool_).reshape(layout.shape)

    def fill(self) -> None:
        self._samples[...] = self._filling

    def finds(self) -> bool:
        """True when anything is left, in any row."""
        if not self._is_whole:
            self._seen[...] = self._samples  # line by line: the next is fetched meanwhile
        np.equal(self._words, self._word, self._hits)
        return True in self._hit_bytes

    def text(self, present: Rows) -> str:
        """Words how much ``finds`` found in the rows that are present; empty: nothing."""
        hits = self._hits[np.array(list(present), dtype=np.bool_)]
        count = int(np.count_nonzero(hits))
        if not count:
            return ""
        share = f"{count} of {hits.size} words ({count / hits.size:.0%})"
        return f"output {self.name!r}: {share} were not written by this call; {HOW_TO_WRITE}"


class Outputs:
    """Outputs of the policy in one slot of host memory, filled before each call, then checked.

    The policy is given memory of this object's own, and what it wrote is copied: nothing that it
    keeps reaches a result later. An output above ``WHOLE_BYTES`` is the slot itself, so one that
    the policy keeps is a failure as long as it does.

    Args:
        slot: where the result goes.
        integers: what integers are filled with.
        is_locked: memory of its own is page-locked, for a policy that copies it from a GPU.

    Attributes:
        given: the mapping to hand to the policy.
        slot: as it came.
    """

    def __init__(self, slot: HasTensors, integers: int, *, is_locked: bool = False) -> None:
        self.slot = slot
        self._integers, self._is_locked = integers, is_locked
        self._probes = tuple(_Probe(name, t, integers) for name, t in slot.tensors.items())
        large = [probe for probe in self._probes if slot.tensors[probe.name].nbytes > WHOLE_BYTES]
        self._large = {probe.name: (probe, _apart(slot.tensors[probe.name])) for probe in large}
        self.renew()
        self._lent = {name: _referred(tensor) for name, (_, tensor) in self._large.items()}

    def renew(self) -> None:
        """Gives the policy other memory: what it keeps of the old one reaches no result."""
        given: dict[str, Tensor] = {}
        self._own: list[tuple[Tensor, Any, int]] = []  # its storage, and that one's address
        self._fills: list[tuple[memoryview, bytes]] = []
        self._copies: list[tuple[memoryview, memoryview, bytes]] = []
        for name, tensor in self.slot.tensors.items():
            if name in self._large:
                given[name] = self._large[name][1]
                continue
            given[name] = self._lend(tensor)
        self.given: Mapping[str, Tensor] = MappingProxyType(given)
        self._references = self._small_referred()
        self._is_filled = False

    def _lend(self, tensor: Tensor) -> Tensor:
        """Returns memory for what ends up in ``tensor``."""
        own = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._is_locked)
        storage = own.untyped_storage()  # held: its address stays its own
        self._own.append((own, storage, storage._cdata))
        memory, layout = _bytes(own).data, _Layout.of(tensor, self._integers)
        pattern = layout.pattern * (len(memory) // 4 + 2)
        word = pattern[: layout.word_bytes] if len(memory) <= SEARCHED_BYTES else b""
        self._fills.append((memory, pattern[: len(memory)]))
        self._copies.append((_bytes(tensor).data, memory, word))
        return own

    def prove(self, call: Callable[[], object], present: Rows) -> None:
        """Makes a call of the policy, which writes into ``given``; raises what it raises.

        Raises:
            UnwrittenError: as ``fill`` and ``hand_over``; it tried to put tensors of its own there.
        """
        try:
            self.fill()
            call()
            self.hand_over(present)
        except BaseException as error:
            self.renew()
            if why := rebinding(error):
                raise why from error
            raise

    def rehearse(self) -> None:
        """Do around no call what ``prove`` does around one; of a slot that nobody reads."""
        if not self._large:
            self.fill()
            for slot, memory, _ in self._copies:
                memory[:] = slot
            self.hand_over(())
            self.settle()

    def settle(self) -> None:
        """Behind a call, and before the next at the latest: fill what the slot does not share.

        A thread of the policy's that has kept memory may yet write there: nobody shall read it.
        """
        if self._is_filled:
            return
        if self.is_kept():
            self.renew()
        for memory, pattern in self._fills:
            memory[:] = pattern
        self._is_filled = True

    def fill(self) -> None:
        """Before a call.

        Raises:
            UnwrittenError: an earlier call has kept an output that cannot be renewed.
        """
        if not self._is_filled:
            self.settle()
        if self._large:
            self._check_returned()
            for probe, _ in self._large.values():
                probe.fill()
        self._is_filled = False  # the call that follows writes there

    def hand_over(self, present: Rows) -> None:
        """Behind a call: what was written is in the slot, and was looked at there.

        Raises:
            UnwrittenError: something of a row that is present was not written, or the call has kept
                an output that cannot be renewed.
        """
        is_suspect = bool(self._large)
        for slot, memory, word in self._copies:
            slot[:] = written = memory.tobytes()
            is_suspect = is_suspect or word in written  # at any byte; b"" is in all
        for probe in self._probes if is_suspect else ():
            if probe.finds() and (text := probe.text(present)):
                raise UnwrittenError(text)
        if self._large:
            self._check_returned()

    def is_kept(self) -> bool:
        """True when the policy, or a thread of its, still refers to memory that can be renewed."""
        return self._small_referred() != self._references

    def _small_referred(self) -> int:
        """References to the mapping, its tensors, their storages, views and arrays."""
        count = sys.getrefcount(self.given)
        for tensor, storage, address in self._own:
            references: int = _storage_references(address)
            count += sys.getrefcount(tensor) + sys.getrefcount(storage) + references
        return count

    def _check_returned(self) -> None:
        for name, (_, tensor) in self._large.items():
            if _referred(tensor) > self._lent[name]:
                collect_garbage()  # an exception may be what kept it
                if _referred(tensor) > self._lent[name]:
                    raise UnwrittenError(
                        f"output {name!r} is still referenced after the call: it has "
                        f"{tensor.nbytes >> 10} KiB, above {WHOLE_BYTES >> 10} it is the result's "
                        f"own memory, which a thread could write into later; keep out[{name!r}]"
                        ".clone(), and have threads end before the call does"
                    )


class Results:
    """Looks at results that come from a GPU, in rank 0's own copies of them."""

    def __init__(self, integers: int) -> None:
        self._integers = integers
        self._slots: dict[int, tuple[HasTensors, tuple[_Probe, ...]]] = {}

    def finds(self, slot: HasTensors) -> bool:
        """True when the policy left something out, in any row."""
        known = self._slots.get(id(slot))
        for probe in self._new_probes(slot) if known is None else known[1]:
            if probe.finds():
                return True
        return False

    def unwritten(self, slot: HasTensors, present: Rows) -> str:
        """Words what the policy left out in rows that are present; empty: nothing."""
        known = self._slots.get(id(slot))
        for probe in self._new_probes(slot) if known is None else known[1]:
            if probe.finds() and (text := probe.text(present)):
                return text
        return ""

    def _new_probes(self, slot: HasTensors) -> tuple[_Probe, ...]:
        probes = tuple(_Probe(name, t, self._integers) for name, t in slot.tensors.items())
        self._slots[id(slot)] = slot, probes  # held: its id stays its own
        return probes


class FilledPolicy:
    """Runs like ``policy``, on outputs in a GPU's memory that it fills first, on the same stream.

    Between a policy and its graphs, so that the fill is recorded with it. What it does not find,
    ``Results`` does. All rows are filled, however few the policy is called with: no older result
    is left in any.
    """

    takes_rows = True

    def __init__(self, policy: Policy, integers: int) -> None:
        self.inputs: tuple[TensorSpec, ...] = policy.inputs
        self.outputs: tuple[TensorSpec, ...] = policy.outputs
        self.name = str(getattr(policy, "name", "") or type(policy).__name__)
        self._policy, self._call = policy, rows_call(policy)
        self._integers = integers
        self._fills: dict[int, tuple[Mapping[str, Tensor], list[tuple[Tensor, int]]]] = {}

    def __getattr__(self, name: str) -> Any:
        """Whatever else the policy has or says: ``stateless``, ``instruct``."""
        return getattr(self._policy, name)

    def reset(self, rows: Tensor) -> None:
        """As the policy does."""
        self._policy.reset(rows)

    def __call__(
        self, window: Mapping[str, Tensor], out: Mapping[str, Tensor], rows: int | None = None
    ) -> None:
        """Fill, then run the policy on the first ``rows``; both only queue.

        Raises:
            UnwrittenError: the policy tried to put tensors of its own into ``out``.
        """
        known = self._fills.get(id(out))
        if known is None:
            known = self._fills[id(out)] = out, [_words(t, self._integers) for t in out.values()]
        for words, word in known[1]:
            words.fill_(word)
        try:
            self._call(window, out, rows)
        except BaseException as error:
            if why := rebinding(error):
                raise why from error
            raise


def _words(tensor: Tensor, integers: int) -> tuple[Tensor, int]:
    """Returns which part of a tensor is filled, and with what, as one kernel can do it."""
    layout = _Layout.of(tensor, integers)
    size = min(4, layout.word_bytes)
    dtype = {4: torch.int32, 2: torch.int16, 1: torch.uint8}[size]
    words = tensor.detach().view(-1).view(dtype)
    if not layout.is_whole:
        rows, samples, count = layout.shape
        row, sample = (stride // size for stride in layout.strides)
        words = words.as_strided(
            (rows, samples, count * layout.word_bytes // size), (row, sample, 1)
        )
    return words, int.from_bytes(layout.pattern[:size], "little")


def _apart(tensor: Tensor) -> Tensor:
    """The same memory of the host as a storage of its own, whose references are counted alone."""
    return torch.from_numpy(_bytes(tensor)).view(tensor.dtype).view(tensor.shape)


def _referred(tensor: Tensor) -> int:
    """References to a tensor, its views and arrays."""
    storage: int = _storage_references(tensor.untyped_storage()._cdata)
    return sys.getrefcount(tensor) + storage


def _bytes(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The memory of a contiguous tensor on the host."""
    return tensor.detach().view(-1).view(torch.uint8).numpy()
