"""A server of openpi in thirty lines, as others write them: one answer after the other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import ServerConnection, serve

from ppstream.wire.openpi import decode, encode

Answer = Callable[[dict[str, Any]], Any]


def echo(observation: dict[str, Any]) -> dict[str, Any]:
    """Twelve steps of the numbers that came, joints first."""
    values = [observation["observation/joint_position"], observation["gripper"]]
    return {"actions": np.tile(np.concatenate(values).astype(np.float64), (12, 1))}


class PolicyServer:
    """Gives each observation to ``answer``: a map, or a text that says why not.

    Args:
        answer: what it says to an observation.
        port: 0 for any.
        spare: requests, counted from 1, that it answers twice.
        silent: connections, counted from 1, that hear nothing.
        opens_in_s: until it tells a connection anything.
    """

    def __init__(
        self,
        answer: Answer = echo,
        port: int = 0,
        spare: Collection[int] = frozenset(),
        silent: Collection[int] = frozenset(),
        opens_in_s: float = 0.0,
    ) -> None:
        self._silent, self._opens_in_s = silent, opens_in_s
        self.answer, self._spare = answer, spare
        self.seen: list[dict[str, Any]] = []
        self.connections = 0
        self._accepted: list[ServerConnection] = []
        self.headers: list[Any] = []
        self._server = serve(self._serve, "127.0.0.1", port, compression=None, max_size=None)
        self.port = int(self._server.socket.getsockname()[1])
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join(10)

    def hang_up(self) -> None:
        """Close every connection, as after a while without requests."""
        for connection in self._accepted:
            connection.close(1000, "idle")

    def _serve(self, connection: ServerConnection) -> None:
        self.connections += 1
        self._accepted.append(connection)
        if self.connections in self._silent:
            with suppress(ConnectionClosed):
                connection.recv()
            return
        assert connection.request
        self.headers.append(connection.request.headers)
        time.sleep(self._opens_in_s)
        try:
            connection.send(encode({"reset_pose": [0.0]}))
            for frame in connection:
                self.seen.append(decode(bytes(frame)))  # type: ignore[arg-type] # clients send bytes
                reply = self.answer(self.seen[-1])
                for _ in range(1 + (len(self.seen) in self._spare)):
                    connection.send(reply if isinstance(reply, str) else encode(reply))
                if isinstance(reply, str):
                    connection.close(1011)
        except ConnectionClosed:
            pass


@contextmanager
def policy_server(answer: Answer = echo, port: int = 0, **others: Any) -> Iterator[PolicyServer]:
    server = PolicyServer(answer, port, **others)
    try:
        yield server
    finally:
        server.close()
