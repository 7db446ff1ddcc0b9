"""A main thread that stands is no dead process: builds and first calls that are slow, or endless.

Hearts beat each 5 ms here, so a socket that nobody reads is full after 1.5 s; limits are short.
The runs stand most of their time: they stand beside each other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from ranks import SERVED, Ranks, placed

pytestmark = pytest.mark.multirank

STANDING = (
    "liveness.heartbeat_ms=5",
    "bringup.overlap_min=0",
    SERVED,
)
WHOLE = (
    "policy.target=drill.standing_policy:build",
    "policy.options.inner=ppstream_stages.simulated:build",
)
IN_PARTS = ("policy.target=policy_in_parts:build", *placed(0, 1, 1))
SHAPE = "steps=8, dim=5, horizon=4, action_dim=2"
STANDS_S = 6.0  # full after 1.5 s, and 2 s more for somebody to take something
TOO_LONG = "liveness.start_s=5"
RUNS = {
    "build": (*WHOLE, f"policy.options.build_s={STANDS_S}"),
    # no other Python thread runs: the heart does not beat meanwhile
    "build that holds": (*WHOLE, f"policy.options.build_s={STANDS_S}", "policy.options.holds=true"),
    "rank 0 that holds": (*IN_PARTS, f"policy.options={{{SHAPE}, first_s={STANDS_S}}}"),
    "first call": (*WHOLE, f"policy.options.first_s={STANDS_S}"),
    "endless build": (*WHOLE, TOO_LONG, "policy.options.build_s=3600"),
    "endless first call": (*WHOLE, TOO_LONG, "policy.options.first_s=3600"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Ranks]]:
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(Ranks(tmp_path_factory.mktemp("logs"), *STANDING, *settings))
            for name, settings in RUNS.items()
        }


@pytest.mark.parametrize("what", ["build", "build that holds", "rank 0 that holds", "first call"])
def test_what_outlasts_every_socket_is_waited_for(runs: dict[str, Ranks], what: str) -> None:
    ranks = runs[what]
    assert ranks.wait(90) == [0, 0], ranks.output()


@pytest.mark.parametrize(
    ("what", "named"),
    [
        (
            "endless build",
            "the main thread made no progress .* of drill.standing_policy:build",
        ),
        ("endless first call", "stage B made no progress .* at epoch 0, seq 0"),
    ],
)
def test_a_start_that_stands_too_long_is_21_named_by_both_ranks(
    runs: dict[str, Ranks], what: str, named: str
) -> None:
    ranks = runs[what]
    assert ranks.wait() == [20, 21], ranks.output()
    for rank, end in ranks.exits().items():
        assert "gone" not in end["reason"], rank
        match = rf"{named}; MainThread is in .*standing_policy\.py:\d+ "
        assert re.search(match, end["reason"]), (rank, end)
    assert "first to fail: rank 1: exit 21 WATCHDOG" in ranks.output()
