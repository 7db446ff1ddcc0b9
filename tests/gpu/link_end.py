"""One end of a device link as a process of its own: sends, receives, checks, and says what it saw.

Started by the tests with torchrun's environment and the name of a scenario.
"""

from __future__ import annotations

import faulthandler
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ppstream.control.launcher_store import LauncherStore, join_store
from ppstream.core.specs import TensorSpec
from ppstream.cuda import startup
from ppstream.cuda.driver import CudaEvent, CudaStream
from ppstream.links.factory import open_device
from ppstream.links.latency_probe import measure
from ppstream.links.nccl import NcclLink
from ppstream.links.peer_memory import PeerLink
from ppstream.links.slots import BACK, FRONT, LinkShape, SlotLayout

MESSAGES = 200
HEADER = ("index", "generation", "epoch", "seq")
SIDE, LARGE_SIDE = 64, 301  # 32 KB, and 708 KB of no round size
WAIT_S = 10.0
EVERY_SIZE = 1 << 30
GROUP_S, IDLE_S = 5, 12
LIMIT_S = 45  # then a process says where it stands, and ends
AHEAD = 8  # receipts that the policy rank keeps queued


def shape(kind: str) -> LinkShape:
    side = LARGE_SIDE if kind == "peer-put" else SIDE
    into = SlotLayout(HEADER, (TensorSpec("ramp", (side, side)), TensorSpec("tag", (), "int64")), 2)
    back = SlotLayout((*HEADER, "failed"), (TensorSpec("found", (2,)),), 2)
    return LinkShape(into, back, 2, 2, generation=7)


def open_link(kind: str, side: str, store: LauncherStore, device: torch.device) -> Any:
    """``peer-put`` and ``peer-copy`` send slots of any size so; ``nccl-short`` has a time-out.

    ``nccl-net`` is ``nccl`` with what the environment leaves it.
    """
    if kind in ("peer-put", "peer-copy"):
        put_bytes = EVERY_SIZE if kind == "peer-put" else 0
        return PeerLink(side, store, shape(kind), device, WAIT_S, put_bytes=put_bytes)
    if kind == "nccl-short":
        short = timedelta(seconds=GROUP_S)
        return NcclLink(side, store.raw, shape(kind), device, WAIT_S, group_timeout=short)
    return open_device(
        kind.removesuffix("-net"), side, store, shape(kind), device, timeout_s=WAIT_S
    )


class End:
    """A rank with its link open."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.store = join_store()
        self.is_front = self.store.rank == 0
        self.device = torch.device("cuda", self.store.rank)
        startup.start(self.device)
        torch.cuda.set_stream(torch.cuda.Stream())
        self.stream = CudaStream(torch.cuda.current_stream().cuda_stream)
        self.events = [[CudaEvent() for _ in range(3)] for _ in range(MESSAGES)]
        self.open(self.store)

    def open(self, store: LauncherStore) -> None:
        side = FRONT if self.is_front else BACK
        self.link: Any = open_link(self.kind, side, store, self.device)
        self.latency = measure(self.link, side, WAIT_S)
        self.n = len(self.link.out)
        pixels = self.link.out if self.is_front else self.link.into
        one = pixels[0].tensors["ramp"][0]
        self.ramp = torch.arange(one.numel(), device=self.device).view(one.shape).float()
        self.warm(store)

    def warm(self, store: LauncherStore) -> None:
        for place in range(self.n):
            if self.is_front:
                self.fill(place, 0)
            else:
                self.answer(place)
        self.link.out[0].header.cpu()
        torch.cuda.synchronize()
        self.meet("warm", store)

    def meet(self, where: str, store: LauncherStore | None = None) -> None:
        """Go on when the other end is there, too."""
        here = store or self.store
        here.set(f"{where}/{here.rank}", "1")
        here.get(f"{where}/{1 - here.rank}", WAIT_S + IDLE_S)

    def fill(self, place: int, index: int) -> None:
        tensors = self.link.out[place].tensors
        torch.add(self.ramp, index, out=tensors["ramp"][0])
        torch.add(self.ramp, index + 1, out=tensors["ramp"][1])
        tensors["tag"].fill_(index)

    def answer(self, place: int) -> None:
        """Its tag, and how far any value of the envelope is off."""
        envelope, result = self.link.into[place].tensors, self.link.out[place].tensors
        tag = envelope["tag"].float()
        for row in range(2):
            off = envelope["ramp"][row] - self.ramp - (tag[row] + row)
            result["found"][row, 0] = off.abs().amax()
        result["found"][:, 1].copy_(tag)

    def send(self, index: int, done: CudaEvent, header: tuple[int, ...]) -> None:
        """As the loops do: within the stage's stream where that is short."""
        self.link.queue_header(index, header)
        if self.link.is_short:
            self.link.queue_send(index, self.stream)
        else:
            self.link.sending.wait_for(done)
            self.link.queue_send(index)

    def receive(self, index: int, ready: CudaEvent) -> None:
        """As the policy rank's loop does: on the link's stream, and on the stage's."""
        self.link.queue_receive(index)
        self.link.receiving.record(ready)
        if not self.link.queue_wait(index, self.stream):
            self.stream.wait_for(ready)

    def front(self, messages: int) -> list[list[float]]:
        """Send, with credits as the loop takes them; returns what came back."""
        got = torch.zeros(messages, 4, device=self.device)
        for index in range(messages):
            done, ready, _ = self.events[index]
            if index >= 2:
                self.stream.wait_for(self.events[index - 2][1])
            self.fill(index % self.n, index)
            self.stream.record(done)
            self.send(index, done, (5, index))
            self.link.queue_receive(index)
            self.link.receiving.record(ready)
            if index >= 5:  # bound what the host queues, as the loop does
                self.events[index - 5][1].wait()
            read = torch.cuda.current_stream()
            CudaStream(read.cuda_stream).wait_for(ready)
            got[index].copy_(self.link.into[index % self.n].tensors["found"].view(4))
        return got.tolist()

    def back(self, messages: int) -> None:
        for index in range(messages):
            done, ready, seen = self.events[index]
            self.receive(index, ready)
            self.answer(index % self.n)
            self.stream.record(done)
            self.send(index, done, (5, index, 0))
            (self.stream if self.link.is_short else self.link.sending).record(seen)
            if index >= 4:
                self.events[index - 4][2].wait()
        self.events[messages - 1][2].wait()


