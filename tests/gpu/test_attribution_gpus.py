"""Blocks and profiles of a policy on a GPU: a table of shares, and traces of a run that goes on."""

from __future__ import annotations

import signal
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import SERVE, Ranks

from ppstream.report import attribution
from ppstream.report.kernels import cli
from ppstream.report.kernels.findings import findings

CONFIG = Path(__file__).parents[2] / "stages" / "ppstream_stages" / "two_gpus.toml"
BLOCKS = ["embed", "encoder", "decoder", "head"]  # of ppstream_stages.act
ATTRIBUTION = (
    'mode="attribution"',
    "policy.graph=false",
    "bringup.envelopes=400",
    "bringup.warmup_max=200",
    "service.endpoint=none",
)
ACTIVE = 20  # envelopes of a profile
AHEAD_MAX = 16  # further ones that are queued when it is to stop
RECORDED_S = 60
HELD_LIMIT_MS = 20_000
LIMIT_S = 50
IDLE_S = 7  # longer than the profiler takes to load, and than any watchdog waits

if torch.cuda.device_count() < 2:
    pytest.skip("needs two GPUs", allow_module_level=True)
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("world_size", "settings"),
    [(2, ()), (2, ("placement.rank0=cpu", "simulate.kind=sleep")), (1, ("simulate.kind=gpu",))],
    ids=["both-on-gpus", "rank-0-on-the-cpu", "inline"],
)
def test_blocks_of_a_policy_on_a_gpu_are_timed(
    tmp_path: Path, world_size: int, settings: tuple[str, ...]
) -> None:
    settings = (*ATTRIBUTION, *settings)
    with Ranks(tmp_path, *settings, world_size=world_size, config=CONFIG, module=SERVE) as ranks:
        assert ranks.wait(LIMIT_S) == [0] * world_size, ranks.output()
        table = attribution.report(ranks.directory)
        assert table is not None
        print(table)
        assert table in ranks.output()
        (said,) = [line for line in ranks.lines(0) if line.get("name") == "attribution"]
        assert 0.1 < said["perturbation"] < 10
        ratio = said["period_ns"] / said["throughput_period_ns"]
        assert said["perturbation"] == pytest.approx(ratio, rel=1e-3)
        modes = {line["mode"] for line in ranks.envelopes("bring-up")}
        blocks = [
            line["blocks"]
            for rank in range(world_size)
            for line in ranks.lines(rank)
            if line["kind"] == "blocks"
        ]
    assert modes == {"attribution"}
    rows = {line.split()[0]: line.split() for line in table.splitlines()[3:]}
    assert [name for name in rows if name in BLOCKS] == BLOCKS
    assert all(list(found) == BLOCKS for found in blocks)
    assert len(blocks) > 300  # a policy rank starts with its phase, some envelopes late
    share = {name: float(row[-1].rstrip("%")) for name, row in rows.items() if row[-1][-1] == "%"}
    assert share["encoder"] > share["embed"]
    assert share["decoder"] > share["head"]
    assert sum(share[name] for name in BLOCKS) > 0.6 * share["B"]
    assert sum(share[name] for name in BLOCKS) <= 1.05 * share["B"]


@pytest.mark.parametrize("graph", ["true", "false"])
def test_profiles_of_both_ranks_while_receipts_stand_queued(tmp_path: Path, graph: str) -> None:
    settings = (
        "bringup.envelopes=200",
        "service.endpoint=none",
        f"service.duration_s={RECORDED_S}",
        f"service.recording={recording(tmp_path)}",
        f"policy.graph={graph}",
        "profile.after=100",
        f"profile.active={ACTIVE}",
    )
    with Ranks(tmp_path, *settings, config=CONFIG) as ranks:
        wait_until(ranks, is_ready)
        wait_until(ranks, partial(has_profiles, count=1))
        tell(ranks, signal.SIGUSR2)
        wait_until(ranks, partial(has_profiles, count=2))
        time.sleep(0.5)  # the run goes on
        tell(ranks, signal.SIGTERM)
        assert ranks.wait() == [0, 0], ranks.output()
        for rank, name in ((0, "A"), (1, "B")):
            for number in (0, 1):
                path = ranks.directory / f"profile.rank{rank}.gen0.{number}.json"
                found = findings(cli.read_trace(path))
                print("\n".join(cli.lines(found, 5)))
                assert found.is_gpu
                assert found.kernels, "no kernel was recorded"
                calls = {s.name: s.calls for s in found.ranges}
                assert ACTIVE <= calls[name] <= ACTIVE + AHEAD_MAX
                if rank == 1 and graph == "false":
                    (work,) = [s for s in found.stages if s.name == name]
                    assert work.share > 0.9  # the policy's kernels, each in its range
                    assert set(BLOCKS) <= {s.name for s in found.stages}
        before_ns, after_ns = periods_ns(ranks.lines(0))
        held_ms = [line["held_ms"] for rank in (0, 1) for line in ended(ranks, rank)]
    print(f"loops stood for {held_ms} ms; period {before_ns} ns before, {after_ns} ns after")
    assert max(held_ms) < HELD_LIMIT_MS
    assert after_ns < 2 * before_ns


