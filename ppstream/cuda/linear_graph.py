"""LinearGraph: kernels and captured graphs, one behind the other, as one launch.

Nothing in it changes from one launch to the next; kernels that need other numbers read them from
memory. It is started again only when it is over. Parts never run beside each other: forks would
gain nothing here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from ppstream.cuda import driver
from ppstream.cuda.driver import checked

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


_cuda: Final[Any] = torch.cuda  # torch does not annotate its methods


class GraphPart(Protocol):
    """A kernel or a graph, as ``kernel_launch.KernelLaunch``."""

    def add_to(self, graph: Any, after: list[Any]) -> Any:
        """Adds it to the driver's ``graph`` behind the nodes ``after``; returns its node."""


class CapturedPart:
    """A captured graph, by the driver's handle, as a part of another.

    Args:
        handle: the driver's.
        owner: of the memory that it uses; kept as long as the graph that it is a part of.
    """

    def __init__(self, handle: int, owner: object) -> None:
        self.handle, self._owner = handle, owner

    def add_to(self, graph: Any, after: list[Any]) -> Any:
        """As ``GraphPart``."""
        cuda = driver.driver()
        child = cuda.CUgraph(self.handle)
        added = cuda.cuGraphAddChildGraphNode(graph, after, len(after), child)
        (node,) = checked(added, "a graph in a graph")
        return node


def captured(work: Callable[[], object]) -> CapturedPart | None:
    """Returns what ``work`` queues on torch's current stream; None: torch does not give it away.

    It has run before, so that nothing is loaded here. Waits for the GPU.
    """
    graph = empty_graph()
    if graph is None:
        return None
    with _cuda.graph(graph, stream=_cuda.Stream(), capture_error_mode="thread_local"):
        work()
    return CapturedPart(graph.raw_cuda_graph(), graph)


def empty_graph() -> Any:
    """Returns a graph of torch's that keeps its nodes, to be instantiated; None: torch has none."""
    try:
        return _cuda.CUDAGraph(keep_graph=True)
    except TypeError:
        return None


class LinearGraph:
    """Made before anything waits on the device.

    Args:
        parts: in order.

    Raises:
        DeviceError: the driver refuses a part.
    """

    def __init__(self, parts: Sequence[GraphPart]) -> None:
        cuda = driver.driver()
        (graph,) = checked(cuda.cuGraphCreate(0), "a graph")
        after: list[Any] = []
        for part in parts:
            after = [part.add_to(graph, after)]
        (self._executable,) = checked(cuda.cuGraphInstantiate(graph, 0), "a graph's start")
        checked(cuda.cuGraphDestroy(graph), "the end of a graph's making")
        self._launch = cuda.cuGraphLaunch
        self._parts = tuple(parts)

    def queue(self, stream: Any) -> None:
        """Start it on the driver's ``stream``."""
        answer = self._launch(self._executable, stream)
        if answer[0]:
            checked(answer, "the start of a graph")
