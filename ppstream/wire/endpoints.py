"""Endpoints: what ``tcp://ADDRESS:PORT`` and ``ipc://PATH`` must look like, and who can reach them.

Text only: nothing is resolved, opened or bound here.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Final

IPC_PATH_MAX_BYTES: Final = 107  # sun_path of a UNIX socket, without its closing zero
PORT_MAX: Final = 65535
LOCAL_NAMES: Final = frozenset({"localhost", "lo"})  # the name, and the interface of that name

_TCP = re.compile(r"tcp://(?P<host>\[[0-9A-Fa-f:.]+\]|[^:/\s\[\]]+):(?P<port>\d{1,5}|\*)")


def endpoint_problem(endpoint: str) -> str | None:
    """Returns the reason why ``endpoint`` cannot be one, as ``got ..., want ...``; None: it can."""
    if endpoint.startswith("ipc://"):
        length = len(endpoint.removeprefix("ipc://").encode())
        if 1 <= length <= IPC_PATH_MAX_BYTES:
            return None
        return f"got {length} bytes of path, want 1 to {IPC_PATH_MAX_BYTES}"
    match = _TCP.fullmatch(endpoint)
    if match is None or (match["port"] != "*" and int(match["port"]) > PORT_MAX):
        return f"got {endpoint!r}, want 'tcp://ADDRESS:PORT' or 'ipc://PATH'"
    return None


def is_local(endpoint: str) -> bool:
    """True when only programs of this host can reach it: a UNIX socket, or TCP on loopback.

    What cannot be told by the text alone, such as another name, counts as reachable from outside.
    """
    if endpoint.startswith(("ipc://", "inproc://")):
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
