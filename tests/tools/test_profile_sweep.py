"""The sweep of profiles on a CPU: what it keeps, measures anew, and loses with a failing cell."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import profile_sweep
import pytest
from bench.profile_cells import SIZES, TokenDecoder, answer, step_of
from profile_sweep import Worker, main
from torch import device, enable_grad

TINY = ("--sizes", "tiny", "--contexts", "8", "16", "--device", "cpu", "--steps", "1")
CPU = device("cpu")
POLICY = """
name = "own"
[[streams]]
name = "joints"
dim = 4
rate_hz = 100
reference = true
[window]
steps = 2
dt_ms = 10
[actions]
names = ["x"]
horizon = 1
dt_ms = 10
low = [-1.0]
high = [1.0]
lease_ms = 100
[policy]
target = "dying_policy:build"
"""


def measured(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines about cells that were not kept."""
    return re.findall(r"^\d+ of \d+  (.*)$", capsys.readouterr().out, re.MULTILINE)


class WorkerHere(Worker):
    """Measures in this process, which has imported what that takes."""

    def ask(self, **order: Any) -> dict[str, Any]:
        with enable_grad():  # runs in this process may have turned it off
            found: dict[str, Any] = json.loads(json.dumps(answer({"device": "cpu"} | order)))
        return found


def test_each_cell_has_shares_and_is_kept_while_it_is_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile_sweep, "Worker", WorkerHere)
    asked = [str(tmp_path), *TINY, "--kinds", "forward", "training", "--policies", "two_cameras"]
    names = [f"tiny-{context}-{kind}" for context in (8, 16) for kind in ("forward", "training")]
    assert main(asked) == 0
    assert measured(capsys) == [*names, "two_cameras"]
    files = [tmp_path / "cells" / f"{name}.json" for name in names]
    traces = [file.with_suffix(".trace.json") for file in files]
    found = [json.loads(file.read_text()) for file in files]
    for one in found:
        assert abs(sum(one["categories"].values()) - 1) < 1e-6
        assert one["categories"]["matmul"] > 0
        assert 0 < one["ranges"]["softmax"] < one["ranges"]["attention"] < 1
    assert found[1]["flops"] == 3 * found[0]["flops"]
    assert [one["ranges"].get("optimizer", 0) > 0 for one in found[:2]] == [False, True]
    assert (tmp_path / "sweep.svg").stat().st_size > 1000

    traces[0].write_bytes(traces[0].read_bytes()[:-9])
    files[1].write_text("{")
    traces[2].unlink()
    found[3]["settings"]["batch"] += 1
    files[3].write_text(json.dumps(found[3]))
    assert main(asked) == 0
    assert measured(capsys) == [
        f"{names[0]} (its trace is another file, a placeholder or cut)",
        f"{names[1]} (its result is damaged)",
        f"{names[2]} (its trace is gone)",
        f"{names[3]} (its result is stale: made with other settings)",
    ]


def test_a_cell_that_kills_its_process_costs_itself_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "dying_policy.py").write_text("import os\ndef build(*_): os._exit(7)\n")
    (tmp_path / "own.toml").write_text(POLICY)
    policies = ("--policies", str(tmp_path / "own.toml"), "two_cameras")  # the next in a new one
    asked = [str(tmp_path / "out"), "--sizes", "--device", "cpu", "--steps", "1", *policies]
    assert main(asked) == 1
    said = capsys.readouterr().out
    assert "failed: its process ended with 7" in said
    assert "start it again to measure these alone" in said
    assert json.loads((tmp_path / "out/cells/two_cameras.json").read_text())["status"] == "done"


def test_a_cell_above_its_limit_is_ended() -> None:
    with Worker("cpu", limit_s=0.2) as worker:
        found = worker.ask()
    assert found == {"status": "failed", "why": "above 0.2 s"}


def test_the_family_has_the_sizes_that_it_is_named_after() -> None:
    millions = {"small": 128.6, "medium": 423.2, "large": 969.4, "xl": 1998.2, "2.7B": 3406.8}
    assert set(millions) == set(profile_sweep.FAMILY)
    with device("meta"):
        counts = {
            name: sum(weight.numel() for weight in TokenDecoder(SIZES[name], 16).parameters())
            for name in millions
        }
    for name, count in millions.items():
        assert abs(counts[name] / 1e6 / count - 1) < 0.002


def test_a_token_sees_none_behind_it() -> None:
    settings = {"size": "tiny", "context": 8, "batch": 1, "kind": "forward", "dtype": "float32"}
    step = step_of(settings, CPU).step
    model, given = step.__wrapped__.func, step.__wrapped__.args[0]  # type: ignore[attr-defined]
    before = model(given)
    given[0, 5] = (given[0, 5] + 1) % 100
    changed = (model(given) != before).any(dim=2)[0].tolist()
    assert changed == [False] * 5 + [True] * 3
