"""Parts: a policy cut into pieces with named inputs and outputs, and what travels between places.

A place is a position in the chain of ranks: place 0 is rank 0, whose parts run at the end of stage
A; place k is policy rank k. What a hop carries is derived from the names alone: what a later part
reads and an earlier place has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import fmean
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec
import torch

from ppstream.core.clock import now_ns
from ppstream.core.errors import PolicyError
from ppstream.core.specs import AGE_S, FRAMES, VALID, VALUES, TensorSpec
from ppstream.policy.batch_sizes import ALWAYS, PRESENT, rows_call
from ppstream.policy.compiled import CompiledPart, compiled_parts
from ppstream.policy.host_staged import zeros
from ppstream.policy.protocol import Policy, refused
from ppstream.policy.unwritten import FilledPolicy, Outputs, Rows

if TYPE_CHECKING:
    from torch import Tensor

CALLS_TIMED: Final = 64  # newest ones of each part

Around = Callable[[str], AbstractContextManager[object]]
_NOTHING: Final = nullcontext()


class Part(Policy, Protocol):
    """A piece of a policy that runs on one rank; a policy of one part is one, too.

    ``inputs`` are named by the window or by an earlier part's ``outputs``. The last part's
    ``outputs`` contain ``actions``; every other output is read by a later part. A part does not
    change its inputs: others may read them.

    ``build`` runs on every rank of a policy in parts, so it only makes specs. A part that has
    weights makes them in ``load() -> None``, which is optional and called once, before the first
    call, on the rank that runs it.

    On the ranks of a mesh (``placement.mesh``) ``build`` gets ``mesh=``, a ``DeviceMesh`` of one
    dimension, and all ranks call the same parts on the same inputs, in the same order. What
    ``state_dict()`` returns, if there is one, is compared between them once it is loaded.
    """

    name: str


class PartSpecs(msgspec.Struct, frozen=True):
    """Names and tensors of a part, as ranks tell them to each other."""

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    stateless: bool = False  # keeps nothing from call to call
    needs_samples: bool = False  # of every stream that it reads, whatever it knows of holes
    plain_frames: bool = False  # of 0..1: it normalises them itself


def specs_of(parts: Sequence[Policy]) -> tuple[PartSpecs, ...]:
    """Returns the specs of built parts; a policy of one part needs no name."""
    return tuple(
        PartSpecs(
            name_of(part),
            tuple(part.inputs),
            tuple(part.outputs),
            is_stateless(part),
            bool(getattr(part, "needs_samples", False)),
            bool(getattr(part, "plain_frames", False)),
        )
        for part in parts
    )


def is_stateless(part: Policy) -> bool:
    """Returns True for one that says so; what says nothing may keep anything."""
    return bool(getattr(part, "stateless", False))


def name_of(part: Policy) -> str:
    """Returns how people call a part."""
    return str(getattr(part, "name", "") or "policy")


@dataclass(frozen=True, slots=True)
class Place:
    """Parts that one rank runs, and the hops around them.

    Attributes:
        first: index of its first part.
        names: of its parts; none on a rank 0 without front parts.
        inputs: tensors that come to it; on place 0 the window.
        outputs: tensors that leave it; of the last place the result.
    """

    first: int
    names: tuple[str, ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def of(self, parts: Sequence[Policy]) -> Sequence[Policy]:
        """Those of ``parts`` that run here."""
        return parts[self.first : self.first + len(self.names)]


def blind_reads(parts: Iterable[PartSpecs]) -> dict[str, bool]:
    """Finds streams and groups of which a part reads samples, and acts as if they were there.

    False: of those alone that are ``needs_samples``, and see how many a window has.
    """
    found: dict[str, bool] = {}
    for part in parts:
        names = {spec.name for spec in part.inputs}
        for name in names:
            of = name.rpartition(".")[0]
            if name not in (of + VALUES, of + FRAMES):
                continue
            if not names & {of + VALID, of + AGE_S}:
                found[of] = True
            elif part.needs_samples:
                found.setdefault(of, False)
    return found


def cut(
    parts: Sequence[PartSpecs], where: Sequence[int], window: Sequence[TensorSpec]
) -> tuple[Place, ...]:
    """Cuts ``parts`` into places; ``where`` names each one's place and never decreases.

    Without front parts the first hop carries the whole window; the cut must have no problems.
    """
    made = [*window]
    for part in parts:
        made += part.outputs
    places: list[Place] = []
    incoming = tuple(window)
    for place in range(max(where) + 1):
        first = sum(at < place for at in where)
        names = tuple(part.name for part, at in zip(parts, where, strict=True) if at == place)
        behind = parts[first + len(names) :]
        if not behind:
            outgoing = tuple(parts[-1].outputs)
        elif not first + len(names):
            outgoing = tuple(window)
        else:
            wanted = {spec.name for part in behind for spec in part.inputs}.union(ALWAYS)
            later = {spec.name for part in behind for spec in part.outputs}
            outgoing = tuple(s for s in made if s.name in wanted and s.name not in later)
        places.append(Place(first, names, incoming, outgoing))
        incoming = outgoing
    return tuple(places)


class Joined:
    """The parts of a place as one policy: in order, with memory of their own between them.

    What is read behind the place is copied through. What one part hands to the next is proven to be
    written by this call, in host memory, as results are. A part that changes what it reads, which
    others may read, too, is refused. Called with few rows, the parts are; what is copied through is
    copied whole.

    Args:
        parts: of this place, built and loaded.
        place: what goes in and out.
        rows: the batch B.
        device: of all tensors.
        integers: as ``Outputs``.
        around: is entered for each part of a call, with its name.
    """

    takes_rows = True

    def __init__(
        self,
        parts: Sequence[Policy],
        place: Place,
        rows: int,
        device: torch.device,
        integers: int,
        around: Around = lambda _name: _NOTHING,
    ) -> None:
        self.name = " + ".join(map(name_of, parts))
        self.stateless = all(map(is_stateless, parts))
        self.any_rows = all(bool(getattr(part, "any_rows", False)) for part in parts)
        leaving = {spec.name for spec in place.outputs}
        written = {spec.name for part in parts for spec in part.outputs}
        self._carried = tuple(spec.name for spec in place.outputs if spec.name not in written)
        asked = {spec.name for part in parts for spec in part.inputs}.difference(written)
        asked.update(self._carried, (PRESENT,))
        self.inputs = tuple(spec for spec in place.inputs if spec.name in asked)
        self.outputs = place.outputs
        self._steps: list[_Step] = []
        for part in parts:
            inner = [spec for spec in part.outputs if spec.name not in leaving]
            tensors = zeros(inner, rows, device)
            self._steps.append(_Step(part, tensors, leaving, device, integers))
        self._around = around
        self._is_host = device.type == "cpu"
        takers = [part for part in parts if callable(getattr(part, "instruct", None))]
        if takers:
            self.instruct: Callable[[int, str], None] = _Takers(takers)

    @property
    def parts(self) -> tuple[Policy, ...]:
        """As it was given."""
        return tuple(step.part for step in self._steps)

    @property
    def compiled_parts(self) -> tuple[CompiledPart, ...]:
        """Those of its parts that are compiled."""
        return tuple(one for part in self.parts for one in compiled_parts(part))

    def reset(self, rows: Tensor) -> None:
        """As each part does; no part sees what another one does to ``rows``."""
        for step in self._steps:
            step.part.reset(rows.clone())

    def __call__(
        self, window: Mapping[str, Tensor], out: Mapping[str, Tensor], rows: int | None = None
    ) -> None:
        """As ``Policy``, given what comes to the place; raises what a part raises."""
        known = dict(window)
        present: Rows = ()
        if self._is_host:
            there = known[PRESENT].numpy().copy()  # as no part changes it
            if rows is not None:
                there[rows:] = 0  # not computed, whoever is there in a dry run
            present = there
        for name in self._carried:
            out[name].copy_(known[name], non_blocking=True)
        for step in self._steps:
            with self._around(step.name):
                begun_ns = now_ns()
                step.run(known, out, present, rows)
                step.newest_ns.append(now_ns() - begun_ns)

    def part_times(self, calls: int) -> dict[str, int]:
        """Mean duration of each part in the newest calls, by the host's clock."""
        newest = {step.name: list(step.newest_ns)[-calls:] for step in self._steps}
        return {name: round(fmean(found)) for name, found in newest.items() if found}