def test_an_idle_run_that_is_asked_for_a_profile_holds_nobody_up(tmp_path: Path) -> None:
    settings = ("bringup.envelopes=200", f"service.endpoint=unix://{tmp_path}/robots")
    with Ranks(tmp_path, *settings, "service.duration_s=60", config=CONFIG) as ranks:
        wait_until(ranks, is_ready)
        tell(ranks, signal.SIGUSR2)
        time.sleep(IDLE_S)
        assert [process.poll() for process in ranks.processes] == [None, None], ranks.output()
        tell(ranks, signal.SIGTERM)
        assert ranks.wait() == [0, 0], ranks.output()


def recording(folder: Path) -> Path:
    """Samples of two_gpus' streams."""
    rng = np.random.default_rng(3)
    arrays = {}
    for name, dim, rate_hz in (("joints", 14, 500), ("vision", 256, 30)):
        count = RECORDED_S * rate_hz
        arrays[f"{name}.stamps_ns"] = 10**15 + np.arange(count, dtype=np.int64) * (10**9 // rate_hz)
        arrays[f"{name}.values"] = rng.normal(size=(count, dim)).astype(np.float32)
    np.savez(folder / "recording.npz", **arrays)
    return folder / "recording.npz"


def ended(ranks: Ranks, rank: int) -> list[dict[str, Any]]:
    return [
        line
        for line in ranks.lines(rank)
        if line.get("name") == "profile" and line["state"] == "ended"
    ]


def is_ready(ranks: Ranks) -> bool:
    return any(line.get("phase") == "ready" for line in ranks.lines(0) if "name" in line)


def has_profiles(ranks: Ranks, count: int) -> bool:
    """Whether both ranks have ended so many."""
    return all(len(ended(ranks, rank)) >= count for rank in (0, 1))


def wait_until(ranks: Ranks, holds: Callable[[Ranks], bool]) -> None:
    """Fails with what the ranks said when one ends before, or when it takes too long."""
    deadline = time.monotonic() + LIMIT_S
    while not holds(ranks):
        ends = [process.poll() for process in ranks.processes]
        told = [line for rank in (0, 1) for line in ranks.lines(rank) if line["kind"] == "event"]
        assert ends == [None, None], (ends, told[-8:], ranks.output())
        assert time.monotonic() < deadline, (told[-8:], stacks(ranks), ranks.output())
        time.sleep(0.1)


def stacks(ranks: Ranks) -> str:
    """Where every thread of both ranks stands."""
    tell(ranks, signal.SIGQUIT)
    time.sleep(1)
    return "\n".join(path.read_text() for path in ranks.directory.glob("*stacks*"))


def tell(ranks: Ranks, number: signal.Signals) -> None:
    for process in ranks.processes:
        process.send_signal(number)


def periods_ns(lines: list[dict[str, Any]]) -> tuple[float, float]:
    """Median period of service before the first profile and behind the last."""
    served = [line for line in lines if line["kind"] == "envelope" and line["phase"] == "ready"]
    traced = [index for index, line in enumerate(served) if line["mode"] == "trace"]
    parts = (served[: traced[0]], served[traced[-1] + 1 :])
    before, after = (
        statistics.median(
            later["tA0"] - line["tA0"] for line, later in pairwise(part) if "tA0" in later
        )
        for part in parts
    )
    return before, after
