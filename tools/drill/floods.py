"""Floods: a second robot, or strangers, send all they can for 2 s beside a robot at 200 Hz.

The good robot must keep 95 % of its actions. Started as ``drill/floods.py ENDPOINT KIND`` it is the
flood itself, a process of its own: bare sockets, nothing of the client's own limits.
"""

from __future__ import annotations

import os
import random
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tools/


ROOT: Final = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # behind an installation, if there is one

import numpy as np
import zmq
from drill.faults import Recovering, Seen
from drill.robot import ACTIONS, STREAMS
from drill.scene import Failed, Scene

from ppstream.core.clock import NS_PER_MS, NS_PER_S, now_ns
from ppstream.wire import robot_messages as m
from ppstream.wire.fields import WIRE_MAJOR, WIRE_MINOR, encoder

FLOOD_S: Final = 2.0
KEPT_MIN: Final = 0.95  # of the good robot's ticks: they execute an action
RATE_HZ: Final = 200
SETTINGS: Final = ("batch.rows=2", f"streams.joints.rate_hz={RATE_HZ}", "actions.lease_ms=200")
SAMPLES: Final = 110  # of a frame
MEGABYTE: Final = 52_000  # samples of joints
STRANGERS: Final = 8
NOISE: Final = bytes(range(256)) * 8
HELLO_MS: Final = 200  # until it asks again: the row of the flood before may not be free yet
LEAVE_S: Final = 1.1  # a goodbye above the limit of a second is not read
SEEN_S: Final = 20.0
LATE_S: Final = 0.1  # of the robot's prints


