"""One suite over both links; each test runs with both ends in real use, threads or processes."""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked_process import ForkedProcess
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ranks import free_port
from robot_rig import file_size_limit, wait_until

from ppstream.control.launcher_store import LauncherStore, join_store
from ppstream.control.peer import Peer
from ppstream.control.rendezvous import Listener, connect
from ppstream.core.clock import NS_PER_S, now_ns
from ppstream.core.errors import ConfigError, PeerLostError, ProtocolError, SpecError
from ppstream.core.host_memory import available_bytes
from ppstream.core.interpreter import set_switch_interval
from ppstream.core.specs import TensorSpec
from ppstream.core.waiter import Waiter
from ppstream.links.factory import open_hops
from ppstream.links.protocol import Hops, InHop, Neighbours
from ppstream.links.replicas import in_turn
from ppstream.links.slots import BACK, FRONT, INDEX, LinkShape, SlotLayout
from ppstream.pipeline.credits import CreditLedger
from ppstream.wire.rank_messages import PhaseChange

HEADER = ("index", "generation", "epoch", "seq")
KINDS = ("host", "gloo")
WAIT_NS = 20 * NS_PER_S
OPEN_S = 20.0
PAYLOADS = (1, 7, 64, 4096, 100_003, 1 << 20, 16 << 20)  # bytes

torch.set_num_threads(1)
set_switch_interval()

#: A policy rank that answers each envelope with its bytes; "stop" makes it wait to be killed.


def memory_store() -> Any:
    return vars(dist)["HashStore"]()  # the type stubs do not name it


def layout_of(*shape: int, dtype: str = "float32", rows: int = 1) -> SlotLayout:
    return SlotLayout(HEADER, (TensorSpec("x", shape, dtype),), rows)


def shape_of(d_in: int = 2, d_out: int = 2, generation: int = 0, size: int = 4) -> LinkShape:
    return LinkShape(layout_of(size), layout_of(size + 1), d_in, d_out, generation)


def index_of(hop: InHop, peer: Peer) -> int | None:
    """The next index that has come, whatever the wait has named."""
    peer.pump()
    hop.on_ready(())
    arrival = hop.receive_nowait()
    return None if arrival is None else arrival[0]


class Ends:
    """Both ends of a link in this process."""

    def __init__(self, kind: str, front: LinkShape, back: LinkShape | None = None) -> None:
        near, far = socket.socketpair()
        self.front_peer, self.back_peer = Peer(near), Peer(far, expects_fds=True)
        store = LauncherStore(memory_store(), 0, 2, 0)
        opened: list[Hops] = []
        failed: list[Exception] = []

        def open_other() -> None:
            try:
                ends = Neighbours.pair(BACK, self.back_peer)
                opened.append(open_hops(kind, ends, store, back or front, timeout_s=OPEN_S))
            except ProtocolError as error:
                failed.append(error)

        thread = threading.Thread(target=open_other)
        thread.start()
        ends = Neighbours.pair(FRONT, self.front_peer)
        self.front = open_hops(kind, ends, store, front, timeout_s=OPEN_S)
        thread.join()
        if failed:
            self.front_peer.close()
            self.back_peer.close()
            raise failed[0]
        self.back = opened[0]
        self.waiter = Waiter()
        for peer in (self.front_peer, self.back_peer):
            self.waiter.register(peer.fileno())
        for hops in (self.front, self.back):
            hops.into.register_with(self.waiter)

    def result_nowait(self) -> int | None:
        return index_of(self.front.into, self.front_peer)

    def envelope_nowait(self) -> int | None:
        return index_of(self.back.into, self.back_peer)

    def result(self) -> int:
        deadline_ns = now_ns() + WAIT_NS
        while (index := self.result_nowait()) is None:
            assert now_ns() < deadline_ns
            self.waiter.wait(WAIT_NS)
        return index

    def envelope(self) -> int:
        deadline_ns = now_ns() + WAIT_NS
        while (index := self.envelope_nowait()) is None:
            assert now_ns() < deadline_ns
            self.waiter.wait(WAIT_NS)
        return index

    def close(self) -> None:
        self.front.close()
        self.back.close()
        self.front_peer.close()
        self.back_peer.close()
        self.waiter.close()


@contextmanager
def opened(kind: str, front: LinkShape, back: LinkShape | None = None) -> Iterator[Ends]:
    ends = Ends(kind, front, back)
    try:
        yield ends
    finally:
        ends.close()


