"""A server of openpi in thirty lines, as others write them: one answer after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    """Gives each observation to ``answer``: a map, or a text that says why not."""

    def __init__(self, answer: Answer = echo, port: int = 0) -> None:
        self.answer = answer
        self.seen: list[dict[str, Any]] = []
        self.connections = 0
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

    def _serve(self, connection: ServerConnection) -> None:
        self.connections += 1
        assert connection.request
        self.headers.append(connection.request.headers)
        try:
            connection.send(encode({"reset_pose": [0.0]}))
            for frame in connection:
                self.seen.append(decode(bytes(frame)))  # type: ignore[arg-type] # clients send bytes
                reply = self.answer(self.seen[-1])
                connection.send(reply if isinstance(reply, str) else encode(reply))
                if isinstance(reply, str):
                    connection.close(1011)
        except ConnectionClosed:
            pass


@contextmanager
def policy_server(answer: Answer = echo, port: int = 0) -> Iterator[PolicyServer]:
    server = PolicyServer(answer, port)
    try:
        yield server
    finally:
        server.close()
