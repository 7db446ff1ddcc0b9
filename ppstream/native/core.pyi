"""Compiled twins of ring append, window cut, settling, action limits, doorbell and wait.

See ``core.c`` and, for the last two, ``wait.c``.

The members are the Python classes' own; an int beyond 64 bits raises OverflowError.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

from numpy.typing import NDArray

API: int
Packet: TypeAlias = tuple[bytes, tuple[int, ...], int]  # none at the end; descriptors; msg_flags
Line: TypeAlias = tuple[bytes, Ring, Ledger, Clock]  # the prefix of a stream's ``Samples``

class Ledger:
    """Members of ``SampleLedger``."""

    received: int
    used: int
    in_flight: int

class Clock:
    """Members of ``StampFilter``."""

    _floor_ns: int
    _best_ns: int
    _best_until_ns: int
    _rejected: int
    _stale_since_ns: int

class Ring:
    """Members of ``SensorRing``, and its calls."""

    accepted: int
    count: int
    settled: int
    newest_ns: int
    newest_rx_ns: int
    _takes: bool

    def bind(
        self,
        capacity: int,
        dim: int,
        values: NDArray[Any] | None,
        stamps: NDArray[Any],
        count: NDArray[Any],
        head: NDArray[Any],
        gap_ns: int,
        /,
    ) -> None:
        """Keep the ring's memory: float32 ``[N, dim]`` or none; int64 ``[N]``, ``[1]``, ``[1]``.

        Raises:
            ValueError: an array is not as above, or the ring is bound.
        """

    def try_append(
        self,
        stamps: NDArray[Any] | memoryview,
        values: NDArray[Any] | memoryview,
        rx_ns: int,
        ledger: Ledger,
        clock: Clock,
        /,
    ) -> int:
        """``SensorRing.append``: n, or 0 with nothing touched, which means not mine.

        Either array may be its bytes, as ``append_message`` has them. A stamp that the clock learns
        from goes to its ``accepts``, samples that no window has used to the ledger's ``drop``.
        """

    def cut(
        self,
        steps: int,
        dt_ns: int,
        mode: int,
        gap_ns: int,
        age_ns: int,
        values: memoryview,
        valid: memoryview,
        age_s: memoryview,
        end_ns: int | None,
        /,
    ) -> bool:
        """Resample the ring at T targets up to ``end_ns``, or before any sample; all are valid.

        Args:
            steps: T.
            dt_ns: distance of two targets.
            mode: 0 linear (in float64), 1 previous, 2 nearest.
            gap_ns: as ``StreamSource.max_gap_ns``.
            age_ns: as ``StreamSource.max_age_ns``.
            values: ``[T, dim]`` float32, written; its rows may be apart.
            valid: ``[T]`` bool, written, strided.
            age_s: ``[T]`` float32, written, strided.
            end_ns: of the last target; None: all targets lie at ``NEVER_NS``.

        Raises:
            ValueError: an array is not as above, or the ring's numbers disagree.
        """

    def account(self, first_target_ns: int, end_ns: int, ledger: Ledger, /) -> int | None:
        """``SensorRing.settle``. Raises ValueError when the ring's numbers disagree."""

class Bell:
    """Members of ``Doorbell``, and its calls.

    A call raises ValueError before there are words. ``_words`` is memory to write to: int64
    ``[STAMPS + slots]``, aligned; the bell holds it until it gets another.
    """

    _words: memoryview
    _fd: int
    _is_ordered: bool
    _count: int
    _taken: int

    @property
    def is_rung(self) -> bool:
        """As ``Doorbell``, and no system call where both ends fence."""

    @property
    def frames(self) -> int:
        """As ``Doorbell``."""

    def ring(self, index: int, at_ns: int, frames: int, /) -> None:
        """As ``Doorbell``, whose eventfd it writes without letting go of the GIL."""

    def rouse(self) -> None:
        """As ``Doorbell``."""

    def pop(self) -> tuple[int, int]:
        """As ``Doorbell``."""

    def sleep(self) -> bool:
        """As ``Doorbell``."""

    def wake(self) -> None:
        """As ``Doorbell``."""

class Waiter:
    """Members of ``Waiter`` in ``core/waiter.py``, and its calls."""

    woken: bool
    _fds: list[int]
    _bells: list[Any]  # Bell
    spin_ns: int
    _wake_fd: int
    _asleep: bool
    _wake_due: bool
    _closed: bool

    def wait(self, timeout_ns: int | None, /) -> Sequence[int]:
        """As ``Waiter.wait``, at any descriptor to the nanosecond, by ppoll(2).

        A mere look keeps the GIL; a longer wait lets go of it. Signal handlers run at once, or once
        it has looked for ``spin_ns``.

        Raises:
            OSError: as ``Waiter.wait``.
            TypeError: a bell is not a compiled one.
        """

    def wake(self) -> None:
        """As ``Waiter.wake``. Whoever calls it holds the GIL, so it needs no lock."""

def receive(
    fd: int, lines: tuple[Line, ...], rx_ns: int, most: int, /
) -> tuple[int, int, list[Packet]]:
    """Take the samples in a socket's packets, some 16 at a time, until ``most`` or more are read.

    A packet is mine if it is the prefix of a line, then stamps and values as ``Samples`` has them,
    no descriptor with them, and ``try_append`` of the line's ring takes these. At one that is not
    it ends; those that were read with it are behind it in the list, samples or not.

    Returns:
        Samples and packets taken, and what else was read. Nothing at all as well when another
        thread is here.
    """

def are_inside(actions: NDArray[Any], low: memoryview, high: memoryview, /) -> bool:
    """True for contiguous float32 arrays of one size with ``low <= actions <= high``, no NaN."""
