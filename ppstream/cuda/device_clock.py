"""DeviceClock: times of CUDA events, or of stamps, on the host's CLOCK_MONOTONIC.

The device counts in a clock of its own, which drifts by some ppm against the host's. An anchor is
one event whose host time is known: it was recorded on a stream of its own, which is idle, between
two readings of the host's clock; of stamps, it is a kernel's answer to a word in pinned memory.
Anchors are renewed each second, so no difference of two events spans more than that second (float32
of milliseconds), and the drift between anchors is carried.
Durations of one device need no mapping and lose nothing to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, Protocol, TypeVar

from ppstream.core.clock import NS_PER_S, now_ns
from ppstream.cuda.driver import DeviceError

if TYPE_CHECKING:
    from typing import Self

RENEW_NS: Final = NS_PER_S
FIRST_TRIES: Final = 1000  # of measurements: the first kernel of a device takes a while
TRIES: Final = 5  # the one with the narrowest bracket counts
BRACKET_MAX_NS: Final = 40_000  # usually some 10 µs; more says that the host was held up
KEPT_NS: Final = 4 * NS_PER_S  # so old an anchor is replaced by any: float32 ends
RETRY_NS: Final = NS_PER_S // 20
DRIFT_MAX: Final = 100e-6  # beyond what clocks of one machine do: then the anchors were bad
DRIFT_SPAN_NS: Final = 2 * NS_PER_S  # over less, the brackets outweigh the drift


class TimedEvent(Protocol):
    """An event, as ``driver.CudaEvent``, or ``device_stamps.ClockStamp``."""

    def wait(self) -> bool: ...  # False: it did not happen in time

    def ns_since(self, earlier: Self) -> int | None: ...


E = TypeVar("E", bound=TimedEvent)


class TimedEvents(Protocol):
    """Several events that are asked at once, as ``in_flight.Marks``."""

    def ns_since(self, earlier: Any) -> Sequence[int]: ...


class Probe(Protocol[E]):
    """Makes events, and records them on an idle stream, as ``driver.DeviceProbe``."""

    def event(self) -> E: ...

    def record(self, event: E) -> None: ...


class ClockState(NamedTuple):
    """Quality of the mapping; for the log."""

    bracket_ns: int  # the anchor lies somewhere in it: twice the bound of the constant error
    drift_ppb: int  # host clock against device clock
    surprise_ns: int  # where the newest anchor was, against where the one before it put it


class DeviceClock(Generic[E]):
    """Maps events of one device; for one thread, which calls ``renew_when_due`` at safe points."""

    def __init__(self, probe: Probe[E], now: Callable[[], int] = now_ns) -> None:
        self._probe = probe
        self._now = now
        self._spare = [probe.event() for _ in range(TRIES + 1)]
        self._drift = 0.0
        self._anchor, self._anchor_ns, bracket_ns = self._first()
        self._due_ns = self._anchor_ns + RENEW_NS
        self._base_ns = self._anchor_ns  # where host and device time were first compared
        self._device_ns = 0  # since then, on the device
        self.state = ClockState(bracket_ns, 0, 0)

    def host_ns(self, event: E) -> int | None:
        """When ``event`` happened by this host's clock; None: it has not."""
        elapsed_ns = event.ns_since(self._anchor)
        if elapsed_ns is None:
            return None
        return self._anchor_ns + elapsed_ns + int(elapsed_ns * self._drift)

    def is_past(self, event: E) -> bool:
        """True when ``event`` has happened: sooner told than when."""
        return event.ns_since(self._anchor) is not None

    def past_ns(self, event: E) -> int:
        """When ``event``, which has happened, did."""
        elapsed_ns = event.ns_since(self._anchor)
        assert elapsed_ns is not None, "asked when an event happened that has not"
        return self._anchor_ns + elapsed_ns + int(elapsed_ns * self._drift)

    def all_past_ns(self, events: TimedEvents) -> list[int]:
        """When ``events``, all of which have happened, did."""
        anchor_ns, drift = self._anchor_ns, self._drift
        return [anchor_ns + ns + int(ns * drift) for ns in events.ns_since(self._anchor)]

    def renew_when_due(self, settle: Callable[[], object] | None = None) -> bool:
        """Set a new anchor when the last is a second old; some 0.1 ms. Returns whether it did.

        Args:
            settle: called before the anchor moves. Times by two anchors differ by up to both
                brackets, more than lies between some events: in their order they are of one.
        """
        if self._now() < self._due_ns:
            return False
        if settle is not None:
            settle()
        found = self._measure()
        if found is None:  # the anchor before serves on
            self._due_ns = self._now() + RETRY_NS
            return False
        event, at_ns, bracket_ns = found
        if bracket_ns > BRACKET_MAX_NS and at_ns - self._anchor_ns < KEPT_NS:
            self._spare.append(event)
            self._due_ns = at_ns + RETRY_NS
            return False
        self._due_ns = at_ns + RENEW_NS
        elapsed_ns = event.ns_since(self._anchor)
        assert elapsed_ns is not None, "an anchor is done"
        surprise_ns = at_ns - self.past_ns(event)
        self._device_ns += elapsed_ns
        host_span_ns = at_ns - self._base_ns
        if self._device_ns >= DRIFT_SPAN_NS:
            drift = host_span_ns / self._device_ns - 1
            self._drift = max(-DRIFT_MAX, min(DRIFT_MAX, drift))
        self._spare.append(self._anchor)
        self._anchor, self._anchor_ns = event, at_ns
        self.state = ClockState(bracket_ns, round(self._drift * 1e9), surprise_ns)
        return True

    def _first(self) -> tuple[E, int, int]:
        """As ``_measure``, again until it was not held up: all is mapped by it for a second."""
        best: tuple[E, int, int] | None = None
        for _ in range(FIRST_TRIES):
            found = self._measure()
            if found is not None and (best is None or found[2] < best[2]):
                best, found = found, best
            if found is not None:
                self._spare.append(found[0])
            if best is not None and best[2] <= BRACKET_MAX_NS:
                return best
        if best is None:
            raise DeviceError("the GPU, which has nothing to do, does not tell its time")
        return best

    def _measure(self) -> tuple[E, int, int] | None:
        """An anchor, its host time (the middle of its bracket) and the bracket; None: no answer."""
        best: tuple[E, int, int] | None = None
        for _ in range(TRIES):
            event = self._spare.pop()
            before = self._now()
            self._probe.record(event)
            if not event.wait():
                self._spare.append(event)
                break
            bracket_ns = self._now() - before
            if best is None or bracket_ns < best[2]:
                if best is not None:
                    self._spare.append(best[0])
                best = event, before + bracket_ns // 2, bracket_ns
            else:
                self._spare.append(event)
        return best
