"""The quick part of the fault drill: real ranks, a real robot process, real faults."""

import os
import secrets
import subprocess
import sys
from collections import Counter

import pytest
import real_runs
from drill import fault_drill
from drill import gpu as drill_gpu
from drill import torchrun as drill_torchrun
from drill.fault_drill import CPU, GPU, QUICK, drill
from drill.judging import FaultOutcome
from drill.launches import LaunchDrill
from drill.live_logs import NOTHING_SENT
from drill.processes import MARK, marked
from drill.scene import Failed
from forked_process import FORKING

pytestmark = pytest.mark.multirank


@pytest.fixture
def forked_ranks(monkeypatch):
    """The drill's, without the seconds that an interpreter takes to import torch."""
    monkeypatch.setattr(real_runs, "subprocess", FORKING)


#: The bounds are of a run that serves.
BRIEF_BRING_UP = ("bringup.envelopes=100", "bringup.warmup_max=60")


@pytest.mark.alone
@pytest.mark.usefixtures("forked_ranks")
def test_one_fault_of_each_mechanism_keeps_its_bounds(tmp_path):
    told = []
    outcomes = drill(QUICK, tmp_path, told.append, BRIEF_BRING_UP)
    assert outcomes == told
    assert {outcome.name for outcome in outcomes} == set(QUICK)
    missed = {outcome.name: outcome.missed for outcome in outcomes if outcome.missed}
    assert not missed


def test_a_bound_that_is_missed_is_said(tmp_path, monkeypatch):
    """The drill itself can fail: a fault whose evidence never comes."""
    from drill.faults import Recovering

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


def test_a_launch_that_leaves_what_it_must_not_is_said(tmp_path):
    def leaves(folder, outcome: FaultOutcome):
        outcome.codes = (20, 20)
        raise Failed("no orphan: not within 5 s")

    outcome = fault_drill.launches(tmp_path / "x", LaunchDrill("x", "", "", "", leaves))
    assert outcome.missed == "no orphan: not within 5 s"
    assert outcome.codes == (20, 20)


def test_a_process_that_outlives_its_run_is_an_orphan(monkeypatch):
    monkeypatch.setattr(drill_torchrun, "ORPHAN_S", 0.3)
    mark = secrets.token_hex(8)
    process = subprocess.Popen(["sleep", "60"], env=os.environ | {MARK: mark})
    try:
        drill_torchrun.until("its environment to be there", 5.0, lambda: bool(marked(mark)))
        with pytest.raises(Failed, match="no orphan"):
            drill_torchrun.no_orphans(mark)
    finally:
        process.kill()
        process.wait()
    assert drill_torchrun.no_orphans(mark) == "none"


@pytest.mark.usefixtures("forked_ranks")
def test_ranks_that_differ_are_gone_without_orphans_and_sent_nothing(tmp_path):
    told = []
    (outcome,) = drill(["ranks-differ"], tmp_path, told.append)
    assert (outcome.missed, outcome.codes) == ("", (10, 10))
    assert (outcome.ledger, outcome.orphans) == (NOTHING_SENT, "none")


def test_the_tier_of_two_gpus_says_that_it_needs_them(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr(sys, "argv", ["drill/fault_drill.py", "--gpu"])
    assert fault_drill.main() == 0
    assert capsys.readouterr().out == "skipped: needs two GPUs\n"


def test_quick_faults_are_those_without_a_gpu(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["drill/fault_drill.py", "--gpu", "--quick"])
    with pytest.raises(SystemExit, match="its faults need no GPU"):
        fault_drill.main()


def test_the_faults_of_a_chain_of_gpus_are_left_out_by_name_on_two(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr(
        sys, "argv", ["drill/fault_drill.py", "--gpu", "--only", "gpus-kill-rank-2"]
    )
    assert fault_drill.main() == 0
    said = capsys.readouterr().out
    assert said.startswith("left out, they need three GPUs: gpus-kill-rank-2\n0 of 0 faults")


def test_faults_have_names_of_their_own_and_gpu_faults_run_on_two_gpus():
    names = Counter(fault.name for tier in (CPU, GPU) for fault in tier.faults)
    assert [name for name, count in names.items() if count > 1] == []
    assert {"placement.rank0=cuda:0", "placement.policy=cuda:1"} <= set(GPU.settings)
    dead = {f.name for f in GPU.endings if f.settings[0].startswith("link.kind=")}
    for link in drill_gpu.LINKS:
        assert {
            f"{word}-{rank}-{link}"
            for word in ("kill", "freeze")
            for rank in ("rank-0", "policy-rank")
        } <= dead
