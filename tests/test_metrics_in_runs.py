"""The arithmetic of what watching costs real ranks, and one such bring-up."""

from __future__ import annotations

from pathlib import Path

import metrics_in_runs
import pytest
from metrics_in_runs import Watched

from ppstream.claims import audit_claims

SMALL = str(Path(__file__).parent / "multirank" / "small.toml")


def pair(off_us: float, on_us: float) -> tuple[Watched, Watched]:
    return (
        Watched(off_us, 0.0, (0.0, 0.0), 100, []),
        Watched(on_us, 0.0, (0.0, 0.0), 100, [5.0]),
    )


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([pair(1000, 1004)], 0.004),
        ([pair(1000, 1004), pair(1000, 1500), pair(1000, 990)], 0.004),  # the middle one
        ([pair(1000, 1010), pair(500, 510)], 0.015),
    ],
)
def test_the_cost_is_the_median_of_pairs_and_can_be_audited(
    pairs: list[tuple[Watched, Watched]], expected: float
) -> None:
    assert metrics_in_runs.cost(pairs) == pytest.approx(expected)
    (target,) = metrics_in_runs.targets_of(pairs)
    assert target.met == (expected <= 0.01)
    claims = metrics_in_runs.claims_of(pairs)
    assert all(finding.holds for finding in audit_claims(claims))
    claims[0]["claimed"] += 0.01
    assert not any(finding.holds for finding in audit_claims(claims))


@pytest.mark.multirank
def test_a_watched_bring_up_was_asked_while_its_envelopes_ran() -> None:
    settings = ("bringup.envelopes=150",)
    found = metrics_in_runs.bring_up(SMALL, settings, rate=20.0)
    assert found.envelopes >= 150
    assert found.period_us > 4000  # two stages of 2 ms on one thread
    assert len(found.scrapes_ms) >= 4
    assert all(0 < cpu_us < found.period_us for cpu_us in found.cpu_us)
