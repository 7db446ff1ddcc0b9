"""Every form of a run over two hosts, namespaces with a cable: losses are told, robots are safe.

The faults are the drill's, which also judges how long each takes; there a run has one, here some
have two, a generation each.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from drill import torchrun
from drill.judging import OLDEST_MS, FaultOutcome
from drill.two_host_network import is_possible
from drill.two_hosts import FAULTS, HostFault, counted_apart, cut, frozen, in_turn, restarted
from forked_process import FORKING
from ranks import BRIEF, UNGATED

pytestmark = [
    pytest.mark.multirank,
    pytest.mark.timeout(400),  # two bring-ups of several ranks on processors that others use
    pytest.mark.skipif(not is_possible(), reason="network namespaces need root and iproute2"),
]

NAMED = {fault.name: fault for fault in FAULTS}
IN_TURN = NAMED["mesh-cable-cut"]._replace(name="mesh-faults-in-turn", check=in_turn(cut, frozen))
#: The agents count 0 and 1, then 1 and 2.
COUNTED_APART = NAMED["host-restart-uncounted"]._replace(check=in_turn(counted_apart, restarted))


@pytest.mark.parametrize(
    "fault",
    [
        NAMED["cable-in-a-chain"],
        NAMED["replica-cable-cut"],
        IN_TURN,
        COUNTED_APART,
        NAMED["host-replaced"],
    ],
    ids=lambda fault: fault.name,
)
def test_a_run_over_two_hosts_ends_or_goes_on_as_it_must_and_its_robot_is_safe(
    fault: HostFault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchrun, "subprocess", FORKING)
    brief = fault.form._replace(settings=(*fault.form.settings, *BRIEF))
    outcome = FaultOutcome(fault.name, fault.ids, fault.does, fault.expected)
    fault._replace(form=brief).inject(tmp_path, outcome, module=UNGATED)
    assert (outcome.ledger, outcome.orphans) == ("balances", "none")
    assert outcome.safe_s is not None
    assert (outcome.oldest_ms or 0) <= OLDEST_MS