@pytest.fixture(params=KINDS)
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    with opened(request.param, shape_of()) as ends:
        yield ends


class EchoRank:
    """A front link in this process, and the echoing policy rank in a real second one."""

    def __init__(
        self, kind: str, size: int, envelopes: int, output: Path, stack: ExitStack
    ) -> None:
        port = str(free_port())
        environment = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        store = join_store(environment | {"RANK": "0"})
        listener = Listener(store)
        stack.callback(listener.close)
        command = ["echo_rank", kind, str(size), str(envelopes)]
        environment = os.environ | environment | {"RANK": "1"}
        self.process = ForkedProcess(command, environment, output)
        stack.callback(self.process.wait)
        stack.callback(self.process.kill)
        self.peer = listener.accept(30.0)
        stack.callback(self.peer.close)
        layout = layout_of(size, dtype="uint8")
        ends, shape = Neighbours.pair(FRONT, self.peer), LinkShape(layout, layout, 2, 2)
        self.link = open_hops(kind, ends, store, shape, timeout_s=OPEN_S)
        stack.callback(self.link.close)
        self.waiter = Waiter()
        stack.callback(self.waiter.close)
        self.waiter.register(self.peer.fileno())
        self.link.into.register_with(self.waiter)

    def go_on(self, index: int) -> None:
        for more in range(index, index + 10**6):
            self.result()
            self.link.out.commit(more)

    def result(self) -> int:
        deadline_ns = now_ns() + WAIT_NS
        while True:
            if (index := index_of(self.link.into, self.peer)) is not None:
                return index
            assert now_ns() < deadline_ns
            self.waiter.wait(WAIT_NS)


# ---- what travels ---------------------------------------------------------------------------


@pytest.mark.multirank
@pytest.mark.parametrize("kind", KINDS)
def test_a_full_pipe_of_large_payloads_crosses_two_processes_bit_exact(
    kind: str, tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(3)
    size, envelopes = PAYLOADS[-1], 7
    payloads = [
        torch.randint(0, 256, (1, size), dtype=torch.uint8, generator=generator) for _ in range(3)
    ]
    with ExitStack() as stack:
        rank = EchoRank(kind, size, envelopes, tmp_path / "output", stack)
        committed = 0
        for received in range(envelopes):
            while committed < min(received + 2, envelopes):
                rank.link.out.slot(committed).tensors["x"].copy_(payloads[committed % 3])
                rank.link.out.commit(committed)
                committed += 1
            assert rank.result() == received
            assert torch.equal(rank.link.into.slot(received).tensors["x"], payloads[received % 3])
        rank.peer.close()
        assert rank.process.wait(10) == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", PAYLOADS)
def test_payloads_of_any_size_are_bit_exact_both_ways(kind: str, size: int) -> None:
    layout = layout_of(size, dtype="uint8")
    there = torch.randint(0, 256, (1, size), dtype=torch.uint8)
    with opened(kind, LinkShape(layout, layout, 1, 1)) as ends:
        for index in range(3):
            ends.front.out.slot(index).tensors["x"].copy_(there)
            ends.front.out.commit(index)
            assert ends.envelope() == index
            got = ends.back.into.slot(index)
            assert torch.equal(got.tensors["x"], there)
            torch.bitwise_not(got.tensors["x"], out=ends.back.out.slot(index).tensors["x"])
            ends.back.out.commit(index)
            assert ends.result() == index
            assert torch.equal(ends.front.into.slot(index).tensors["x"], torch.bitwise_not(there))
            there = there.roll(1)


def test_all_fields_and_tensors_keep_their_places(ends: Ends) -> None:
    ends.front.out.slot(0).header[2:] = (-5, 2**62)
    ends.front.out.commit(0)
    assert ends.envelope() == 0
    assert ends.back.into.slot(0).header.tolist() == [0, 0, -5, 2**62]
    ends.back.out.slot(0).header[2:] = (8, 9)
    ends.back.out.commit(0)
    assert ends.result() == 0
    assert ends.front.into.slot(0).header.tolist() == [0, 0, 8, 9]


@pytest.mark.parametrize(("kind", "envelopes"), [("host", 1000), ("gloo", 60)])
def test_no_slot_is_overwritten_before_its_envelope_is_emitted(kind: str, envelopes: int) -> None:
    """Random interleavings at any bounds: every slot in use holds what was written into it."""

    @settings(
        max_examples=12 if kind == "host" else 4,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 2**32))
    def check(d_in: int, d_out: int, seed: int) -> None:
        with opened(kind, shape_of(d_in, d_out)) as ends:
            Model(ends, d_in, d_out, random.Random(seed)).run(envelopes)

    check()