class Flood:
    """A robot's session on a bare socket, and others without one."""

    def __init__(self, endpoint: str, name: str) -> None:
        self._host, self._port = endpoint.removeprefix("tcp://").split(":")
        self._endpoint = endpoint
        self._context = zmq.Context()
        self._socket = self._dealer()
        streams = tuple(m.StreamDeclaration(stream, dim, "float32") for stream, dim in STREAMS)
        hello = encoder.encode(m.Hello(WIRE_MAJOR, WIRE_MINOR, name, streams, ACTIONS))
        self._session = 0
        while not self._session:
            self._socket.send(hello)
            if self._socket.poll(HELLO_MS):
                answer = m.to_robot.decode(self._socket.recv())
                self._session = answer.session if isinstance(answer, m.Welcome) else 0

    def run(self, kind: str, until_ns: int) -> int:
        """Send until then; returns how many frames, or connections."""
        if kind == "connections":
            return self.connect(until_ns)
        strangers = [self._dealer() for _ in range(STRANGERS)]
        frames: Iterator[bytes] = getattr(self, kind)()
        sent = 0
        for sender in cycle(strangers if kind == "strangers" else [self._socket]):
            if now_ns() > until_ns:
                break
            with suppress(zmq.Again):
                sender.send(next(frames), zmq.NOBLOCK)
                sent += 1
            while sender.poll(0):
                sender.recv()
        return sent

    def leave(self) -> None:
        """Free the row."""
        time.sleep(LEAVE_S)
        self._socket.send(encoder.encode(m.Bye(self._session)))
        self._context.destroy(linger=1000)

    # ---- what is sent ----------------------------------------------------------------------------

    def valid(self) -> Iterator[bytes]:
        """Samples between the frame before and now."""
        newest_ns = now_ns()
        while True:
            until_ns = now_ns()
            yield self._frame(np.linspace(newest_ns + 1, until_ns, SAMPLES))
            newest_ns = until_ns

    def not_finite(self) -> Iterator[bytes]:
        """The same, and every second sample is NaN."""
        values = np.ones((SAMPLES, STREAMS[0][1]), np.float32)
        values[::2] = np.nan
        newest_ns = now_ns()
        while True:
            until_ns = now_ns()
            yield self._frame(np.linspace(newest_ns + 1, until_ns, SAMPLES), values)
            newest_ns = until_ns

    def ahead(self) -> Iterator[bytes]:
        """Samples at the declared rate, frame behind frame: ever further ahead of their time."""
        newest_ns = now_ns()
        steps = np.arange(1, SAMPLES + 1) * (NS_PER_S // RATE_HZ)
        while True:
            yield self._frame(newest_ns + steps)
            newest_ns += int(steps[-1])

    def decreasing(self) -> Iterator[bytes]:
        """The newest sample first."""
        while True:
            yield self._frame(now_ns() - np.arange(SAMPLES) * NS_PER_MS)

    def megabytes(self) -> Iterator[bytes]:
        """Frames of 1 MiB."""
        while True:
            yield self._frame(np.linspace(now_ns() - NS_PER_MS, now_ns(), MEGABYTE))

    def pings(self) -> Iterator[bytes]:
        """The smallest frames."""
        return cycle([encoder.encode(m.Ping(self._session))])

    def strangers(self) -> Iterator[bytes]:
        """Frames without a session, and some that are none."""
        return cycle([encoder.encode(m.Ping(1)), NOISE])

    def connect(self, until_ns: int) -> int:
        """Open connections, say noise, and leave."""
        count = 0
        rng = random.Random(1)
        while now_ns() < until_ns:
            with suppress(OSError), socket.create_connection((self._host, int(self._port))) as raw:
                raw.sendall(NOISE[: rng.randint(1, len(NOISE))])
                count += 1
        return count

    def _frame(self, stamps: np.ndarray[Any, Any], values: Any = None) -> bytes:
        if values is None:
            values = np.ones((len(stamps), STREAMS[0][1]), np.float32)
        raw = memoryview(stamps.astype(np.int64).tobytes()), memoryview(values.tobytes())
        return encoder.encode(m.Samples(self._session, 0, *raw))

    def _dealer(self) -> zmq.Socket[bytes]:
        dealer: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        dealer.connect(self._endpoint)
        return dealer


def start(kind: str) -> Callable[[Scene], None]:
    """Nothing of it goes through the good robot's cable."""

    def inject(scene: Scene) -> None:
        command = [__file__, f"tcp://127.0.0.1:{scene.port}", kind]
        scene.start_beside(f"flood-{kind}", command)

    return inject


def kept(kind: str) -> Callable[[Scene, int], Seen]:
    """Seen once the flood is over; the robot must have executed actions all the time."""

    def look(scene: Scene, _since_ns: int) -> Seen:
        found = scene.folder.joinpath(f"flood-{kind}.txt").read_text().split()
        if len(found) < 3:
            return None
        begin_ns, end_ns, sent = map(int, found)
        if now_ns() < end_ns + LATE_S * NS_PER_S:
            return None
        ticks = [tick for tick in scene.ticks(begin_ns) if tick.at_ns <= end_ns]
        moved = [tick for tick in ticks if tick.moved]
        oldest_ms = max((tick.age_ms for tick in moved), default=0.0)
        text = (
            f"{sent} sent; the robot moved in {len(moved)} of {len(ticks)} ticks, "
            f"by actions up to {oldest_ms:.0f} ms old; load {os.getloadavg()[0]:.1f} on "
            f"{os.cpu_count()} CPUs"
        )
        if len(moved) < KEPT_MIN * len(ticks) or not ticks:
            raise Failed(text)
        return text

    return look


def _flood(kind: str, does: str) -> Recovering:
    name = f"flood-{kind.replace('_', '-')}"
    return Recovering(name, "F39", does, start(kind), kept(kind), SEEN_S, settings=SETTINGS)


FLOODS: Final = (
    _flood("valid", "another robot floods: valid frames of 110 samples"),
    _flood("ahead", "the same at the declared rate: ever further ahead of their time"),
    _flood("not_finite", "another robot floods: every second sample is NaN"),
    _flood("decreasing", "another robot floods: the newest sample first"),
    _flood("megabytes", "another robot floods: frames of 1 MiB"),
    _flood("pings", "another robot floods: the smallest frames"),
    _flood("strangers", "8 strangers flood: frames without a session, and noise"),
    _flood("connections", "strangers open connections, say noise, and leave"),
)


def main() -> int:
    """Flood the endpoint given, and say from when to when, and how often."""
    endpoint, kind = sys.argv[1:3]
    flood = Flood(endpoint, f"flood-{kind}")
    began_ns = now_ns()
    sent = flood.run(kind, began_ns + round(FLOOD_S * NS_PER_S))
    print(began_ns, now_ns(), sent, flush=True)
    flood.leave()
    return 0


if __name__ == "__main__":
    sys.exit(main())
