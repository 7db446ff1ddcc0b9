"""A policy behind torch.compile, how often the compiler had to come back, and where it gave up.

Compiling is for the warm-up. A compiler at work later stalls the pipeline for seconds, and a graph
break leaves Python, a wait for a GPU or a collective outside its graph. Both are counted for each
part, with the line of user code; the gate is ``check_graph_breaks``.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from ppstream.core.errors import ConfigError, PolicyError
from ppstream.core.interpreter import uncollected

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from ppstream.config.schema import PolicyConfig
    from ppstream.core.specs import TensorSpec
    from ppstream.policy.protocol import Policy

logger = logging.getLogger("ppstream")

#: The logger of torch's compiler whose lines name the user code that broke a graph, whatever did.
BREAKS_LOG: Final = "torch._dynamo.symbolic_convert.__graph_breaks"
BREAK: Final = re.compile(r"in user code at (.+):(\d+)\nGraph Break Reason: (.*)", re.DOTALL)
COMPILE_ID: Final = re.compile(r"^\d+/\d+: ")
WRAPPED: Final = "Encountered graph break when"  # the reason stands in the next line
#: Of what the policy raised while the compiler ran it with shapes alone, and the lines it was at.
GOT: Final = re.compile(r"run FX node with fake tensors: .*: got (\w+\(.*\))\s*$", re.MULTILINE)
PLACE: Final = re.compile(r'^ *File "(.+)", line (\d+), in ', re.MULTILINE)
INSTALLED: Final = ("site-packages", "dist-packages")  # folders of libraries, seldom the user's
REASON_MAX: Final = 120  # characters
NAMED_MAX: Final = 20  # breaks in one error


class CompileCounts(NamedTuple):
    """Counts of torch's compiler in this process."""

    graphs: int  # compiled: every one after the first is a recompile or follows a break
    breaks: int  # places where it gave up and ran Python

    def since(self, before: CompileCounts) -> CompileCounts:
        return CompileCounts(self.graphs - before.graphs, self.breaks - before.breaks)


class GraphBreak(NamedTuple):
    """A place where the compiler gave up and ran Python."""

    place: str  # file:line of user code
    why: str


class CompiledPart:
    """Counts of the compiler in one part of a policy; written by the thread that calls the part.

    Attributes:
        name: of the part.
        graphs: compiled for it.
        kernels: that they were compiled to; 0 where the backend counts none.
        breaks: reasons by place; the compiler may meet a place more than once.
        recompiles: failed guards because of which a graph was compiled again, in order.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.graphs = self.kernels = 0
        self.breaks: dict[str, GraphBreak] = {}
        self.recompiles: list[str] = []

    @property
    def counts(self) -> dict[str, int]:
        """For the log, and for ranks that must agree."""
        return {
            "graphs": self.graphs,
            "breaks": len(self.breaks),
            "recompiles": len(self.recompiles),
            "kernels": self.kernels,
        }


def compile_counts() -> CompileCounts:
    """Up to now."""
    return CompileCounts(_graphs(), len(_LISTENER.places))


def compiled_parts(policy: object) -> tuple[CompiledPart, ...]:
    """The compiled parts of what a rank runs, whatever wraps it; none where nothing is compiled."""
    found: tuple[CompiledPart, ...] = getattr(policy, "compiled_parts", ())
    return found


def check_graph_breaks(parts: Sequence[CompiledPart], limit: int) -> None:
    """Refuses parts whose graphs broke more often than ``limit``, all of them together.

    Raises:
        ConfigError: names each break by file, line and reason.
    """
    lines = break_lines(parts)
    if len(lines) <= limit:
        return
    more = [f"and {len(lines) - NAMED_MAX} more"] if len(lines) > NAMED_MAX else []
    raise ConfigError(
        [
            f"policy.graph_breaks_max: torch.compile broke {len(lines)} "
            f"graph{'s' * (len(lines) > 1)} of the policy, limit {limit}: rewrite the lines below, "
            "or raise the limit",
            *lines[:NAMED_MAX],
            *more,
        ]
    )


def break_lines(parts: Sequence[CompiledPart]) -> list[str]:
    """One line for each graph break: its file and line, the part, and the compiler's reason."""
    found = ((part.name, one) for part in parts for one in part.breaks.values())
    return [f"{one.place}: part {name!r}: {one.why}" for name, one in found]


