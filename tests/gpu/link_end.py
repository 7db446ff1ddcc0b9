"""One end of a device link as a process of its own: sends, receives, checks, and says what it saw.

Started by the tests with torchrun's environment and the name of a scenario.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch

from ppstream import cuda_start
from ppstream.links import BACK, FRONT, join_store, open_device
from ppstream.memops import CudaStream, Event
from ppstream.slots import LinkShape
from ppstream.specs import SlotLayout, TensorSpec

MESSAGES = 200
HEADER = ("index", "generation", "epoch", "seq")
SIDE = 64
WAIT_S = 10.0


def shape() -> LinkShape:
    into = SlotLayout(HEADER, (TensorSpec("ramp", (SIDE, SIDE)), TensorSpec("tag", (), "int64")), 2)
    back = SlotLayout((*HEADER, "failed"), (TensorSpec("sum", (3,)),), 2)
    return LinkShape(into, back, 2, 2, generation=7)


class End:
    """A rank with its link open."""

    def __init__(self, kind: str) -> None:
        self.store = join_store()
        self.is_front = self.store.rank == 0
        self.device = torch.device("cuda", self.store.rank)
        cuda_start.start(self.device)
        torch.cuda.set_stream(torch.cuda.Stream())
        side = FRONT if self.is_front else BACK
        self.link: Any = open_device(kind, side, self.store, shape(), self.device)
        self.stream = CudaStream(torch.cuda.current_stream().cuda_stream)
        self.n = len(self.link.out)
        self.events = [[Event() for _ in range(3)] for _ in range(MESSAGES)]
        self.warm()

    def warm(self) -> None:
        for place in range(self.n):
            if self.is_front:
                self.fill(place, 0)
            else:
                self.answer(place)
        self.link.out[0].header.cpu()
        torch.cuda.synchronize()
        self.store.set(f"warm/{self.store.rank}", "1")
        self.store.get(f"warm/{1 - self.store.rank}", WAIT_S)

    def fill(self, place: int, index: int) -> None:
        tensors = self.link.out[place].tensors
        tensors["ramp"].fill_(index)
        tensors["tag"].fill_(index)

    def answer(self, place: int) -> None:
        envelope, result = self.link.into[place].tensors, self.link.out[place].tensors
        result["sum"].copy_(envelope["ramp"].mean(dim=(1, 2))[:, None].expand(2, 3))

    def front(self, messages: int) -> list[float]:
        """Send, with credits as the loop takes them; returns what came back."""
        got = torch.zeros(messages, device=self.device)
        for index in range(messages):
            done, ready, _ = self.events[index]
            if index >= 2:
                self.stream.wait_for(self.events[index - 2][1])
            self.fill(index % self.n, index)
            self.stream.record(done)
            self.link.queue_header(index, (5, index))
            self.link.sending.wait_for(done)
            self.link.queue_send(index)
            self.link.queue_receive(index)
            self.link.receiving.record(ready)
            if index >= 5:  # bound what the host queues, as the loop does
                self.events[index - 5][1].wait()
            read = torch.cuda.current_stream()
            CudaStream(read.cuda_stream).wait_for(ready)
            got[index].copy_(self.link.into[index % self.n].tensors["sum"][0, 0])
        return got.tolist()

    def back(self, messages: int) -> None:
        for index in range(messages):
            done, ready, seen = self.events[index]
            self.link.queue_receive(index)
            self.link.receiving.record(ready)
            self.stream.wait_for(ready)
            self.answer(index % self.n)
            self.stream.record(done)
            self.link.queue_header(index, (5, index, 0))
            self.link.sending.wait_for(done)
            self.link.queue_send(index)
            self.link.sending.record(seen)
            if index >= 4:
                self.events[index - 4][2].wait()
        self.events[messages - 1][2].wait()


def part(end: End) -> None:
    """Both are through."""
    end.store.set(f"over/{end.store.rank}", "1")
    end.store.get(f"over/{1 - end.store.rank}", WAIT_S)


def leave(end: End) -> None:
    """The back goes first: the front holds the store."""
    if end.is_front:
        end.store.get("gone", WAIT_S)
    else:
        end.store.set("gone", "1")


def exchange(end: End) -> None:
    """Every message arrives whole, in order, with its header."""
    if end.is_front:
        values = end.front(MESSAGES)
        assert values == [float(index) for index in range(MESSAGES)], values[:10]
        header = end.link.into[(MESSAGES - 1) % end.n].header.tolist()
        assert header == [MESSAGES - 1, 7, 5, MESSAGES - 1, 0], header
    else:
        end.back(MESSAGES)
        header = end.link.into[(MESSAGES - 1) % end.n].header.tolist()
        assert header == [MESSAGES - 1, 7, 5, MESSAGES - 1], header
    part(end)
    assert end.link.close()
    leave(end)


def alone(end: End) -> None:
    """Who waits for a peer that never sends is released by its own close, and soon."""
    if end.is_front:
        end.link.queue_receive(0)
        end.link.receiving.record(end.events[0][0])
        end.stream.wait_for(end.events[0][0])
        end.stream.record(end.events[0][1])
        time.sleep(0.2)
        assert not end.events[0][1].is_done()
        began = time.monotonic()
        assert end.link.close()
        took_s = time.monotonic() - began
        end.events[0][1].wait()
        print(f"released after {took_s * 1e3:.2f} ms")
    part(end)
    leave(end)


def orphan(end: End) -> None:
    """The peer dies while this end waits for it, and swallows what is sent: close still works."""
    import os

    if not end.is_front:
        os.kill(os.getpid(), 9)
    end.link.queue_header(0, (0, 0))
    end.link.queue_receive(0)
    end.link.receiving.record(end.events[0][0])
    time.sleep(0.5)
    end.link.queue_send(0)
    assert not end.events[0][0].is_done()
    assert end.link.close()
    torch.cuda.synchronize()  # nothing is left that could hang


if __name__ == "__main__":
    import os

    scenario = {"exchange": exchange, "alone": alone, "orphan": orphan}[sys.argv[1]]
    scenario(End(sys.argv[2]))
    print("ok", flush=True)
    sys.stdout.flush()
    os._exit(0)
