"""ReplicaLosses: rank 0 goes on without a replica that is lost, while enough of them are left.

Before *ready* a loss always ends the run: nothing was proven without that replica.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, Protocol

from ppstream.core.errors import PeerLostError, PpstreamError
from ppstream.core.user_code import message_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ppstream.core.waiter import Waiter
    from ppstream.pipeline.policy_rank_peer import PolicyRankPeer
    from ppstream.pipeline.rank0 import Rank0

logger = logging.getLogger("ppstream")

SERVED: Final = ("ready", "degraded", "draining")  # phases in which a replica may go


class ReplicaHops(Protocol):
    """Rank 0's hops to and from all replicas, as far as losses go."""

    def name_of(self, replica: int, index: int) -> int:
        """The run's index of an envelope that a replica names, and that is under way."""

    def lose(self, replica: int, waiter: Waiter, /) -> None:
        """Go on without a replica."""


class ReplicaLosses:
    """Judges and carries out the loss of a replica; for the thread that receives results.

    Args:
        fewest: replicas without which the run ends.
        hops: to and from all of them.
        policy_ranks: all of them, in order of their ranks.
        let_go: ends what is left of a rank, and has the run's end not ask for it any more.
    """

    def __init__(
        self,
        fewest: int,
        hops: ReplicaHops,
        policy_ranks: tuple[PolicyRankPeer, ...],
        let_go: Callable[[int], str],
    ) -> None:
        self.policy_ranks = policy_ranks
        self.waiter: Waiter  # the one that results wake
        self.rank0: Rank0 | None = None  # before a loop has it, nothing is borne
        self._fewest = fewest
        self._hops = hops
        self._let_go = let_go
        self._all = policy_ranks

    def bears(self, lost: int) -> bool:
        """True when the run goes on with so many replicas lost; any thread."""
        is_served = self.rank0 is not None and self.rank0.phase in SERVED
        return is_served and len(self._all) - lost >= self._fewest

    def bears_the_silent(self) -> bool:
        """The same of those whose end was noticed, by whomever."""
        return self.bears(sum(found.peer.lost_ns is not None for found in self._all))

    def check_hops(self, broken: Mapping[int, PpstreamError]) -> bool:
        """Accepts hops that broke, by replica; returns True if any were not known of."""
        before = self.policy_ranks
        for replica, error in [*broken.items()]:
            self.accept(self._all[replica], error)
        return self.policy_ranks is not before

    def accept(self, policy_rank: PolicyRankPeer, error: PpstreamError) -> None:
        """Go on without it, or raise ``error``; one that is lost already is no further loss."""
        if policy_rank not in self.policy_ranks:
            return
        left = tuple(other for other in self.policy_ranks if other is not policy_rank)
        if self.rank0 is None or not self.bears(len(self._all) - len(left)):
            raise error
        policy_rank.peer.mark_lost()
        if isinstance(error, PeerLostError):  # it may have said why
            error = policy_rank.peer.last_words() or error
        self.policy_ranks = left
        self.waiter.unregister(policy_rank.peer.fileno())
        self._hops.lose(policy_rank.rank - 1, self.waiter)
        policy_rank.forget()
        reason = message_of(error) + self._let_go(policy_rank.rank)
        logger.warning(
            "replica %d is lost, %d of %d go on: %s",
            *(policy_rank.rank, len(left), len(self._all), reason),
        )
        self.rank0.lose_replica(policy_rank.rank, len(left), reason)
        self.waiter.wake()  # what it owes is there
