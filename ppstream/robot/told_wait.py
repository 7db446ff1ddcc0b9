"""Waits of a robot: for a session, for a phase in which it may move, for an answer.

A wait tells whoever wants to know what it waits for.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Condition
from typing import TYPE_CHECKING, Final

from ppstream.core.clock import NS_PER_MS, NS_PER_S, limit_ns, now_ns
from ppstream.core.errors import HandshakeError, PeerLostError
from ppstream.core.phases import ENDING
from ppstream.robot.session import HOPELESS
from ppstream.wire.endpoints import unix_path

if TYPE_CHECKING:
    from ppstream.robot.connection import RobotLink
    from ppstream.wire.robot_messages import Conditioned

SILENT_NS: Final = 2 * NS_PER_S  # no shorter wait is worth a word
SAID_NS: Final = 10 * NS_PER_S  # between two words on the same wait
LOOK_NS: Final = 50 * NS_PER_MS  # so late a new reason is told
GONE_NS: Final = NS_PER_S  # nobody listens for so long where a run did: it has gone

Say = Callable[[str], object]  # such as print


class Told:
    """Tells of one wait after 2 s, when the reason changes, and each 10 s.

    Args:
        say: is called with the words; None: nobody is told.
        whom: is waited for.
    """

    def __init__(self, say: Say | None, whom: str) -> None:
        self._say, self._whom = say, whom
        self._began_ns = now_ns()
        self._said, self._due_ns = "", self._began_ns + SILENT_NS

    def tell(self, why: str, now_ns: int) -> None:
        """Says why the wait is not over, if that is due; call it every ``LOOK_NS``."""
        waited_ns = now_ns - self._began_ns
        is_due = why != self._said or now_ns >= self._due_ns
        if self._say is not None and waited_ns >= SILENT_NS and is_due:
            self._say(f"waiting for {self._whom}: {why} ({waited_ns // NS_PER_S} s)")
            self._said, self._due_ns = why, now_ns + SAID_NS


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

    wait_for(link.changed, is_over, timeout_s, Told(say, link.endpoint), why_not)
    with link.changed:
        is_open, refused = session.session != 0, session.refused
    link.raise_end()
    if is_open:
        return
    unheard = "no run listens there, or its ranks still start"
    why = f"no answer within {timeout_s:g} s: {unheard}{_keys_hint(link)}"
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

    wait_for(link.changed, is_over, timeout_s, Told(say, link.endpoint), why_not)
    link.raise_end()
    if not session.executable and (found := end()):
        raise PeerLostError(
            f"{link.endpoint}: {found}: it does not become ready; its last line, and "
            "'ppstream report' of its log, say why; once another run listens there, connect() again"
        )
    return session.executable


def wait_for(
    changed: Condition,
    is_over: Callable[[], bool],
    timeout_s: float | None,
    told: Told,
    why_not: Callable[[], str],
) -> None:
    """Wait until ``is_over()``, looked at whenever ``changed``, and now and then.

    For at most ``timeout_s``; None: without limit. ``told`` has ``why_not()``, which is called with
    the condition held.
    """
    until_ns = None if timeout_s is None else now_ns() + limit_ns(timeout_s)
    while True:
        left_ns = LOOK_NS if until_ns is None else min(LOOK_NS, until_ns - now_ns())
        with changed:
            if changed.wait_for(is_over, max(0, left_ns) / NS_PER_S):
                return
            why = why_not()
        now = now_ns()
        if until_ns is not None and now >= until_ns:
            return
        told.tell(why, now)


def wait_conditioned(link: RobotLink, epoch: int, timeout_s: float) -> Conditioned | None:
    """Wait for the answer to the instruction ``epoch``, or a newer; None: late, or closed.

    Raises:
        ReceiverEndedError: the link's thread ended by an exception.
    """

    def given() -> Conditioned | None:
        answer = link.session.conditioned
        return answer if answer and answer.conditioning_epoch >= epoch else None

    with link.changed:
        link.changed.wait_for(lambda: given() or link.is_ended, limit_ns(timeout_s) / NS_PER_S)
    link.raise_failure()
    return given()
