"""The links between rank 0's GPU and its replicas, as one link: envelopes go out in turn.

With r replicas envelope k goes to replica k mod r, by a link that each has alone, and its result is
waited for on rank 0's one receiving stream, so in order of the envelopes. The slots of all links
take turns, too: index n is in slot ``n % len(out)``, as with one link, and that slot is always the
same replica's. When a replica is lost, the slots of the others line up anew, while no envelope is
under way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ppstream.links.replicas import ReplicaTurn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ppstream.core.waiter import Waiter
    from ppstream.cuda.driver import CudaStream
    from ppstream.links.device_counters import CountedLink
    from ppstream.links.device_link import DeviceSlot


class _LineUp(NamedTuple):
    """Replicas that take turns from an envelope on."""

    first: int  # envelope of the run
    replicas: tuple[int, ...]  # in their order; the first one's turn it is
    begun: tuple[int, ...]  # by replica: envelopes that it was given before

    def turn(self, index: int) -> ReplicaTurn:
        turns, at = divmod(index - self.first, len(self.replicas))
        replica = self.replicas[at]
        return ReplicaTurn(replica, self.begun[replica] + turns)

    def name_of(self, turn: ReplicaTurn) -> int:
        turns = turn.at - self.begun[turn.replica]
        return self.first + turns * len(self.replicas) + self.replicas.index(turn.replica)

    def has(self, turn: ReplicaTurn) -> bool:
        return turn.replica in self.replicas and turn.at >= self.begun[turn.replica]

    def without(self, lost: frozenset[int], first: int) -> _LineUp:
        """Returns the turns from ``first`` on: the next one left is behind the last one's."""
        count = len(self.replicas)
        turns, at = divmod(first - self.first, count)
        begun = [*self.begun]
        for place, replica in enumerate(self.replicas):
            begun[replica] += turns + (place < at)
        order = (*self.replicas[at:], *self.replicas[:at])
        return _LineUp(first, tuple(k for k in order if k not in lost), tuple(begun))


class DeviceReplicas:
    """Rank 0's links to all replicas (device_link.DeviceLink), in order of their ranks.

    Args:
        links: open, of one kind, on the same two streams.

    Attributes:
        lost: replicas whose waits were ended; behind ``line_up`` they get no envelopes.
        out, into: slots of those that take turns.
    """

    def __init__(self, links: Sequence[CountedLink]) -> None:
        first = links[0]
        self.name, self.note_bytes = first.name, first.note_bytes
        self.sending: CudaStream = first.sending
        self.receiving: CudaStream = first.receiving
        self.is_short, self.spins = first.is_short, first.spins
        self.lost: frozenset[int] = frozenset()
        self.out: tuple[DeviceSlot, ...]
        self.into: tuple[DeviceSlot, ...]
        self._links = links
        everybody = tuple(range(len(links)))
        self._line_ups = [_LineUp(0, everybody, (0,) * len(links))]  # the newest last
        self._take_slots()

    def turn(self, index: int) -> ReplicaTurn:
        """The replica that has or gets envelope ``index``, and the index on that replica's link."""
        found = next(one for one in reversed(self._line_ups) if index >= one.first)
        return found.turn(index)

    def name_of(self, replica: int, index: int) -> int:
        """The run's index of an envelope that a replica names."""
        turn = ReplicaTurn(replica, index)
        found = next(one for one in reversed(self._line_ups) if one.has(turn))
        return found.name_of(turn)

    def lose(self, replica: int, _waiter: Waiter) -> None:
        """End every wait for a replica: what stands behind those runs on slots that mean nothing.

        What still goes to it goes into memory that this process has mapped, so nobody misses it.
        """
        self.lost |= {replica}
        self.end_waits_for_lost()

    def end_waits_for_lost(self) -> None:
        """To be called until nothing of theirs is under way: one that dies may still have counted.

        Its device may have begun that before it was told to end.
        """
        for replica in self.lost:
            self._links[replica].end_waits()

    def line_up(self, first: int) -> None:
        """From envelope ``first``, the next one, on, those that are left take turns.

        Nothing is under way. ``out`` and ``into`` are others afterwards.
        """
        self._line_ups.append(self._line_ups[-1].without(self.lost, first))
        self._take_slots()

    def queue_header(self, index: int, numbers: Sequence[int]) -> None:
        """As ``DeviceLink``."""
        replica, at = self.turn(index)
        self._links[replica].queue_header(at, numbers)

    def queue_send(self, index: int, stream: CudaStream | None = None) -> None:
        """As ``DeviceLink``."""
        replica, at = self.turn(index)
        self._links[replica].queue_send(at, stream)

    def queue_receive(self, index: int, stream: CudaStream | None = None) -> None:
        """As ``DeviceLink``."""
        replica, at = self.turn(index)
        self._links[replica].queue_receive(at, stream)

    def queue_wait(self, index: int, stream: CudaStream) -> bool:
        """As ``DeviceLink``; before the newest line-up everything was received, or is lost."""
        if index < self._line_ups[-1].first:
            return True
        replica, at = self.turn(index)
        return self._links[replica].queue_wait(at, stream)

    def queue_note(self) -> None:
        """No notes: each link was measured by itself."""
        raise NotImplementedError

    def queue_note_receipt(self) -> None:
        """As ``queue_note``."""
        raise NotImplementedError

    def close(self) -> bool:
        """As ``DeviceLink``: one stream may wait for any of them, so all are let go first."""
        for link in self._links:
            link.end_waits()
        closed = [link.close() for link in self._links]
        return all(closed)

    def _take_slots(self) -> None:
        """The slot of each index, from the newest line-up on."""
        first, replicas, _ = self._line_ups[-1]
        count = len(replicas) * len(self._links[0].out)
        turns = {index % count: self.turn(index) for index in range(first, first + count)}
        in_order = [turns[number] for number in range(count)]
        links = self._links
        self.out = tuple(links[k].out[at % len(links[k].out)] for k, at in in_order)
        self.into = tuple(links[k].into[at % len(links[k].into)] for k, at in in_order)
