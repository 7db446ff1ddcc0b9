"""A policy behind torch.compile, and how often the compiler had to come back.

Compiling is for the warm-up. A compiler at work later stalls the pipeline for seconds: recompiles
and graph breaks are counted from ``seal`` on, and stand in the log and the statistics.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from ppstream.core.specs import TensorSpec
    from ppstream.policy.protocol import Policy


class CompileCounts(NamedTuple):
    """Counts of torch's compiler in this process."""

    graphs: int  # compiled: every one after the first is a recompile or follows a break
    breaks: int  # places where it gave up and ran Python

    def since(self, before: CompileCounts) -> CompileCounts:
        return CompileCounts(self.graphs - before.graphs, self.breaks - before.breaks)


def compile_counts() -> CompileCounts:
    """Up to now."""
    counters = _counters()
    return CompileCounts(
        int(counters["stats"]["unique_graphs"]), int(sum(counters["graph_break"].values()))
    )


class RecompileMeter:
    """Counts what the compiler does; one per policy rank, made before the policy runs."""

    def __init__(self) -> None:
        self._told = compile_counts().graphs
        self._sealed: CompileCounts | None = None

    def drain(self) -> int:
        """Graphs compiled since the last call: the log's ``recompiles`` of the next line."""
        graphs = compile_counts().graphs
        fresh, self._told = graphs - self._told, graphs
        return fresh

    def seal(self) -> None:
        """Warm-up is over: from here on nothing should be compiled."""
        self._sealed = compile_counts()

    def phase(self, phase: str, event: Callable[..., None]) -> None:
        """A phase begins: bring-up seals; ``event`` logs what the compiler did until now."""
        if phase == "bring-up":
            self.seal()
        now, late = compile_counts(), self.after_warm_up()
        event("compiler", graphs=now.graphs, breaks=now.breaks, late_graphs=late.graphs)

    def after_warm_up(self) -> CompileCounts:
        """Since ``seal``; zeros before."""
        return CompileCounts(0, 0) if self._sealed is None else compile_counts().since(self._sealed)


def compiled(policy: Policy, backend: str = "inductor") -> Policy:
    """``policy`` with its call compiled for the shapes that it is first given."""
    return _CompiledPolicy(policy, backend)


class _CompiledPolicy:
    def __init__(self, policy: Policy, backend: str) -> None:
        self.inputs: tuple[TensorSpec, ...] = policy.inputs
        self.outputs: tuple[TensorSpec, ...] = policy.outputs
        self._policy = policy
        self._call: Any = torch.compile(policy.__call__, dynamic=False, backend=backend)

    def __getattr__(self, name: str) -> Any:
        """Whatever else the policy has or says: ``stateless``, ``instruct``."""
        return getattr(self._policy, name)

    def reset(self, rows: Tensor) -> None:
        """As the policy does."""
        self._policy.reset(rows)

    def __call__(self, window: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        """As the policy does, compiled by the first call."""
        self._call(dict(window), dict(out))


def _counters() -> Any:
    import torch._dynamo.utils  # seconds of import, for those who compile

    return torch._dynamo.utils.counters