class _Step:
    """One part of a place."""

    def __init__(
        self,
        part: Policy,
        tensors: Mapping[str, Tensor],
        leaving: set[str],
        device: torch.device,
        integers: int,
    ) -> None:
        self.part = part
        self.name = name_of(part)
        self.newest_ns: deque[int] = deque(maxlen=CALLS_TIMED)
        self._reads = [spec.name for spec in part.inputs]
        self._leaves = [spec.name for spec in part.outputs if spec.name in leaving]
        self.tensors = tensors  # that stay here
        self._is_host = device.type == "cpu"
        self._proof = Outputs(self, integers) if self._is_host and tensors else None
        is_plain = self._is_host or not tensors
        self._run = rows_call(part if is_plain else FilledPolicy(part, integers))
        self._given: dict[int, tuple[Mapping[str, Tensor], Mapping[str, Tensor]]] = {}

    def run(
        self,
        known: dict[str, Tensor],
        out: Mapping[str, Tensor],
        present: Rows,
        rows: int | None = None,
    ) -> None:
        """Runs the part on the first ``rows``; what it made is ``known`` behind it.

        Raises:
            PolicyError: it changed what it reads. What it raises passes through.
        """
        # ``data`` is the same memory, and counts the changes that are made through it alone
        reads = {name: known[name].data for name in self._reads}

        def call() -> None:
            self._run(dict(reads), self._given_to(out), rows)

        if self._proof is None:
            call()
        else:
            self._proof.prove(call, present)
        if changed := [name for name, tensor in reads.items() if tensor._version]:
            raise PolicyError(
                f"part {self.name!r} changed its input {', '.join(changed)} in place: another part "
                "may read it, so actions would depend on the cut; work on a copy"
            )
        known.update(self.tensors)
        known.update(self._leaving(out))

    def _leaving(self, out: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: out[name] for name in self._leaves}

    def _given_to(self, out: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Returns all outputs of the part; on a device the same mapping for the same ``out``."""
        if self._is_host:  # a mapping that is kept would be taken for one that the policy keeps
            own = self.tensors if self._proof is None else self._proof.given
            return MappingProxyType({**own, **self._leaving(out)})
        if id(out) not in self._given:
            self._given[id(out)] = out, MappingProxyType({**self.tensors, **self._leaving(out)})
        return self._given[id(out)][1]


class _Takers:
    """Hands a text to every part that takes texts."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self._parts = parts

    def __call__(self, number: int, text: str) -> None:
        for part in self._parts:
            part.instruct(number, text)


def load(parts: Sequence[Policy], target: str) -> None:
    """Has each part of the policy named ``target`` make what is heavy, on the rank that runs it.

    Raises:
        ConfigError: a part raised; as ``call_target``.
    """
    name = ""
    try:
        for part in parts:
            name = name_of(part)
            if callable(make := getattr(part, "load", None)):
                make()
    except BaseException as error:  # noqa: BLE001 - user code
        raise refused(error, f"policy.target: part {name!r} of {target}") from None


def part_times_of(policy: Policy) -> Callable[[int], dict[str, int]]:
    """Returns what tells the times of a place's parts; nothing of a policy of one part."""
    return policy.part_times if isinstance(policy, Joined) else lambda _calls: {}
