"""Endpoints: how ``unix://PATH`` and ``tcp://ADDRESS:PORT`` must look, and who can reach them.

Nothing is resolved, opened or bound here; the folder of a ``unix://`` path is looked at.
"""

from __future__ import annotations

import ipaddress
import os
import re
import stat
from pathlib import Path
from typing import Final

UNIX_PATH_MAX_BYTES: Final = 107  # sun_path of a UNIX socket, without its closing zero
OWN_MODE: Final = 0o700  # of the folder, when its owner alone may connect
SHARED_MODE: Final = 0o711  # of the folder that is made for other users, too
PORT_MAX: Final = 65535
LOCAL_NAMES: Final = frozenset({"localhost", "lo"})  # the name, and the interface of that name

_TCP = re.compile(r"tcp://(?P<host>\[[0-9A-Fa-f:.]+\]|[^:/\s\[\]]+):(?P<port>\d{1,5}|\*)")


def endpoint_problem(endpoint: str) -> str | None:
    """Returns the reason why ``endpoint`` cannot be one, as ``got ..., want ...``; None: it can."""
    path = unix_path(endpoint)
    if path is not None:
        return _path_problem(path)
    if endpoint.startswith("ipc://"):
        return f"got {endpoint!r}, want {endpoint.replace('ipc', 'unix', 1)!r} on both sides"
    match = _TCP.fullmatch(endpoint)
    if match is None or (match["port"] != "*" and int(match["port"]) > PORT_MAX):
        return f"got {endpoint!r}, want 'unix://PATH' or 'tcp://ADDRESS:PORT'"
    return None


def bracketed(host: str) -> str:
    """Returns ``host`` as it stands in front of ``:PORT``: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def unix_path(endpoint: str) -> str | None:
    """Returns PATH of ``unix://PATH``; None for any other endpoint.

    ``{uid}`` in it stands for the number of this process's user.
    """
    if not endpoint.startswith("unix://"):
        return None
    return endpoint.removeprefix("unix://").replace("{uid}", str(os.geteuid()))


def tcp_address(endpoint: str) -> tuple[str, int] | None:
    """Returns ADDRESS and PORT of a sound ``tcp://ADDRESS:PORT``, 0 for ``*``; None: no TCP."""
    match = _TCP.fullmatch(endpoint)
    if match is None:
        return None
    return match["host"].strip("[]"), int(match["port"].replace("*", "0"))


def folder_problem(path: Path, *, is_shared: bool) -> str | None:
    """Returns the reason why no socket may lie at ``path``; None: it may.

    Whoever may write into its folder could put a socket of their own there, and move robots.
    """
    folder = path.parent
    want = f"want a folder of your own with mode {SHARED_MODE if is_shared else OWN_MODE:o}"
    example = f"unix:///tmp/ppstream-{{uid}}/{path.name}"
    try:
        found = [folder.lstat(), folder.stat()]  # a link that another user could turn counts, too
    except FileNotFoundError:
        return None if folder.parent.is_dir() else f"{folder.parent} does not exist; make it"
    except OSError as error:
        return f"{folder}: {error.strerror}; {want}"
    mode = stat.S_IMODE(found[1].st_mode)
    if others := [one.st_uid for one in found if one.st_uid != os.geteuid()]:
        return f"{folder} belongs to user {others[0]}; {want}, such as {example}"
    if not stat.S_ISDIR(found[1].st_mode):
        return f"{folder} is no folder; {want}"
    if mode & (stat.S_IWGRP | stat.S_IWOTH if is_shared else stat.S_IRWXG | stat.S_IRWXO):
        return f"{folder} has mode {mode:o}; {want}, such as {example}"
    return None


def _path_problem(path: str) -> str | None:
    length = len(path.encode())
    if length > UNIX_PATH_MAX_BYTES:
        return (
            f"got {length} bytes of path, want at most {UNIX_PATH_MAX_BYTES}: use a shorter folder"
        )
    if not path.startswith("/") or path.endswith("/") or "\0" in path:
        return f"got path {path!r}, want that of a file, from the root: unix:///FOLDER/NAME"
    return None


def is_local(endpoint: str) -> bool:
    """True when only programs of this host can reach it: a UNIX socket, or TCP on loopback.

    What cannot be told by the text alone, such as another name, counts as reachable from outside.
    """
    if endpoint.startswith("unix://"):
        return True
    match = _TCP.fullmatch(endpoint)
    if match is None:
        return False
    host = match["host"].strip("[]")
    if host in LOCAL_NAMES:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
