"""The link between rank 0 and a policy rank: one interface, chosen once at start by placement.

A link moves envelopes and results through slots and says when one is complete; permission to send
is the ledger's (credits.py), liveness the control socket's (control/peer.py). This file also joins
the launcher's store. The links themselves are ``host.py`` and ``gloo.py``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final, Protocol

import torch.distributed as dist

from ppstream.control.peer import Peer
from ppstream.core.errors import ConfigError, PeerLostError
from ppstream.links.arrivals import Arrivals
from ppstream.links.device_link import BACK, FRONT, DeviceLink
from ppstream.links.gloo import GlooBack, GlooFront
from ppstream.links.host import HostBack, HostFront
from ppstream.links.nccl import NcclLink
from ppstream.links.peer_memory import PeerLink
from ppstream.links.pinned_memory import PinnedLink
from ppstream.links.slots import LinkShape, Slot

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store

__all__ = ["BackLink", "FrontLink", "LauncherStore", "LinkShape", "Slot", "join_store"]
__all__ += ["BACK", "FRONT", "DeviceLink", "open_back", "open_device", "open_front"]

KINDS: Final = ("host", "gloo")
DEVICE_KINDS: Final = ("peer", "pinned", "nccl")
OPEN_TIMEOUT_S: Final = 15.0


class FrontLink(Protocol):
    """Rank 0's end. One thread sends; one thread, which pumps the peer, receives.

    Attributes:
        name: the kind, for the log and the report.
        fds: to be waited for besides the peer's; readable: a result may be there.
    """

    name: str
    fds: tuple[int, ...]

    def envelope(self, index: int) -> Slot:
        """The slot to write envelope ``index`` into, while it is the next one due."""

    def commit(self, index: int) -> None:
        """Send envelope ``index``; its slot is the peer's until its result was received.

        Raises:
            ProtocolError: another index is due, or ``d_in`` are unanswered.
            PeerLostError: the peer is gone.
        """

    def receive_nowait(self) -> int | None:
        """Index of the next complete result, in order; the peer must have been pumped.

        Raises:
            ProtocolError: what arrived is not the next index of this generation.
            PeerLostError: the link's own connection broke.
        """

    def result(self, index: int) -> Slot:
        """The slot of a received result, valid until it is emitted."""

    def close(self) -> None:
        """Release what the link holds, within a second; slots still referred to stay readable."""


class BackLink(Protocol):
    """The policy rank's end; one thread. Attributes and errors as in ``FrontLink``."""

    name: str
    fds: tuple[int, ...]

    @property
    def arrivals(self) -> Arrivals:
        """When envelopes came while the thread was busy."""

    def receive_nowait(self) -> int | None:
        """Index of the next complete envelope, in order; the peer must have been pumped."""

    def envelope(self, index: int) -> Slot:
        """The slot of a received envelope, valid until it is answered."""

    def result(self, index: int) -> Slot:
        """The slot to write result ``index`` into."""

    def reply(self, index: int) -> None:
        """Send result ``index``: exactly one for each envelope, in order."""

    def close(self) -> None:
        """Release what the link holds, within a second."""


def open_front(
    kind: str,
    peer: Peer,
    store: LauncherStore,
    shape: LinkShape,
    *,
    timeout_s: float = OPEN_TIMEOUT_S,
) -> FrontLink:
    """Rank 0's end of a new link; the policy rank must be in ``open_back`` at the same time.

    Args:
        kind: ``host`` (both ranks on this host) or ``gloo``.
        peer: the policy rank; stays the caller's and must outlive the link.
        store: used by ``gloo`` only.
        shape: the same on both ends.
        timeout_s: bound of the whole opening.

    Raises:
        ConfigError: unknown kind, or the slots do not fit into memory.
        PeerLostError: the peer did not open its end within ``timeout_s``.
    """
    _check_kind(kind)
    if kind == "host":
        return HostFront(peer, shape)
    return GlooFront(peer, store.raw, shape, timeout_s)


