"""Sends a few messages by kernel on a GPU, and waits for them, for a memory checker: to itself."""

from __future__ import annotations

import torch

from ppstream_kernels.cuda_put import Puts, Route
from ppstream_kernels.cuda_wait import Waits

SIZES = (64, 1000, 4096, 65_600, 300_001)


def main() -> None:
    device = torch.device("cuda", 0)
    source, target = (torch.zeros(max(SIZES), dtype=torch.uint8, device=device) for _ in "io")
    counter = torch.zeros(1, dtype=torch.int32, device=device)
    routes = [Route(source.data_ptr(), target.data_ptr(), size) for size in SIZES]
    puts = Puts(device, routes, counter.data_ptr())
    waits = Waits(device, counter.data_ptr())
    stream = torch.cuda.current_stream().cuda_stream
    for message in range(len(SIZES)):
        puts.write_header(message, (message, 1, 2, 3))
        puts.queue(message, message + 1, stream)
        waits.queue(message + 1, stream)  # behind the message: a checker may run one at a time
    torch.cuda.synchronize()
    assert counter.item() == len(SIZES)
    print(f"sent {len(SIZES)} messages")


if __name__ == "__main__":
    main()
