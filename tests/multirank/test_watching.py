"""What only real ranks show of watching: each one's own door, and a policy rank's blocks."""

import json
import os
import signal
from pathlib import Path

import pytest
from ranks import Ranks
from watched_ranks import get

from ppstream.report import attribution

pytestmark = pytest.mark.multirank

SUPPORT = str(Path(__file__).resolve().parents[1] / "support")
ATTRIBUTION = (
    'mode="attribution"',
    "bringup.envelopes=100",
    "metrics.port=0",
    'policy.target="policy_with_blocks:build"',
    "policy.options={}",
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    path = {"PYTHONPATH": os.pathsep.join([SUPPORT, os.environ.get("PYTHONPATH", "")])}
    with Ranks(tmp_path_factory.mktemp("logs"), *ATTRIBUTION, env=path) as ranks:
        ranks.wait_for_event("phase", phase="bring-up")
        ranks.seen = [door(ranks, rank) for rank in (0, 1)]
        for process in ranks.processes:
            process.send_signal(signal.SIGUSR2)  # no profile now, and no end either
        assert ranks.wait() == [0, 0], ranks.output()
        yield ranks


def door(ranks, rank):
    """Health, readiness and metrics of one rank, while it runs."""
    (port,) = [line["port"] for line in ranks.lines(rank) if line.get("name") == "metrics"]
    return [get(port, path) for path in ("/healthz", "/readyz", "/metrics")]


def test_each_rank_has_its_own_door(ranks):
    for rank, (health, readiness, metrics) in enumerate(ranks.seen):
        said = json.loads(health[1])
        assert (said["rank"], said["mode"]) == (str(rank), "attribution")
        assert said["pid"] == ranks.processes[rank].pid
        assert readiness[0] == 503  # such a run never becomes ready
        assert 'ppstream_stage_duration_seconds_count{stage="B"}' in metrics[1]
    assert "ppstream_queue_depth" in ranks.seen[0][2][1]
    assert "ppstream_residence_seconds" in ranks.seen[1][2][1]


def test_blocks_of_the_policy_rank_stand_in_the_table_that_rank_0_prints(ranks):
    table = attribution.report(ranks.directory)
    rows = [line.split() for line in table.splitlines()]
    names = [row[0] for row in rows[3:]]
    assert names == ["A", "B", "encode", "decode", "(in", "C"]
    calls = {row[0]: int(row[1]) for row in rows[3:] if row[0] in ("B", "encode")}
    assert calls["B"] == 100
    assert calls["encode"] > 80  # a policy rank starts with its phase, some envelopes later
    assert table in ranks.output()


def test_no_gate_accepts_it_and_nobody_is_served(ranks):
    assert "PERTURBED" in ranks.output()
    assert {line["mode"] for line in ranks.envelopes("bring-up")} == {"attribution"}
    assert ranks.envelopes("ready") == []
    assert not [line for line in ranks.lines(0) if line.get("name") in ("verdict", "profile")]
