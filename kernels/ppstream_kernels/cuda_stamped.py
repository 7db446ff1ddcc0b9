"""Makes the launches at both ends of a stage: a wait that ends it, and a put behind it, with times.

None of them ever changes: what differs from one use of a slot to the next lies in host memory,
where each launch reads it and leaves its stamps. So a graph can hold them.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import device as Device

from ppstream_kernels import cuda_put, cuda_wait
from ppstream_kernels.cuda_put import Route, Stamps
from ppstream_kernels.cuda_wait import StampedWait
from ppstream_kernels.kernel_launch import KernelLaunch, index_of

_FLAG: Final = 4  # bytes of a count of blocks
_WORD: Final = 8
_WARP: Final = 32


class StampedLaunches:
    """Launches on one device; both kernels are loaded and have run once when this returns.

    Args:
        device: current.
        puts: messages at most.

    Raises:
        RuntimeError: cuda-core is missing, or the driver refuses a kernel.
    """

    def __init__(self, device: Device, puts: int) -> None:
        index = index_of(device)
        self._put = cuda_put.kernels(index)["put_stamped"]
        self._wait = cuda_wait.kernels(index)["wait_stamped"]
        self._arrived = torch.zeros(puts + 2, dtype=torch.int32, device=device)
        first = self._arrived.data_ptr()
        counter = first + (puts + 1) * _FLAG  # counted on this end
        self._free = iter(range(first, counter, _FLAG))
        words = torch.zeros(4, dtype=torch.int64, pin_memory=True)
        now, other, began, ended = range(words.data_ptr(), words.data_ptr() + 4 * _WORD, _WORD)
        stream: Any = torch.cuda.current_stream(index).cuda_stream
        self.wait(StampedWait(counter, now, ended, counter)).queue(stream)
        self.put(Route(0, 0, 0), counter, Stamps(now, began, other), 0).queue(stream)
        torch.cuda.synchronize(device)

    def wait(self, call: StampedWait) -> KernelLaunch:
        """Returns a wait for a counter, with the time of its end."""
        return KernelLaunch(self._wait, (1, 1, 1), call.packed(), _WARP)

    def put(self, route: Route, counter: int, stamps: Stamps, header_words: int) -> KernelLaunch:
        """Returns the sending of one message, whose header comes from ``stamps.now``.

        Raises:
            ValueError: the header is too long.
        """
        blocks, threads = cuda_put.grid(route.size)
        arguments = cuda_put.pack_stamped(route, counter, next(self._free), stamps, header_words)
        return KernelLaunch(self._put, (blocks, 1, 1), arguments, threads)
