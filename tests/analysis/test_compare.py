"""Comparing runs: the difference with its interval, and every reason not to compare."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faulty_runs import unsettled
from golden_runs import GoldenRun, jittered, simulate, stages

from ppstream.analysis.period_model import PipelineForm
from ppstream.core.errors import CompareError
from ppstream.report.cli import main
from ppstream.report.comparison import compare_folders, comparison_text

CONFIG: dict[str, Any] = {
    "name": "one",
    "streams": [{"name": "joints", "dim": 7, "rate_hz": 1000.0}],
    "policy": {"target": "lab:build", "weights": "/here/w.safetensors", "options": {"b_ms": 10.0}},
    "pipeline": {"d_in": 2, "d_out": 2, "threads": "serial"},
    "bringup": {"source": "synthetic", "envelopes": 400},
    "service": {"endpoint": "none"},
}
HARDWARE = {"host": "one", "cpu": "some CPU", "cpus": 8, "kernel": "6.1"}


def golden(b: float = 10, seed: int = 1, **ids: Any) -> GoldenRun:
    run = simulate(jittered(stages(b=b), 200, seed), **ids)
    run.manifest |= {"config": json.loads(json.dumps(CONFIG)), "hardware": dict(HARDWARE)}
    run.manifest |= {"run_id": f"run{seed}", "versions": {"ppstream": "0.1.0"}}
    return run


def both(tmp_path: Path, a: GoldenRun, b: GoldenRun) -> tuple[Path, Path]:
    return a.write(tmp_path / "before"), b.write(tmp_path / "after")


def refusal(tmp_path: Path, a: GoldenRun, b: GoldenRun) -> str:
    with pytest.raises(CompareError) as caught:
        compare_folders(*both(tmp_path, a, b))
    return str(caught.value)


def test_a_faster_stage_is_found_with_an_interval_that_holds_the_truth(tmp_path: Path) -> None:
    found = compare_folders(*both(tmp_path, golden(b=12), golden(b=11.4, seed=2)))
    period = found.differences[0]
    assert period.name == "period"
    assert period.low < 11.4 / 12 - 1 < period.high < 0
    assert found.verdict.startswith("after is ")
    assert " faster than before" in found.verdict
    assert {d.name for d in found.differences} == {"period", "latency", "age on rank 0"}


def test_no_difference_is_claimed_where_there_is_none(tmp_path: Path) -> None:
    found = compare_folders(*both(tmp_path, golden(seed=3), golden(seed=4)))
    assert found.differences[0].low < 0 < found.differences[0].high
    assert found.verdict.startswith("no difference")
    assert "not shown" in comparison_text(found)


def test_the_same_run_twice_differs_by_nothing(tmp_path: Path) -> None:
    found = compare_folders(*both(tmp_path, golden(), golden()))
    assert [d.change for d in found.differences] == [0, 0, 0]


def test_swapping_both_sides_turns_the_sign(tmp_path: Path) -> None:
    a, b = both(tmp_path, golden(b=12), golden(b=9, seed=2))
    one, other = compare_folders(a, b).differences[0], compare_folders(b, a).differences[0]
    assert one.change < 0 < other.change
    assert (1 + one.change) * (1 + other.change) == pytest.approx(1)


def test_interval_is_about_as_wide_as_twenty_fresh_pairs_scatter(tmp_path: Path) -> None:
    pairs = [
        compare_folders(*both(tmp_path / str(s), golden(seed=s), golden(seed=s + 100)))
        for s in range(20)
    ]
    covered = sum(p.differences[0].low <= 0 <= p.differences[0].high for p in pairs)
    assert covered >= 16  # of 20 at 95 %: fewer than that has a chance of 0.3 %


def test_several_runs_a_side_widen_the_interval_by_how_they_differ(tmp_path: Path) -> None:
    for side, periods in (("a", (10, 11, 12)), ("b", (10.2, 11.1, 12.1))):
        for b in periods:
            golden(b=b, seed=int(10 * b)).write(tmp_path / side / f"{b}")
    found = compare_folders(tmp_path / "a", tmp_path / "b")
    assert not found.differences[0].is_shown
    assert found.differences[0].high - found.differences[0].low > 0.1
    assert "from one start to the next" not in comparison_text(found)
    alone = compare_folders(tmp_path / "a" / "10", tmp_path / "b" / "12.1")
    assert "from one start to the next" in comparison_text(alone)


def test_no_interval_of_few_runs_says_that_a_time_may_fall_by_more_than_all(
    tmp_path: Path,
) -> None:
    for side, periods in (("a", (20, 20, 60)), ("b", (5, 5, 40))):
        for k, b in enumerate(periods):
            run = simulate(stages(b=b), n=160).set("run_id", f"{side}{k}")
            run.write(tmp_path / side / f"{k}")
    found = compare_folders(tmp_path / "a", tmp_path / "b").differences[0]
    assert -1 < found.low < found.change < found.high


@pytest.mark.parametrize(("apart", "is_shown"), [(0.15, False), (0.5, True)])
def test_few_runs_a_side_show_only_what_their_own_spread_cannot_be(
    apart: float, is_shown: bool, tmp_path: Path
) -> None:
    """By Student's t of the six means: 1.8 and 6.1, where 2.8 is needed."""
    for side, first in (("a", 10.0), ("b", 10.0 + apart)):
        for k in range(3):
            run = simulate(stages(b=first + 0.1 * k), n=160).set("run_id", f"{side}{k}")
            run.write(tmp_path / side / f"{k}")
    found = compare_folders(tmp_path / "a", tmp_path / "b").differences[0]
    assert found.is_shown is is_shown


