"""Sessions driven by hand, for tests: time is passed in, robots are bare sockets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from robot_rig import ACTIONS, make_config, make_rows, wait_until

from ppstream.config.schema import PipelineConfig
from ppstream.core.clock import NS_PER_S, Clock, now_ns
from ppstream.sessions.server import Sessions
from ppstream.wire import robot_messages as m
from ppstream.wire.fields import WIRE_MAJOR, WIRE_MINOR, encoder
from ppstream.wire.message_socket import MessageSocket
from ppstream.wire.transports import connect_client

STREAMS = (m.StreamDeclaration("joints", 3, "float32"), m.StreamDeclaration("imu", 2, "float64"))


class Desk:
    """Sessions driven by hand: time is passed in, robots are bare sockets."""

    def __init__(
        self,
        config: PipelineConfig | None = None,
        *,
        rows: int = 1,
        phase: str | None = "ready",
        clock: Clock = now_ns,
    ) -> None:
        self.config = config or make_config(rows=rows)
        self.rows = make_rows(self.config)
        self.sessions = Sessions(self.config, self.rows, clock)
        self.now_ns = 10 * NS_PER_S
        self._robots: list[MessageSocket] = []
        if phase is not None:
            self.sessions.set_phase(phase)

    def robot(self) -> MessageSocket:
        self._robots.append(connect_client(self.sessions.endpoint))
        return self._robots[-1]

    def send(self, robot: MessageSocket, *messages: Any) -> int:
        """Send and have it handled; returns how many samples were accepted."""
        taken: list[int] = []
        wanted = self.sessions.statistics().frames_received + len(messages)

        def is_handled() -> bool:
            taken.append(self.sessions.drain(self.now_ns))
            return self.sessions.statistics().frames_received >= wanted

        for message in messages:
            body = message if isinstance(message, bytes) else encoder.encode(message)
            wait_until(lambda body=body: robot.send(body) or is_handled())  # it may be full
        wait_until(is_handled)
        return sum(taken)

    def receive(self, robot: MessageSocket) -> Any:
        """The next message to a robot."""
        frames: list[Any] = []
        wait_until(lambda: frames.extend(robot.drain(limit=1)) or frames)
        return m.to_robot.decode(frames[0].body)

    def admit(self, socket: MessageSocket, /, **changes: Any) -> m.Welcome:
        self.send(socket, hello(**changes))
        answer = self.receive(socket)
        assert isinstance(answer, m.Welcome), answer
        return answer

    def close(self) -> None:
        for robot in self._robots:
            robot.close()
        self.sessions.close()
        for row in self.rows:
            assert row.session == 0
            for ring in row.rings.values():
                ring.check()
        statistics = self.sessions.statistics()
        dropped = sum(statistics.frames_dropped.values())
        assert statistics.frames_received == statistics.frames_handled + dropped
        assert statistics.opened == sum(statistics.closed.values())


def hello(**changes: Any) -> m.Hello:
    fields: dict[str, Any] = {"robot": "arm", "streams": STREAMS, "actions": ACTIONS}
    return m.Hello(**{"major": WIRE_MAJOR, "minor": WIRE_MINOR, **fields, **changes})


def samples(session: int, *stamps_ns: int, stream: int = 0) -> m.Samples:
    dim, dtype = ((3, "f4"), (2, "f8"))[stream]
    values = np.ones((len(stamps_ns), dim), dtype)
    stamps = np.array(stamps_ns, np.int64)
    return m.Samples(session, stream, memoryview(stamps.tobytes()), memoryview(values.tobytes()))


@contextmanager
def open_desk(**options: Any) -> Iterator[Desk]:
    desk = Desk(**options)
    try:
        yield desk
    finally:
        desk.close()