def open_back(
    kind: str,
    peer: Peer,
    store: LauncherStore,
    shape: LinkShape,
    *,
    timeout_s: float = OPEN_TIMEOUT_S,
) -> BackLink:
    """The policy rank's end; arguments and errors as ``open_front``.

    Raises:
        ProtocolError: rank 0's slots are of another size.
    """
    _check_kind(kind)
    if kind == "host":
        return HostBack(peer, shape, timeout_s)
    return GlooBack(peer, store.raw, shape, timeout_s)


def open_device(
    kind: str,
    side: str,
    store: LauncherStore,
    shape: LinkShape,
    device: torch.device,
    *,
    timeout_s: float = OPEN_TIMEOUT_S,
    looks: bool = True,
) -> DeviceLink:
    """One end of a new link between two GPUs; both ranks must be here at the same time.

    Args:
        kind: ``peer``, ``pinned`` or ``nccl``.
        side: ``FRONT`` on rank 0, ``BACK`` on the policy rank.
        store: where the ends find each other.
        shape: the same on both ends.
        device: of this rank; current, and CUDA has started on it.
        timeout_s: bound of the peer's coming.
        looks: of ``peer``: streams of stages wait by a kernel (``peer_memory.py``).

    Raises:
        ConfigError: unknown kind.
        PeerLostError: the peer did not open its end within ``timeout_s``.
        DeviceError: the driver refuses memory or mapping.
        ProtocolError: the ends disagree on their sizes.
    """
    if kind == "peer":
        return PeerLink(side, store, shape, device, timeout_s, looks=looks)
    if kind == "pinned":
        return PinnedLink(side, store, shape, device, timeout_s)
    if kind == "nccl":
        return NcclLink(side, store.raw, shape, device)
    raise ConfigError([f"link.kind: {kind!r} is not one of {', '.join(DEVICE_KINDS)}"])


@dataclass(frozen=True, slots=True)
class LauncherStore:
    """The launcher's key-value store as one generation of this run sees it (rendezvous.Store)."""

    raw: Store
    rank: int
    world_size: int
    generation: int

    def set(self, key: str, value: str) -> None:
        """Publish ``value`` for the ranks of this generation."""
        self.raw.set(key, value)

    def get(self, key: str, timeout_s: float) -> str:
        """What was published under ``key``, waiting for it.

        Raises:
            PeerLostError: nothing was published within ``timeout_s``, or the store is gone.
        """
        try:
            self.raw.wait([key], timedelta(seconds=timeout_s))
            return bytes(self.raw.get(key)).decode()
        except dist.DistError as error:
            raise PeerLostError(
                f"no rank published {key!r} within {timeout_s:.1f} s: did every rank start?"
            ) from error


def join_store(
    environment: Mapping[str, str] = os.environ, *, timeout_s: float = OPEN_TIMEOUT_S
) -> LauncherStore:
    """The store that torchrun's environment names; without torchrun's agent, rank 0 hosts it.

    Raises:
        ConfigError: the environment is incomplete or malformed.
        PeerLostError: nobody serves the store within ``timeout_s``.
    """
    rank, world_size = (_number(environment, name) for name in ("RANK", "WORLD_SIZE"))
    generation = int(environment.get("TORCHELASTIC_RESTART_COUNT", "0"))
    has_agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    host, port = environment.get("MASTER_ADDR", "127.0.0.1"), _number(environment, "MASTER_PORT")
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            host,
            port,
            world_size,
            is_master=rank == 0 and not has_agent,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
    except dist.DistError as error:
        raise PeerLostError(f"no store at {host}:{port} within {timeout_s:.1f} s") from error
    prefixed = dist.PrefixStore(f"ppstream/{generation}", store)  # type: ignore[attr-defined]
    return LauncherStore(prefixed, rank, world_size, generation)


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise ConfigError([f"link.kind: {kind!r} is not one of {', '.join(KINDS)}"])


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not text.isdigit():
        raise ConfigError([f"{name} is {text!r}, want a number: start the ranks with torchrun"])
    return int(text)