class RecompileMeter:
    """Counts what the compiler does; one per policy rank, made before the policy runs.

    Args:
        parts: that are compiled on this rank.
        breaks_max: ``policy.graph_breaks_max``.
    """

    def __init__(self, parts: Sequence[CompiledPart] = (), breaks_max: int = 0) -> None:
        self._parts = parts
        self._breaks_max = breaks_max
        self._told = compile_counts().graphs
        self._sealed: CompileCounts | None = None
        self._known: dict[str, int] = {}  # recompiles of each part that were told

    @classmethod
    def of(cls, config: PolicyConfig, stage_b: object) -> RecompileMeter | None:
        """A meter of what ``stage_b`` runs; None where nothing is compiled."""
        if not config.compile:
            return None
        return cls(compiled_parts(stage_b), config.graph_breaks_max)

    def drain(self) -> int:
        """Graphs compiled since the last call: the log's ``recompiles`` of the next line."""
        graphs = _graphs()
        fresh, self._told = graphs - self._told, graphs
        if fresh and self._sealed is not None:
            self._name_late()
        return fresh

    def seal(self) -> None:
        """Warm-up is over: from here on nothing should be compiled."""
        self._sealed = compile_counts()
        self._known = {part.name: len(part.recompiles) for part in self._parts}

    def phase(self, phase: str, event: Callable[..., None]) -> None:
        """A phase begins: ``event`` logs what the compiler did until now.

        Raises:
            ConfigError: as ``warm_up_is_over``, which bring-up says.
        """
        if phase == "bring-up" and self._sealed is None:
            self.warm_up_is_over(event)
        else:
            self._tell(event)

    def warm_up_is_over(self, event: Callable[..., None]) -> None:
        """Logs, seals, and refuses too many graph breaks.

        Raises:
            ConfigError: there were more than ``breaks_max``; names each.
        """
        self.seal()
        self._tell(event)
        check_graph_breaks(self._parts, self._breaks_max)

    def _tell(self, event: Callable[..., None]) -> None:
        now, late = compile_counts(), self.after_warm_up()
        event(
            "compiler",
            graphs=now.graphs,
            breaks=now.breaks,
            late_graphs=late.graphs,
            parts={part.name: part.counts for part in self._parts},
            graph_breaks=break_lines(self._parts),
            recompiled={part.name: part.recompiles for part in self._parts if part.recompiles},
        )

    def after_warm_up(self) -> CompileCounts:
        """Since ``seal``; zeros before."""
        return CompileCounts(0, 0) if self._sealed is None else compile_counts().since(self._sealed)

    def _name_late(self) -> None:
        """Prints each recompile since the last look: the pipeline stood for it."""
        for part in self._parts:
            for why in part.recompiles[self._known.get(part.name, 0) :]:
                logger.warning("part %r was compiled again after the warm-up: %s", part.name, why)
            self._known[part.name] = len(part.recompiles)


def compiled(policy: Policy, backend: str = "inductor") -> Policy:
    """``policy`` with its call compiled for the shapes that it is first given."""
    return _CompiledPolicy(policy, backend)


