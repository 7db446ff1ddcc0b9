"""The quick part of the fault drill: real ranks, a real robot process, real faults."""

import pytest
from drill_scene import Failed
from fault_drill import QUICK, drill

pytestmark = pytest.mark.multirank


def test_one_fault_of_each_mechanism_keeps_its_bounds(tmp_path):
    told = []
    outcomes = drill(QUICK, tmp_path, told.append)
    assert outcomes == told
    assert {outcome.name for outcome in outcomes} == set(QUICK)
    missed = {outcome.name: outcome.missed for outcome in outcomes if outcome.missed}
    assert not missed


def test_a_bound_that_is_missed_is_said(tmp_path, monkeypatch):
    """The drill itself can fail: a fault whose evidence never comes."""
    import fault_drill
    from drill_faults import Recovering

    class Calm:
        def codes(self):
            return [None, None]

        def ticks(self, since_ns):
            return []

        def imbalance(self):
            return ""

        def wait(self, what, limit_s, look):
            raise Failed(f"{what}: not within {limit_s:g} s")

    fault = Recovering("x", "", "", lambda scene: None, lambda scene, at: None, 0.1)
    outcome = fault_drill.recovers(Calm(), fault)
    assert outcome.missed == "evidence: not within 0.1 s"
