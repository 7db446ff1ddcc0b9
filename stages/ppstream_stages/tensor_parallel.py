"""Sharding of networks over the ranks of a mesh, by ``torch.distributed.tensor.parallel`` alone.

A module that can be sharded says how: ``shard_plan(ranks)`` rearranges its weights so that each
rank's contiguous piece is whole heads and pairs of gate and value, and returns the styles of its
linear layers. The collectives are torch's: one all-reduce behind attention, one behind the
feed-forward layer. At batch 1 that is a way to fit a model, not to hurry it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor, nn

from ppstream import ConfigError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

Plan = dict[str, "ParallelStyle"]


class Shardable(Protocol):
    """A module that can be sharded."""

    def shard_plan(self, ranks: int) -> Plan:
        """Rearranges weights and counts for ``ranks``; returns the styles of its layers."""


def shard(network: nn.Module, mesh: DeviceMesh) -> None:
    """Shards every module of ``network``, which is loaded, that says how; all ranks call it.

    The weights of the first rank of the mesh count.
    """
    from torch.distributed.tensor.parallel import parallelize_module  # takes half a second

    for module in list(network.modules()):
        if hasattr(module, "shard_plan"):
            plan = cast("Shardable", module).shard_plan(mesh.size())
            parallelize_module(module, mesh, plan)


def plan_of(columns: Sequence[str], rows: Sequence[str]) -> Plan:
    """Styles of layers whose outputs are divided, and of those that sum over the ranks."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    by_column: Plan = {name: ColwiseParallel() for name in columns}
    return by_column | {name: RowwiseParallel() for name in rows}


def regroup(linear: nn.Linear, groups: int, ranks: int) -> None:
    """Moves rows of a layer that makes ``groups`` outputs so that each rank's are together."""
    for tensor in (linear.weight, linear.bias):
        if tensor is not None:
            pieces = tensor.data.view(groups, ranks, -1, *tensor.shape[1:])
            tensor.data.copy_(pieces.transpose(0, 1).reshape(tensor.shape).clone())


def repeat_rows(linear: nn.Linear, divided: int, ranks: int) -> None:
    """Divides the first rows of a layer without bias over the ranks; each gets all others, too."""
    weight = linear.weight.data
    pieces = weight[:divided].chunk(ranks)
    rows: list[Tensor] = [part for piece in pieces for part in (piece, weight[divided:])]
    linear.weight = nn.Parameter(torch.cat(rows), requires_grad=False)


def check_divides(mesh: DeviceMesh | None, counts: Mapping[str, int]) -> None:
    """Refuses a mesh that does not divide what is sharded.

    Raises:
        ConfigError: names each count that is not divided, and the sizes that would be.
    """
    ranks = 1 if mesh is None else mesh.size()
    wrong = [f"{count} {what}" for what, count in counts.items() if count % ranks]
    if wrong:
        most = min(counts.values())
        fitting = [n for n in range(1, most + 1) if not any(c % n for c in counts.values())]
        raise ConfigError(
            [
                f"placement.mesh: got {ranks}, which does not divide {', '.join(wrong)}; "
                f"want one of {', '.join(map(str, fitting))}"
            ]
        )
