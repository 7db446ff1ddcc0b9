"""Event times are mapped to the host's clock within the anchor's bracket, and drift is carried."""

from __future__ import annotations

import pytest

from ppstream.core.clock import NS_PER_S
from ppstream.cuda.device_clock import (
    BRACKET_MAX_NS,
    KEPT_NS,
    RENEW_NS,
    RETRY_NS,
    TRIES,
    DeviceClock,
)
from ppstream.cuda.driver import DeviceError

BRACKET_NS = 8_000


class Clocks:
    """A host and a device whose clock runs ``drift`` faster; a record takes half a bracket."""

    def __init__(self, drift: float = 0.0, noise: tuple[int, ...] = (0,)) -> None:
        self.host = 1_000 * NS_PER_S
        self.drift = drift
        self._noise = noise
        self._records = 0
        self.answers = True

    def now(self) -> int:
        return self.host

    def device(self, host_ns: int) -> float:
        return host_ns * (1 + self.drift) + 77

    def event(self) -> Stamp:
        return Stamp(self)

    def record(self, event: Stamp) -> None:
        extra = self._noise[self._records % len(self._noise)]
        self._records += 1
        event.at_host = self.host + BRACKET_NS // 2
        self.host += BRACKET_NS // 2
        event.wait_ns = BRACKET_NS // 2 + extra

    def stamp(self) -> Stamp:
        stamp = Stamp(self)
        stamp.at_host = self.host
        return stamp


class Stamp:
    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks
        self.at_host = 0
        self.wait_ns = 0

    def wait(self) -> bool:
        self._clocks.host += self.wait_ns
        return self._clocks.answers

    def ns_since(self, earlier: Stamp) -> int:
        device = self._clocks.device
        return round(device(self.at_host) - device(earlier.at_host))


def test_an_event_is_mapped_to_when_it_happened() -> None:
    clocks = Clocks()
    clock = DeviceClock(clocks, clocks.now)
    clocks.host += 123_456
    assert abs(clock.past_ns(clocks.stamp()) - clocks.host) <= 1


def test_the_narrowest_of_several_brackets_counts() -> None:
    clocks = Clocks(noise=(200_000, 90_000, 0, 50_000, 400_000))
    clock = DeviceClock(clocks, clocks.now)
    assert clock.state.bracket_ns == BRACKET_NS
    clocks.host += 5_000
    assert abs(clock.past_ns(clocks.stamp()) - clocks.host) <= 1


def test_a_first_anchor_that_was_held_up_is_measured_again() -> None:
    bad = (25 * BRACKET_MAX_NS,) * TRIES
    clocks = Clocks(noise=(*bad, *bad, *(0,) * TRIES))
    clock = DeviceClock(clocks, clocks.now)
    assert clock.state.bracket_ns == BRACKET_NS
    for _ in range(5):  # no event was lost
        clocks.host += RENEW_NS
        clock.renew_when_due()
        assert abs(clock.past_ns(clocks.stamp()) - clocks.host) <= 1


def test_a_device_that_always_takes_long_is_mapped_by_its_best() -> None:
    always = (3 * BRACKET_MAX_NS, 4 * BRACKET_MAX_NS)
    clock = DeviceClock(clocks := Clocks(noise=always), clocks.now)
    assert clock.state.bracket_ns == BRACKET_NS + 3 * BRACKET_MAX_NS


def test_anchors_are_renewed_each_second_and_not_before() -> None:
    clocks = Clocks()
    clock = DeviceClock(clocks, clocks.now)
    clocks.host += RENEW_NS // 2
    assert not clock.renew_when_due()
    clocks.host += RENEW_NS
    assert clock.renew_when_due()
    assert not clock.renew_when_due()


def test_drift_is_carried_between_anchors() -> None:
    clocks = Clocks(drift=50e-6)
    clock = DeviceClock(clocks, clocks.now)
    for _ in range(5):
        clocks.host += RENEW_NS
        assert clock.renew_when_due()
    clocks.host += RENEW_NS - 10_000_000
    # 50 ppm over a second would be 50 µs
    assert abs(clock.past_ns(clocks.stamp()) - clocks.host) < 1_000
    assert abs(clock.state.drift_ppb + 50_000) < 100
    assert abs(clock.state.surprise_ns) < 1_000


def test_an_anchor_is_not_reused_while_it_is_the_present_one() -> None:
    clocks = Clocks(noise=(0, 10, 20, 30, 40))
    clock = DeviceClock(clocks, clocks.now)
    for _ in range(20):
        clocks.host += RENEW_NS
        clock.renew_when_due()
        clocks.host += 1_000
        assert abs(clock.past_ns(clocks.stamp()) - clocks.host) < 100


def test_an_anchor_that_was_held_up_is_tried_again_soon() -> None:
    good, bad = (0,) * TRIES, (10 * BRACKET_MAX_NS,) * TRIES
    clocks = Clocks(noise=(*good, *bad, *good))
    clock = DeviceClock(clocks, clocks.now)
    clocks.host += RENEW_NS
    assert not clock.renew_when_due()
    assert abs(clock.past_ns(clocks.stamp()) - clocks.host) < 100
    assert not clock.renew_when_due()  # not at once
    clocks.host += RETRY_NS
    assert clock.renew_when_due()
    assert clock.state.bracket_ns == BRACKET_NS


def test_a_bad_anchor_is_better_than_one_that_is_too_old() -> None:
    clocks = Clocks(noise=(*(0,) * TRIES, *(10 * BRACKET_MAX_NS,) * 1000))
    clock = DeviceClock(clocks, clocks.now)
    clocks.host += KEPT_NS
    assert clock.renew_when_due()


def test_a_device_that_gives_no_answer_keeps_the_anchor_and_is_asked_again() -> None:
    clocks = Clocks(drift=5e-6)
    clock = DeviceClock(clocks, clocks.now)
    clocks.answers = False
    clocks.host += RENEW_NS
    assert not clock.renew_when_due()
    assert not clock.renew_when_due()  # not at once
    assert abs(clock.past_ns(clocks.stamp()) - clocks.host) < 10_000
    clocks.answers = True
    clocks.host += RETRY_NS
    assert clock.renew_when_due()
    assert abs(clock.past_ns(clocks.stamp()) - clocks.host) <= 1


def test_a_device_that_never_answers_is_refused() -> None:
    clocks = Clocks()
    clocks.answers = False
    with pytest.raises(DeviceError, match="does not tell its time"):
        DeviceClock(clocks, clocks.now)
