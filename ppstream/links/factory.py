"""Opens the hops between ranks; placement chooses the kind, once, at start.

A link, on CPUs one hop each way, moves envelopes and results through slots and says when one is
complete; permission to send is the ledger's (``credits.py``), liveness the control socket's
(``control/peer.py``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ppstream.control.launcher_store import LauncherStore
from ppstream.core.errors import ConfigError
from ppstream.links.device_link import DeviceLink
from ppstream.links.gloo import open_gloo
from ppstream.links.host import open_host
from ppstream.links.nccl import NcclLink
from ppstream.links.peer_memory import PeerLink
from ppstream.links.pinned_memory import PinnedLink
from ppstream.links.protocol import Hops, Neighbours
from ppstream.links.slots import LinkShape, Position

if TYPE_CHECKING:
    import torch


KINDS: Final = ("host", "gloo")
DEVICE_KINDS: Final = ("peer", "pinned", "nccl")


def open_hops(
    kind: str,
    ends: Neighbours,
    store: LauncherStore,
    shape: LinkShape,
    *,
    timeout_s: float,
) -> Hops:
    """Both hops of a rank to and from its neighbours, which must be in here at the same time.

    Args:
        kind: ``host`` (all ranks on this host) or ``gloo``.
        ends: this rank's place; the peers stay the caller's and must outlive the hops.
        store: used by ``gloo`` only.
        shape: of the two hops; the same on both ends of each.
        timeout_s: bound of the whole opening; a neighbour that works may take long to come.

    Raises:
        ConfigError: unknown kind, or the slots do not fit into memory.
        PeerLostError: the peer did not open its end within ``timeout_s``.
        ProtocolError: rank 0's slots are of another size.
    """
    if kind == "host":
        return open_host(ends, shape, timeout_s)
    if kind == "gloo":
        return open_gloo(ends, store.raw, shape, timeout_s)
    raise ConfigError([f"link.kind: {kind!r} is not one of {', '.join(KINDS)}"])


def open_device(
    kind: str,
    position: Position,
    store: LauncherStore,
    shape: LinkShape,
    device: torch.device,
    *,
    timeout_s: float,
    spins: bool = True,
    stamps: bool = False,
) -> DeviceLink:
    """Both hops of a rank with a GPU; its neighbours must be here at the same time.

    Args:
        kind: ``peer``, ``pinned`` or ``nccl``.
        position: of this rank in the chain.
        store: where neighbours find each other.
        shape: of the two hops; each the same on both ends.
        device: of this rank; current, and CUDA has started on it.
        timeout_s: bound of a neighbour's coming; one that works may take long.
        spins: of ``peer``: streams of stages wait by a kernel (``peer_memory.py``).
        stamps: of ``peer``: kernels leave their times.

    Raises:
        ConfigError: unknown kind.
        PeerLostError: a neighbour did not open its end within ``timeout_s``.
        DeviceError: the driver refuses memory or mapping.
        ProtocolError: the ends disagree on their sizes.
    """
    if kind == "peer":
        return PeerLink(position, store, shape, device, timeout_s, spins=spins, stamps=stamps)
    if kind == "pinned":
        return PinnedLink(position, store, shape, device, timeout_s)
    if kind == "nccl":
        return NcclLink(position, store.raw, shape, device, timeout_s)
    raise ConfigError([f"link.kind: {kind!r} is not one of {', '.join(DEVICE_KINDS)}"])
