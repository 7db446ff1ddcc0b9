"""A fixed amount of work for a GPU that stands in for a stage: matrix products in one graph.

It occupies the device as a policy does, and takes the same time at each replay, about the mean it
was made for. Nothing is drawn, and nothing waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from ppstream.core.clock import NS_PER_MS
from ppstream.cuda.driver import DriverCall
from ppstream.cuda.linear_graph import CapturedPart, empty_graph

if TYPE_CHECKING:
    from ppstream.cuda.driver import CudaStream

SIDE: Final = 512  # of a product: some 3 µs on a large GPU
TIMED: Final = 400  # products that the calibration times
US_PER_MS: Final = 1000.0

_cuda: Final[Any] = torch.cuda  # torch does not annotate its methods


class GpuWork:
    """Queues about ``mean_ms`` of work, at each call the same.

    Made before anything waits on the device: the graph is captured here.

    Attributes:
        products: kernels of one call, all the same.
        mean_ns: what it was made for.
    """

    def __init__(self, mean_ms: float, device: torch.device) -> None:
        self.products = 0
        self.mean_ns = round(mean_ms * NS_PER_MS)
        if not mean_ms:
            return
        generator = torch.Generator(device).manual_seed(0)
        self._left = torch.randn(
            SIDE, SIDE, device=device, dtype=torch.bfloat16, generator=generator
        )
        self._out = torch.empty_like(self._left)
        self._graph = self._captured(TIMED)
        self.products = max(1, round(mean_ms * US_PER_MS / self._product_us()))
        self._graph = self._captured(self.products)
        self._graph.replay()
        torch.cuda.synchronize(device)

    def calls(self, stream: CudaStream) -> tuple[DriverCall, ...]:
        """Returns the calls that queue one mean's work on ``stream``, for a ``Routine``."""
        if not self.products:
            return ()
        if hasattr(self._graph, "raw_cuda_graph_exec"):
            return (stream.to_launch(self._graph.raw_cuda_graph_exec()),)
        outer = _cuda.ExternalStream(int(stream.handle))

        def replay() -> tuple[int]:  # a torch that does not give its handle away
            with torch.cuda.stream(outer):
                self._graph.replay()
            return (0,)

        return (DriverCall(replay, "the start of a graph"),)

    def parts(self) -> tuple[CapturedPart, ...] | None:
        """Returns one mean's work for a larger graph; None: torch does not give its graph away."""
        if not self.products:
            return ()
        if not hasattr(self._graph, "raw_cuda_graph"):
            return None
        return (CapturedPart(self._graph.raw_cuda_graph(), self._graph),)

    def queue(self) -> None:
        """One mean's worth of work on the current stream."""
        if not self.products:
            return
        if torch.cuda.is_current_stream_capturing():  # a graph cannot hold the start of another
            self.queue_products(self.products)
        else:
            self._graph.replay()

    def _captured(self, products: int) -> torch.cuda.CUDAGraph:
        stream = _cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.mm(self._left, self._left, out=self._out)  # makes the library's workspace
        stream.synchronize()
        graph = empty_graph() or torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            self.queue_products(products)
        if hasattr(graph, "instantiate"):
            graph.instantiate()
        return graph

    def queue_products(self, count: int) -> None:
        """``count`` kernels, all the same, on the current stream."""
        for _ in range(count):
            torch.mm(self._left, self._left, out=self._out)

    def _product_us(self) -> float:
        """Of one product inside a graph, once the clocks are up."""
        start, stop = (_cuda.Event(enable_timing=True) for _ in range(2))
        best = float("inf")
        for _ in range(20):
            start.record()
            self._graph.replay()
            stop.record()
            stop.synchronize()
            best = min(best, float(start.elapsed_time(stop)))
        return best * US_PER_MS / TIMED
