"""Mesh: the ranks that compute one place together meet, and get a ``DeviceMesh`` for the policy.

With replicas each of them is a mesh of its own. Each purpose has a group of its own, made here in
one order by every rank of a mesh: ``compute`` is torch's default group, for the policy's
collectives, gloo's on CPUs and NCCL's on GPUs; ``links/mesh.py`` has that of the envelopes, which
stay in host memory. Rank 0 is in none. Who is alive is the heartbeats' business: no limit of a
group ends a run.
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
from ppstream.cuda import startup
from ppstream.links import mesh as mesh_links
from ppstream.links import nccl

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from ppstream.config.schema import PipelineConfig
    from ppstream.control.launcher_store import LauncherStore
    from ppstream.control.peer import Peer
    from ppstream.links.gloo import Group
    from ppstream.links.protocol import Hops
    from ppstream.links.slots import LinkShape

DIMENSION: Final = "tensor"  # its name in the policy's mesh
INTERFACE: Final = "GLOO_SOCKET_IFNAME"
NCCL_INTERFACE: Final = "NCCL_SOCKET_IFNAME"  # "=" before a name: no other that begins so
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


def open_mesh(
    config: PipelineConfig, store: LauncherStore, rank0: Peer, device: torch.device
) -> Mesh | None:
    """Meets the other ranks of the mesh; None: every place is one rank.

    Args:
        config: of the run.
        store: where they meet.
        rank0: names the interface that they use.
        device: of this rank; on a GPU CUDA starts.

    Raises:
        ConfigError: there is no such device.
        PeerLostError: one of them did not come within ``liveness.start_s``, or NCCL refuses.
    """
    size, limit_s = config.placement.mesh, config.liveness.start_s
    if size == 1:
        return None
    # a host's own name may take a resolver seconds, and lead to an address that others cannot reach
    if name := interface_of(rank0.local_host or LOOPBACK):
        os.environ.setdefault(INTERFACE, name)
        os.environ.setdefault(NCCL_INTERFACE, f"={name}")
    leader = config.placement.leader_of(store.rank)
    member = config.placement.mesh_of(leader).index(store.rank)
    store = store.within(f"mesh/{leader}")
    try:
        devices = _compute_group(store, member, size, device, limit_s)
    except RuntimeError as error:
        raise PeerLostError(
            f"the {size} ranks of the mesh did not meet within {limit_s:g} s: {_words(error)}"
        ) from error
    envelopes = mesh_links.open_envelopes(store.raw, rank0, member, size, limit_s)
    return Mesh(member, size, devices, envelopes)


def _compute_group(
    store: LauncherStore, member: int, size: int, device: torch.device, limit_s: float
) -> DeviceMesh:
    """torch's default group of the mesh, and the mesh of its devices; connected on GPUs."""
    backend, limit, bound_to = "gloo", timedelta(seconds=limit_s), None
    if device.type == "cuda":
        startup.start(device)
        nccl.settle()
        store.raw.set_timeout(limit)  # of the meeting; no collective's runs out
        backend, limit, bound_to = "nccl", nccl.FOR_EVER, startup.started()
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("compute", store.raw),  # type: ignore[attr-defined]
        rank=member,
        world_size=size,
        timeout=limit,
        device_id=bound_to,
    )
    return init_device_mesh(device.type, (size,), mesh_dim_names=(DIMENSION,))


def _words(error: RuntimeError) -> str:
    """The first line; of NCCL all of them: the first one names a file of torch."""
    text = str(error)
    is_nccl = isinstance(error, dist.DistBackendError)
    return " ".join((text if is_nccl else text.partition("\n")[0]).split())


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
