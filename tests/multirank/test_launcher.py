"""``ppstream run`` with real ranks and signals: its code, its last line, and who outlives it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from forked_process import ForkedProcess
from ranks import (
    BRIEF,
    CONFIG,
    NOTICED_BY,
    SERIAL,
    SERVE,
    SERVED,
    Ranks,
    environment_without_ranks,
)
from robot_rig import wait_until

from ppstream.control.peer_process import HeldProcess, children, command, ranks_started_by
from ppstream.control.watchdog import overdue_ns
from ppstream.core.clock import now_ns
from ppstream.launch.held_rank import LOOK_S
from ppstream.launch.launcher import LEAD_S
from ppstream.observe.run_folder import Run

pytestmark = pytest.mark.multirank

SERVE_ON = ("service.duration_s=none", SERVED, *BRIEF)
STANDING = (
    "policy.target=drill.standing_policy:build",
    "policy.options.inner=ppstream_stages.simulated:build",
    "policy.options.build_s=60",
)
LEAVING = """
import sys

from ppstream_stages import simulated


class Leaving:
    def __init__(self, inner):
        self.inputs, self.outputs, self.reset = inner.inputs, inner.outputs, inner.reset

    def __call__(self, window, out):
        sys.exit(3)


def build(options, device):
    return Leaving(simulated.build(options, device))
