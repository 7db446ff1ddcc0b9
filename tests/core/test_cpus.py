"""CPUs that may be used, from affinity and cgroups of both versions; waits for one."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ppstream.core.clock import thread_cpu_ns
from ppstream.core.cpus import (
    ONE_OF,
    SHORT_NS,
    Machine,
    MachineMeter,
    RunDelay,
    StageCost,
    has_spare_cpus,
    preemptions,
    usable_cpus,
)

OWN = len(os.sched_getaffinity(0))


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({}, OWN),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, OWN),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 0.5),
        (
            {  # the parent's quota is the smaller one
                "proc/self/cgroup": "0::/pod/run\n",
                "sys/fs/cgroup/pod/run/cpu.max": "90000 100000\n",
                "sys/fs/cgroup/pod/cpu.max": "25000 100000\n",
            },
            0.25,
        ),
        (  # the path is the host's, the mount the container's own
            {"proc/self/cgroup": "0::/host/x\n", "sys/fs/cgroup/cpu.max": "30000 100000\n"},
            0.3,
        ),
        (
            {
                "proc/self/cgroup": "5:memory:/\n4:cpu,cpuacct:/docker/x\n",
                "sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_quota_us": "40000\n",
                "sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_period_us": "100000\n",
            },
            0.4,
        ),
        (
            {
                "proc/self/cgroup": "1:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            OWN,
        ),
    ],
)
def test_quota_of_every_cgroup_above_limits_the_cpus(
    files: dict[str, str], cpus: float, tmp_path: Path
) -> None:
    assert usable_cpus(root=tree(tmp_path, files)) == cpus


@pytest.mark.parametrize(
    ("cpus", "quota_us", "spare"), [(8, -1, True), (7, -1, False), (64, 700_000, False)]
)
def test_a_host_of_many_cpus_has_some_to_spare_unless_a_quota_takes_them(
    cpus: int, quota_us: int, spare: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = "sys/fs/cgroup/cpu"
    files = {"proc/self/cgroup": "1:cpu:/\n", f"{folder}/cpu.cfs_quota_us": f"{quota_us}\n"}
    files[f"{folder}/cpu.cfs_period_us"] = "100000\n"
    monkeypatch.setattr(os, "cpu_count", lambda: cpus)
    assert has_spare_cpus(tree(tmp_path, files)) is spare


def test_who_lets_others_have_its_cpu_counts_as_preempted() -> None:
    before, own = preemptions(), os.sched_getaffinity(0)
    try:
        with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
            try:
                os.sched_setaffinity(0, {min(own)})
                os.sched_setaffinity(other.pid, {min(own)})
                until = time.monotonic() + 20
                while preemptions() == before and time.monotonic() < until:
                    os.sched_yield()
            finally:
                other.kill()
    finally:
        os.sched_setaffinity(0, own)
    assert preemptions() > before


def test_affinity_of_another_process_adds_its_cpus(tmp_path: Path) -> None:
    everything = os.sched_getaffinity(0)
    if len(everything) < 2:
        pytest.skip("needs two CPUs")
    first = min(everything)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        try:
            os.sched_setaffinity(0, {first})
            assert usable_cpus(root=tmp_path) == 1
            assert usable_cpus((other.pid,), tmp_path) == len(everything)
            os.sched_setaffinity(other.pid, {first})
            assert usable_cpus((other.pid,), tmp_path) == 1  # both on one
            assert usable_cpus((1 << 22,), tmp_path) == 1  # nobody
        finally:
            os.sched_setaffinity(0, everything)
            assert other.stdin is not None
            other.stdin.close()


def test_steal_is_a_share_of_the_time_since_construction(tmp_path: Path) -> None:
    stat = "cpu  100 0 100 {idle} 0 0 0 {steal} 5 5\nintr 1 2 3\n"
    root = tree(tmp_path, {"proc/stat": stat.format(idle=800, steal=100)})
    meter = MachineMeter(2, root=root)
    assert meter.read().steal_share is None
    tree(tmp_path, {"proc/stat": stat.format(idle=875, steal=125)})
    assert meter.read().steal_share == 0.25
    assert MachineMeter(2, root=tmp_path / "nowhere").read().steal_share is None


def test_cpus_that_others_use_are_the_usable_ones_less_our_own(tmp_path: Path) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    usable = f"cpu{cpus[0]} {{user}} 0 0 {{idle}} 0 0 0 0 0 0\n"
    busy = "cpu 9 9 9 9 9 9 9 9 9 9\n" + usable + "cpu4095 {user} 0 0 0 0 0 0 0 0 0\n"
    own = f"proc/{os.getpid()}/stat"
    stat = "1 (a ) name) S" + " 0" * 10 + " {user} {system} 0\n"
    files = {"proc/stat": busy.format(user=0, idle=0), own: stat.format(user=7, system=2)}
    meter = MachineMeter(2, root=tree(tmp_path, files))
    assert meter.read().others_cpus is None
    files = {"proc/stat": busy.format(user=90, idle=10), own: stat.format(user=37, system=12)}
    tree(tmp_path, files)
    assert meter.read().others_cpus == 0.5  # 90 used, 40 of it by this process
    meter.restart()
    assert meter.read().others_cpus is None


def test_machine_says_when_threads_have_to_share_a_cpu() -> None:
    assert Machine(2, 2, 8.6, 0.12).text() == "load 8.6 on 2 usable CPUs, 12% stolen"
    assert Machine(4, 2, 8.6, 0.0, 1.26).text().endswith("0% stolen, other programs take 1.3")
    assert Machine(1, 2, 8.6, None).text() == (
        "load 8.6 on 1 usable CPU, steal unknown: 2 threads work at the same time and share them"
    )


def test_cpus_are_found_for_every_set_of_threads() -> None:
    apart = {"r0A": [0, 1], "r0C": [1], "mesh": [0, 1, 2]}
    machine = Machine(3, 3, 1.0, 0.0, 0.0, apart)
    assert machine.holds({"r0A": 1, "r0C": 1, "mesh": 1})
    assert machine.confined == ()
    assert not machine.is_short
    together = machine._replace(thread_cpus=apart | {"r0A": [1]})
    assert not together.holds({"r0A": 0.9, "r0C": 0.2, "mesh": 0})
    assert together.holds({"r0A": 0.7, "r0C": 0.2, "mesh": 1})
    assert together.confined == ("r0A", "r0C")
    assert together.text().endswith("r0A and r0C may use CPU 1 only, and share it")
    assert not Machine(1.5, 2, 1.0, 0.0, 0.0, apart).holds({"r0A": 1, "mesh": 1})  # a quota
    assert not Machine(1, 2, 1.0, 0.0).holds({"r0": 1, "mesh": 1})  # nobody knows which


def test_what_the_run_has_started_is_no_other_program(tmp_path: Path) -> None:
    cpu = min(os.sched_getaffinity(0))
    stat = "1 (a) S" + " 0" * 10 + " {user} 0 {ended} 0\n"
    line = f"cpu{cpu} {{user}} 0 0 {{idle}} 0 0 0 0 0 0\n"

    def at(user: int, own: int, child: int) -> Path:
        files = {"proc/stat": line.format(user=user, idle=user // 9)}
        files[f"proc/{os.getpid()}/stat"] = stat.format(user=own, ended=own)
        return tree(tmp_path, files | {"proc/77/stat": stat.format(user=child, ended=0)})

    found: list[int] = []
    meter = MachineMeter(2, family=lambda: found, root=at(0, 0, 0))
    at(90, 10, 50)
    assert meter.read({"r0": [cpu]}).others_cpus == 0.7  # 10 itself, 10 children that have ended
    found.append(77)
    assert meter.read({"r0": [cpu]}).others_cpus == 0.2
    assert meter.read({"r0": [cpu + 4000]}).others_cpus is None


def test_what_a_long_stage_costs_is_asked_each_time_and_a_short_one_s_now_and_then() -> None:
    delay = RunDelay()
    delay.begin()
    cost = StageCost(delay)
    known = []
    for took_ns in [10 * SHORT_NS] * 20 + [SHORT_NS // 10] * 80 + [10 * SHORT_NS] * 40:
        cost.enter()
        cost.leave(took_ns)
        known.append(cost.cpu_ns is not None)
    assert all(known[:20])
    assert sum(known[52:100]) == 48 // ONE_OF
    assert all(known[110:])


def test_cost_of_a_stage_is_the_time_that_its_thread_computed_in_it() -> None:
    delay = RunDelay()
    delay.begin()
    cost = StageCost(delay)
    cost.enter()
    compute(2_000_000)
    cost.leave(2_000_000)
    assert cost.cpu_ns is not None
    assert 2_000_000 <= cost.cpu_ns < 20_000_000
    assert cost.delay_ns is None or cost.delay_ns >= 0


def compute(ns: int) -> None:
    until_ns = thread_cpu_ns() + ns
    while thread_cpu_ns() < until_ns:
        pass


def test_what_a_thread_computes_behind_the_end_of_a_stage_is_not_the_stage_s() -> None:
    delay = RunDelay()
    delay.begin()
    cost = StageCost(delay)
    for _ in range(2):
        cost.enter()
        cost.end()
        compute(20_000_000)
        cost.leave(SHORT_NS)
        assert cost.cpu_ns is not None
        assert cost.cpu_ns < 10_000_000
    cost.enter()
    compute(2_000_000)
    cost.leave(2_000_000)
    assert cost.cpu_ns >= 2_000_000


def test_thread_beside_a_busy_one_on_its_cpu_was_runnable_without_it() -> None:
    cpu = min(os.sched_getaffinity(0))
    busy = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]
    waited: list[int] = []

    def work() -> None:
        os.sched_setaffinity(0, {cpu})  # of this thread alone
        delay = RunDelay()
        assert delay.pop_ns() is None
        delay.begin()
        while not waited or waited[-1] < 3_000_000:
            sum(range(20_000))
            delay.read_ns()
            waited.append((waited[-1] if waited else 0) + (delay.pop_ns() or 0))

    with subprocess.Popen(busy, stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None
            other.stdout.readline()
            os.sched_setaffinity(other.pid, {cpu})
            thread = threading.Thread(target=work)
            thread.start()
            thread.join(60)
            assert waited[-1] >= 3_000_000
        finally:
            other.kill()
