"""Every form of a run over two hosts, namespaces with a cable: losses are told, robots are safe.

The faults are the drill's, which also judges how long each takes.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from drill.judging import OLDEST_MS, FaultOutcome
from drill.two_host_network import is_possible
from drill.two_hosts import FAULTS
from ranks import UNGATED

pytestmark = [
    pytest.mark.multirank,
    pytest.mark.timeout(400),  # two bring-ups of several ranks on processors that others use
    pytest.mark.skipif(not is_possible(), reason="network namespaces need root and iproute2"),
]

NAMED = {fault.name: fault for fault in FAULTS}


@pytest.mark.parametrize(
    "name",
    [
        "cable-in-a-chain",
        "replica-cable-cut",
        "replica-host-frozen",
        "replica-host-restart",
        "mesh-cable-cut",
        "mesh-host-frozen",
        "mesh-host-restart",
    ],
)
def test_a_run_over_two_hosts_ends_or_goes_on_as_it_must_and_its_robot_is_safe(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = (os.environ.get("PYTHONPATH"), str(Path(__file__).parents[1] / "support"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, found)))
    fault = NAMED[name]
    outcome = FaultOutcome(fault.name, fault.ids, fault.does, fault.expected)
    fault.inject(tmp_path, outcome, module=UNGATED)
    assert (outcome.ledger, outcome.orphans) == ("balances", "none")
    assert outcome.safe_s is not None
    assert (outcome.oldest_ms or 0) <= OLDEST_MS