def leave(end: End) -> None:
    """The back goes first: the front holds the store."""
    end.meet("over")
    if end.is_front:
        end.store.get("gone", WAIT_S)
    else:
        end.store.set("gone", "1")


def check(end: End) -> None:
    """Every message arrives whole, in order, with its header."""
    last = MESSAGES - 1
    if end.is_front:
        found = end.front(MESSAGES)
        assert found == [[0.0, index, 0.0, index] for index in range(MESSAGES)], found[:10]
        expected = [last, 7, 5, last, 0]
    else:
        end.back(MESSAGES)
        expected = [last, 7, 5, last]
    header = end.link.into[last % end.n].header.tolist()
    assert header == expected, header


def exchange(end: End) -> None:
    check(end)
    end.meet("checked")
    print(f"{end.latency.one_way_ns} ns one way, {end.latency.note_bytes} bytes")
    assert end.link.close()
    leave(end)


def wrap(end: End) -> None:
    """The counters pass half of their cycle, and its end."""
    for count in ((1 << 31) - 20, (1 << 32) - 20):
        end.link.count_from(count)
        torch.cuda.synchronize()
        end.meet(f"at {count}")
        check(end)
        end.meet(f"past {count}")
    assert end.link.close()
    leave(end)


def reopen(end: End) -> None:
    """A link whose back runs ahead, as the loop does, closes; a further one opens, and works."""
    if not end.is_front:
        for index in range(AHEAD):
            done, ready, _ = end.events[index]
            end.receive(index, ready)
            end.answer(index % end.n)
            end.stream.record(done)
            end.send(index, done, (5, index, 0))
        time.sleep(0.2)
    end.meet("queued")
    began = time.monotonic()
    assert end.link.close(), "a stream still waits"
    print(f"closed after {(time.monotonic() - began) * 1e3:.0f} ms", flush=True)
    torch.cuda.synchronize()
    end.meet("closed")
    began = time.monotonic()
    prefixed = dist.PrefixStore("again", end.store.raw)  # type: ignore[attr-defined]
    end.open(LauncherStore(prefixed, end.store.rank, 2, end.store.generation))
    print(f"opened again after {(time.monotonic() - began) * 1e3:.0f} ms", flush=True)
    check(end)
    end.meet("checked")
    assert end.link.close()
    leave(end)


def idle(end: End) -> None:
    """A receive stands posted for longer than the group's time-out; what comes then arrives."""
    if end.is_front:
        time.sleep(IDLE_S)
    check(end)
    end.meet("checked")
    assert end.link.close()
    leave(end)


def alone(end: End) -> None:
    """Who waits for a peer that never sends is released by its own close, and soon."""
    if end.is_front:
        end.receive(0, end.events[0][0])
        end.stream.record(end.events[0][1])
        time.sleep(0.2)
        assert not end.events[0][1].is_done()
        began = time.monotonic()
        assert end.link.close()
        took_s = time.monotonic() - began
        end.events[0][1].wait()
        print(f"released after {took_s * 1e3:.2f} ms")
    leave(end)


def orphan(end: End) -> None:
    """The peer dies while this end waits for it, and swallows what is sent: close still works."""
    import os

    if not end.is_front:
        os.kill(os.getpid(), 9)
    end.link.queue_header(0, (0, 0))
    end.receive(0, end.events[0][0])
    end.stream.record(end.events[0][1])
    time.sleep(0.5)
    end.link.queue_send(0)
    assert not end.events[0][0].is_done()
    assert not end.events[0][1].is_done()
    assert end.link.close()
    torch.cuda.synchronize()  # nothing is left that could hang


SCENARIOS = {
    "exchange": exchange,
    "wrap": wrap,
    "reopen": reopen,
    "idle": idle,
    "alone": alone,
    "orphan": orphan,
}

if __name__ == "__main__":
    import os

    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    SCENARIOS[sys.argv[1]](End(sys.argv[2]))
    print("ok", flush=True)
    sys.stdout.flush()
    os._exit(0)
