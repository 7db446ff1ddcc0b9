"""How runs end, with real processes and real signals."""

import json
import re
import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from ranks import BRIEF, END_LIMIT_S, JUDGED_AGAIN, Ranks
from robot_rig import wait_until

from ppstream.analysis.judge import judge
from ppstream.analysis.log_reader import read_run
from ppstream.core.clock import NS_PER_S
from ppstream.launch.run_rank0 import GOODBYE_LIMIT_NS
from ppstream.robot.client import RobotClient

pytestmark = pytest.mark.multirank

DROID = Path(__file__).parents[1] / "support" / "droid.toml"

#: How fast a busy machine is proves nothing here.
SERVE_ON = (
    "service.duration_s=none",
    "bringup.overlap_min=0",
    "bringup.accept=['NOTHING_TO_HIDE']",
)
LONG_STAGES = (
    *("simulate.a_ms=6", "simulate.c_ms=6", "policy.options.b_ms=15"),
    "bringup.standalone=10",
)
#: How a rank words what it sees at once, and not only after a silence.
DIED = "closed its control socket or died"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One run from start to drain, seen by several tests; a load is short beside its stages."""
    with Ranks(tmp_path_factory.mktemp("logs"), *LONG_STAGES, judged=True) as ranks:
        codes = ranks.wait()
        assert codes != [31, 31], ranks.output()
        yield ranks, codes


@pytest.mark.alone
def test_run_passes_the_gate_serves_and_drains(finished):
    ranks, codes = finished
    assert codes == [0, 0], ranks.output()
    assert {rank: end["name"] for rank, end in ranks.exits().items()} == {
        "0": "DRAINED",
        "1": "DRAINED",
    }
    phases = [line["phase"] for line in ranks.lines(0) if line.get("name") == "phase"]
    assert phases == ["warming", "bring-up", "ready", "draining"]
    verdict = next(line for line in ranks.lines(0) if line.get("name") == "verdict")
    assert verdict["verdict"] == "PASS"


@pytest.mark.alone
def test_every_envelope_stands_in_both_logs_exactly_once(finished):
    ranks, _ = finished
    front = [(e["epoch"], e["seq"]) for e in ranks.lines(0) if e["kind"] == "envelope"]
    back = [(e["epoch"], e["seq"]) for e in ranks.lines(1) if e["kind"] == "stage1"]
    assert front == back == [(0, seq) for seq in range(len(front))]


@pytest.mark.alone
def test_ledger_balances_at_the_end(finished):
    ranks, _ = finished
    ledgers = [line for line in ranks.lines(0) if line["kind"] == "ledger"]
    for line in ledgers:
        for entry in (*line["streams"].values(), line["envelopes"]):
            dropped = sum(entry["dropped"].values())
            assert entry["received"] == entry["used"] + dropped + entry["in_flight"], line
    assert ledgers[-1]["envelopes"]["in_flight"] == 0


@pytest.mark.alone
def test_standalone_stage_times_are_measured_not_copied(finished):
    import json

    ranks, _ = finished
    standalone = json.loads((ranks.directory / "run.json").read_text())["standalone"]
    assert 6e6 < standalone["A_ns"] < 14e6
    assert 6e6 < standalone["C_ns"] < 14e6
    assert 15e6 < standalone["B_ns"] < 30e6


def test_ranks_that_disagree_end_with_the_difference(tmp_path):
    with Ranks(tmp_path, "liveness.handshake_s=300", only={1: ("pipeline.d_in=3",)}) as ranks:
        assert ranks.wait() == [10, 10], ranks.output()
        assert "config.pipeline.d_in: rank 0 has 2, rank 1 has 3" in ranks.output()


def test_a_rank_0_that_refuses_before_the_handshake_is_told_by_the_other_with_its_code(tmp_path):
    """As where torchrun has started more ranks than the configuration wants."""
    with Ranks(tmp_path, only={0: ("placement.replicas=2",)}) as ranks:
        assert ranks.wait() == [11, 11], ranks.output()
        wrong = "world size: got 2 ranks, want 3"
        assert f"first to fail: rank 0: exit 11 CONFIG {wrong}" in ranks.output()
        assert f"left with 11 CONFIG: {wrong}" in ranks.exits()["1"]["reason"]


def test_a_signal_to_both_ranks_drains_with_zero(tmp_path):
    with Ranks(tmp_path, *SERVE_ON) as ranks:
        ranks.wait_for_event("phase", phase="ready")
        began = time.monotonic()
        for process, number in zip(ranks.processes, (signal.SIGTERM, signal.SIGINT), strict=True):
            process.send_signal(number)
        assert ranks.wait(12) == [0, 0], ranks.output()
        assert time.monotonic() - began < 10
        assert [end["code"] for end in ranks.exits().values()] == [0, 0]


def test_a_policy_rank_that_is_busy_when_a_run_drains_is_waited_for(tmp_path):
    """It encodes a text, say: nothing is owed, and it is alive."""
    settings = ("policy.target=told_echo:build", "policy.instructions=true", "gateway=[]")
    patient = ("liveness.watchdog_s=200", f"service.endpoint=unix://{tmp_path}/r")
    with Ranks(tmp_path, *settings, *patient, config=DROID) as ranks:
        ranks.wait_for_event("phase", phase="ready")
        with RobotClient(f"unix://{tmp_path}/r") as robot:
            robot.connect(10)
            robot.instruct(str(tmp_path))
            wait_until((tmp_path / "began").exists)
            for process in ranks.processes:
                process.terminate()
            with pytest.raises(subprocess.TimeoutExpired):
                ranks.processes[0].wait(GOODBYE_LIMIT_NS / NS_PER_S + 1)
            (tmp_path / "over").touch()
            assert ranks.wait(12) == [0, 0], ranks.output()


def test_a_stop_while_warming_never_becomes_ready(tmp_path):
    slow = ("policy.options.b_ms=50", "bringup.warmup_max=2000")
    with Ranks(tmp_path, *SERVE_ON, *slow) as ranks:
        ranks.wait_for_event("phase", phase="warming")
        for process in ranks.processes:
            process.terminate()
        assert ranks.wait(12) == [0, 0], ranks.output()
        phases = [line["phase"] for line in ranks.lines(0) if line.get("name") == "phase"]
        assert phases == ["warming", "draining"]


def test_a_run_whose_folder_is_deleted_ends_as_any_other(tmp_path):
    with Ranks(tmp_path, *SERVE_ON) as ranks:
        ranks.wait_for_event("phase", phase="ready")
        shutil.rmtree(ranks.directory)
        for process in ranks.processes:
            process.terminate()
        assert ranks.wait(12) == [0, 0], ranks.output()
        assert "Traceback" not in ranks.output()
        assert ranks.output().count("rank 0: the end is not recorded") == 1
        assert "ppstream: exit 0 DRAINED" in ranks.output()


def test_an_idle_run_notices_a_killed_policy_rank_also_when_its_folder_is_deleted(tmp_path):
    with Ranks(tmp_path, *SERVE_ON) as ranks:
        ranks.wait_for_event("phase", phase="ready")
        shutil.rmtree(ranks.directory)
        ranks.processes[1].kill()
        assert ranks.processes[0].wait(60) == 20, ranks.output()
        assert DIED in ranks.output()
        assert "Traceback" not in ranks.output()
        assert ranks.output().count("rank 0: the end is not recorded") == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_a_disk_that_is_full_in_bring_up_is_named_by_the_gate(tmp_path, rank):
    with Ranks(tmp_path, *SERVE_ON, "bringup.envelopes=300") as ranks:
        ranks.wait_for_event("phase", phase="bring-up")
        log = ranks.directory / f"rank{rank}.gen0.jsonl"
        # run.json is less, and can still be written
        wait_until(lambda: log.stat().st_size >= 16_384, seconds=END_LIMIT_S)
        limits = log.stat().st_size, resource.RLIM_INFINITY
        resource.prlimit(ranks.processes[rank].pid, resource.RLIMIT_FSIZE, limits)
        assert ranks.wait() == [11, 11], ranks.output()
        refused = f"exit 11 CONFIG log.root: cannot write to {log}: File too large; lines of bring"
        assert refused in ranks.output()
        assert ranks.output().count("make room, or set log.root elsewhere") > 0


def test_a_disk_that_is_full_in_service_is_told_and_its_run_is_no_pass(tmp_path):
    with Ranks(tmp_path, *SERVE_ON) as ranks:
        ranks.wait_for_event("phase", phase="ready")
        log = ranks.directory / "rank0.gen0.jsonl"
        limits = log.stat().st_size + 100, resource.RLIM_INFINITY
        resource.prlimit(ranks.processes[0].pid, resource.RLIMIT_FSIZE, limits)
        told = f"cannot write to {log}: File too large; its lines are lost until it can"
        wait_until(lambda: told in ranks.output(), seconds=END_LIMIT_S)
        for process in ranks.processes:
            process.terminate()
        assert ranks.wait(12) == [0, 0], ranks.output()
        assert ranks.output().count(told) == 1
        assert re.search(rf"{re.escape(str(log))} lacks \d+ of \d+ lines: File", ranks.output())
        assert "MISSING_LOGS" in judge(read_run(ranks.directory)).reasons


@pytest.mark.parametrize("killed", [0, 1])
def test_killed_rank_ends_the_other_with_20_before_its_silence_would(tmp_path, killed):
    with Ranks(tmp_path, *SERVE_ON, "bringup.envelopes=2000") as ranks:
        ranks.wait_for_event("phase", phase="bring-up")
        log = ranks.directory / "rank0.gen0.jsonl"
        # envelopes are in flight now
        wait_until(lambda: log.stat().st_size >= 16_384, seconds=END_LIMIT_S)
        ranks.processes[killed].kill()
        assert ranks.processes[1 - killed].wait(60) == 20, ranks.output()
        left = ranks.exits()[str(1 - killed)]
        assert left["name"] == "PEER_LOST"
        assert DIED in left["reason"]


def test_killed_policy_rank_is_20_also_when_the_stop_signal_came_first(tmp_path):
    with Ranks(tmp_path, *SERVE_ON, "policy.options.b_ms=800", "bringup.envelopes=2000") as ranks:
        ranks.wait_for_event("phase", phase="warming")
        # behind the first envelope, stage B is in the middle of one that is owed
        wait_until(lambda: any(line["kind"] == "stage1" for line in ranks.lines(1)))
        ranks.processes[0].send_signal(signal.SIGTERM)
        time.sleep(0.05)
        ranks.processes[1].kill()
        assert ranks.processes[0].wait(60) == 20, ranks.output()
        assert DIED in ranks.exits()["0"]["reason"]


NOTHING_TO_HIDE = ("simulate.a_ms=0", "simulate.c_ms=0", "policy.options.b_ms=8")


@pytest.mark.alone
@JUDGED_AGAIN
def test_nothing_to_hide_is_refused_with_31_and_a_later_generation_ends_at_once(tmp_path):
    with Ranks(tmp_path, *NOTHING_TO_HIDE, judged=True) as ranks:
        assert ranks.wait() == [31, 31], ranks.output()
        assert re.search(r"exit 31 GATE_INCONCLUSIVE .*NOTHING_TO_HIDE", ranks.output())
    began = time.monotonic()
    with Ranks(tmp_path, env={"TORCHELASTIC_RESTART_COUNT": "1"}, judged=True) as ranks:
        assert ranks.wait() == [31, 31], ranks.output()
    assert time.monotonic() - began < 5  # two interpreters start; the ranks themselves take none


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_start_that_its_launcher_did_not_count_is_the_run_s_next_generation(tmp_path, world_size):
    """As where a host was only told by the other one's torchrun to start anew."""
    launched = {"TORCHELASTIC_RUN_ID": "arm", "TORCHELASTIC_RESTART_COUNT": "0"}
    for generation in range(2):
        with Ranks(tmp_path, world_size=world_size, env=launched) as ranks:
            assert ranks.wait() == [0] * world_size, ranks.output()
            for rank in range(world_size):
                assert ranks.lines(rank, generation)
                assert ranks.exits()[str(rank)]["generation"] == generation
    assert len([*tmp_path.glob("*/run.json")]) == 2  # the run's, and by the link to it


