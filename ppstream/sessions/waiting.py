"""WaitingList: robots that found no free row, in the order in which they first asked for one.

Without it a row goes to the first robot that asks once the row is free: robots that connect again
and again always ask sooner than one that asks every two seconds, and that one waits for ever. No
socket and no clock: ``server.py`` asks and speaks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

from ppstream.core.clock import NS_PER_S

if TYPE_CHECKING:
    from ppstream.wire.robot_messages import Hello

WAITING_MAX: Final = 64  # robots; each of more has to ask when a row is free
#: A robot asks every 2 s at the least; one that has not asked for longer than this has gone.
PATIENCE_NS: Final = 5 * NS_PER_S


class WaitingRobot(NamedTuple):
    """A robot that waits: its connection, what it said there last, and when."""

    peer: bytes
    hello: Hello
    asked_ns: int


class WaitingList:
    """At most ``WAITING_MAX`` robots by name, and one of each connection."""

    def __init__(self) -> None:
        self._robots: dict[str, WaitingRobot] = {}  # the one that has waited longest first

    def __len__(self) -> int:
        return len(self._robots)

    def add(self, peer: bytes, hello: Hello, now_ns: int) -> int:
        """A robot was refused a row; its place in the line is that of when it was first refused.

        Returns:
            How many robots wait before it.
        """
        name = hello.robot
        self._forget(lambda other, robot: robot.peer == peer and other != name)
        self._forget_gone(now_ns)
        if name in self._robots or len(self._robots) < WAITING_MAX:
            self._robots[name] = WaitingRobot(peer, hello, now_ns)
        names = [*self._robots]
        return names.index(name) if name in self._robots else len(names)

    def remove(self, peer: bytes, name: str) -> None:
        """A robot has a row now."""
        self._forget(lambda other, robot: robot.peer == peer or other == name)

    def pop(self, now_ns: int, is_in_use: Callable[[str], bool]) -> WaitingRobot | None:
        """Takes out the robot that is next, if any: no other robot has its name."""
        self._forget_gone(now_ns)
        name = next((name for name in self._robots if not is_in_use(name)), None)
        return None if name is None else self._robots.pop(name)

    def _forget_gone(self, now_ns: int) -> None:
        self._forget(lambda _, robot: now_ns - robot.asked_ns >= PATIENCE_NS)

    def _forget(self, is_over: Callable[[str, WaitingRobot], bool]) -> None:
        for name in [name for name, robot in self._robots.items() if is_over(name, robot)]:
            del self._robots[name]