"""
TOOLS = str(Path(__file__).resolve().parents[2] / "tools")
FINDS_TOOLS = {"PYTHONPATH": TOOLS}
END_LIMIT_S = 60.0
GONE_LIMIT_S = 20.0  # ranks whose launcher is gone; they would stay for good


class Launched:
    """``ppstream run`` as a process, its output, and its ranks."""

    def __init__(
        self, folder: Path, *settings: str, options: tuple[str, ...] = (), config: Path = CONFIG
    ) -> None:
        self.output = folder / "output"
        command = ["forking_launcher", "ppstream.launch.commands", "run", str(config), *options]
        for setting in (f"log.root={folder}", *settings):
            command += ["--set", setting]
        path = f"{TOOLS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        environment = environment_without_ranks() | {"PYTHONPATH": path}
        self.output.touch()
        self.process = ForkedProcess(command, environment, self.output, own_session=True)
        self.log = Ranks.of_log(folder, [self.output])
        self.ranks: list[HeldProcess] = []

    def has_ranks(self, count: int = 2) -> bool:
        pids = ranks_started_by(self.process.pid)
        if len(pids) < count:
            return False
        self.ranks = [held for _, pid in sorted(pids.items()) if (held := HeldProcess.of(pid))]
        return len(self.ranks) == count

    def wait_for_phase(self, phase: str) -> None:
        wait_until(self.has_ranks, seconds=40)
        wait_until((self.log.log_root / "latest").exists, seconds=40)
        self.log.wait_for_event("phase", phase=phase)

    def wait(self, limit_s: float = END_LIMIT_S) -> int:
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end within {limit_s} s:\n{self.text()}") from None

    def text(self) -> str:
        return self.output.read_text()

    def last_line(self) -> str:
        return self.text().splitlines()[-1]


@contextmanager
def launched(folder: Path, *settings: str, **more: Any) -> Iterator[Launched]:
    run = Launched(folder, *settings, **more)
    try:
        yield run
        text = run.text()
        assert "Traceback" not in text, text
        assert "torch" not in text.replace("torchrun", ""), text
    finally:
        run.has_ranks()
        run.process.kill()
        for rank in run.ranks:
            rank.end()
        run.process.wait()


def test_a_run_that_drains_by_itself_ends_with_0_and_our_line(tmp_path: Path) -> None:
    with launched(tmp_path, SERVED, options=("--nproc=1",)) as run:
        assert run.wait() == 0, run.text()
        assert run.last_line() == "ppstream: exit 0 DRAINED service.duration_s is over"
        assert len(run.log.exits()) == 1


def test_a_demo_robot_that_lies_beside_the_configuration_is_found(tmp_path: Path) -> None:
    (tmp_path / "arm").mkdir()
    config = tmp_path / "arm" / "run.toml"
    config.write_text(CONFIG.read_text())
    (tmp_path / "arm" / "robot_beside_its_toml.py").write_text("raise SystemExit(7)")
    settings = "demo.robot=robot_beside_its_toml", f"service.endpoint=unix://{tmp_path}/r"
    with launched(tmp_path, *settings, SERVED, options=("--nproc=1",), config=config) as run:
        assert run.wait() == 11, run.text()
        assert "demo.robot: it ended with code 7 before the run was ready" in run.text()


def test_a_refused_run_ends_with_its_code_and_says_why_last(tmp_path: Path) -> None:
    enough = "bringup.envelopes=500"  # behind a busy start
    with launched(tmp_path, *SERIAL, enough) as run:
        assert run.wait() == 30, run.text()
        *said, last = run.text().splitlines()[-3:]  # rank 0's, and rank 1's before or behind it
        assert any(line.startswith("ppstream: exit 30 GATE_FAIL bring-up verdict") for line in said)
        assert last == f"ppstream: exit 30 GATE_FAIL {run.log.directory}"
        assert "first to fail: rank 1" not in run.text()


def test_ctrl_c_drains_with_0(tmp_path: Path) -> None:
    """It comes to the whole group, as from a terminal; and again, as impatient people do."""
    with launched(tmp_path, *SERVE_ON) as run:
        run.wait_for_phase("ready")
        for _ in range(3):
            os.killpg(run.process.pid, signal.SIGINT)
            time.sleep(0.02)
        assert run.wait(15) == 0, run.text()
        assert run.last_line().startswith("ppstream: exit 0 DRAINED SIGINT")
        assert {end["code"] for end in run.log.exits().values()} == {0}


def test_a_terminal_that_closes_while_ranks_start_ends_with_0(tmp_path: Path) -> None:
    with launched(tmp_path, *SERVE_ON) as run:
        wait_until(run.has_ranks, seconds=40)
        os.killpg(run.process.pid, signal.SIGHUP)
        # less than a rank waits for another one, or for the launcher's store
        assert run.wait(12) == 0, run.text()


def test_ctrl_c_while_ranks_still_import_ends_with_0_and_says_so(tmp_path: Path) -> None:
    """None has a handler yet: rank 0 cannot say how it ended."""
    output = tmp_path / "output"
    settings = (f"log.root={tmp_path}", "placement.replicas=2", *SERVE_ON)
    with output.open("w") as file:
        run = subprocess.Popen(
            run_command(*settings),
            env=environment_without_ranks(),
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        wait_until(lambda: 0 in ranks_started_by(run.pid), seconds=40)
        os.killpg(run.pid, signal.SIGINT)
        assert run.wait(20) == 0, output.read_text()
        assert output.read_text() == "ppstream: exit 0 DRAINED SIGINT before the run was ready\n"
    finally:
        run.kill()


@pytest.mark.parametrize("is_again", [False, True], ids=["once", "twice"])
def test_a_stop_that_waits_for_a_slow_policy_says_for_how_long(
    tmp_path: Path, is_again: bool
) -> None:
    with launched(tmp_path, *SERVE_ON, "policy.options.b_ms=60000") as run:
        run.wait_for_phase("warming")
        os.killpg(run.process.pid, signal.SIGINT)
        wait_until(lambda: "under way ends first, within 33 s; Ctrl-C ends it" in run.text())
        if not is_again:
            run.process.terminate()  # as a supervisor does; it ends nothing
            time.sleep(1.0)
            assert run.process.poll() is None, run.text()
            return
        os.killpg(run.process.pid, signal.SIGINT)
        assert run.wait(5) == 20, run.text()
        said = "ppstream: exit 20 PEER_LOST SIGINT came again; rank 0 ended with signal 9 SIGKILL; "
        assert run.last_line().startswith(said)


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_stop_before_the_ranks_have_met_is_no_failure(tmp_path: Path, is_begun: bool) -> None:
    with launched(tmp_path, *SERVE_ON) as run:
        wait_until(run.has_ranks, seconds=40)
        if is_begun:
            wait_until((tmp_path / "latest").exists, seconds=40)
        run.process.terminate()
        assert run.wait(12) == 0, run.text()
        assert "first to fail" not in run.text()
        assert "PEER_LOST" not in run.text()


@pytest.mark.parametrize("is_late", [False, True], ids=["at once", "late"])
def test_a_rank_that_rank_0_never_met_is_ended_behind_it(tmp_path: Path, is_late: bool) -> None:
    """Also when rank 0 takes longer to leave than the launcher waits between two signals."""
    for attempt in range(10):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        with launched(folder, *SERVE_ON, *NOTICED_BY[signal.SIGKILL]) as run:
            wait_until(run.has_ranks, seconds=40)
            run.ranks[1].signal(signal.SIGSTOP)  # it is slower: a signal to stop it is not heeded
            found = Run.of_launcher(folder, run.process.pid)
            if found is not None and found.ranks_met():
                continue  # this process was slower than both: again
            if is_late:
                run.ranks[0].signal(signal.SIGSTOP)
            run.process.terminate()
            if is_late:
                assert not run.ranks[1].wait_gone(5 * LEAD_S)
                run.ranks[0].signal(signal.SIGCONT)
            assert run.ranks[1].wait_gone(20), run.text()
            assert run.wait(20) == 0, run.text()
            assert "PEER_LOST" not in run.text()
            return
    raise AssertionError("the ranks always met first")


def test_a_rank_0_that_hears_no_stop_before_it_has_met_the_others_is_not_waited_for(
    tmp_path: Path,
) -> None:
    """It serves nobody: nothing is under way that could end first."""
    for attempt in range(10):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        with launched(folder, *SERVE_ON, *NOTICED_BY[signal.SIGKILL]) as run:
            wait_until(run.has_ranks, seconds=40)
            for rank in run.ranks:
                rank.signal(signal.SIGSTOP)
            found = Run.of_launcher(folder, run.process.pid)
            if found is not None and found.ranks_met():
                continue  # this process was slower than both: again
            run.process.terminate()
            assert run.wait(25) == 20, run.text()
            said = "no end within 5 s of the stop; rank 0 ended with signal 9 SIGKILL; "
            assert run.last_line().startswith(f"ppstream: exit 20 PEER_LOST {said}")
            assert "within 3 s; Ctrl-C" in run.text()
            return
    raise AssertionError("the ranks always met first")


def test_a_run_that_nohup_has_started_outlives_its_terminal(tmp_path: Path) -> None:
    output = tmp_path / "output"
    command = ["nohup", *run_command(f"log.root={tmp_path}", *SERVE_ON), "--nproc=1"]
    log = Ranks.of_log(tmp_path, [output])
    with (
        output.open("w") as file,
        subprocess.Popen(
            command,
            env=environment_without_ranks(),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        ) as process,
    ):
        try:
            wait_until((tmp_path / "latest").exists, seconds=60)
            log.wait_for_event("phase", phase="ready")
            os.killpg(process.pid, signal.SIGHUP)
            written = ledgers(log)
            wait_until(lambda: ledgers(log) > written + 2, seconds=30)  # one a second
            process.terminate()
            assert process.wait(60) == 0, output.read_text()
        finally:
            process.kill()


def test_a_launcher_that_waits_for_its_ranks_to_leave_opens_nothing_meanwhile(
    tmp_path: Path,
) -> None:
    with launched(tmp_path, *SERVE_ON) as run:
        run.wait_for_phase("ready")
        for rank in run.ranks:
            rank.signal(signal.SIGSTOP)
        run.process.terminate()
        time.sleep(4 * LEAD_S)  # both are asked to leave
        before = set(os.listdir(f"/proc/{run.process.pid}/fd"))
        time.sleep(6 * LEAD_S)
        assert set(os.listdir(f"/proc/{run.process.pid}/fd")) == before


def test_a_stop_signal_before_anything_has_started_starts_nothing(tmp_path: Path) -> None:
    with launched(tmp_path, *SERVE_ON) as run:
        run.process.terminate()
        assert run.wait(30) in (0, -signal.SIGTERM)


def test_a_stop_signal_while_the_policy_is_built_is_heard_by_both_ranks(tmp_path: Path) -> None:
    with launched(tmp_path, *SERVE_ON, *STANDING) as run:
        wait_until(lambda: "the build takes" in run.text(), seconds=40)
        run.process.terminate()
        began = time.monotonic()
        assert run.wait(15) == 0, run.text()
        assert time.monotonic() - began < 5
        assert {rank: end["code"] for rank, end in run.log.exits().items()} == {"0": 0, "1": 0}


def test_a_mistake_in_the_configuration_starts_nothing(tmp_path: Path) -> None:
    with launched(tmp_path, "pipeline.d_in=0", "window.steps='x'") as run:
        assert run.wait() == 11
        assert run.text().count("pipeline.d_in") == 1
        assert "window.steps" in run.text()
        assert run.last_line() == "ppstream: exit 11 CONFIG 2 problems, listed above"
    assert not (tmp_path / "latest").exists()


def test_all_that_ranks_would_refuse_on_this_host_is_told_at_once(tmp_path: Path) -> None:
    wrong = "log.root=/proc/none", "metrics.port=65533", "policy.target=nobody_here:build"
    with launched(tmp_path, *wrong, options=("--nproc=4",)) as run:
        assert run.wait() == 11
        assert "metrics.port: got 65533, want 65532 at most with 4 ranks" in run.text()
        assert "world size: got 4 ranks, want 2 (pipelined)" in run.text()
        assert "log.root: cannot write to /proc/none: No such file" in run.text()
        assert "policy.target: got 'nobody_here:build', but there is no module" in run.text()
        assert run.last_line() == "ppstream: exit 11 CONFIG 4 problems, listed above"


def test_an_address_that_another_program_has_is_told_before_ranks_start(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with launched(tmp_path, f"service.endpoint=tcp://127.0.0.1:{port}") as run:
            assert run.wait() == 11
            told = f"service.endpoint: cannot listen on 127.0.0.1:{port}: Address already in use"
            assert told in run.text()
            assert run.last_line() == "ppstream: exit 11 CONFIG 1 problem, listed above"
    assert not (tmp_path / "latest").exists()


def test_a_device_that_is_not_there_is_told_before_ranks_start(tmp_path: Path) -> None:
    with launched(tmp_path, "placement.policy=cuda:99") as run:
        assert run.wait() == 11
        assert "placement.policy: got cuda:99, but this machine has " in run.text()
        assert run.last_line() == "ppstream: exit 11 CONFIG 1 problem, listed above"
    assert not (tmp_path / "latest").exists()


@pytest.mark.parametrize("is_launched", [True, False], ids=["run", "torchrun"])
def test_a_lone_rank_whose_interpreter_is_held_is_ended_with_its_stacks(
    tmp_path: Path, is_launched: bool
) -> None:
    """Its own watchdog cannot look: it is a thread of that interpreter."""
    holding = (*STANDING, "policy.options.holds=true")
    holding += ("liveness.start_s=2", "liveness.watchdog_s=2")
    if is_launched:
        with launched(tmp_path, *holding, options=("--nproc", "1")) as run:
            assert run.wait() == 21, run.text()
            log, text = run.log, run.text()
            assert run.last_line() == f"ppstream: exit 21 WATCHDOG {log.directory}"
    else:
        with Ranks(tmp_path, *holding, world_size=1, module=SERVE, env=FINDS_TOOLS) as log:
            assert log.wait() == [-signal.SIGKILL], log.output()
            text = log.output()
    held = "ppstream: exit 21 WATCHDOG no Python thread of rank 0 could run"
    (line,) = [line for line in text.splitlines() if line.startswith(held)]
    stacks = re.search(r"\(all stacks: (.*)\)$", line)
    assert stacks, line
    assert "standing_policy.py" in Path(stacks[1]).read_text()
    end = log.exits()["0"]
    assert (end["code"], f"ppstream: exit 21 WATCHDOG {end['reason']}") == (21, line)
    manifest = json.loads((log.directory / "run.json").read_text())
    assert manifest["exit_code"] == 21
    assert manifest["finished_utc"] is not None


def test_a_lone_rank_that_drains_leaves_nothing_that_looks_at_it(tmp_path: Path) -> None:
    with launched(tmp_path, *SERVE_ON, options=("--nproc", "1")) as run:
        wait_until(lambda: run.has_ranks(1), seconds=40)
        wait_until((tmp_path / "latest").exists, seconds=40)
        run.log.wait_for_event("phase", phase="ready")
        (beside,) = children(run.ranks[0].pid)
        process = HeldProcess.of(beside)
        assert process is not None
        assert "held_rank" in command(beside)
        run.ranks[0].signal(signal.SIGTERM)
        assert run.wait() == 0, run.text()
        assert process.wait_gone(GONE_LIMIT_S)
        process.close()


def test_a_lone_rank_that_is_stopped_and_goes_on_is_left_alone(tmp_path: Path) -> None:
    quick = (*SERVE_ON, "liveness.watchdog_s=2")
    with launched(tmp_path, *quick, options=("--nproc", "1")) as run:
        wait_until(lambda: run.has_ranks(1), seconds=40)
        wait_until((tmp_path / "latest").exists, seconds=40)
        run.log.wait_for_event("phase", phase="ready")
        (stacks,) = (tmp_path / "latest").glob("*.stacks.txt")
        looked_twice_ns = round(2 * LOOK_S * 1e9)
        wait_until(lambda: overdue_ns(stacks, now_ns()) > -3e9)  # it has looked since ready
        run.ranks[0].signal(signal.SIGSTOP)
        wait_until(lambda: overdue_ns(stacks, now_ns()) > looked_twice_ns)
        run.ranks[0].signal(signal.SIGCONT)
        wait_until(lambda: overdue_ns(stacks, now_ns()) <= 0)
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 0, run.text()


def test_a_killed_rank_0_is_a_lost_one(tmp_path: Path) -> None:
    with launched(tmp_path, *SERVE_ON) as run:
        run.wait_for_phase("ready")
        run.ranks[0].end()
        assert run.wait(15) == 20, run.text()
        said = "ppstream: exit 20 PEER_LOST rank 0 ended with signal 9 SIGKILL; "
        assert run.last_line().startswith(said)
        manifest = json.loads((run.log.directory / "run.json").read_text())
        assert (manifest["exit_code"], manifest["finished_utc"]) == (20, None)


def test_a_crashed_policy_rank_is_told_with_its_signal(tmp_path: Path) -> None:
    with launched(tmp_path, *SERVE_ON) as run:
        run.wait_for_phase("ready")
        run.ranks[1].signal(signal.SIGSEGV)
        assert run.wait(15) == 20, run.text()
        said = "ppstream: exit 20 PEER_LOST rank 1 ended with signal 11 SIGSEGV; "
        assert run.last_line() == f"{said}{run.log.directory}"


LARGE = """
from pathlib import Path
import os
import torch


