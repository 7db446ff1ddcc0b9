from __future__ import annotations

from dev.draw_golden_cases import REPORT, draw_report
from golden_runs import GoldenRun, ms, simulate

from ppstream.analysis.judge import judge
from ppstream.report.text import WIDTH, render


def test_the_text_is_the_golden_one() -> None:
    """Write it again with ``python tools/dev/draw_golden_cases.py``, and show the difference."""
    assert draw_report() == REPORT.read_text(encoding="utf-8")


def whole(golden: GoldenRun) -> str:
    """The report's words, wherever its lines end."""
    return " ".join(render(judge(golden.parse())).split())


def test_the_policy_and_its_weights_are_named() -> None:
    golden = simulate().set("config.policy", {"target": "my_arm:build", "weights": "/a/new.onnx"})
    assert "· my_arm:build with new.onnx " in whole(golden)
    golden.set("weights_sha256", "3fa1" * 16)
    assert "my_arm:build with new.onnx (sha256 3fa13fa13fa1)" in whole(golden)
    golden.set("config.policy", {"target": "my_arm:build", "weights": None})
    assert "my_arm:build without a file of weights" in whole(golden)


def test_time_that_the_configuration_adds_to_stages_is_told() -> None:
    """Else made-up work passes for work that is hidden."""
    golden = simulate().set("config.policy", {"target": "my_arm:build", "weights": None})
    golden.set("config.simulate", {"a_ms": 0.0, "c_ms": 0.0, "kind": "sleep"})
    assert "simulated work" not in whole(golden)
    golden.set("config.simulate", {"a_ms": 6.0, "c_ms": 0.5, "kind": "sleep"})
    assert "without a file of weights · simulated work in A 6 ms, C 0.5 ms" in whole(golden)
    assert judge(golden.parse()).as_dict()["simulated_ms"] == {"A": 6.0, "C": 0.5}


def test_stages_in_turn_that_are_less_than_their_times_alone_say_why() -> None:
    """A policy that spins by the clock takes as long where others use its CPU."""
    golden = simulate().set("standalone", {"A_ns": ms(4), "B_ns": ms(10), "C_ns": ms(5)})
    assert "in turn 19.0 ms limits" in whole(golden)
    golden.set("standalone.B_ns", ms(14))
    why = "in turn 19.0 ms without waits for a CPU, and no longer than in the run limits"
    assert why in whole(golden)


def test_no_name_is_cut_and_long_ones_stand_above_their_numbers() -> None:
    long = "a_stream_with_a_name_of_forty_characters"
    golden = simulate().bend(
        lambda line: line.update(input_age_ns={"orientation": ms(3), "arm_temperature": ms(4)})
    )
    lines = render(judge(golden.parse())).splitlines()
    rows = [line for line in lines if line.startswith(("  orientation ", "  arm_temperature "))]
    assert [row.index("p50") for row in rows] == [18, 18]
    assert sum(line.index("p50") == 18 for line in lines if " p50 " in line) == 4
    golden.bend(lambda line: line.update(input_age_ns={long: ms(3)}))
    lines = render(judge(golden.parse())).splitlines()
    at = lines.index(f"  {long}")
    assert lines[at + 1].startswith(" " * 13 + "p50 3.00 ms")
    assert max(map(len, lines)) <= WIDTH


def test_samples_that_were_dropped_are_told_by_stream_and_reason() -> None:
    golden = simulate()
    kept = {"received": 9, "used": 9, "dropped": {}, "in_flight": 0}
    joints = kept | {"received": 21, "dropped": {"future": 9, "late": 3, "rate": 0}}
    imu = kept | {"received": 11, "dropped": {"late": 2}}
    golden.tell(golden.book() | {"streams": {"joints": joints, "imu": imu, "front": kept}})
    said = "samples dropped: 9 future, 5 late of joints: 9 future, 3 late of imu: 2 late ledger"
    assert said in whole(golden)
    golden.tell(golden.book() | {"streams": {"joints": joints, "imu": kept}})
    assert "samples dropped: 9 future, 3 late, all of joints ledger" in whole(golden)
