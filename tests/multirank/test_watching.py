"""What only real ranks show of watching: each one's own door, and a policy rank's blocks."""

import json
import os
import signal
from pathlib import Path

import pytest
from ranks import SERVE, Ranks
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
    with Ranks(tmp_path_factory.mktemp("logs"), *ATTRIBUTION, env=path, module=SERVE) as ranks:
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


def test_each_place_of_a_chain_tells_its_own_stage(tmp_path):
    parts_ms = (1, 6, 3)
    settings = (
        f"policy.options={{parts_ms={list(parts_ms)}, horizon=4, action_dim=2}}",
        "placement.parts=[1, 2, 3]",
        'placement.policy=["cpu", "cpu", "cpu"]',
        "metrics.port=0",
        "service.duration_s=none",
    )
    with Ranks(tmp_path, *settings, world_size=4) as ranks:
        ranks.wait_for_event("phase", phase="ready")
        seen = [samples(door(ranks, rank)[2][1]) for rank in range(4)]
        ranks.processes[0].terminate()
        assert ranks.wait(10) == [0] * 4, ranks.output()
    means = []
    for found in seen:
        summed, count = (
            found[f'ppstream_stage_duration_seconds_{what}{{stage="B"}}']
            for what in ("sum", "count")
        )
        means.append(summed / count * 1e3)
    assert all(mean >= least for mean, least in zip(means[1:], parts_ms, strict=True))
    assert means[2] > means[3] > means[1]
    assert means[0] >= means[2]  # of each envelope the slowest
    for place in seen[1:]:  # what the dashboard's row asks for
        assert place["ppstream_residence_seconds_sum"] > 0
        assert 'ppstream_wait_seconds_total{cause="input"}' in place


def samples(text):
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}
