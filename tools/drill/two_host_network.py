"""Two hosts on one machine: network namespaces with a cable between them. Needs root, iproute2."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

NAMES: Final = tuple(f"ppstream-{os.getpid()}{letter}" for letter in "ab")
PLUGS: Final = tuple(f"pps{os.getpid()}{letter}" for letter in "ab")  # 15 letters at most
ADDRESSES: Final = ("10.213.7.1", "10.213.7.2")


@dataclass(frozen=True)
class Host:
    """``prefix`` of a command that shall run there."""

    address: str
    prefix: tuple[str, ...]


def is_possible() -> bool:
    """True when this process may make network namespaces."""
    return os.geteuid() == 0 and shutil.which("ip") is not None


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Both hosts, connected; they vanish with the block."""
    _remove()
    try:
        for name in NAMES:
            _ip("netns", "add", name)
        first, second = zip(PLUGS, NAMES, strict=True)
        cable = ("type", "veth", "peer", "name", second[0], "netns", second[1])
        _ip("link", "add", first[0], "netns", first[1], *cable)
        for name, plug, address in zip(NAMES, PLUGS, ADDRESSES, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", plug)
            for device in (plug, "lo"):
                _ip("-n", name, "link", "set", device, "up")
        one, other = (
            Host(address, ("ip", "netns", "exec", name))
            for name, address in zip(NAMES, ADDRESSES, strict=True)
        )
        yield one, other
    finally:
        _remove()


def cut_cable() -> None:
    """From now on nothing passes between them, and neither is told."""
    _ip("-n", NAMES[0], "link", "set", PLUGS[0], "down")


def plug_cable_in() -> None:
    """It carries again what is sent, also what nobody has acknowledged since it was cut."""
    _ip("-n", NAMES[0], "link", "set", PLUGS[0], "up")


def _remove() -> None:
    for name in NAMES:
        subprocess.run(("ip", "netns", "del", name), check=False, stderr=subprocess.DEVNULL)


def _ip(*words: str) -> None:
    subprocess.run(("ip", *words), check=True)
