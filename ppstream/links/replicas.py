"""The hops between rank 0 and its replicas, as one hop out and one in: envelopes go out in turn.

Envelope k goes to the replica behind the one that has envelope k - 1, so with r replicas to replica
k mod r, and rank 0 receives result k from the same one. A result waits in the slot it was written
to until all before it were received: nothing is put in order, and nothing is copied.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from ppstream.core.clock import now_ns
from ppstream.core.errors import PeerLostError, ProtocolError
from ppstream.links.headers import EPOCH, FAILED, REPLICA_LOST, RESULT_HEADER, SEQ
from ppstream.links.protocol import Hops
from ppstream.links.slots import SlotLayout, new_slots

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ppstream.core.waiter import Waiter
    from ppstream.links.slots import LinkShape, Slot


class ReplicaTurn(NamedTuple):
    """Owner of one envelope: a replica, from 0 on, and the index on that replica's hops."""

    replica: int
    at: int


class Turns:
    """Which replica has which envelope, and which replicas are lost.

    The thread that sends gives envelopes out; the one that receives may lose a replica. Kept are
    the envelopes that are under way, and those whose results are being decoded.

    Attributes:
        lost: replicas that get no envelope any more.
        broken: hops that broke, by replica, and how.
        committed: envelopes that were sent.
    """

    def __init__(self, replicas: int, shape: LinkShape) -> None:
        self.lost: frozenset[int] = frozenset()
        self.broken: dict[int, PeerLostError | ProtocolError] = {}
        self.committed = 0
        self._replicas = replicas
        self._turns = [ReplicaTurn(0, 0)] * (shape.result_slots + 1)
        self._next = [0] * replicas  # index on the hops of each
        self._last = replicas - 1
        self._given = 0  # envelopes

    def of(self, index: int) -> ReplicaTurn:
        """The owner of an envelope that was given out and is not emitted yet."""
        return self._turns[index % len(self._turns)]

    def give(self, index: int) -> ReplicaTurn:
        """The owner of an envelope; the next one due is given out with the first call.

        Raises:
            ProtocolError: another one is due.
        """
        if index == self._given:
            replica = self._behind(self._last)
            self._turns[index % len(self._turns)] = ReplicaTurn(replica, self._next[replica])
            self._next[replica] += 1
            self._last = replica
            self._given += 1
        elif index + 1 != self._given:
            raise ProtocolError(f"envelope {index} was to be sent, {self._given} is due")
        return self.of(index)

    def name_of(self, turn: ReplicaTurn) -> int | None:
        """The envelope of a turn; as ``of``, and None of one that was emitted long ago."""
        newest = range(self._given - 1, max(-1, self._given - 1 - len(self._turns)), -1)
        return next((index for index in newest if self.of(index) == turn), None)

    def lose(self, replica: int) -> None:
        """No envelope goes there any more; those that are there have no results."""
        self.lost |= {replica}

    def _behind(self, replica: int) -> int:
        turns = ((replica + n) % self._replicas for n in range(1, self._replicas + 1))
        return next(found for found in turns if found not in self.lost)


class ReplicasOut:
    """The sending end of all hops to replicas (``links.protocol.OutHop``)."""

    def __init__(self, hops: Sequence[Hops], turns: Turns) -> None:
        self._hops = [each.out for each in hops]
        self._turns = turns

    def slot(self, index: int) -> Slot:
        """As ``OutHop``."""
        turn = self._turns.give(index)
        return self._hops[turn.replica].slot(turn.at)

    def commit(self, index: int) -> None:
        """As ``OutHop``; one that a broken hop does not take is lost with its replica."""
        turns, (replica, at) = self._turns, self._turns.give(index)
        turns.committed = index + 1
        if replica in turns.lost or replica in turns.broken:
            return
        try:
            self._hops[replica].commit(at)
        except PeerLostError as error:
            turns.broken[replica] = error


