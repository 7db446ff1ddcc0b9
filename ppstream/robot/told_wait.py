"""wait_for: a wait that tells whoever wants to know what it waits for."""

from __future__ import annotations

from collections.abc import Callable
from threading import Condition
from typing import Final, NamedTuple

from ppstream.core.clock import NS_PER_MS, NS_PER_S, now_ns

SILENT_NS: Final = 2 * NS_PER_S  # no shorter wait is worth a word
SAID_NS: Final = 10 * NS_PER_S  # between two words on the same wait
LOOK_NS: Final = 50 * NS_PER_MS  # so late a new reason is told

Say = Callable[[str], object]  # such as print


class Told(NamedTuple):
    """Names who is told of a wait, and what."""

    say: Say | None  # None: nobody
    whom: str  # is waited for
    why: Callable[[], str]  # it is not over; called with the condition held


def wait_for(
    changed: Condition, is_over: Callable[[], bool], timeout_s: float | None, told: Told
) -> None:
    """Wait until ``is_over()``, looked at whenever ``changed``; for at most ``timeout_s``.

    ``told.say`` is called after 2 s, when the reason changes, and each 10 s.
    """
    began_ns = now_ns()
    until_ns = None if timeout_s is None else began_ns + round(timeout_s * NS_PER_S)
    said, due_ns = "", began_ns + SILENT_NS
    while True:
        left_ns = [] if until_ns is None else [until_ns - now_ns()]
        if told.say is not None:
            left_ns.append(LOOK_NS)
        with changed:
            limit_s = max(0, min(left_ns)) / NS_PER_S if left_ns else None
            if changed.wait_for(is_over, limit_s):
                return
            why = told.why()
        now = now_ns()
        if until_ns is not None and now >= until_ns:
            return
        if told.say is not None and now - began_ns >= SILENT_NS and (why != said or now >= due_ns):
            told.say(f"waiting for {told.whom}: {why} ({(now - began_ns) // NS_PER_S} s)")
            said, due_ns = why, now + SAID_NS