class Model:
    """Rank 0 and the policy rank as the credits allow them to act, in a drawn order."""

    def __init__(self, ends: Ends, d_in: int, d_out: int, draw: random.Random) -> None:
        self.ends = ends
        self.ledger = CreditLedger(d_in, d_out)
        self.draw = draw
        self.committed = self.emitted = 0
        self.arrived: deque[int] = deque()  # at the policy rank, not yet answered
        self.decoding: deque[int] = deque()  # at rank 0, received

    def run(self, envelopes: int) -> None:
        actions = [self.commit, self.arrive, self.reply, self.receive, self.emit]
        idle = 0
        while self.emitted < envelopes:
            self.may_commit = self.committed < envelopes and self.ledger.may_commit()
            moved = self.draw.choice(actions)()
            idle = 0 if moved else idle + 1
            if idle > 50:  # nothing can be done here: the link is at work
                self.ends.waiter.wait(NS_PER_S // 1000)
            self.check()

    def commit(self) -> bool:
        if not self.may_commit:
            return False
        self.ends.front.out.slot(self.committed).tensors["x"].fill_(self.committed)
        self.ledger.commit(0)
        self.ends.front.out.commit(self.committed)
        self.committed += 1
        return True

    def arrive(self) -> bool:
        index = self.ends.envelope_nowait()
        if index is None:
            return False
        self.arrived.append(index)
        return True

    def reply(self) -> bool:
        if not self.arrived:
            return False
        index = self.arrived.popleft()
        self.ends.back.out.slot(index).tensors["x"].fill_(-index)
        self.ends.back.out.commit(index)
        return True

    def receive(self) -> bool:
        if not self.ledger.may_receive():
            return False
        index = self.ends.result_nowait()
        if index is None:
            return False
        self.ledger.receive(0)
        if not self.decoding:
            self.ledger.begin_decode(0)
        self.decoding.append(index)
        return True

    def emit(self) -> bool:
        if not self.decoding:
            return False
        assert self.decoding.popleft() == self.emitted
        self.ledger.emit(0)
        self.emitted += 1
        if self.decoding:
            self.ledger.begin_decode(0)
        return True

    def check(self) -> None:
        for index in self.arrived:
            assert bool((self.ends.back.into.slot(index).tensors["x"] == index).all())
        for index in self.decoding:
            assert bool((self.ends.front.into.slot(index).tensors["x"] == -index).all())


# ---- broken order -----------------------------------------------------------------------------


def test_an_index_out_of_turn_is_refused(ends: Ends) -> None:
    with pytest.raises(ProtocolError, match="envelope 1 was to be sent, 0 is due"):
        ends.front.out.commit(1)
    ends.front.out.commit(0)
    ends.envelope()
    ends.back.out.commit(0)
    with pytest.raises(ProtocolError, match="result 0 was to be sent, 1 is due"):
        ends.back.out.commit(0)


@pytest.mark.parametrize("kind", KINDS)
def test_another_generation_is_refused(kind: str) -> None:
    with opened(kind, shape_of(generation=3), shape_of(generation=4)) as ends:
        ends.front.out.commit(0)
        with pytest.raises(ProtocolError, match=r"\(generation 4\) holds 0 \(generation 3\)"):
            ends.envelope()


def test_a_doorbell_without_its_envelope_is_refused() -> None:
    with opened("host", shape_of(d_in=1)) as ends:
        ends.front.out.commit(0)
        ends.envelope()
        ends.front.out.commit(1)
        ends.front.out.slot(1).header[INDEX] = 0  # as if it had not been written
        with pytest.raises(ProtocolError, match="slot of envelope 1"):
            ends.envelope()


def test_control_frames_that_were_sent_before_an_envelope_are_taken_before_it() -> None:
    with opened("host", shape_of()) as ends:
        ends.front_peer.send(PhaseChange("ready"))
        ends.front.out.commit(0)
        assert ends.back.into.receive_nowait() is None  # nobody has pumped: the hop did
        assert ends.back_peer.inbox.popleft() == PhaseChange("ready")
        ends.front_peer.send(PhaseChange("draining"))
        assert ends.back.into.receive_nowait() is not None  # of a later frame nothing is said


def test_a_commit_is_stamped_by_its_sender_not_by_who_looks() -> None:
    with opened("host", shape_of()) as ends:
        began_ns = now_ns()
        ends.front.out.commit(0)
        ended_ns = now_ns()
        arrival = ends.back.into.receive_nowait()
        assert arrival is not None
        assert began_ns <= arrival[1] <= ended_ns


def test_ranks_with_different_slots_do_not_open() -> None:
    with pytest.raises(ProtocolError, match="disagree"):
        Ends("host", shape_of(size=4), shape_of(size=400))


def test_an_unknown_kind_is_a_configuration_error() -> None:
    near, far = socket.socketpair()
    store = LauncherStore(memory_store(), 0, 2, 0)
    with near, far, pytest.raises(ConfigError, match=r"link\.kind: 'nccl'"):
        open_hops("nccl", Neighbours.pair(FRONT, Peer(near)), store, shape_of(), timeout_s=OPEN_S)


# ---- memory -----------------------------------------------------------------------------------


def open_host_front(layout: SlotLayout) -> None:
    near, far = socket.socketpair()
    with near, far:
        store = LauncherStore(memory_store(), 0, 2, 0)
        ends, shape = Neighbours.pair(FRONT, Peer(near)), LinkShape(layout, layout, 1, 1)
        open_hops("host", ends, store, shape, timeout_s=OPEN_S)


def test_slots_larger_than_the_memory_are_a_configuration_error() -> None:
    before = open_files()
    floats = available_bytes() // 4
    with pytest.raises(ConfigError, match=r"need .* MiB of shared memory, .* available; lower"):
        open_host_front(layout_of(floats))
    assert open_files() <= before  # an earlier test's may be closed meanwhile


def open_files() -> set[tuple[int, int]]:
    """Device and inode of each descriptor of this process."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the listing
            about = os.fstat(int(fd))
            found.add((about.st_dev, about.st_ino))
    return found


def test_slots_that_the_kernel_refuses_are_a_configuration_error() -> None:
    with file_size_limit(1 << 20), pytest.raises(ConfigError, match="File too large; lower"):
        open_host_front(layout_of(1 << 20))


def test_slots_still_referred_to_stay_readable_after_close() -> None:
    ends = Ends("host", shape_of())
    tensor = ends.front.out.slot(0).tensors["x"]
    tensor.fill_(6.0)
    other = ends.back.into.slot(0).tensors["x"]
    ends.close()
    assert other.tolist() == [[6.0] * 4]


def test_a_layout_of_no_known_type_cannot_be_made() -> None:
    with pytest.raises(SpecError):
        layout_of(3, dtype="complex64")


# ---- the end ----------------------------------------------------------------------------------


@pytest.mark.multirank
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_policy_rank_is_noticed_and_the_link_still_closes(
    kind: str, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        rank = EchoRank(kind, 1000, 10**9, tmp_path / "output", stack)
        rank.link.out.commit(0)
        rank.result()
        rank.link.out.commit(1)
        rank.process.send_signal(signal.SIGKILL)
        began = now_ns()
        with pytest.raises(PeerLostError):
            rank.go_on(2)
        assert now_ns() - began < 2 * NS_PER_S
        began = now_ns()
        rank.link.close()
        assert now_ns() - began < 3 * NS_PER_S
        assert [t.name for t in threading.enumerate() if t.name == "gloo-receive"] == []


def await_receivers() -> None:
    """Until the threads of killed ranks' links have ended: no process may leave before."""
    wait_until(lambda: "gloo-receive" not in {thread.name for thread in threading.enumerate()})


@pytest.mark.multirank
@pytest.mark.parametrize(("is_lost", "limit_ns"), [(True, NS_PER_S), (False, 2 * NS_PER_S)])
def test_a_stopped_policy_rank_holds_up_the_end_for_a_second_at_most(
    is_lost: bool, limit_ns: int, tmp_path: Path
) -> None:
    """One that is known to be lost does not: two waits of a second each were in its way."""
    with ExitStack() as stack:
        rank = EchoRank("gloo", 1000, 10**9, tmp_path / "output", stack)
        rank.link.out.commit(0)
        rank.result()
        rank.process.send_signal(signal.SIGSTOP)
        for index in (1, 2):  # the receipt that stands ready there is used up
            rank.link.out.commit(index)
        if is_lost:
            rank.peer.mark_lost()
        began = now_ns()
        rank.link.close()
        assert now_ns() - began < limit_ns
    await_receivers()


@pytest.mark.multirank
def test_several_stopped_replicas_hold_up_the_end_no_longer_than_one(tmp_path: Path) -> None:
    with ExitStack() as stack:
        ranks = [EchoRank("gloo", 1000, 10**9, tmp_path / str(k), stack) for k in range(2)]
        for rank in ranks:
            rank.process.send_signal(signal.SIGSTOP)
            for index in (0, 1):
                rank.link.out.commit(index)
        layout = layout_of(1000, dtype="uint8")
        both = in_turn([rank.link for rank in ranks], LinkShape(layout, layout, 2, 2))
        began = now_ns()
        both.close()
        assert now_ns() - began < 2 * NS_PER_S
    await_receivers()


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_leaks_after_close(kind: str) -> None:
    def counts() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    with opened(kind, shape_of()):
        pass  # what a first use loads stays
    before = counts()
    for _ in range(3):
        with opened(kind, shape_of()) as ends:
            ends.front.out.commit(0)
            ends.envelope()
            ends.back.out.commit(0)
            ends.result()

    def grown() -> bool:  # fewer is well: a thread of an earlier test may have been on its way out
        return any(now > then for now, then in zip(counts(), before, strict=True))

    until_ns = now_ns() + 5 * NS_PER_S  # the kernel counts a thread a moment after its end
    while grown() and now_ns() < until_ns:
        os.sched_yield()
    assert not grown(), f"{counts()} file descriptors and threads, {before} before"


@pytest.mark.parametrize("closes", ["front", "back"])
def test_one_end_closes_without_waiting_for_the_other_to_close(closes: str) -> None:
    with opened("gloo", shape_of()) as ends:
        ends.front.out.commit(0)
        ends.envelope()
        began = now_ns()
        getattr(ends, closes).close()
        getattr(ends, closes).close()
        assert now_ns() - began < NS_PER_S // 2
        with pytest.raises(PeerLostError, match="closed"):
            ends.back.out.commit(0) if closes == "front" else ends.front.out.commit(1)


@pytest.mark.parametrize("kind", KINDS)
def test_an_absent_peer_ends_the_opening_within_its_limit(kind: str) -> None:
    near, far = socket.socketpair()
    store = LauncherStore(memory_store(), 0, 2, 0)
    began = now_ns()
    with near, far, pytest.raises(PeerLostError, match=r"within 0\.1 s"):
        open_hops(
            kind,
            Neighbours.pair(BACK, Peer(near, expects_fds=True)),
            store,
            shape_of(),
            timeout_s=0.1,
        )
    assert now_ns() - began < 5 * NS_PER_S


# ---- the launcher's store ---------------------------------------------------------------------


def test_ranks_of_one_generation_share_the_store() -> None:
    port = str(free_port())
    base = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    front = join_store(base | {"RANK": "0"})
    back = join_store(base | {"RANK": "1"})
    later = join_store(base | {"RANK": "1", "TORCHELASTIC_RESTART_COUNT": "1"})
    front.set("word", "näher")
    assert back.get("word", 5.0) == "näher"
    assert (front.rank, back.rank, later.generation) == (0, 1, 1)
    with pytest.raises(PeerLostError, match="no rank published 'word'"):
        later.get("word", 0.05)


def test_ranks_meet_through_the_store() -> None:
    store = LauncherStore(memory_store(), 0, 2, 0)
    listener = Listener(store)
    near = connect(store, 5.0)
    far = listener.accept(5.0)
    near.ring(1)
    far.close()
    near.close()
    listener.close()


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_PORT"])
def test_an_incomplete_environment_is_a_configuration_error(missing: str) -> None:
    environment = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1"}
    del environment[missing]
    with pytest.raises(ConfigError, match=f"{missing} is ''.*torchrun"):
        join_store(environment)


def test_a_store_that_nobody_serves_is_a_lost_peer() -> None:
    environment = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1"}
    with pytest.raises(PeerLostError, match="no store at"):
        join_store(environment, timeout_s=0.2)
