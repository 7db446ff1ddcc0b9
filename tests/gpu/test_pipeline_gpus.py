"""The product on two GPUs: real ranks earn *ready*, drain when told, and end when one dies."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from ranks import JUDGED_AGAIN, Ranks, environment_without_ranks, free_port
from recorded_runs import arm_recording, assert_as_the_model_says, assert_played, brought_up
from sync_watch import FROM, UNTIL

from ppstream.analysis.judge import judge
from ppstream.analysis.log_reader import read_run

CONFIG = Path(__file__).parents[2] / "stages" / "ppstream_stages" / "bench_gpus.toml"
SETTINGS = ("service.endpoint=none", "service.duration_s=30", "bringup.envelopes=200")
DEATH_LIMIT_S = 4.0
PEER_LOST = 20
COLD_LIMIT_S = 60
GAP_MAX = 0.06  # of a period of 0.5 ms and more to the model's

if torch.cuda.device_count() < 2:
    pytest.skip("needs two GPUs", allow_module_level=True)
pytestmark = pytest.mark.gpu


@JUDGED_AGAIN
def test_a_run_on_two_gpus_earns_ready_and_drains_when_told(tmp_path: Path) -> None:
    with Ranks(tmp_path, *SETTINGS, config=CONFIG, judged=True) as ranks:
        ranks.wait_for_event("phase", phase="ready")
        for process in ranks.processes:  # as torchrun signals: all at once
            process.send_signal(signal.SIGTERM)
        assert ranks.wait() == [0, 0], ranks.output()
        report = judge(read_run(ranks.directory))
        assert report.verdict.name == "PASS", (report.reasons, ranks.output())
        assert all(audit.ok or audit.may_lack for audit in report.audits.values()), report.audits
        assert report.window.topology.device_stamped
        surprises = [
            abs(line["surprise_ns"]) for line in ranks.lines(0) if line.get("name") == "clock"
        ]
        assert max(surprises, default=0) < 50_000  # how far the mapping was off after a second


def test_a_dead_policy_rank_ends_rank_0_whose_streams_wait_for_it(tmp_path: Path) -> None:
    with Ranks(tmp_path, *SETTINGS, config=CONFIG) as ranks:
        ranks.wait_for_event("phase", phase="bring-up")
        time.sleep(0.05)
        ranks.processes[1].kill()
        killed = time.monotonic()
        code = ranks.processes[0].wait(20)
        took_s = time.monotonic() - killed
        assert code == PEER_LOST, ranks.output()
        assert took_s < DEATH_LIMIT_S


BRIEF = (
    *("service.endpoint=none", "service.duration_s=0.2"),
    *("bringup.envelopes=200", "bringup.warmup_max=100"),
)
BUSY = """
import sys, torch
device = torch.device("cuda", int(sys.argv[1]))
x = torch.zeros(2048, 2048, device=device)
print("begins", flush=True)
while True:
    for _ in range(4):
        x = x @ x
    torch.cuda.synchronize(device)
"""


@pytest.mark.parametrize("shared", [0, 1])
def test_a_gpu_that_another_program_uses_breaks_no_audit(tmp_path: Path, shared: int) -> None:
    """Each gets slices of some ms: what is queued stands meanwhile, between any two kernels."""
    command = [sys.executable, "-c", BUSY, str(shared)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "begins\n"
            with Ranks(tmp_path, *BRIEF, config=CONFIG) as ranks:
                ranks.wait(90)
                output = ranks.output()
        finally:
            other.kill()
    report = judge(read_run(ranks.directory))
    assert report.window.n > 20, output
    assert {name: audit for name, audit in report.audits.items() if audit.ok is False} == {}


OTHERS = ("link.kind=pinned", "link.kind=nccl", "pipeline.credit=after_window")


@pytest.mark.parametrize("other", OTHERS)
def test_the_other_links_and_throughput_mode_earn_ready_too(tmp_path: Path, other: str) -> None:
    with Ranks(tmp_path, *SETTINGS, other, config=CONFIG) as ranks:
        ranks.wait_for_event("phase", phase="ready")
        ranks.processes[0].send_signal(signal.SIGTERM)
        assert ranks.wait() == [0, 0], ranks.output()


def test_a_real_policy_on_a_recording_overlaps_at_two_and_collapses_at_one(tmp_path: Path) -> None:
    recording = arm_recording(tmp_path)
    one, two = (brought_up(tmp_path / f"d{depth}", recording, depth) for depth in (1, 2))
    print(one.output, two.output)
    assert_as_the_model_says(one, two, GAP_MAX)
    for run in (one, two):
        assert_played(run, recording)
        assert run.report.window.topology.device_stamped
        assert all(audit.ok or audit.may_lack for audit in run.report.audits.values()), (
            run.report.audits
        )
    assert two.report.primary is not None
    assert two.report.primary.s is not None
    assert two.report.primary.s >= 0.9


def test_no_loop_waits_for_its_gpu_or_allocates_once_it_is_warm(tmp_path: Path) -> None:
    settings = (
        "policy.target=sync_watch:build_policy",
        f"policy.options.folder='{tmp_path}'",
        "decode.target=sync_watch:build_decoder",
        f"decode.options.folder='{tmp_path}'",
        "bringup.warmup_max=60",
        "bringup.standalone=20",
        "bringup.envelopes=300",
        "service.endpoint=none",
        "service.duration_s=0.2",
    )
    with Ranks(tmp_path / "logs", *settings, config=CONFIG) as ranks:
        assert ranks.wait() == [0, 0], ranks.output()
        phases = {line["seq"]: line["phase"] for line in ranks.lines(0) if "seq" in line}
    assert phases[FROM] == phases[UNTIL] == "bring-up"  # it looked at the loops at full speed
    for rank in (0, 1):
        before, after = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert after == before, f"rank {rank}: device memory, locked pages"


#: Stage A of three cameras takes microseconds beside its policy: nothing to hide, and accepted.
SHIPPED = {"two_gpus": "bring-up PASS", "three_cameras": "ppstream: ready"}


@pytest.mark.parametrize("shipped", SHIPPED)
def test_a_shipped_configuration_is_ready_within_a_minute_of_a_cold_start(
    shipped: str, tmp_path: Path
) -> None:
    launcher = ["timeout", "-k", "5", str(COLD_LIMIT_S), sys.executable]
    launcher += [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        f"--master-port={free_port()}",
    ]
    command = [*launcher, "-m", "ppstream.serve", "--config", shipped]
    command += ["--set", f"log.root={tmp_path}", "--set", "service.duration_s=0.2"]
    began = time.monotonic()
    done = subprocess.run(
        command,
        env=environment_without_ranks(),
        capture_output=True,
        text=True,
        timeout=COLD_LIMIT_S + 10,
        check=False,
    )
    print(f"{time.monotonic() - began:.1f} s\n{done.stdout}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert SHIPPED[shipped] in done.stderr
