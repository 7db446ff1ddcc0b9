"""SessionTable: which robot holds which row, and whether there is room for another.

No socket, no clock and no answers: ``server.py`` asks and speaks.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from ppstream.core.clock import NS_PER_S
from ppstream.sessions.session import Session, SessionStream
from ppstream.sessions.session_limits import frames_per_second, samples_per_second

if TYPE_CHECKING:
    from ppstream.config.schema import PipelineConfig
    from ppstream.ingest.ring import RowInput
    from ppstream.wire.messages import Hello

SILENCE_NS: Final = 5 * NS_PER_S  # a robot that says nothing for longer has left


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
            stream.name: samples_per_second(config, stream) for stream in config.streams
        }
        self._at: list[Session | None] = [None] * len(rows)
        self._of: dict[bytes, Session] = {}

    def __len__(self) -> int:
        return len(self._of)

    def at(self, row: int) -> Session | None:
        """Who holds a row."""
        return self._at[row]

    def at_session(self, session: int) -> Session | None:
        """Who has this number."""
        return next((one for one in self._of.values() if one.id == session), None)

    def of(self, peer: bytes) -> Session | None:
        """Who speaks on a connection."""
        return self._of.get(peer)

    def all(self) -> list[Session]:
        """A copy, so that sessions may be closed on the way."""
        return [*self._of.values()]

    def replaced_by(self, peer: bytes, hello: Hello) -> list[Session]:
        """What ends when this Hello is accepted: the same connection's, and the one resumed."""
        return [s for s in self._of.values() if s.peer == peer or s.id == hello.resumes]

    def objection(self, hello: Hello) -> tuple[str | None, list[str]]:
        """Why there is no place now (``name_in_use``, ``full``), and what would change that."""
        if any(session.hello.robot == hello.robot for session in self._of.values()):
            line = (
                f"robot {hello.robot!r} is connected; its name is free {SILENCE_NS / NS_PER_S:g} s"
                " after its last frame"
            )
            return "name_in_use", [line]
        if None not in self._at:
            return "full", [f"all {len(self._at)} rows are taken; raise batch.rows"]
        return None, []

    def open(self, peer: bytes, hello: Hello, now_ns: int) -> Session:
        """Give the first free row to a robot that nothing objects to."""
        place = self._at.index(None)
        row = self._rows[place]
        session = Session(
            id=secrets.randbits(48) | 1,  # not to be guessed, and new after a restart
            peer=peer,
            place=place,
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
            wish=(hello.conditioning_epoch, hello.instruction),
        )
        self._of[peer] = self._at[place] = session
        return session

    def refill(self) -> None:
        """A second is over: everybody may speak again."""
        for session in self._of.values():
            session.frames_left = self._frames_per_s
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
