"""A main thread that stands is no dead process: builds and first calls that are slow, or endless.

Hearts beat each 5 ms here, so a socket that nobody reads is full after 1.5 s; limits are short.
"""

from __future__ import annotations

import re

import pytest
from ranks import Ranks

pytestmark = pytest.mark.multirank

STANDING = (
    "policy.target=drill.standing_policy:build",
    "policy.options.inner=ppstream_stages.simulated:build",
    "liveness.heartbeat_ms=5",
    "bringup.overlap_min=0",
    "bringup.accept=['NOTHING_TO_HIDE']",
)
STANDS_S = 6.0  # full after 1.5 s, and 2 s more for somebody to take something


@pytest.mark.parametrize("holds", ["true", "false"])
def test_a_build_that_outlasts_every_socket_is_waited_for(tmp_path, holds):
    """Also one that lets no other Python thread run: its heart does not beat meanwhile."""
    slow = (f"policy.options.build_s={STANDS_S}", f"policy.options.holds={holds}")
    with Ranks(tmp_path, *STANDING, *slow) as ranks:
        assert ranks.wait(90) == [0, 0], ranks.output()


def test_a_first_call_that_outlasts_every_socket_is_waited_for(tmp_path):
    with Ranks(tmp_path, *STANDING, f"policy.options.first_s={STANDS_S}") as ranks:
        assert ranks.wait(90) == [0, 0], ranks.output()


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ("build_s", "the main thread made no progress .* of drill.standing_policy:build"),
        ("first_s", "stage B made no progress .* at epoch 0, seq 0"),
    ],
)
def test_a_start_that_stands_too_long_is_21_named_by_both_ranks(tmp_path, option, named):
    limits = ("liveness.start_s=5", f"policy.options.{option}=3600")
    with Ranks(tmp_path, *STANDING, *limits) as ranks:
        assert ranks.wait() == [20, 21], ranks.output()
        for rank, end in ranks.exits().items():
            assert "gone" not in end["reason"], rank
            match = rf"{named}; MainThread is in .*standing_policy\.py:\d+ "
            assert re.search(match, end["reason"]), (rank, end)
    assert "first to fail: rank 1: exit 21 WATCHDOG" in ranks.output()