def test_inline_twin_serves_without_a_gate(tmp_path):
    with Ranks(tmp_path, world_size=1) as ranks:
        assert ranks.wait() == [0], ranks.output()
        phases = [line["phase"] for line in ranks.lines(0) if line.get("name") == "phase"]
        assert phases == ["warming", "ready", "draining"]


def test_configuration_error_is_told_once_before_anything_starts(tmp_path):
    with Ranks(tmp_path / "logs", "pipeline.d_in=0", "window.steps='x'") as ranks:
        assert ranks.wait() == [11, 11]
        text = ranks.output()
    assert text.count("pipeline.d_in") == 1
    assert "window.steps" in text
    assert not (tmp_path / "logs" / "latest").exists()


@pytest.fixture(scope="module")
def stopped_while_warming(tmp_path_factory):
    """A run whose envelopes all expire, stopped once it has said so."""
    slow = ("simulate.a_ms=200", "actions.lease_ms=30", "bringup.warmup_max=400")
    with Ranks(tmp_path_factory.mktemp("warming"), *slow) as ranks:
        wait_until(lambda: "s each" in ranks.output(), seconds=END_LIMIT_S, found=ranks.output)
        ranks.processes[0].send_signal(signal.SIGINT)
        assert ranks.wait() == [0, 0], ranks.output()
        yield ranks


