"""Waits of a robot: for a session, and for a phase in which it may move.

A wait tells whoever wants to know what it waits for.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Condition
from typing import TYPE_CHECKING, Final, NamedTuple

from ppstream.core.clock import NS_PER_MS, NS_PER_S, limit_ns, now_ns
from ppstream.core.errors import HandshakeError, PeerLostError
from ppstream.core.phases import ENDING
from ppstream.robot.session import HOPELESS
from ppstream.wire.endpoints import unix_path

if TYPE_CHECKING:
    from ppstream.robot.connection import RobotLink

SILENT_NS: Final = 2 * NS_PER_S  # no shorter wait is worth a word
SAID_NS: Final = 10 * NS_PER_S  # between two words on the same wait
LOOK_NS: Final = 50 * NS_PER_MS  # so late a new reason is told
GONE_NS: Final = NS_PER_S  # nobody listens for so long where a run did: it has gone

Say = Callable[[str], object]  # such as print


class Told(NamedTuple):
    """Names who is told of a wait, and what."""

    say: Say | None  # None: nobody
    whom: str  # is waited for
    why: Callable[[], str]  # it is not over; called with the condition held


def wait_open(link: RobotLink, timeout_s: float, say: Say | None = None) -> None:
    """Wait for a session of ``link``; ``say`` as ``wait_for``.

    Raises:
        HandshakeError: the server refuses this robot for good; the message is the difference.
        PeerLostError: no session in time; the message has the last refusal.
        PpstreamError: the link was closed.
        ReceiverEndedError: the link's thread has ended by an exception.
    """
    session = link.session
    with link.changed:
        session.refused = None

    def why_not() -> str:
        refused = session.refused
        if refused is None:
            return f"no answer, its ranks may still start{_keys_hint(link)}"
        return ": ".join([refused.reason, *refused.details[:1]])

    def is_over() -> bool:
        return bool(session.session or session.is_hopeless or link.is_ended)

    wait_for(link.changed, is_over, timeout_s, Told(say, link.endpoint, why_not))
    with link.changed:
        is_open, refused = session.session != 0, session.refused
    link.raise_end()
    if is_open:
        return
    why = f"no answer within {timeout_s:g} s{_keys_hint(link)}"
    why = why if refused is None else refused.reason
    lines = [f"{link.endpoint}: no session: {why}", *(refused.details if refused else ())]
    raise (HandshakeError if why in HOPELESS else PeerLostError)("\n  ".join(lines))


def _keys_hint(link: RobotLink) -> str:
    """Another reason for no answer: rank 0 says nothing to whom it refuses for its keys."""
    if unix_path(link.endpoint) is not None:
        return ""
    return (
        ", or it refuses this robot's keys: 'ppstream keys public FILE.secret' there prints the "
        "key that the robot must know, here the one that its allowed_keys must list"
    )


def wait_executable(link: RobotLink, timeout_s: float | None, say: Say | None = None) -> bool:
    """Wait for a phase in which actions may be executed; False when it did not come in time.

    ``say`` as ``wait_for``. A robot of a fleet moves to another run when its own ends.

    Raises:
        PeerLostError: the run ends, or it has gone.
        PpstreamError: the link was closed.
        ReceiverEndedError: the link's thread has ended by an exception.
    """
    session, missed_ns = link.session, 0

    def end() -> str:
        """Words for how the run has ended; empty: as far as is known it has not."""
        nonlocal missed_ns
        is_missed = session.is_unheard and unix_path(link.endpoint) is not None
        missed_ns = (missed_ns or now_ns()) if is_missed else 0
        if link.directory is not None:
            return ""
        if session.phase in ENDING:
            return f"the run is {session.phase}"
        is_gone = missed_ns and now_ns() - missed_ns > GONE_NS
        return f"the run was {session.phase}, and nobody listens any more" if is_gone else ""

    def is_over() -> bool:
        return bool(session.executable or link.is_ended or end())

    def why_not() -> str:
        is_held = session.session != 0
        return f"the run is {session.phase}" if is_held else f"no session, it was {session.phase}"

    wait_for(link.changed, is_over, timeout_s, Told(say, link.endpoint, why_not))
    link.raise_end()
    if not session.executable and (found := end()):
        raise PeerLostError(
            f"{link.endpoint}: {found}: it does not become ready; its last line, and "
            "'ppstream report' of its log, say why; once another run listens there, connect() again"
        )
    return session.executable


def wait_for(
    changed: Condition, is_over: Callable[[], bool], timeout_s: float | None, told: Told
) -> None:
    """Wait until ``is_over()``, looked at whenever ``changed``, and now and then.

    For at most ``timeout_s``; None: without limit.

    ``told.say`` is called after 2 s, when the reason changes, and each 10 s.
    """
    began_ns = now_ns()
    until_ns = None if timeout_s is None else began_ns + limit_ns(timeout_s)
    said, due_ns = "", began_ns + SILENT_NS
    while True:
        left_ns = LOOK_NS if until_ns is None else min(LOOK_NS, until_ns - now_ns())
        with changed:
            if changed.wait_for(is_over, max(0, left_ns) / NS_PER_S):
                return
            why = told.why()
        now = now_ns()
        if until_ns is not None and now >= until_ns:
            return
        if told.say is not None and now - began_ns >= SILENT_NS and (why != said or now >= due_ns):
            told.say(f"waiting for {told.whom}: {why} ({(now - began_ns) // NS_PER_S} s)")
            said, due_ns = why, now + SAID_NS
