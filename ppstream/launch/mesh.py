"""Mesh: the ranks that compute one place together meet, and get a ``DeviceMesh`` for the policy.

With replicas each of them is a mesh of its own. Each purpose has a group of its own, made here in
one order by every rank of a mesh: ``compute`` is torch's default group, for the policy's
collectives; ``links/mesh.py`` has that of the envelopes. Rank 0 is in none. Who is alive is the
heartbeats' business: no limit of a group ends a run.
"""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, Final, NamedTuple

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

DIMENSION: Final = "tensor"  # its name in the policy's mesh
INTERFACE: Final = "GLOO_SOCKET_IFNAME"
LOOPBACK: Final = "127.0.0.1"
#: Where the bytes of an address stand in the system's ``sockaddr``, by its family.
IPV4_BYTES: Final = slice(4, 8)
IPV6_BYTES: Final = slice(8, 24)
ADDRESS_BYTES: Final = {int(socket.AF_INET): IPV4_BYTES, int(socket.AF_INET6): IPV6_BYTES}


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
    # a host's own name may take a resolver seconds, and lead to an address that others cannot reach
    if name := interface_of(rank0.local_host or LOOPBACK):
        os.environ.setdefault(INTERFACE, name)
    leader = config.placement.leader_of(store.rank)
    member = config.placement.mesh_of(leader).index(store.rank)
    store = store.within(f"mesh/{leader}")
    try:
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore("compute", store.raw),  # type: ignore[attr-defined]
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


def interface_of(address: str) -> str | None:
    """Name of this host's network interface that has ``address``, IPv4 or IPv6; None: none has."""
    wanted = ip_address(address.partition("%")[0]).packed
    return next((name for name, found in _interfaces() if found == wanted), None)


class _Entry(ctypes.Structure):
    """The head of ``struct ifaddrs``."""


_Entry._fields_ = [
    ("next", ctypes.POINTER(_Entry)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
]


def _interfaces() -> Iterator[tuple[str, bytes]]:
    """Every address of this host, as bytes, behind its interface's name."""
    library = ctypes.CDLL(None, use_errno=True)
    first: Any = ctypes.POINTER(_Entry)()
    if library.getifaddrs(ctypes.byref(first)):
        raise OSError(ctypes.get_errno(), "getifaddrs")
    try:
        entry = first
        while entry:
            found = entry.contents
            family = ctypes.c_ushort.from_address(found.address).value if found.address else 0
            if (at := ADDRESS_BYTES.get(family)) is not None:
                yield found.name.decode(), ctypes.string_at(found.address, at.stop)[at]
            entry = found.next
    finally:
        library.freeifaddrs(first)
