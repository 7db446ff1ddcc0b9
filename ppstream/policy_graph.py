"""A policy replayed from CUDA graphs: one per pair of slots, recorded through the real path.

A graph is the policy's own kernels without the host's part: launching all of them costs what
launching one did. It is recorded while the run warms up; later the slots come again and only
``replay`` is left. What a graph cannot hold (waiting for the GPU, another shape) is found while it
is recorded, and said with the switch that turns graphs off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from ppstream.errors import ConfigError
from ppstream.policy_compile import compiled

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from ppstream.config import PolicyConfig
    from ppstream.specs import TensorSpec
    from ppstream.stage import Policy

WARM_UP_CALLS: Final = 3  # before recording: libraries choose their kernels, compilers compile

_cuda: Final[Any] = torch.cuda  # torch does not annotate its methods


class GraphStatistics(NamedTuple):
    """Of one policy since the start."""

    graphs: int
    replays: int
    eager_calls: int  # after ``seal``, with tensors that were not there before


def prepared_policy(policy: Policy, config: PolicyConfig, device: torch.device) -> Policy:
    """``policy`` as the configuration wants it run: compiled, replayed from graphs, or as it is.

    Graphs are for CUDA devices; elsewhere ``graph`` has no effect.
    """
    if config.compile:
        policy = compiled(policy)
    return GraphedPolicy(policy) if config.graph and device.type == "cuda" else policy


class GraphedPolicy:
    """Runs like the policy it is given, from graphs, on the current stream.

    ``reset`` stays outside: it must change state in place, where the graphs read it.
    """

    def __init__(self, policy: Policy) -> None:
        self.inputs: tuple[TensorSpec, ...] = policy.inputs
        self.outputs: tuple[TensorSpec, ...] = policy.outputs
        self._policy = policy
        self._first_input = policy.inputs[0].name if policy.inputs else None
        self._first_output = policy.outputs[0].name
        self._graphs: dict[tuple[int, int], Any] = {}
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

    def __call__(self, window: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        """Write every output; a pair of slots that is new is recorded first.

        Raises:
            ConfigError: the policy cannot be recorded.
        """
        graph = self._graphs.get(self._key(window, out))
        if graph is not None:
            self._replays += 1
            graph.replay()
        elif self._is_sealed:
            self._eager_calls += 1
            self._policy(window, out)
        else:
            self.prepare(window, out)
            self(window, out)

    def prepare(self, window: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        """Record the graph of this pair of slots, unless there is one; waits for the GPU.

        For before a link opens: recording beside a stream that waits can block both.
        """
        key = self._key(window, out)
        if key not in self._graphs:
            self._graphs[key] = self._record(window, out)

    def seal(self) -> None:
        """Warm-up is over: what comes with other tensors runs without a graph, and is counted."""
        self._is_sealed = True

    def statistics(self) -> GraphStatistics:
        return GraphStatistics(len(self._graphs), self._replays, self._eager_calls)

    def _key(self, window: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> tuple[int, int]:
        """All tensors of a slot move together: one of them names it."""
        first = window[self._first_input].data_ptr() if self._first_input else 0
        return first, out[self._first_output].data_ptr()

    def _record(self, window: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> Any:
        side = _cuda.Stream()
        side.wait_stream(_cuda.current_stream())
        try:
            with _cuda.stream(side):
                for _ in range(WARM_UP_CALLS):
                    self._policy(window, out)
            _cuda.synchronize()
            graph = _cuda.CUDAGraph()
            with _cuda.graph(
                graph, pool=self._pool, stream=side, capture_error_mode="thread_local"
            ):
                self._policy(window, out)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # torch's name for whatever a capture refuses
            text = str(error).splitlines()[0]
            raise ConfigError(
                [
                    f"policy.graph: {type(self._policy).__name__} cannot be recorded as a CUDA "
                    f"graph ({text}); set policy.graph = false, or take out what waits for the GPU "
                    "(.item(), .cpu(), print) and what changes its shapes"
                ]
            ) from error
        self._pool = graph.pool()
        return graph
