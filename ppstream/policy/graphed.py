"""A policy replayed from CUDA graphs: one per pair of slots and batch size, recorded through the
real path.

A graph is the policy's own kernels without the host's part: launching all of them costs what
launching one did. It is recorded while the run warms up; later the slots come again and only
``replay`` is left. What a graph cannot hold (waiting for the GPU, another shape) is found while it
is recorded, and said with the switch that turns graphs off.
"""

from __future__ import annotations

import warnings
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from ppstream.core.clock import NS_PER_MS
from ppstream.core.errors import ConfigError
from ppstream.cuda.driver import graph_nodes
from ppstream.cuda.linear_graph import empty_graph
from ppstream.policy.batch_sizes import rows_call
from ppstream.policy.compiled import compiled
from ppstream.policy.parts import Joined
from ppstream.policy.unwritten import INTEGERS, FilledPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from ppstream.config.schema import PolicyConfig
    from ppstream.core.specs import TensorSpec
    from ppstream.policy.protocol import Policy

WARM_UP_CALLS: Final = 3  # before recording: libraries choose their kernels, compilers compile
TIMED_CALLS: Final = 3

_cuda: Final[Any] = torch.cuda  # torch does not annotate its methods


class Rehearsal(NamedTuple):
    """One call of a policy, as it will be replayed."""

    nodes: int | None  # kernels, copies and memsets, with those of ``reset``; None: not known
    duration_ns: int  # the shortest of a few


class GraphStatistics(NamedTuple):
    """Of one policy since the start."""

    graphs: int
    replays: int
    eager_calls: int  # after ``seal``, with tensors that were not there before


def prepared_policy(
    policy: Policy, config: PolicyConfig, device: torch.device, integers: int = INTEGERS
) -> Policy:
    """``policy`` as the configuration wants it run: compiled, replayed from graphs, or as it is.

    Of ``Joined`` parts each one is compiled by itself, by who joins them.

    On a CUDA device its outputs are filled before each call (``unwritten.py``), with ``integers``
    where they are integers. Graphs are for CUDA devices; elsewhere ``graph`` has no effect.
    """
    if config.compile and not isinstance(policy, Joined):
        policy = compiled(policy)
    if device.type != "cuda":
        return policy
    policy = FilledPolicy(policy, integers)
    return GraphedPolicy(policy) if config.graph else policy


