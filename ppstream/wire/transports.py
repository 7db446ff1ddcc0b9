"""Transports of robots' messages: the MessageSocket that an endpoint's scheme selects.

ZeroMQ is imported for ``tcp://`` alone.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from ppstream.core.errors import ConfigError
from ppstream.wire.endpoints import endpoint_problem, is_local, unix_path
from ppstream.wire.message_socket import MAX_FRAME_BYTES, MessageSocket

if TYPE_CHECKING:
    from ppstream.wire.keys import ClientKeys, ServerKeys


def bind_server(
    endpoint: str,
    keys: ServerKeys | None = None,
    frame_bytes_max: int = MAX_FRAME_BYTES,
    allowed_uids: Collection[int] = (),
) -> MessageSocket:
    """A server on ``endpoint``.

    Args:
        endpoint: ``unix://PATH`` or ``tcp://ADDRESS:PORT``.
        keys: encrypt, and serve allowed robots alone; of ``tcp://``.
        frame_bytes_max: a larger frame loses its sender the connection before memory is taken.
        allowed_uids: users who may connect; none: this process's own; of ``unix://``.

    Raises:
        ConfigError: the endpoint is malformed, taken, or not on this host; other hosts could reach
            it and there are no keys; or other users could replace the socket's file.
    """
    _check("listen on", endpoint, has_keys=keys is not None)
    if unix_path(endpoint) is not None:
        from ppstream.wire.unix_socket import UnixServer

        return UnixServer(endpoint, frame_bytes_max, allowed_uids)
    from ppstream.wire.zmq_socket import bind_zmq

    return bind_zmq(endpoint, keys, frame_bytes_max)


def connect_client(endpoint: str, keys: ClientKeys | None = None) -> MessageSocket:
    """A client that keeps trying to reach ``endpoint`` and queues nothing while nobody is there.

    Raises:
        ConfigError: the endpoint is malformed; or on another host, and there are no keys.
    """
    _check("connect to", endpoint, has_keys=keys is not None)
    if unix_path(endpoint) is not None:
        from ppstream.wire.unix_socket import UnixClient

        return UnixClient(endpoint)
    from ppstream.wire.zmq_socket import connect_zmq

    return connect_zmq(endpoint, keys)


def _check(verb: str, endpoint: str, *, has_keys: bool) -> None:
    """Raises ConfigError: the endpoint cannot be one, or keys are missing or of no use there."""
    problem = endpoint_problem(endpoint)
    if problem is None and has_keys and unix_path(endpoint) is not None:
        problem = "keys are of tcp:// endpoints alone; leave them out"
    if problem is None and not has_keys and not is_local(endpoint):
        problem = (
            "other hosts can reach it, and there are no keys; make them with ppstream keys, or use "
            "tcp://127.0.0.1:PORT through a tunnel"
        )
    if problem is not None:
        raise ConfigError([f"cannot {verb} {endpoint!r}: {problem}"])