def test_a_run_that_warms_says_how_far_it_is_and_that_its_envelopes_expire(stopped_while_warming):
    told = stopped_while_warming.output()
    line = re.search(r"ppstream: rank 0: warming: (\d+) of at most 400 envelopes, (.*)", told)
    assert line, told
    assert re.fullmatch(
        rf"{line[1]} older than actions.lease_ms = 30, .* m?s each, .* left", line[2]
    )


def test_a_run_stopped_while_it_warms_is_no_log_that_lacks_lines(stopped_while_warming):
    report = judge(read_run(stopped_while_warming.directory))
    assert report.reasons == ["TOO_FEW"]
    through = len(stopped_while_warming.envelopes("warming"))
    assert (
        f"the run was stopped in warming (SIGINT), before it was ready: {through} envelopes of "
        "warming"
    ) in report.statements


def test_a_bring_up_without_a_chunk_in_time_is_refused_before_all_are_made(tmp_path: Path) -> None:
    late = ("policy.options.b_ms=60", "actions.lease_ms=30", *BRIEF, "bringup.envelopes=400")
    with Ranks(tmp_path, *late, judged=True) as ranks:
        assert ranks.wait() == [31, 31], ranks.output()
        made = len([e for e in ranks.envelopes("bring-up") if e.get("mode") == "throughput"])
    reason = ranks.exits()["0"]["reason"]
    assert reason.startswith("bring-up verdict INCONCLUSIVE: EXPIRED")
    assert 100 < made < 200
    assert f"EXPIRED: {made} of {made} were older than the lease of 30.0 ms" in ranks.output()


@pytest.mark.parametrize("b_ms", [5, 14])  # within the lease; past it, each time
def test_one_rank_that_is_refused_for_its_lease_leaves_its_times(tmp_path: Path, b_ms: int) -> None:
    settings = (*BRIEF, "actions.lease_ms=12", f"policy.options.b_ms={b_ms}")
    with Ranks(tmp_path, *settings, world_size=1, judged=True) as ranks:
        assert ranks.wait() == [30], ranks.output()
    assert "SHORT_LEASE: robots would hold" in ranks.exits()["0"]["reason"]
    told = json.loads((ranks.directory / "run.json").read_text())
    assert told["standalone"]["B_ns"] >= b_ms * 1_000_000
