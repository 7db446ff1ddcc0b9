"""Mesh: the ranks that compute one place together meet, and get a ``DeviceMesh`` for the policy.

Each purpose has a group of its own, made here in one order by every rank of the mesh: ``compute``
is torch's default group, for the policy's collectives; ``links/mesh.py`` has that of the envelopes.
Rank 0 is in none. Who is alive is the heartbeats' business: no limit of a group ends a run.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING, Final, NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ppstream.core.errors import PeerLostError
from ppstream.links import mesh as mesh_links

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ppstream.config.schema import PipelineConfig
    from ppstream.control.launcher_store import LauncherStore
    from ppstream.control.peer import Peer
    from ppstream.links.gloo import Group
    from ppstream.links.protocol import Hops
    from ppstream.links.slots import LinkShape

FIRST_RANK: Final = 1  # the leader's
DIMENSION: Final = "tensor"  # its name in the policy's mesh
INTERFACE: Final = "GLOO_SOCKET_IFNAME"


class Mesh(NamedTuple):
    """This rank's end of a mesh of ``size`` ranks; ``member`` 0 is the leader."""

    member: int
    size: int
    devices: DeviceMesh
    envelopes: Group

    @property
    def is_leader(self) -> bool:
        return self.member == mesh_links.LEADER

    def lead(self, hops: Hops, shape: LinkShape) -> Hops:
        """The leader's hops, from which envelopes go on to the members."""
        return mesh_links.with_members(hops, self.envelopes, self.size, shape)

    def follow(self, rank0: Peer, shape: LinkShape) -> Hops:
        """A member's hops."""
        return mesh_links.open_member(self.envelopes, rank0, shape)


def open_mesh(config: PipelineConfig, store: LauncherStore, rank0: Peer) -> Mesh | None:
    """Meets the other ranks of the mesh; None: every place is one rank.

    Raises:
        PeerLostError: one of them did not come within ``liveness.start_s``.
    """
    size, limit_s = config.placement.mesh, config.liveness.start_s
    if size == 1:
        return None
    if rank0.local_host is None:
        os.environ.setdefault(INTERFACE, "lo")  # a host's own name may take a resolver seconds
    member = store.rank - FIRST_RANK
    try:
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore("mesh/compute", store.raw),  # type: ignore[attr-defined]
            rank=member,
            world_size=size,
            timeout=timedelta(seconds=limit_s),
        )
        devices = init_device_mesh("cpu", (size,), mesh_dim_names=(DIMENSION,))
    except RuntimeError as error:
        text = str(error).partition("\n")[0]
        raise PeerLostError(
            f"the {size} ranks of the mesh did not meet within {limit_s:g} s: {text}"
        ) from error
    envelopes = mesh_links.open_envelopes(store.raw, rank0, member, size, limit_s)
    return Mesh(member, size, devices, envelopes)
