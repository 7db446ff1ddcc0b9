"""SessionTable: which robot holds which row, whether there is room for another, and its limits.

No socket, no clock and no answers: ``server.py`` asks and speaks. Limits are the largest frame,
frames and samples per second; each has a reason in what the declared streams need, with room for a
robot that sends each sample alone, in bursts, somewhat faster than it said.
"""

from __future__ import annotations

import math
import secrets
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from ppstream.config.schema import RATE_MARGIN
from ppstream.core.clock import NS_PER_MS, NS_PER_S
from ppstream.sessions.session import Session, SessionStream
from ppstream.wire.fields import MAX_PUSH_BYTES

if TYPE_CHECKING:
    from ppstream.config.schema import PipelineConfig
    from ppstream.ingest.rows import RowInput
    from ppstream.wire.robot_messages import Hello

SILENCE_NS: Final = 5 * NS_PER_S  # a robot that says nothing for longer has left
HEADER_BYTES: Final = 1 << 16  # of any message, beside its samples
OTHER_FRAMES_PER_S: Final = 400  # reports, prefixes, pings, instructions
CHANGES_PER_S: Final = 50  # resets, instructions and goodbyes that are read beyond those
STRANGER_FRAMES_PER_S: Final = 500  # of all connections without a session together
DRAIN_NS: Final = NS_PER_MS  # then what comes waits until results were looked at
DRAIN_FRAMES: Final = 16  # read at once, between two looks at the clock
LONE_FRAMES: Final = 64  # the same of a lone robot's samples, which take less than 1 ms


def frame_bytes_max(config: PipelineConfig) -> int:
    """A larger frame loses its sender the connection before memory is taken for it."""
    largest = max(stream.dim * np.dtype(stream.dtype).itemsize for stream in config.streams)
    return max(MAX_PUSH_BYTES, largest) + HEADER_BYTES


def frames_per_second(config: PipelineConfig) -> int:
    """Limit of the frames that one robot may send; but for ``CHANGES_PER_S`` the rest is dropped.

    A lone robot may send all it can, a recording at full speed for one: there is nobody to delay.
    """
    if config.batch.rows == 1:
        return sys.maxsize
    samples_per_s = sum(stream.most_hz for stream in config.streams)
    return OTHER_FRAMES_PER_S + math.ceil(RATE_MARGIN * samples_per_s)


class SessionTable:
    """Open sessions by connection and by row. One thread changes it; ``at`` is for any thread.

    Args:
        rows: places of robots.
        config: says what a robot may send in a second; ``refill`` begins the next one.
    """

    def __init__(self, rows: Sequence[RowInput], config: PipelineConfig) -> None:
        self._rows = rows
        self._frames_per_s = frames_per_second(config)
        self._samples_per_s = {
            stream.name: config.samples_per_second(stream) for stream in config.streams
        }
        self._at: list[Session | None] = [None] * len(rows)
        self._of: dict[bytes, Session] = {}
        self.by_peer = self._of.get  # the session on a connection, or None
        self.by_row = self._at.__getitem__  # the session that holds a row, or None

    def __len__(self) -> int:
        return len(self._of)

    @property
    def is_full(self) -> bool:
        """True when each row has its robot."""
        return None not in self._at

    def holds(self, robot: str) -> bool:
        """True when a robot of this name has a session."""
        return any(session.hello.robot == robot for session in self._of.values())

    def by_id(self, session: int) -> Session | None:
        """Returns the session with this number."""
        return next((one for one in self._of.values() if one.id == session), None)

    def all(self) -> list[Session]:
        """A copy, so that sessions may be closed on the way."""
        return [*self._of.values()]

    def replaced_by(self, peer: bytes, hello: Hello) -> list[Session]:
        """Returns the sessions that this Hello ends: its connection's, and the resumed one."""
        return [s for s in self._of.values() if s.peer == peer or s.id == hello.resumes]

    def rejection_reason(self, hello: Hello) -> tuple[str | None, list[str]]:
        """Returns why no place is free (``name_in_use``, ``full``), and what would change it."""
        if self.holds(hello.robot):
            line = (
                f"robot {hello.robot!r} is connected; its name is free {SILENCE_NS / NS_PER_S:g} s"
                " after its last frame"
            )
            return "name_in_use", [line]
        if self.is_full:
            rows = len(self._at)
            taken = "the only row is" if rows == 1 else f"all {rows} rows are"
            return "full", [f"{taken} taken; raise batch.rows"]
        return None, []

    def open(self, peer: bytes, hello: Hello, now_ns: int) -> Session:
        """Give the first free row to a robot that nothing objects to."""
        index = self._at.index(None)
        row = self._rows[index]
        session = Session(
            id=secrets.randbits(48) | 1,  # not to be guessed, and new after a restart
            peer=peer,
            place=index,
            row=row,
            hello=hello,
            streams=[
                SessionStream(
                    row.rings[stream.name], stream.encoding, self._samples_per_s[stream.name]
                )
                for stream in hello.streams
            ],
            heard_ns=now_ns,
            frames_left=self._frames_per_s,
            changes_left=CHANGES_PER_S,
            wish=(hello.conditioning_epoch, hello.instruction),
        )
        self._of[peer] = self._at[index] = session
        return session

    def refill(self) -> None:
        """A second is over: everybody may speak again."""
        for session in self._of.values():
            session.frames_left = self._frames_per_s
            session.changes_left = CHANGES_PER_S
            for stream in session.streams:
                stream.refill()

    def close(self, session: Session) -> None:
        """Free its row."""
        self._at[session.place] = None
        del self._of[session.peer]
        session.end()

    def next_silent_ns(self) -> int | None:
        """When the first robot is to be given up, if it says nothing until then."""
        heard = [session.heard_ns for session in self._of.values()]
        return min(heard) + SILENCE_NS if heard else None

    def silent(self, now_ns: int) -> list[Session]:
        """Robots that have said nothing for too long."""
        return [s for s in self._of.values() if now_ns - s.heard_ns >= SILENCE_NS]