class _CompiledPolicy:
    def __init__(self, policy: Policy, backend: str) -> None:
        self.inputs: tuple[TensorSpec, ...] = policy.inputs
        self.outputs: tuple[TensorSpec, ...] = policy.outputs
        self._policy = policy
        self._call: Any = torch.compile(_entry(policy), dynamic=False, backend=backend)
        self._part = CompiledPart(str(getattr(policy, "name", "") or "policy"))
        self.compiled_parts = (self._part,)

    def __getattr__(self, name: str) -> Any:
        """Whatever else the policy has or says: ``stateless``, ``instruct``."""
        return getattr(self._policy, name)

    def reset(self, rows: Tensor) -> None:
        """As the policy does."""
        self._policy.reset(rows)

    def __call__(self, window: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        """As the policy does, compiled by the first call.

        Raises:
            ConfigError: the compiler failed.
            PolicyError: the policy did, as the compiler read it with shapes alone.
        """
        with _LISTENER.hearing(self._part):
            try:
                self._call(dict(window), dict(out))
            except RuntimeError as error:
                from torch._dynamo.exc import TorchDynamoException, TorchRuntimeError

                if not isinstance(error, TorchDynamoException):  # imported long ago, here
                    raise
                if isinstance(error, TorchRuntimeError) and (own := _own_failure(str(error))):
                    raise PolicyError(
                        f"part {self._part.name!r} raised {own}; set policy.compile = false if it "
                        "runs uncompiled"
                    ) from error
                raise ConfigError([_failure(self._part.name, error)]) from error


def _entry(policy: Policy) -> Callable[[Any, Any], None]:
    """The policy's call as a function with code of its own.

    The compiler keeps at most ``recompile_limit`` graphs of one code: parts of one class would
    share them, and the ninth would run uncompiled.
    """

    def call(window: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        policy(window, out)

    return FunctionType(call.__code__.replace(), globals(), "call", closure=call.__closure__)


class _Listener(logging.Handler):
    """Hears from torch's compiler which part's graph broke or was compiled again, and where."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.places: set[str] = set()  # of breaks in this process
        self._here = threading.local()  # the part that this thread calls
        self._listens = False
        self._newest: object = None  # of torch's records of what it compiled

    @contextmanager
    def hearing(self, part: CompiledPart) -> Iterator[None]:
        """Inside: a call of ``part`` on this thread."""
        if not self._listens:
            self._listen()
        graphs, kernels = _graphs(), _kernels()
        self._here.part = part
        try:
            yield
        finally:
            self._here.part = None
            if (fresh := _graphs() - graphs) or self._newest is None:
                part.graphs += fresh
                part.kernels += _kernels() - kernels
                part.recompiles += self._recompiles()

    def emit(self, record: logging.LogRecord) -> None:
        """One graph break, as the compiler words it."""
        part: CompiledPart | None = getattr(self._here, "part", None)
        found = BREAK.search(record.getMessage())
        if part is None or found is None:
            return
        place = f"{found[1]}:{found[2]}"
        self.places.add(place)
        part.breaks.setdefault(place, GraphBreak(place, _reason(found[3])))

    def _recompiles(self) -> list[str]:
        """Reasons of what was compiled again since the last look, oldest first."""
        import torch._dynamo.utils

        records = torch._dynamo.utils.get_compilation_metrics()
        found = []
        for record in reversed(records):
            if record is self._newest:
                break
            if why := getattr(record, "recompile_reason", None):
                found.append(_reason(COMPILE_ID.sub("", why)))
        if records:
            self._newest = records[-1]
        return found[::-1]

    def _listen(self) -> None:
        with uncollected():
            import_module(BREAKS_LOG.rpartition(".")[0])  # it sets up its logger; takes seconds
        self._listens = True
        log = logging.getLogger(BREAKS_LOG)
        if not log.isEnabledFor(logging.DEBUG):  # else the user asked torch to print them
            log.setLevel(logging.DEBUG)
            log.propagate = False
        log.addHandler(self)


def _own_failure(text: str) -> str:
    """The error of user code and its place, from the compiler's ``text``; empty: it has none."""
    found = GOT.search(text)
    if found is None:
        return ""
    not_own = (f"{Path(torch.__file__).parent}{os.sep}", __file__)
    places = [place for place in PLACE.findall(text) if not place[0].startswith(not_own)]
    own = [place for place in places if not set(INSTALLED) & set(Path(place[0]).parts)] or places
    where = f" at {own[-1][0]}:{own[-1][1]}" if own else ""
    return found[1][:REASON_MAX] + where


def _failure(part: str, error: Exception) -> str:
    inner = getattr(error, "inner_exception", error)
    return (
        f"policy.compile: torch.compile failed at part {part!r} ({type(inner).__name__}: "
        f"{_reason(str(inner))}); set policy.compile = false, or take out what it cannot do, "
        "such as torch.inference_mode()"
    )


def _reason(text: str) -> str:
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    if lines and lines[0].startswith(WRAPPED):
        lines = lines[1:]
    return lines[0][:REASON_MAX] if lines else "no reason given"


def _graphs() -> int:
    utils = sys.modules.get("torch._dynamo.utils")  # nothing is compiled before it is imported
    return 0 if utils is None else int(utils.counters["stats"]["unique_graphs"])


def _kernels() -> int:
    metrics = sys.modules.get("torch._inductor.metrics")
    return 0 if metrics is None else int(metrics.generated_kernel_count)


_LISTENER: Final = _Listener()
