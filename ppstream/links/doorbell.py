"""Doorbell: how many slots of a hop were committed, when, and whether the receiver sleeps.

Words in the shared memory of the hop and one stamp a slot. A commit writes the slot, its
stamp, and then the count; only for a receiver that says that it sleeps it writes an eventfd, too.
Both ends are on one host and share its monotonic clock, so a stamp of the sender is exact for the
receiver, however long that was busy.

Python has no memory barriers. x86-64 keeps stores in order, and taking a lock there is the barrier
between "I sleep" and the last look at the count. Elsewhere each commit writes the eventfd, and the
receiver believes a count only once it has read that: the two system calls are the barrier. The
compiled core has barriers and needs none of this where both ends have it (``native/wait.c``).
"""

from __future__ import annotations

import os
import platform
import threading
from typing import TYPE_CHECKING, Final

from ppstream import native

if TYPE_CHECKING:
    import mmap

COUNT: Final = 0  # slots committed; the sender's
FRAMES: Final = 1  # control frames that the sender had sent before that; the sender's
SLEEPS: Final = 8  # not 0: the receiver wants the eventfd; on a cache line of its own
# Words 2 and 9 are the compiled core's: sender and receiver say there that they have barriers.
STAMPS: Final = 16  # of the newest commit in each slot; the sender's
WORD_BYTES: Final = 8
IS_ORDERED: Final = platform.machine() in ("x86_64", "AMD64")


def doorbell_bytes(slots: int) -> int:
    """Bytes of shared memory that the doorbell of so many slots takes."""
    return (STAMPS + slots) * WORD_BYTES


class PythonDoorbell:
    """``Doorbell`` without the compiled core, and the reference of it."""

    def __init__(
        self, memory: mmap.mmap, slots: int, fd: int, *, is_ordered: bool = IS_ORDERED
    ) -> None:
        self._words = memoryview(memory)[: doorbell_bytes(slots)].cast("q")
        self._slots = slots
        self._fd = fd
        self._is_ordered = is_ordered
        self._barrier = threading.Lock()
        self._count = self._taken = 0  # that the receiver believes, and that it has taken

    def fileno(self) -> int:
        """Readable: the sender has rung since the receiver slept."""
        return self._fd

    # ---- the sender's ------------------------------------------------------------------------

    def ring(self, index: int, at_ns: int, frames: int, /) -> None:
        """Slot ``index`` was complete at ``at_ns``, behind so many control frames."""
        words = self._words
        words[STAMPS + index % self._slots] = at_ns
        words[FRAMES] = frames
        with self._barrier:
            words[COUNT] = index + 1
        if words[SLEEPS] or not self._is_ordered:
            self._wake_receiver()

    def rouse(self) -> None:
        """Wake a receiver that sleeps, since a commit follows soon; it may go to sleep again."""
        if self._words[SLEEPS]:
            self._wake_receiver()

    def _wake_receiver(self) -> None:
        self._words[SLEEPS] = 0
        os.eventfd_write(self._fd, 1)

    # ---- the receiver's ----------------------------------------------------------------------

    @property
    def is_rung(self) -> bool:
        """True when a slot was committed that was not taken."""
        if self._is_ordered:
            self._count = self._words[COUNT]
        elif self._count == self._taken:
            self.clear()
        return self._count != self._taken

    @property
    def frames(self) -> int:
        """Control frames that belong before the newest slot."""
        return self._words[FRAMES]

    def pop(self) -> tuple[int, int]:
        """Index of the oldest slot that was not taken, and when it was committed."""
        index = self._taken
        self._taken += 1
        return index, self._words[STAMPS + index % self._slots]

    def sleep(self) -> bool:
        """Ask for the eventfd from the next commit on; returns False when a slot is there."""
        self._words[SLEEPS] = 1
        with self._barrier:
            return not self.is_rung

    def wake(self) -> None:
        """The receiver is awake. A commit may have written the eventfd meanwhile: harmless."""
        self._words[SLEEPS] = 0

    def clear(self) -> None:
        """Take back what was written to the eventfd."""
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            return
        self._count = self._words[COUNT]

    def close(self) -> None:
        """Close the eventfd and let go of the memory. Twice is fine."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._words = memoryview(bytearray(self._words)).cast("q")


class Doorbell(native.Bell, PythonDoorbell):
    """One end of it: one thread rings, or one thread listens. The ends may be different twins.

    Args:
        memory: of the hop, zeroed when it was made.
        slots: that the hop has.
        fd: the eventfd, non-blocking; owned.
        is_ordered: the processor keeps stores in order.
    """