class ReplicasIn:
    """The receiving end of all hops from replicas (``links.protocol.InHop``).

    Attributes:
        turns: shared with the sending end.
    """

    def __init__(self, hops: Sequence[Hops], turns: Turns, shape: LinkShape) -> None:
        self.turns = turns
        self._hops = [each.into for each in hops]
        self._sent = [each.out for each in hops]
        self._arrived: list[deque[tuple[int, int]]] = [deque() for _ in hops]
        failed = SlotLayout(RESULT_HEADER, (), shape.result.rows)
        self._failed = new_slots(failed, shape.result_slots)  # of envelopes that lost their replica
        self._has_failed = [False] * shape.result_slots
        self._due = 0

    def register_with(self, waiter: Waiter) -> frozenset[int]:
        """As ``InHop``."""
        return frozenset().union(*(hop.register_with(waiter) for hop in self._hops))

    def unregister_from(self, waiter: Waiter) -> None:
        """As ``InHop``."""
        for replica in self._served():
            self._hops[replica].unregister_from(waiter)

    def on_ready(self, ready: Sequence[int]) -> None:
        """As ``InHop``."""
        for replica in self._served():
            self._hops[replica].on_ready(ready)

    def receive_nowait(self) -> tuple[int, int] | None:
        """As ``InHop``, and None where a broken hop owes the next result.

        A result that a lost replica owes is there at once, as one that failed.
        """
        if self._due == self.turns.committed:
            return None
        turn, at = self.turns.of(self._due), self._due % len(self._has_failed)
        arrived = self._arrived[turn.replica]
        if not arrived and turn.replica not in self.turns.lost:
            self._take()
        self._has_failed[at] = not arrived
        if arrived:
            index, at_ns = arrived.popleft()
            assert index == turn.at, f"replica {turn.replica}: {index} came, {turn.at} is due"
        elif turn.replica in self.turns.lost:
            self._fail(at, turn)
            at_ns = now_ns()
        else:
            return None
        self._due += 1
        return self._due - 1, at_ns

    def slot(self, index: int) -> Slot:
        """As ``InHop``."""
        at = index % len(self._has_failed)
        if self._has_failed[at]:
            return self._failed[at]
        turn = self.turns.of(index)
        return self._hops[turn.replica].slot(turn.at)

    def name_of(self, replica: int, index: int) -> int | None:
        """The run's index of an envelope that a replica names; None: it is under way no more."""
        return self.turns.name_of(ReplicaTurn(replica, index))

    def lose(self, replica: int, waiter: Waiter) -> None:
        """Go on without a replica; what has come from it is still received."""
        self._take()
        self.turns.lose(replica)
        self._hops[replica].unregister_from(waiter)

    def _fail(self, at: int, turn: ReplicaTurn) -> None:
        """Write the header that says so, in the place of the result that will not come."""
        sent, words = self._sent[turn.replica].slot(turn.at).words, self._failed[at].words
        words[EPOCH], words[SEQ], words[FAILED] = sent[EPOCH], sent[SEQ], REPLICA_LOST

    def _served(self) -> list[int]:
        return [k for k in range(len(self._hops)) if k not in self.turns.lost]

    def _take(self) -> None:
        """Take what has come from everybody: a bell that goes on ringing would end every wait."""
        for replica in self._served():
            if replica in self.turns.broken:
                continue
            try:
                while (arrival := self._hops[replica].receive_nowait()) is not None:
                    self._arrived[replica].append(arrival)
            except (PeerLostError, ProtocolError) as error:
                self.turns.broken[replica] = error


def replica_folder(rank: int) -> str:
    """Folder of the launcher's store in which a replica and rank 0 find each other."""
    return f"replica/{rank}"


def in_turn(hops: Sequence[Hops], shape: LinkShape) -> Hops:
    """The hops to every replica, in order of their ranks, as rank 0's two hops."""
    turns = Turns(len(hops), shape)

    def end() -> None:
        for each in hops:
            each.end()

    def close() -> None:
        end()
        for each in hops:
            each.close()

    return Hops(hops[0].name, ReplicasOut(hops, turns), ReplicasIn(hops, turns, shape), close, end)
