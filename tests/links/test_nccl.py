"""The NCCL link's order of calls, over groups that only remember them; GPUs: ``tests/gpu``."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_cuda import FakeDriver

from ppstream.core.errors import PeerLostError
from ppstream.core.specs import TensorSpec
from ppstream.cuda import driver as memops
from ppstream.cuda.driver import CudaStream
from ppstream.links import nccl
from ppstream.links.nccl import NOTE_VALUES, PARKED_BYTES, NcclLink
from ppstream.links.slots import BACK, FRONT, LinkShape, Position, SlotLayout

LIMIT_S = 0.05
HEADER = ("index", "generation", "epoch", "seq")
HEADER_BYTES, NOTE_BYTES = 64, NOTE_VALUES * 8


class Group:
    """Remembers the sizes of what it is given."""

    def __init__(self, name: str, calls: list[tuple[str, str, int]]) -> None:
        self.name, self._calls = name, calls

    def eager_connect_single_device(self, device: torch.device) -> None:
        assert device == torch.device("cpu")
        self._calls.append((self.name, "connect", 0))

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Group:
        self._calls.append((self.name, "send", tensors[0].nbytes))
        return self

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Group:
        self._calls.append((self.name, "recv", tensors[0].nbytes))
        return self

    def wait(self) -> None:
        """At once."""

    def abort(self) -> None:
        """At once, too."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str, int]]]:
    """What the groups of every link were asked for."""
    found: list[tuple[str, str, int]] = []
    driver = FakeDriver()
    monkeypatch.setattr(memops, "driver", lambda: driver)
    monkeypatch.setattr(nccl, "own_stream", lambda role: CudaStream())
    monkeypatch.setattr(nccl, "open_group", lambda store, name, *_: Group(name, found))
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: handle)
    monkeypatch.setattr(torch.cuda, "stream", lambda external: nullcontext())
    yield found
    driver.close()


@pytest.mark.parametrize("places", [1, 2, 3])
def test_each_hop_has_a_group_of_its_own_and_opens_in_one_order(
    calls: list[tuple[str, str, int]], places: int
) -> None:
    found = []
    for place in range(places + 1):
        link(Position(place, places), 64)
        found.append(calls.copy())
        calls.clear()
    hops = [[name for name, what, _ in rank if what == "connect"] for rank in found]
    assert all(sorted(names) == names for names in hops)  # two orders could wait for each other
    for place, rank in enumerate(found):
        sent = {name for name, what, _ in rank if what == "send"}
        came = {name for name, what, _ in found[(place + 1) % (places + 1)] if what == "recv"}
        assert sent == came == {f"hop {place}"}


def link(side: Position, result_bytes: int, store: dist.Store | None = None) -> NcclLink:
    envelope = SlotLayout(HEADER, (TensorSpec("x", (1 << 20,), "uint8"),), 1)
    result = SlotLayout(HEADER, (TensorSpec("x", (result_bytes,), "uint8"),), 1)
    shape = LinkShape(envelope, result, 2, 2)
    return NcclLink(side, store or dist.HashStore(), shape, torch.device("cpu"), timeout_s=500.0)


def test_a_neighbour_that_comes_late_is_waited_for(calls: list[tuple[str, str, int]]) -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=15))  # of the meeting of the ranks
    link(FRONT, 64, store)
    assert store.timeout == timedelta(seconds=500)


def test_both_ends_connect_in_one_order(calls: list[tuple[str, str, int]]) -> None:
    link(FRONT, 64)
    front = calls.copy()
    calls.clear()
    link(BACK, 64)
    opposite = {"send": "recv", "recv": "send", "connect": "connect"}
    assert front == [(name, opposite[what], size) for name, what, size in calls]
    assert front[:2] == [("hop 0", "connect", 0), ("hop 1", "connect", 0)]
    assert [name for name, _, _ in front[2:]] == ["hop 0", "hop 0", "hop 1", "hop 1"]


@pytest.mark.parametrize("name", ["eager_connect_single_device", "send"])
def test_a_peer_that_does_not_come_is_lost(
    calls: list[tuple[str, str, int]], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def refuse(*_: Any) -> None:
        raise dist.DistBackendError("nobody answers")

    monkeypatch.setattr(Group, name, refuse)
    with pytest.raises(PeerLostError, match=r"did not connect: nobody answers"):
        link(FRONT, 64)


@pytest.mark.parametrize(
    ("size", "notes"), [(PARKED_BYTES - HEADER_BYTES, 0), (PARKED_BYTES - HEADER_BYTES + 1, 1)]
)
def test_a_note_goes_before_what_would_slow_the_policy_while_it_is_parked(
    calls: list[tuple[str, str, int]], size: int, notes: int
) -> None:
    ends = {side: link(side, size) for side in (FRONT, BACK)}
    calls.clear()
    ends[BACK].queue_send(0)
    ends[FRONT].queue_receive(0)
    slot = ends[BACK].out[0].size
    sizes = [NOTE_BYTES] * notes + [slot]
    sends, receipts = ([("hop 1", what, size) for size in sizes] for what in ("send", "recv"))
    assert calls == sends + receipts


def test_close_gives_up_both_communicators_at_the_same_time(
    calls: list[tuple[str, str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each abort ends only when the other has begun, as kernels of either hold up the device."""
    begun = threading.Barrier(2)
    monkeypatch.setattr(Group, "abort", lambda group: begun.wait(1))
    assert link(FRONT, 64).close()
    assert not begun.broken


@pytest.mark.parametrize("stands", [("hop 0",), ("hop 1",), ("hop 0", "hop 1")])
def test_close_says_when_an_abort_does_not_end_and_has_one_limit_for_both(
    calls: list[tuple[str, str, int]], monkeypatch: pytest.MonkeyPatch, stands: tuple[str, ...]
) -> None:
    monkeypatch.setattr(nccl, "ABORT_LIMIT_S", LIMIT_S)
    released = threading.Event()
    monkeypatch.setattr(Group, "abort", lambda group: group.name in stands and released.wait())
    granted_s: list[float | None] = []
    join = threading.Thread.join
    monkeypatch.setattr(
        threading.Thread,
        "join",
        lambda thread, limit_s=None: granted_s.append(limit_s) or join(thread, limit_s),
    )
    assert not link(FRONT, 64).close()
    released.set()
    first_s, second_s = granted_s
    assert first_s is not None
    assert second_s is not None
    assert 0 < first_s <= LIMIT_S
    assert second_s <= (0.0 if "hop 0" in stands and "hop 1" in stands else LIMIT_S)
