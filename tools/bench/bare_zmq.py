"""Bare ZeroMQ servers, for comparison: REQ/REP over ipc, and a chain of two hops and back.

Each request is a message of a stamp and 14 floats, each answer one of the stamp and 7 floats, in
msgspec; nobody checks, buffers, logs or decides anything. ``BareServers`` starts the processes; the
file run by itself is one of them.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import zmq

STATE_DIM: Final = 14
ACTION_DIM: Final = 7
RECEIVE_LIMIT_MS: Final = 5000
ROLES: Final = ("reply", "rank0", "rank1")


class Message(msgspec.Struct, array_like=True):
    stamp_ns: int
    values: memoryview


_encode: Final = msgspec.msgpack.Encoder().encode
_decoder: Final = msgspec.msgpack.Decoder(Message)


class BareServers:
    """All three server processes, and the robot's sockets to them; a context manager."""

    def __init__(self, folder: Path) -> None:
        self._context = zmq.Context()
        self.sockets: list[zmq.Socket[Any]] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for role in ROLES:
                self._processes.append(
                    subprocess.Popen([sys.executable, __file__, role, str(folder)])
                )
            self.sockets.append(_connect(self._context, zmq.REQ, folder / "reply"))
            self.sockets.append(_connect(self._context, zmq.PAIR, folder / "robot"))
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> BareServers:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def request_reply(self, stamp_ns: int, state: np.ndarray[Any, Any]) -> None:
        """One observation to one action and back, through one process."""
        _ask(self.sockets[0], stamp_ns, state)

    def chain(self, stamp_ns: int, state: np.ndarray[Any, Any]) -> None:
        """The same through rank 0, rank 1 and rank 0 again."""
        _ask(self.sockets[1], stamp_ns, state)

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self._context.destroy(linger=0)


def _ask(to: zmq.Socket[Any], stamp_ns: int, state: np.ndarray[Any, Any]) -> None:
    to.send(_encode(Message(stamp_ns, state.data)))
    answer = _decoder.decode(to.recv())
    actions = np.frombuffer(answer.values, np.float32)
    if answer.stamp_ns != stamp_ns or len(actions) != ACTION_DIM:
        raise SystemExit(f"an answer to {answer.stamp_ns} came, {stamp_ns} was asked")


def _infer(body: bytes) -> bytes:
    request = _decoder.decode(body)
    state = np.frombuffer(request.values, np.float32)
    return _encode(Message(request.stamp_ns, state[:ACTION_DIM].data))


def _connect(context: zmq.Context[Any], kind: int, path: Path) -> zmq.Socket[Any]:
    found: zmq.Socket[Any] = context.socket(kind)
    found.setsockopt(zmq.RCVTIMEO, RECEIVE_LIMIT_MS)
    found.connect(f"ipc://{path}")
    return found


def _bind(context: zmq.Context[Any], kind: int, path: Path) -> zmq.Socket[Any]:
    found: zmq.Socket[Any] = context.socket(kind)
    found.bind(f"ipc://{path}")
    return found


def serve(role: str, folder: Path) -> None:
    """One server, until it is killed."""
    context: zmq.Context[Any] = zmq.Context()
    if role == "reply":
        robot = _bind(context, zmq.REP, folder / "reply")
        while True:
            robot.send(_infer(robot.recv()))
    if role == "rank1":
        rank0 = context.socket(zmq.PAIR)
        rank0.connect(f"ipc://{folder / 'ranks'}")
        while True:
            rank0.send(_infer(rank0.recv()))
    robot, rank1 = (_bind(context, zmq.PAIR, folder / name) for name in ("robot", "ranks"))
    while True:
        rank1.send(robot.recv())
        robot.send(rank1.recv())


if __name__ == "__main__":
    serve(sys.argv[1], Path(sys.argv[2]))