def test_weights_are_the_same_by_their_digest_and_without_one_by_their_name(tmp_path: Path) -> None:
    one, other, unknown = golden(), golden(seed=2), golden(seed=3)
    one.manifest["weights_sha256"], other.manifest["weights_sha256"] = "a" * 64, "b" * 64
    said = refusal(tmp_path / "1", one, other)
    assert "sha256 of weights: 'aaaaaaaaaaaa' in before, 'bbbbbbbbbbbb' in after" in said
    assert compare_folders(*both(tmp_path / "2", one, unknown)).knobs == ()
    other.manifest["weights_sha256"] = "a" * 64
    change("config.policy.weights", "/here/copy.safetensors")(other.manifest)
    assert compare_folders(*both(tmp_path / "3", one, other)).knobs == ()


def change(path: str, value: object) -> Callable[[dict[str, Any]], None]:
    def apply(manifest: dict[str, Any]) -> None:
        *tables, key = path.split(".")
        table: Any = manifest
        for name in tables:
            table = table[int(name)] if isinstance(table, list) else table.setdefault(name, {})
        table[key] = value

    return apply


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("config.streams.0.rate_hz", 500.0, "streams.0.rate_hz: 1000.0 in before, 500.0 in after"),
        ("config.policy.options.b_ms", 9.0, "policy.options.b_ms"),
        ("config.policy.options.new", 1, "policy.options.new: None in before, 1 in after"),
        ("config.policy.weights", "/here/other.safetensors", "policy.weights: 'w.safetensors'"),
        ("config.bringup.source", "recording", "bringup.source"),
        ("hardware.cpu", "another CPU", "hardware.cpu: 'some CPU' in before"),
        ("hardware.cpus", 4, "hardware.cpus: 8 in before, 4 in after"),
        ("topology.ranks.1.device", "cuda:0", "device of rank 1: None in before, 'cuda:0'"),
    ],
)
def test_what_matters_is_refused_by_name(
    path: str, value: object, said: str, tmp_path: Path
) -> None:
    other = golden(seed=2)
    change(path, value)(other.manifest)
    assert said in refusal(tmp_path, golden(), other)


