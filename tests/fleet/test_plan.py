"""The answer to how many GPUs a fleet needs, and the times it rests on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ppstream.core.errors import ConfigError
from ppstream.fleet import plan as planning
from ppstream.fleet.outages import Held
from ppstream.fleet.plan import NO_ANSWER, main
from ppstream.fleet.service_times import Duration, of_report
from ppstream.launch.commands import main as ppstream

QUESTION = ("--robots", "500", "--hz", "30", "--age-ms", "150", "--seconds", "4")
TIMES = ("--a-ms", "3", "--c-ms", "1")


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert main([*words, "--json"]) in (0, NO_ANSWER)
    return json.loads(capsys.readouterr().out)


def test_the_fewest_gpus_whose_full_pipelines_are_young_enough(capsys) -> None:
    found = answer(capsys, *QUESTION, *TIMES, "--b-ms", "1=20", "8=34", "32=90")
    best, *others = found["candidates"]
    assert (best["rows"], best["pipelines"], best["all_gpus"]) == (8, 63, 63)
    assert best["age_p99_ms"] <= 150
    assert {one["rows"]: one["is_fit"] for one in others} == {1: True, 32: False}
    assert others[0]["all_gpus"] == 500
    assert any("seed 0" in line for line in found["assumes"])


def test_a_policy_that_is_too_slow_for_one_robot_has_no_answer(capsys) -> None:
    assert main([*QUESTION, *TIMES, "--b-ms", "1=200"]) == NO_ANSWER
    assert "500 robots at 30 Hz with p99 age <= 150 ms: no." in capsys.readouterr().out


def test_replicas_make_a_slow_policy_young_enough(capsys) -> None:
    words = (*QUESTION[:4], "--age-ms", "240", "--seconds", "4", *TIMES, "--b-ms", "8=90")
    found = answer(capsys, *words, "--replicas", "1", "3")
    fits = {one["replicas"]: (one["is_fit"], one["gpus"]) for one in found["candidates"]}
    assert fits == {3: (True, 3), 1: (False, 1)}


@pytest.mark.parametrize("robots", [10, 100, 1000, 10_000])
def test_any_number_of_robots(robots: int, capsys) -> None:
    words = ("--robots", str(robots), "--hz", "10", "--age-ms", "200", "--seconds", "2")
    best = answer(capsys, *words, *TIMES, "--b-ms", "8=30")["candidates"][0]
    assert best["pipelines"] * 8 >= robots
    assert best["pipelines"] <= robots / 8 * 1.1 + 2


def test_failures_ask_for_spares(capsys) -> None:
    words = ("--robots", "64", "--hz", "10", "--age-ms", "200", "--seconds", "2", *TIMES)
    rare = answer(capsys, *words, "--b-ms", "8=30", "--mtbf-h", "10000")["candidates"][0]
    often = answer(capsys, *words, "--b-ms", "8=30", "--mtbf-h", "10")["candidates"][0]
    assert (rare["pipelines"], rare["spares"]) == (8, 0)
    assert often["spares"] >= 1
    assert often["held_s_per_day"] > rare["held_s_per_day"]


def test_the_same_seed_gives_the_same_answer(capsys) -> None:
    words = (*QUESTION, *TIMES, "--b-ms", "4=20:30", "--seed", "5")
    first, again = answer(capsys, *words), answer(capsys, *words)
    assert first == again
    other = answer(capsys, *words[:-1], "6")
    assert other["candidates"][0]["age_p99_ms"] != first["candidates"][0]["age_p99_ms"]


def test_the_command_says_what_it_assumes(capsys) -> None:
    assert ppstream(["fleet", "plan", *QUESTION, *TIMES, "--b-ms", "8=34"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("500 robots at 30 Hz with p99 age <= 150 ms: 63 GPUs. 63 pipelines")
    assert "assumes" in said
    assert "service times of flags" in said


def test_times_of_a_report_are_those_of_its_run(tmp_path: Path) -> None:
    run = {
        "alone": {"times_ms": {"A": 4.0, "B": 10.0, "C": 2.0}, "stretch": {"A": 1.25}},
        "places": [{"busy_ns": 6e6, "hop_ns": 1e5}, {"busy_ns": 11e6, "hop_ns": None}],
        "queues": {"d_in": 3},
    }
    file = tmp_path / "report.json"
    file.write_text(json.dumps({"schema": "ppstream.report/1", "runs": [run]}))
    times = of_report(file)
    means = [times.a.mean_ms, times.places[0].mean_ms, times.c.mean_ms, times.hops[0].mean_ms]
    assert means == pytest.approx([5.0, 11.0, 2.0, 0.1])
    assert times.d_in == 3


def report_of_a_mesh(file: Path, replicas: int) -> Path:
    leaders = [*range(1, 1 + replicas)]
    run = {
        "alone": {"times_ms": {"A": 2.0, "B": 30.0, "C": 1.0}, "stretch": {}},
        "places": [
            {"busy_ns": 3e6, "hop_ns": 1e5, "ranks": [0], "members": []},
            {
                "busy_ns": 3e7,
                "hop_ns": 1e5,
                "ranks": leaders,
                "members": [{"leader": leader} for leader in leaders * 3],
            },
        ],
        "queues": {"d_in": 2},
    }
    file.write_text(json.dumps({"runs": [run]}))
    return file


@pytest.mark.parametrize("replicas", [1, 2])
def test_every_gpu_of_a_mesh_is_counted(replicas: int, tmp_path: Path, capsys) -> None:
    report = str(report_of_a_mesh(tmp_path / "report.json", replicas))
    words = ("--robots", "8", "--hz", "10", "--age-ms", "300", "--seconds", "4", "--report", report)
    for choice in (("--rows", "8"), ("--b-ms", "8=30")):
        found = answer(capsys, *words, *choice, "--replicas", "1", "2")
        assert {one["replicas"]: one["gpus"] for one in found["candidates"]} == {1: 4, 2: 8}
        assert any(
            line.startswith("GPUs of a place of the policy: 4;") for line in found["assumes"]
        )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--b-ms", "8=20,14", "--replicas", "2"), "--replicas: got 2 with 2 places, want 1"),
        (("--b-ms", "8=20", "--replicas", "17"), "--replicas: got 17, want 16 at most"),
        (("--b-ms", "20", "--rows", "8"), "--rows: got 8 with --b-ms, want --b-ms 8=MS"),
        (("--b-ms", "8=10", "8=20"), "--b-ms: got '8=20' beside another time of its rows"),
        (("--b-ms", "1025=20"), "rows of a pipeline: got 1025, want 1024 at most"),
        (("--b-ms", "8=20", "--d-in", "65"), "--d-in: got 65, want 64 at most"),
        (("--b-ms", "8=1" + ",1" * 63), "--b-ms: got 64 places, which want --d-in 65, 64 at most:"),
        (("--b-ms", "20", "--hz", "0.03"), "got 4 with --hz 0.03, want 67 or more"),
        (("--report", "."), "run.json: cannot be read"),
    ],
)
def test_a_question_that_no_run_answers_is_refused(
    words: tuple[str, ...], says: str, tmp_path: Path, capsys, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert ppstream(["fleet", "plan", *QUESTION, *TIMES, *words]) == ConfigError([]).exit_code
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("name", ["--net-ms", "--hop-ms", "--gather-ms", "--gpus-rank0", "--seed"])
def test_nothing_negative_is_taken(name: str, capsys) -> None:
    with pytest.raises(SystemExit):
        main([*QUESTION, *TIMES, "--b-ms", "8=20", name, "-1"])
    assert f"{name}: got -1, want 0 or more" in capsys.readouterr().err


def test_spares_are_found_and_given_up_in_few_tries(capsys, monkeypatch) -> None:
    tried: list[int] = []

    def served(_: int, pipelines: int, *__: object) -> Held:
        tried.append(pipelines)
        return Held(0.0, float(pipelines < enough))

    monkeypatch.setattr(planning.outages, "simulate", served)
    for spares, tries in ((0, 1), (1, 2), (100, 15), (1000, 21), (1001, 12)):
        tried.clear()
        enough = 63 + spares
        (one,) = answer(capsys, *QUESTION, *TIMES, "--b-ms", "8=34")["candidates"]
        assert one["pipelines"] == (enough if spares <= 1000 else 0)
        assert len(tried) <= tries


def test_failures_that_no_spares_make_up_for_are_said_as_such(capsys, monkeypatch) -> None:
    monkeypatch.setattr(planning, "SPARES_MAX", 3)
    words = (*QUESTION, *TIMES, "--b-ms", "8=34", "--mtbf-h", "1")
    assert main(words) == NO_ANSWER
    said = capsys.readouterr().out
    assert "no. Of failures every 1 h (--mtbf-h), 120 s each (--repair-s)" in said
    assert "too few spares" in said
    assert "too old" not in said
    (one,) = answer(capsys, *words)["candidates"]
    assert (one["is_fit"], one["lacks"]) == (False, "spares")


def test_what_never_came_is_null(capsys) -> None:
    words = (*QUESTION, *TIMES, "--b-ms", "8=60000")
    assert main(words) == NO_ANSWER
    assert "No action came within the time" in capsys.readouterr().out
    found = answer(capsys, *words)["candidates"][0]
    assert (found["age_p99_ms"], found["lacks"]) == (None, "age")


def test_no_times_are_said_with_what_is_wanted(tmp_path: Path, capsys) -> None:
    file = tmp_path / "report.json"
    file.write_text('{"runs": [{"alone": null}]}')
    assert (
        ppstream(["fleet", "plan", *QUESTION, "--report", str(file)]) == ConfigError([]).exit_code
    )
    assert "ppstream report FOLDER --json FILE" in capsys.readouterr().err
    assert ppstream(["fleet", "plan", *QUESTION]) == ConfigError([]).exit_code
    assert "--a-ms and --b-ms" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "x", "-1", "5:4", "1:2:3", "inf"])
def test_a_text_that_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="want MEDIAN or MEDIAN:P99"):
        Duration.parse(text)


def test_a_duration_draws_what_was_measured() -> None:
    import numpy as np

    drawn = Duration.parse("10:20").drawn(20_000, np.random.default_rng(1))
    assert np.percentile(drawn, 50) == pytest.approx(10, rel=0.02)
    assert np.percentile(drawn, 99) == pytest.approx(20, rel=0.02)
    seen = Duration.measured([3.0, 1.0, 2.0])
    assert (seen.mean_ms, seen.drawn(100, np.random.default_rng(1)).max() <= 3.0) == (2.0, True)
