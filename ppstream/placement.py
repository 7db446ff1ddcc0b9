"""Who runs what, where, and over which link: decided once, from the configuration and two counts.

Pure: nothing is started, opened or imported here; the answer is logged and printed by ``--check``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from ppstream.config import LinkConfig, PipelineConfig
from ppstream.errors import ConfigError

RANKS_MAX: Final = 2  # rank 0 and one policy rank

LinkKind = Literal["host", "gloo"]
Stage = Literal["A", "B", "C"]


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What one rank does."""

    rank: int
    stages: tuple[Stage, ...]
    device: str  # as torch.device reads it


@dataclass(frozen=True, slots=True)
class Placement:
    """The whole run: its ranks in order, and the link between them (None: inline) with why."""

    ranks: tuple[RankPlan, ...]
    link: LinkKind | None
    why: str

    @property
    def is_inline(self) -> bool:
        """One process runs A, B and C in turn: the unpipelined twin."""
        return self.link is None


def place(config: PipelineConfig, world_size: int, local_world_size: int) -> Placement:
    """The placement of ``world_size`` ranks, ``local_world_size`` of which share this host.

    Raises:
        ConfigError: there are too many ranks, or the link asked for cannot connect them.
    """
    if not 1 <= world_size <= RANKS_MAX:
        raise ConfigError(
            [
                f"world size: got {world_size} ranks, want 2 (pipelined) or 1 (inline); "
                "start with torchrun --nproc-per-node=2"
            ]
        )
    if world_size == 1:
        whole = RankPlan(0, ("A", "B", "C"), "cpu")
        return Placement((whole,), None, "one rank runs every stage in turn")
    link, why = _choose_link(config.link, is_one_host=local_world_size >= world_size)
    return Placement((RankPlan(0, ("A", "C"), "cpu"), RankPlan(1, ("B",), "cpu")), link, why)


def _choose_link(link: LinkConfig, *, is_one_host: bool) -> tuple[LinkKind, str]:
    if is_one_host:
        if link.kind == "gloo":
            return "gloo", "asked for by link.kind, though both ranks share one host"
        return "host", "both ranks share one host and its memory"
    if link.kind == "host":
        raise ConfigError(["link.kind: got 'host' for ranks on two hosts, want 'auto' or 'gloo'"])
    if not link.trusted_network:
        raise ConfigError(
            [
                "link.trusted_network: got false for ranks on two hosts, want true: gloo neither "
                "encrypts nor authenticates, so set it only where nobody else can reach the network"
            ]
        )
    return "gloo", "the ranks are on two hosts, over a network declared as trusted"
