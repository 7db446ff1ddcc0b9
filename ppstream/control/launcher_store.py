"""LauncherStore: the key-value store of the launcher, by which ranks find each other."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import torch.distributed as dist

from ppstream.core.clock import NS_PER_S, now_ns
from ppstream.core.errors import ConfigError, PeerLostError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

OPEN_TIMEOUT_S: Final = 15.0
LOOK_S: Final = 0.01  # between two looks for a value, or,
LOOK_SHARE: Final = 0.05  # the longer it takes,
LONGEST_LOOK_S: Final = 0.2  # the fewer
STORE_GONE: Final = "the launcher's store does not answer"


@dataclass(frozen=True, slots=True)
class LauncherStore:
    """The launcher's key-value store, or the part of it that one generation has (rendezvous.Store).

    ``open_store`` gives the whole of it, ``join_store`` and ``generation.py`` a generation's.
    """

    raw: Store
    rank: int
    world_size: int
    generation: int

    def within(self, folder: str) -> LauncherStore:
        """The same store with all keys in a folder of their own."""
        inside = dist.PrefixStore(folder, self.raw)  # type: ignore[attr-defined]
        return replace(self, raw=inside)

    def of_generation(self, generation: int) -> LauncherStore:
        """Returns the part of the whole store that only ranks of this generation read and write."""
        return replace(self.within(str(generation)), generation=generation)

    def set(self, key: str, value: str) -> None:
        """Publish ``value`` for the other ranks.

        Raises:
            PeerLostError: the store is gone.
        """
        try:
            self.raw.set(key, value)
        except dist.DistError as error:
            raise PeerLostError(f"{STORE_GONE}: {error}") from error

    def peek(self, key: str) -> str | None:
        """Returns the value under ``key`` now; None: nothing is published.

        Raises:
            PeerLostError: the store is gone.
        """
        try:
            return bytes(self.raw.get(key)).decode() if self.raw.check([key]) else None
        except dist.DistError as error:
            raise PeerLostError(f"{STORE_GONE}: {error}") from error

    def get(self, key: str, timeout_s: float, busy: str | None = None) -> str:
        """Returns the value published under ``key``, and waits for it; signals are heard.

        ``timeout_s`` begins anew whenever the value under ``busy`` changes.

        Raises:
            PeerLostError: nothing was published within ``timeout_s``, or the store is gone.
        """
        began_ns, silence = now_ns(), QuietLimit(self, busy, timeout_s)
        while (value := self.peek(key)) is None:
            if silence.is_over():
                raise PeerLostError(
                    f"no rank published {key!r} within {timeout_s:.1f} s: did every rank start?"
                )
            waited_s = (now_ns() - began_ns) / NS_PER_S
            # the store's own wait is deaf to signals
            time.sleep(min(LONGEST_LOOK_S, max(LOOK_S, waited_s * LOOK_SHARE)))
        return value


class QuietLimit:
    """A limit that begins anew whenever the value under ``key`` of ``store`` changes; None: never.

    Attributes:
        is_broken: it has changed.
    """

    def __init__(self, store: LauncherStore, key: str | None, limit_s: float) -> None:
        self.is_broken = False
        self._store = store
        self._key = key
        self._limit_ns = round(limit_s * NS_PER_S)
        self._newest = None if key is None else store.peek(key)  # may be of an earlier start
        self._since_ns = now_ns()

    def is_over(self) -> bool:
        """True when nothing has changed for the limit.

        Raises:
            PeerLostError: the store is gone.
        """
        newest = None if self._key is None else self._store.peek(self._key)
        if newest != self._newest:
            self._newest, self._since_ns, self.is_broken = newest, now_ns(), True
        return now_ns() - self._since_ns > self._limit_ns


def open_store(
    environment: Mapping[str, str] = os.environ, *, timeout_s: float = OPEN_TIMEOUT_S
) -> LauncherStore:
    """The store that torchrun's environment names; without torchrun's agent, rank 0 hosts it.

    Its ``generation`` is how often this host's agent says that it has restarted its ranks, which
    another host's agent may count otherwise.

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
    prefixed = dist.PrefixStore("ppstream", store)  # type: ignore[attr-defined]
    return LauncherStore(prefixed, rank, world_size, generation)


def join_store(
    environment: Mapping[str, str] = os.environ, *, timeout_s: float = OPEN_TIMEOUT_S
) -> LauncherStore:
    """The store of ranks that are started once, or whose one launcher counts for all of them.

    Raises as ``open_store``.
    """
    whole = open_store(environment, timeout_s=timeout_s)
    return whole.of_generation(whole.generation)


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not text.isdigit():
        raise ConfigError([f"{name} is {text!r}, want a number: start the ranks with torchrun"])
    return int(text)