def device_ns(call: Callable[[], object]) -> int:
    """Time that the GPU takes for what ``call`` queues on the current stream; waits for it."""
    begin, end = (_cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return int(begin.elapsed_time(end) * NS_PER_MS)


class GraphedPolicy:
    """Runs like the policy it is given, from graphs, on the current stream.

    ``reset`` stays outside: it must change state in place, where the graphs read it.
    """

    takes_rows = True

    def __init__(self, policy: Policy) -> None:
        self.inputs: tuple[TensorSpec, ...] = policy.inputs
        self.outputs: tuple[TensorSpec, ...] = policy.outputs
        self._policy, self._call = policy, rows_call(policy)
        self._name = getattr(policy, "name", type(policy).__name__)
        self._first_input = policy.inputs[0].name if policy.inputs else None
        self._first_output = policy.outputs[0].name
        self._graphs: dict[tuple[int, int, int | None], Any] = {}
        self._pool: Any = None
        self._is_sealed = False
        self._replays = 0
        self._eager_calls = 0

    def __getattr__(self, name: str) -> Any:
        """Whatever else the policy has or says: ``stateless``, ``instruct``."""
        return getattr(self._policy, name)

    def reset(self, rows: Tensor) -> None:
        """As the policy does."""
        self._policy.reset(rows)

    def __call__(
        self, window: Mapping[str, Tensor], out: Mapping[str, Tensor], rows: int | None = None
    ) -> None:
        """Write the first ``rows`` of every output; what is new is recorded first.

        Raises:
            ConfigError: the policy cannot be recorded.
        """
        graph = self._graphs.get(self._key(window, out, rows))
        if graph is not None:
            self._replays += 1
            graph.replay()
        elif self._is_sealed:
            self._eager_calls += 1
            self._call(window, out, rows)
        else:
            self.prepare(window, out, rows)
            self(window, out, rows)

    def prepare(
        self, window: Mapping[str, Tensor], out: Mapping[str, Tensor], rows: int | None = None
    ) -> None:
        """Record the graph of this pair of slots and size, unless there is one; waits for the GPU.

        For before a link opens: recording beside a stream that waits can block both.
        """
        key = self._key(window, out, rows)
        if key not in self._graphs:
            self._graphs[key], _ = self._record(window, out, rows)

    def rehearse(
        self, window: Mapping[str, Tensor], out: Mapping[str, Tensor], rows: Tensor | None
    ) -> Rehearsal:
        """Records and times the policy on tensors that no slot has, and forgets the graph.

        For before a link opens; waits for the GPU.

        Args:
            window: inputs, as ``__call__`` takes them.
            out: outputs.
            rows: bool ``[B]`` for ``reset``, which then counts as a part of each call; None: the
                policy keeps no state.
        """
        graph, nodes = self._record(window, out, counts=True)
        if nodes is not None and rows is not None:
            resetting = self._nodes_of_reset(rows)
            nodes = None if resetting is None else nodes + resetting
        self._pool = None  # it goes with this graph
        graph.replay()
        return Rehearsal(nodes, min(device_ns(graph.replay) for _ in range(TIMED_CALLS)))

    def recorded(self, window: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> int | None:
        """Returns the driver's handle of what is replayed for this pair of slots, as a part of a
        larger graph; None: there is none, torch does not give it away, or it draws random numbers.

        It is replayed once here: whoever starts it without torch does not move torch's generator,
        and would draw the same numbers each time.
        """
        graph = self._graphs.get(self._key(window, out, None))
        if graph is None or not hasattr(graph, "instantiate"):
            return None
        before = _cuda.get_rng_state()
        graph.replay()
        if not torch.equal(before, _cuda.get_rng_state()):
            return None
        handle: int = graph.raw_cuda_graph()
        return handle

    def seal(self) -> None:
        """Warm-up is over: what comes with other tensors runs without a graph, and is counted."""
        self._is_sealed = True

    def statistics(self) -> GraphStatistics:
        return GraphStatistics(len(self._graphs), self._replays, self._eager_calls)

    def _key(
        self, window: Mapping[str, Tensor], out: Mapping[str, Tensor], rows: int | None
    ) -> tuple[int, int, int | None]:
        """All tensors of a slot move together: one of them names it."""
        first = window[self._first_input].data_ptr() if self._first_input else 0
        return first, out[self._first_output].data_ptr(), rows

    def _nodes_of_reset(self, rows: Tensor) -> int | None:
        """Counts the nodes that ``reset`` queues, which need not be fit for a graph."""
        graph = empty_graph()
        if graph is None:
            return None
        self._policy.reset(rows)  # loads its kernels
        _cuda.synchronize()
        try:
            with (
                warnings.catch_warnings(action="ignore"),  # a reset that queues nothing is fine
                _cuda.graph(graph, stream=_cuda.Stream(), capture_error_mode="thread_local"),
            ):
                self._policy.reset(rows)
        except RuntimeError:
            _leave_capture()
            return None
        return graph_nodes(graph.raw_cuda_graph())

    def _record(
        self,
        window: Mapping[str, Tensor],
        out: Mapping[str, Tensor],
        rows: int | None = None,
        *,
        counts: bool = False,
    ) -> tuple[Any, int | None]:
        """The graph of one call and, where it ``counts`` and torch allows it, its nodes."""
        side = _cuda.Stream()
        side.wait_stream(_cuda.current_stream())
        try:
            with _cuda.stream(side):
                for _ in range(WARM_UP_CALLS):
                    self._call(window, out, rows)
            _cuda.synchronize()
            countable = empty_graph()
            graph = countable or _cuda.CUDAGraph()
            with _cuda.graph(
                graph, pool=self._pool, stream=side, capture_error_mode="thread_local"
            ):
                self._call(window, out, rows)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # torch's name for whatever a capture refuses
            _leave_capture()
            text = str(error).splitlines()[0]
            raise ConfigError(
                [
                    f"policy.graph: {self._name} cannot be recorded as a CUDA "
                    f"graph ({text}); set policy.graph = false, or remove what waits for the GPU "
                    "(.item(), .cpu(), print) and what changes its shapes"
                ]
            ) from error
        self._pool = graph.pool()
        if countable is None:
            return graph, None
        graph.instantiate()
        return graph, graph_nodes(graph.raw_cuda_graph()) if counts else None


def _leave_capture() -> None:
    """Takes torch's generator out of a capture that failed, by one that succeeds.

    Torch leaves the generator in there, and whoever next draws on the device would fail.
    """
    with (
        suppress(RuntimeError),  # of a device that is in an error for good
        warnings.catch_warnings(action="ignore"),  # a capture of nothing is meant
        _cuda.graph(_cuda.CUDAGraph(), stream=_cuda.Stream(), capture_error_mode="thread_local"),
    ):
        pass
