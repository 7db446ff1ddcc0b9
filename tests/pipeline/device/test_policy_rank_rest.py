"""The rest of a policy rank's host that has queued envelopes ahead of its GPU."""

from __future__ import annotations

from collections import deque

import pytest

from ppstream.core.clock import NS_PER_MS
from ppstream.pipeline.device.policy_rank import IDLE_NS, REST_NS, RunAheadRest

AHEAD = 6
LAUNCH_NS = 40_000
LATE_NS = 100_000  # a host that rested runs again


def served_ns(gap_ns: int, envelopes: int, stall_ns: int, most_queued: int = AHEAD + 1) -> int:
    """Time that a device takes for ``envelopes`` of ``gap_ns``, behind a host that once stood."""
    rest = RunAheadRest(AHEAD, most_queued)
    now = device = begun = 10**9
    queued: deque[int] = deque()  # when each is over
    over = 0
    while over < envelopes:
        has_moved = False
        while queued and queued[0] <= now:
            rest.over(queued.popleft())
            over += 1
            has_moved = True
        while len(queued) < most_queued:
            now += LAUNCH_NS
            device = max(now, device) + gap_ns
            queued.append(device)
        if not has_moved:
            now += rest.ns(now) + LATE_NS
            if stall_ns and over > envelopes // 4:
                now += stall_ns
                stall_ns = 0
    return device - begun


@pytest.mark.parametrize("gap_ns", [95_000, 200_000, 700_000])
def test_a_host_that_stood_once_soon_keeps_its_device_busy_again(gap_ns: int) -> None:
    stall_ns, envelopes = 20 * NS_PER_MS, 2000
    took_ns = served_ns(gap_ns, envelopes, stall_ns) - stall_ns
    assert took_ns < 1.05 * envelopes * gap_ns


@pytest.mark.parametrize(
    ("gap_ns", "rest_ns"), [(100_000, AHEAD * 50_000), (4 * NS_PER_MS, REST_NS)]
)
def test_rests_follow_the_pace_of_the_envelopes(gap_ns: int, rest_ns: int) -> None:
    rest = RunAheadRest(AHEAD, AHEAD + 1)
    for number in range(60):
        rest.over(10**9 + number * gap_ns)
    assert rest.ns(rest.newest_ns) == pytest.approx(rest_ns, rel=0.05)
    assert rest.ns(rest.newest_ns + 10**9) == IDLE_NS  # none come
