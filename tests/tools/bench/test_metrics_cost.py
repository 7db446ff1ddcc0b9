"""The arithmetic of what watching costs real ranks, and one such bring-up."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench import metrics_cost
from bench.metrics_cost import Round, Watched

from ppstream.analysis.claims import audit_claims

SMALL = str(Path(__file__).parents[2] / "support" / "small.toml")


def ran(*periods_us: float) -> Round:
    return Round(*(Watched(us, 0.0, (0.0, 0.0), 100, [5.0]) for us in periods_us))


@pytest.mark.parametrize(
    ("rounds", "tallies", "both"),
    [
        ([ran(1000, 1001, 1004)], 0.001, 0.004),
        ([ran(1000, 1020, 1004), ran(1000, 1030, 1500), ran(1000, 900, 990)], 0.02, 0.004),
        ([ran(1000, 1000, 1010), ran(500, 501, 510)], 0.001, 0.015),
    ],
)
def test_the_cost_is_the_median_of_rounds_and_can_be_audited(
    rounds: list[Round], tallies: float, both: float
) -> None:
    assert metrics_cost.cost(rounds, "tallied") == pytest.approx(tallies)
    assert metrics_cost.cost(rounds, "scraped") == pytest.approx(both)
    met = [target.met for target in metrics_cost.targets_of(rounds)]
    assert met == [tallies <= 0.01, both <= 0.01]
    claims = metrics_cost.claims_of_runs(rounds)
    assert all(finding.holds for finding in audit_claims(claims))
    for claim in claims:
        claim["claimed"] += 0.01
    assert not any(finding.holds for finding in audit_claims(claims))


@pytest.mark.multirank
def test_a_watched_bring_up_was_asked_while_its_envelopes_ran() -> None:
    settings = ("bringup.envelopes=150",)
    found = metrics_cost.bring_up(SMALL, settings, rate=20.0)
    assert found.envelopes >= 150
    assert found.period_us > 4000  # two stages of 2 ms on one thread
    assert len(found.scrapes_ms) >= 4
    assert all(0 < cpu_us < found.period_us for cpu_us in found.cpu_us)
