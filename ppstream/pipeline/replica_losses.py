"""ReplicaLosses: rank 0 goes on without a replica that is lost, while enough of them are left.

A replica may be a mesh: the loss of any of its ranks is the loss of all. Before *ready* a loss
always ends the run: nothing was proven without that replica.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from ppstream.core.errors import ExitCode, PeerLostError, PpstreamError
from ppstream.core.user_code import message_of
from ppstream.wire.rank_messages import Goodbye

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ppstream.config.schema import PlacementConfig
    from ppstream.core.waiter import Waiter
    from ppstream.pipeline.policy_rank_peer import PolicyRankPeer
    from ppstream.pipeline.rank0 import Rank0

logger = logging.getLogger("ppstream")

SERVED: Final = ("ready", "degraded", "draining")  # phases in which a replica may go


class ReplicaHops(Protocol):
    """Rank 0's hops to and from all replicas, as far as losses go."""

    def name_of(self, replica: int, index: int) -> int | None:
        """The run's index of an envelope that a replica names; None: it is not known any more."""

    def lose(self, replica: int, waiter: Waiter, /) -> None:
        """Go on without a replica."""


class EndOfRun(Protocol):
    """Ends the run's processes, as far as losses go.

    Attributes:
        bears_loss: True when the run goes on without the ranks that fell silent.
    """

    bears_loss: Callable[[], bool]

    def let_go(self, rank: int, /) -> str:
        """End what is left of a rank, and ask for it no more; returns words on that."""


class ReplicaLosses:
    """Judges and carries out the loss of a replica; for the thread that receives results.

    Attributes:
        policy_ranks: those of the replicas left that hold their hops.
        all_ranks: these, and the other ranks of their meshes.

    Args:
        fewest: replicas without which the run ends.
        hops: to and from all of them.
        replicas: the ranks of each, the one that holds its hops first, in order of these.
        let_go: ends what is left of a rank, and has the run's end not ask for it any more.
    """

    def __init__(
        self,
        fewest: int,
        hops: ReplicaHops,
        replicas: tuple[tuple[PolicyRankPeer, ...], ...],
        let_go: Callable[[int], str],
    ) -> None:
        self.waiter: Waiter  # the one that results wake
        self.rank0: Rank0 | None = None  # before a loop has it, nothing is borne
        self._fewest = fewest
        self._hops = hops
        self._let_go = let_go
        self._all = replicas
        self._go_on_with(replicas)

    @classmethod
    def of(
        cls,
        placement: PlacementConfig,
        policy_ranks: tuple[PolicyRankPeer, ...],
        members: tuple[PolicyRankPeer, ...],
        end: EndOfRun,
        hops: ReplicaHops,
    ) -> ReplicaLosses:
        """The judge of these ranks' losses, which they and ``end`` ask."""
        ranks = {found.rank: found for found in (*policy_ranks, *members)}
        meshes = (placement.mesh_of(leader.rank) for leader in policy_ranks)
        replicas = tuple(tuple(ranks[rank] for rank in mesh) for mesh in meshes)
        losses = cls(placement.fewest, hops, replicas, end.let_go)
        for replica, policy_rank in enumerate(policy_ranks):
            policy_rank.name_of = partial(hops.name_of, replica)
        for policy_rank in ranks.values():
            policy_rank.bears_loss = losses.bears_the_silent
        end.bears_loss = losses.bears_the_silent
        return losses

    def _go_on_with(self, left: tuple[tuple[PolicyRankPeer, ...], ...]) -> None:
        self._left = left
        self.policy_ranks = tuple(ranks[0] for ranks in left)
        members = (member for ranks in left for member in ranks[1:])
        self.all_ranks = (*self.policy_ranks, *members)

    def bears(self, lost: int) -> bool:
        """True when the run goes on with so many replicas lost; any thread."""
        is_served = self.rank0 is not None and self.rank0.phase in SERVED
        return is_served and len(self._all) - lost >= self._fewest

    def bears_the_silent(self) -> bool:
        """The same of those whose end was noticed, by whomever."""
        silent = (any(found.peer.lost_ns is not None for found in ranks) for ranks in self._all)
        return self.bears(sum(silent))

    def check_hops(self, broken: Mapping[int, PpstreamError]) -> bool:
        """Accepts hops that broke, by replica; returns True if any were not known of."""
        before = self._left
        for replica, error in [*broken.items()]:
            self.accept(self._all[replica][0], error)
        return self._left is not before

    def accept(self, policy_rank: PolicyRankPeer, error: PpstreamError) -> None:
        """Go on without its replica, or raise ``error``; a lost one's is no further loss."""
        lost = next((ranks for ranks in self._left if policy_rank in ranks), None)
        if lost is None:
            return
        left = tuple(ranks for ranks in self._left if ranks is not lost)
        if self.rank0 is None or not self.bears(len(self._all) - len(left)):
            raise error
        if isinstance(error, PeerLostError):  # it may have said why
            error = policy_rank.peer.last_words() or error
        text = message_of(error)
        self._go_on_with(left)
        self._hops.lose(self._all.index(lost), self.waiter)
        told = Goodbye(int(ExitCode.PEER_LOST), f"rank 0 goes on without this replica: {text}")
        for each in lost:
            each.peer.mark_lost()
            with suppress(PpstreamError):  # one that stands still on another host hears it later
                each.peer.send(told)
            self.waiter.unregister(each.peer.fileno())
            each.forget()
        reason = text + "".join(self._let_go(each.rank) for each in lost)
        rank = lost[0].rank
        logger.warning(
            "replica %d is lost, %d of %d go on: %s", rank, len(left), len(self._all), reason
        )
        self.rank0.lose_replica(rank, len(left), reason)
        self.waiter.wake()  # what it owes is there