@pytest.mark.parametrize(
    ("path", "value", "knob"),
    [
        ("config.pipeline.new_setting", 3, "pipeline.new_setting None → 3"),
        ("config.streams.0.new_setting", 3, "streams.0.new_setting None → 3"),
        ("versions.ppstream", "0.2.0", "version of ppstream 0.1.0 → 0.2.0"),
        ("hardware.kernel", "6.2", "hardware.kernel 6.1 → 6.2"),
        ("native", True, "native None → True"),
    ],
)
def test_what_is_being_compared_is_named_and_allowed(
    path: str, value: object, knob: str, tmp_path: Path
) -> None:
    other = golden(seed=2)
    change(path, value)(other.manifest)
    assert compare_folders(*both(tmp_path, golden(), other)).knobs == (knob,)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("config.name", "two"),
        ("config.service.endpoint", "tcp://127.0.0.1:1"),
        ("config.bringup.envelopes", 800),
        ("config.policy.weights", "/there/w.safetensors"),
    ],
)
def test_names_and_places_are_no_difference(path: str, value: object, tmp_path: Path) -> None:
    other = golden(seed=2)
    change(path, value)(other.manifest)
    assert compare_folders(*both(tmp_path, golden(), other)).knobs == ()


def test_runs_of_one_side_that_were_set_differently_are_refused(tmp_path: Path) -> None:
    other = golden(seed=2)
    change("config.pipeline.d_in", 3)(other.manifest)
    change("topology.d_in", 3)(other.manifest)
    golden().write(tmp_path / "a" / "1")
    other.write(tmp_path / "a" / "2")
    golden(seed=3).write(tmp_path / "b")
    with pytest.raises(CompareError, match="2 and 3 within a"):
        compare_folders(tmp_path / "a", tmp_path / "b")


def test_other_phase_pacing_or_world_is_refused(tmp_path: Path) -> None:
    assert "judged phase: 'bring-up' in before, 'ready'" in refusal(
        tmp_path / "1", golden(), golden(phase="ready")
    )
    assert "pacing: 'saturated' in before, 'tick'" in refusal(
        tmp_path / "2", golden(), golden(pacing="tick")
    )


def test_a_log_that_contradicts_itself_is_not_compared(tmp_path: Path) -> None:
    lying = simulate(jittered(stages(), 200, 1), PipelineForm("split", d_in=1))
    lying.bend(lambda line: line.update(tA0=line["tA0"] - line["w_credit_ns"]))
    said = refusal(tmp_path, golden(), lying)
    assert "BAD_INSTRUMENT" in said
    assert "are wrong" in said


def test_a_run_whose_period_never_became_steady_is_named(tmp_path: Path) -> None:
    found = compare_folders(*both(tmp_path, simulate(), unsettled().set("run_id", "cold")))
    assert "never became steady (NOT_WARM) in cold" in comparison_text(found)
    assert "NOT_WARM" not in comparison_text(compare_folders(*[tmp_path / "before"] * 2))


def test_too_short_a_run_is_not_compared(tmp_path: Path) -> None:
    assert "needs 10" in refusal(tmp_path, golden(), simulate(n=15))


def test_many_differences_are_not_all_listed(tmp_path: Path) -> None:
    other = golden()
    other.manifest["hardware"] = {f"part{i}": i for i in range(30)}
    assert "more" in refusal(tmp_path, golden(), other).splitlines()[-1]


def test_command_prints_writes_and_exits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = both(tmp_path, golden(b=12), golden(b=10, seed=2))
    out = tmp_path / "found.json"
    assert main(["--compare", str(a), str(b), "--json", str(out)]) == 0
    assert "% faster than before" in capsys.readouterr().out
    assert json.loads(out.read_text())["comparison"]["differences"][0]["name"] == "period"
    assert main(["--compare", str(a), str(tmp_path / "nowhere")]) == 3
    other = golden()
    change("hardware.cpu", "another")(other.manifest)
    assert main(["--compare", str(a), str(other.write(tmp_path / "other"))]) == 3
    assert "hardware.cpu" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([])