def build(options, device):
    (Path(options["group"]) / "cgroup.procs").write_text(str(os.getpid()))
    return torch.ones(1 << 28)
"""


def test_a_rank_that_the_kernel_killed_for_want_of_memory_is_told_as_such(tmp_path: Path) -> None:
    group = Path("/sys/fs/cgroup/memory") / f"ppstream-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(200 << 20))
    except OSError as error:
        pytest.skip(f"no group of processes with less memory can be made: {error}")
    config = tmp_path / "run.toml"
    config.write_text(CONFIG.read_text())
    (tmp_path / "large_policy.py").write_text(LARGE)
    settings = "policy.target=large_policy:build", f"policy.options.group={group}"
    try:
        with launched(tmp_path, *settings, config=config) as run:
            assert run.wait() == 20, run.text()
            said = "ppstream: exit 20 PEER_LOST rank 1 ended with signal 9 SIGKILL; the kernel has "
            assert run.last_line().startswith(f"{said}killed a process of this host for want of")
    finally:
        wait_until(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()


def test_a_run_whose_policy_rank_fails_first_ends_with_its_code(tmp_path: Path) -> None:
    (tmp_path / "arm").mkdir()
    config = tmp_path / "arm" / "run.toml"
    config.write_text(CONFIG.read_text())
    (tmp_path / "arm" / "leaving_policy.py").write_text(LEAVING)
    with launched(tmp_path, "policy.target=leaving_policy:build", config=config) as run:
        assert run.wait() == 26, run.text()
        assert run.last_line() == f"ppstream: exit 26 POLICY_OUTPUT {run.log.directory}"
        why = run.log.exits()["1"]["reason"]
        assert [line for line in run.text().splitlines() if why in line] == [
            f"ppstream: rank 1: exit 26 POLICY_OUTPUT {why}",
            f"ppstream: first to fail: rank 1: exit 26 POLICY_OUTPUT {why}",
        ]
        assert "ppstream: exit 20 PEER_LOST the other rank left with 26 POLICY_OUTPUT" in run.text()
        assert {rank: end["code"] for rank, end in run.log.exits().items()} == {"0": 20, "1": 26}
        assert json.loads((run.log.directory / "run.json").read_text())["exit_code"] == 26


@pytest.mark.parametrize("phase", ["warming", "ready"])
def test_ranks_leave_when_their_launcher_is_killed(tmp_path: Path, phase: str) -> None:
    """And a run that was warming never becomes ready; one whose launcher is stopped goes on."""
    slow = ("policy.options.b_ms=50", "bringup.warmup_max=2000")
    with launched(tmp_path, *SERVE_ON, *(slow if phase == "warming" else ())) as run:
        run.wait_for_phase(phase)
        run.process.send_signal(signal.SIGSTOP)
        assert not any(rank.wait_gone(0.3) for rank in run.ranks)
        run.process.send_signal(signal.SIGCONT)
        assert not any(rank.wait_gone(0.3) for rank in run.ranks)
        run.process.kill()
        assert all(rank.wait_gone(GONE_LIMIT_S) for rank in run.ranks), run.text()
        for end in run.log.exits().values():
            assert end["code"] == 20
            assert end["reason"].startswith("LAUNCHER_LOST")
        phases = [line["phase"] for line in run.log.lines(0) if line.get("name") == "phase"]
        assert ("ready" in phases) == (phase == "ready")
        assert "first to fail" not in run.text()


def test_ranks_leave_when_their_launcher_is_killed_while_the_policy_is_built(
    tmp_path: Path,
) -> None:
    """User code holds the policy rank's main thread, and rank 0's waits for it."""
    with launched(tmp_path, *SERVE_ON, *STANDING) as run:
        wait_until(lambda: "the build takes" in run.text(), seconds=40)
        wait_until(run.has_ranks)
        run.process.kill()
        assert all(rank.wait_gone(GONE_LIMIT_S) for rank in run.ranks), run.text()
        assert {end["code"] for end in run.log.exits().values()} == {20}


def test_a_run_outlives_a_replica_that_it_can_do_without(tmp_path):
    """It is stopped, and ended; its guard, which the launcher has started, leaves with 0."""
    settings = "placement.replicas=2", "placement.replicas_min=1", "liveness.handshake_s=60"
    gate = "bringup.envelopes=200"  # three ranks on a busy machine become even later than others
    with launched(tmp_path, *SERVE_ON, *settings, gate) as run:
        wait_until((tmp_path / "latest").exists, seconds=40)
        run.log.wait_for_event("phase", phase="ready")
        os.kill(run.log.pid_of(2), signal.SIGSTOP)
        run.log.wait_for_event("phase", phase="degraded")
        written = ledgers(run.log)
        wait_until(lambda: ledgers(run.log) > written + 3, seconds=60)  # one a second
        assert [line["phase"] for line in run.log.lines(0) if line.get("name") == "phase"][-2:] == [
            "ready",
            "degraded",
        ]
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 0, run.text()


def test_a_stop_before_replicas_have_met_rank_0_is_heard_by_all(tmp_path: Path) -> None:
    """Those that may be lost have guards, which the launcher has started."""
    settings = "placement.replicas=2", "placement.replicas_min=1", "liveness.handshake_s=60"
    with launched(tmp_path, *SERVE_ON, *settings) as run:
        wait_until((tmp_path / "latest").exists, seconds=40)
        run.process.send_signal(signal.SIGTERM)
        assert run.wait(30) == 0, run.text()
        assert "did not answer" not in run.text()


def test_a_replica_that_rank_0_never_met_is_ended_with_its_guard(tmp_path: Path) -> None:
    settings = "placement.replicas=2", "placement.replicas_min=1", "liveness.handshake_s=60"
    with launched(tmp_path, *SERVE_ON, *settings) as run:
        wait_until(lambda: run.has_ranks(3), seconds=40)
        run.ranks[0].signal(signal.SIGSTOP)  # it meets none of them
        wait_until(lambda: any(children(run.ranks[2].pid)), seconds=40)
        replica = HeldProcess.of(next(children(run.ranks[2].pid)))
        assert replica is not None
        run.ranks.append(replica)
        replica.signal(signal.SIGSTOP)  # it does not notice that its guard is gone
        run.process.terminate()
        run.ranks[0].signal(signal.SIGCONT)
        assert run.wait(20) == 0, run.text()
        assert replica.wait_gone(0.5), run.text()
        assert "LAUNCHER_LOST" not in run.text()


def run_command(*settings: str) -> list[str]:
    """``ppstream run``, of which nothing is loaded before it starts."""
    pairs = (part for setting in settings for part in ("--set", setting))
    return [sys.executable, "-m", "ppstream.launch.commands", "run", str(CONFIG), *pairs]


def ledgers(log: Ranks) -> int:
    return sum(line["kind"] == "ledger" for line in log.lines(0))
