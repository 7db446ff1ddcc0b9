"""The report end to end: folders in, verdict, text, JSON and exit code out."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faulty_runs import robot, served
from golden_runs import GoldenRun, chain, ms, simulate, stages
from judging import sentence

from ppstream.analysis.judge import judge
from ppstream.analysis.period_model import PipelineForm
from ppstream.analysis.requests import ROBOTS_MAX
from ppstream.analysis.run_report import RunReport
from ppstream.report.cli import main
from ppstream.report.html.tables import service_table
from ppstream.report.text import WIDTH, render

CHECKOUT = Path(__file__).resolve().parents[2]
HEALTHY = 0
FAIL = 1
INCONCLUSIVE = 2
BAD_INPUT = 3

RUN_KEYS = {
    "run_id",
    "sentence",
    "figures",
    "verdict",
    "reasons",
    "accepted",
    "limits",
    "n",
    "warmup_skipped",
    "class",
    "compat",
    "primary",
    "alone",
    "cpu",
    "unnamed",
    "machine",
    "input_source",
    "audits",
    "latency_ms",
    "pick_up_ms",
    "age_ms",
    "oldest_action_ms",
    "lease",
    "model",
    "queues",
    "critical_path",
    "drops",
    "faults",
    "service",
    "statements",
    "memory",
    "on_device",
    "clocks",
    "places",
    "better_cut",
    "requests",
    "policy",
    "simulated_ms",
    "compiled",
}


def serialized() -> GoldenRun:
    return simulate(form=PipelineForm("serial", "decode_first"))


def report_of(golden: GoldenRun, **options: Any) -> RunReport:
    return judge(golden.parse(), **options)


# ---- the command ---------------------------------------------------------------------------------


def test_tool_runs_from_a_checkout_with_nothing_installed(tmp_path: Path) -> None:
    simulate().write(tmp_path / "logs" / "one")
    tool = CHECKOUT / "tools" / "overlap_report.py"
    done = subprocess.run(
        [sys.executable, "-S", "-E", str(tool), "logs"],  # -S: no site-packages at all
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == HEALTHY, done.stderr
    assert "PASS" in done.stdout.splitlines()[1]
    assert done.stderr == ""


def test_text_stays_readable_on_a_terminal_without_unicode(tmp_path: Path) -> None:
    simulate(n=150).write(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "ppstream.report.cli", str(tmp_path)],
        cwd=CHECKOUT,
        env={"PYTHONIOENCODING": "ascii", "PYTHONPATH": str(CHECKOUT)},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == HEALTHY, done.stderr
    assert "?" not in done.stdout.decode("ascii")
    assert "####" in done.stdout.decode("ascii")


def test_json_has_exactly_the_keys_of_the_contract(tmp_path: Path) -> None:
    simulate().write(tmp_path / "run")
    out = tmp_path / "report.json"
    assert main([str(tmp_path / "run"), "--json", str(out)]) == HEALTHY
    found = json.loads(out.read_text())
    assert set(found) == {"schema", "runs"}
    assert found["schema"] == "ppstream.report/1"
    (run,) = found["runs"]
    assert set(run) == RUN_KEYS
    assert set(run["compat"]) == {
        "period_ms",
        "stage0_ms",
        "stage1_ms",
        "hidden_ms",
        "overlap_score",
        "gate",
    }
    assert set(run["primary"]) == {
        *("P_ms", "S", "S_low", "S_high", "S_all", "E", "G", "G_star"),
        *("S_alone", "strict", "strict_in_run", "overhead", "bubble"),
    }
    assert set(run["audits"]) == {
        *("conservation", "little", "bounds", "residence", "outstanding", "order", "credit"),
        *("stamps", "ledger", "cpu"),
    }
    assert set(run["latency_ms"]) == {"p50", "p95", "p99", "max"}
    assert set(run["model"]) == {"P_ms", "gap", "W_star", "formula"}
    assert [place["rank"] for place in run["places"]] == [0, 1]
    assert set(run["places"][1]) == {
        *("rank", "parts", "device", "alone_ns", "busy_ns", "share", "hop_ns"),
        *("wait_input_ns", "wait_output_ns", "queue_ns", "ranks", "replicas_ns", "members"),
    }
    assert run["queues"] == {"d_in": 2, "d_out": 2, "outstanding_max": 2, "q_decode_max": 1}
    assert run["primary"]["P_ms"] == pytest.approx(10.0)
    assert run["latency_ms"]["p50"] == pytest.approx(20.0)
    assert run["latency_ms"]["p99"] is None  # of fewer than 1000 envelopes nothing is known
    assert run["audits"]["credit"]["ok"] is True
    assert run["age_ms"] is None
    service = report_of(simulate(phase="ready")).as_dict()["service"]
    assert isinstance(service, dict)
    assert set(service) == {
        *("class", "latency_ms", "age_ms", "deadline", "utilisation", "drops", "actions"),
        *("verdict", "reasons", "longest_without_chunk_ms", "robots", "streams", "requests"),
        *("chunks_per_s", "calls_by_rows", "lease"),
    }


def test_the_report_says_with_how_few_rows_the_policy_was_called() -> None:
    report = report_of(simulate(phase="ready", rows=1))
    assert report.as_dict()["service"]["calls_by_rows"] == {1: 330}  # type: ignore[index]
    assert "calls of the policy by rows: 1 100%" in render(report)
    whole = simulate(phase="ready", rows=4)
    whole.manifest["config"] = {"batch": {"rows": 4}}
    assert "calls of the policy by rows" not in render(report_of(whole))


@pytest.mark.parametrize(
    ("make", "options", "code"),
    [
        (simulate, [], HEALTHY),
        (serialized, [], FAIL),
        (lambda: simulate(stages(t_in=40)), [], INCONCLUSIVE),
        (lambda: simulate(form=PipelineForm(d_in=1)), ["--gate", "bringup"], HEALTHY),
        (lambda: simulate(form=PipelineForm(d_in=1)), ["--gate", "release"], FAIL),
        (simulate, ["--phase", "ready"], INCONCLUSIVE),
    ],
)
def test_exit_code_is_the_verdict(
    make: Callable[[], GoldenRun], options: list[str], code: int, tmp_path: Path
) -> None:
    make().write(tmp_path)
    assert main([str(tmp_path), *options]) == code


def test_a_phase_that_no_run_has_is_no_log_that_lacks_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    simulate().write(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main([str(tmp_path), "--phase", "redy"])
    assert caught.value.code == BAD_INPUT
    assert "--phase: invalid choice: 'redy' (choose from 'starting'" in capsys.readouterr().err


def test_several_runs_are_all_reported_newest_last_and_the_worst_decides(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for day, (name, golden) in enumerate(
        [("b", simulate()), ("c", simulate(stages(t_in=40))), ("a", serialized())], start=1
    ):
        golden.manifest |= {"run_id": name, "created_utc": f"2025-01-0{day}T00:00:00Z"}
        golden.write(tmp_path / name)
    (tmp_path / "latest").symlink_to("a")  # the same run, not a fourth one
    (tmp_path / "notes").mkdir()
    assert main([str(tmp_path)]) == FAIL
    shown = re.findall(r"^(\w) · bring-up", capsys.readouterr().out, flags=re.MULTILINE)
    assert shown == ["b", "c", "a"]
    assert main([str(tmp_path / "latest")]) == FAIL
    assert main([str(tmp_path / "c")]) == INCONCLUSIVE


def test_unknown_schema_is_bad_input_and_does_not_hide_other_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    simulate().write(tmp_path / "good")
    future = simulate()
    future.manifest["schema"] = "ppstream.log/2"
    future.write(tmp_path / "future")
    assert main([str(tmp_path)]) == BAD_INPUT
    printed = capsys.readouterr()
    assert "ppstream.log/2" in printed.err
    assert "PASS" in printed.out


@pytest.mark.parametrize("schema", ["ppstream.log/1.7", "ppstream.log/1"])
def test_later_minor_schema_is_read(schema: str, tmp_path: Path) -> None:
    golden = simulate()
    golden.manifest["schema"] = schema
    golden.write(tmp_path)
    assert main([str(tmp_path)]) == HEALTHY


@pytest.mark.parametrize("schema", [None, 1, "other.log/1", "ppstream.log/", "ppstream.log/10"])
def test_other_schema_is_refused(schema: object, tmp_path: Path) -> None:
    golden = simulate(n=12)
    golden.manifest["schema"] = schema
    golden.write(tmp_path)
    assert main([str(tmp_path)]) == BAD_INPUT


def test_folder_without_runs_is_bad_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path)]) == BAD_INPUT
    assert main([str(tmp_path / "nowhere")]) == BAD_INPUT
    assert "no run here" in capsys.readouterr().err


# ---- what is said --------------------------------------------------------------------------------


def lying() -> GoldenRun:
    run = simulate(form=PipelineForm("split", d_in=1))
    return run.bend(lambda line: line.update(tA0=line["tA0"] - line["w_credit_ns"]))


@pytest.mark.parametrize(
    "make",
    [
        simulate,
        lambda: simulate(stages(c=20), PipelineForm("split")),
        lambda: simulate(stages(t_in=40)),
        lambda: simulate(stages(a=0.05, c=0.05)),
        lambda: simulate(n=20),
        lambda: simulate(phase="ready"),
        serialized,
        lambda: serialized().set("topology.world_size", 1),
        lying,
    ],
)
def test_text_fits_a_hundred_columns_and_begins_with_the_verdict(
    make: Callable[[], GoldenRun],
) -> None:
    report = report_of(make())
    lines = render(report).splitlines()
    assert max(map(len, lines)) <= WIDTH
    first, figures, origin, statements, *_ = "\n".join(lines[1:]).split("\n\n")
    assert " ".join(first.split()) == f"{report.verdict.name}: {report.sentence}"
    assert len(re.findall(r"(?m)^[ !] [a-z]", figures)) == 7
    assert all(reason in origin for reason in report.reasons)
    assert statements.startswith("· ")
    assert json.loads(json.dumps(report.as_dict()))["verdict"]


def test_the_oldest_action_that_a_robot_executed_is_told_beside_what_was_allowed() -> None:
    golden = simulate()
    assert report_of(golden).as_dict()["oldest_action_ms"] is None
    said = [
        {"kind": "robot", "seq": seq, "age_ns": ms(20), "executed": 3, "oldest_ns": oldest}
        for seq, oldest in enumerate([31_000_000, 41_260_000, 0])
    ]
    golden.extra += said
    golden.manifest["config"] = {"actions": {"lease_ms": 90.0, "max_age_ms": 60.0}}
    report = report_of(golden)
    assert report.as_dict()["oldest_action_ms"] == pytest.approx({"age": 41.26, "limit": 60.0})
    assert "oldest action executed: 41.3 ms of 60" in render(report)


# ---- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "loaded"),
    [
        ("--json", set()),
        ("--html", {"ppstream.report.html.page"}),
        ("--perfetto", {"ppstream.report.perfetto"}),
    ],
)
def test_what_draws_is_loaded_when_it_is_asked_for(
    option: str, loaded: set[str], tmp_path: Path
) -> None:
    simulate(n=120).write(tmp_path)
    code = (
        "import sys\n"
        "from ppstream.report.cli import main\n"
        "main(sys.argv[1:])\n"
        "print(*(name for name in sys.modules if name.startswith('ppstream.report.')))"
    )
    command = [sys.executable, "-c", code, str(tmp_path), option, str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    modules = set(done.stdout.splitlines()[-1].split())
    assert "ppstream.report.text" in modules
    drawing = {"ppstream.report.html.page", "ppstream.report.perfetto"}
    assert modules & drawing == loaded


@pytest.mark.parametrize("option", ["--json", "--html", "--perfetto"])
def test_a_file_that_cannot_be_written_is_bad_input(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    simulate(n=120).write(tmp_path)
    assert main([str(tmp_path), option, str(tmp_path / "nowhere" / "x")]) == BAD_INPUT
    assert "cannot write" in capsys.readouterr().err


def test_reader_that_has_enough_changes_no_verdict(tmp_path: Path) -> None:
    simulate().write(tmp_path)
    tool = [sys.executable, str(CHECKOUT / "tools" / "overlap_report.py"), str(tmp_path)]
    with subprocess.Popen(tool, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as done:
        assert done.stdout is not None
        assert done.stderr is not None
        done.stdout.close()  # before anything is printed
        assert done.stderr.read() == ""
        assert done.wait(60) == HEALTHY


def test_a_closed_or_full_standard_output_is_no_traceback(tmp_path: Path) -> None:
    simulate().write(tmp_path)
    tool = f"{sys.executable} {CHECKOUT / 'tools' / 'overlap_report.py'} {tmp_path}"
    for redirect, code, says in (
        (">&-", HEALTHY, ""),
        (">/dev/full", BAD_INPUT, "cannot write standard output: No space left on device\n"),
        (
            "--html /dev/full >/dev/null",
            BAD_INPUT,
            "cannot write /dev/full: No space left on device\n",
        ),
    ):
        done = subprocess.run(f"{tool} {redirect}", shell=True, stderr=subprocess.PIPE, text=True)
        assert (done.returncode, done.stderr) == (code, says)


def test_equal_stamps_and_none_at_all_are_reported(tmp_path: Path) -> None:
    golden = simulate()
    golden.bend(lambda line: line.update({k: 7 for k in line if k[0] == "t" and k[1].isupper()}))
    golden.write(tmp_path)
    assert main([str(tmp_path)]) == INCONCLUSIVE
    assert main(["--compare", str(tmp_path), str(tmp_path)]) == BAD_INPUT


def test_the_first_fault_of_each_kind_is_shown_with_rank_place_and_count(tmp_path: Path) -> None:
    golden = simulate()
    fault = {"kind": "event", "name": "fault", "stage": "B", "rank": 1, "fault": "exception"}
    fault |= {"t": 5, "place": "arm.py:7 in act"}
    golden.extra += [fault | {"what": "ValueError: \x1b[2J" + "x" * 9000}]
    golden.extra += [fault | {"what": "KeyError: 3"}] * 24
    golden.extra += [fault | {"stage": "C", "rank": 0, "what": "OSError: 5", "place": ""}]
    golden.extra += [{"kind": "event", "name": "refused", "t": 5, "rule": "limit", "what": "7 > 1"}]
    golden.extra += [{"kind": "event", "name": "fault", "t": 5, "text": "Traceback\nOldError: x\n"}]
    golden.extra += [fault | {"fault": f"kind{n}"} for n in range(100)]
    report = report_of(golden)
    text = " ".join(render(report).split())
    assert "first faults exception in stage B (rank 1, 26 in all): ValueError: [2Jxxx" in text
    assert "KeyError" not in text
    assert (
        "exception in stage C (rank 0, 1 in all): OSError: 5 limit in stage C (rank 0): 7 >" in text
    )
    assert "kind0 in stage B (rank 1, 1 in all): at arm.py:7 in act" in text
    assert len(report.faults) == 16
    assert all(len(line) <= 100 for line in render(report).splitlines())
    faults = report.as_dict()["faults"]
    assert isinstance(faults, list)
    assert faults[2] == {
        "stage": "C",
        "kind": "limit",
        "n": None,
        "what": "7 > 1",
        "place": "",
        "rank": 0,
    }
    page = tmp_path / "page.html"
    main([str(golden.write(tmp_path)), "--html", str(page)])
    assert "<td>B: exception</td>" in page.read_text()
    assert "What failed" in page.read_text()


def test_a_run_that_cannot_be_read_makes_no_page_and_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    golden = simulate()
    golden.manifest["standalone"]["places_ns"] = [[1], 2]
    page = tmp_path / "page.html"
    assert main([str(golden.write(tmp_path / "run")), "--html", str(page)]) == 3
    assert "places_ns: ns is [1], expected an integer" in capsys.readouterr().err
    assert not page.exists()


def test_service_tells_outages_holes_and_what_robots_say() -> None:
    golden = simulate(stages(t_in=40), phase="ready", pacing="sample")
    for line in golden.lines[200:]:
        line |= {k: v + ms(689) for k, v in line.items() if k[0] == "t" and k[1].isupper()}
    golden.lines[200]["w_input_ns"] += ms(689)  # an idle robot is in no score, but it is an outage
    golden.manifest["config"] = {"actions": {"lease_ms": 300.0}}
    balance = {"received": 900, "used": 900, "dropped": {}, "in_flight": 0}
    imu = balance | {"holes": 2, "longest_hole_ns": ms(164), "targets": 1000, "invalid": 15}
    camera = balance | {"holes": 0, "longest_hole_ns": 0}
    golden.extra = [golden.book() | {"streams": {"imu": imu, "camera": camera}}]
    state = {"kind": "robot_state", "session": 0x2A, "t": 5, "holds": 3, "held_ns": ms(900)}
    state |= {"faults": 1, "fault": "lease\x1b[2J", "chunk_gap_ns": ms(691)}
    named = state | {"session": 0x2B, "robot": "my-arm\x1b[2J", "holds": 0}
    golden.extra += [state | {"holds": 1}, state, named]  # the newest of a session counts
    report = report_of(golden)
    text = " ".join(render(report).split())
    assert "longest without a new chunk 691 ms in 2 sessions above 251 ms (lease less age)" in text
    assert "robot my-arm?[2J (session 2b) 0 holds for 900 ms" in text
    assert "robot of session 2a 3 holds for 900 ms 1 fault, the newest: lease?[2J" in text
    assert "longest without a new chunk 691 ms" in text
    assert "imu holes above max_gap_ms: 2, longest 164 ms 1.5% of targets invalid" in text
    assert "camera holes above max_gap_ms: 0 invalid targets not counted" in text
    service = report.as_dict()["service"]
    assert isinstance(service, dict)
    assert service["longest_without_chunk_ms"] == pytest.approx(691)
    assert service["streams"]["imu"]["invalid_share"] == pytest.approx(0.015)
    golden.manifest["config"]["streams"] = [{"name": "imu", "max_request_hz": 50.0}]
    asked = report_of(golden)
    assert "imu on request 1.5% of targets invalid" in " ".join(render(asked).split())
    assert "on request, 1.5% of targets invalid" in service_table(asked.service or report.service)
    page = service_table(report.service) if report.service else ""
    for shown in (
        "691 ms, in 2 sessions above 251 ms (lease less age)",
        "3 holds for 900 ms",
        "2 holes above max_gap_ms",
    ):
        assert shown in page


def told_by_robots(*told: dict[str, Any]) -> tuple[str, str]:
    """The service in text and on the page, after these accounts of robots."""
    golden = served(stages())
    golden.tell(*(robot(t=ms(k)) | account for k, account in enumerate(told)))
    report = report_of(golden)
    assert report.service is not None
    return render(report), service_table(report.service)


def test_what_a_robot_did_not_say_is_left_out_in_text_and_on_the_page() -> None:
    unsaid = dict.fromkeys(("holds", "held_ns", "faults", "chunk_gap_ns"))
    text, page = told_by_robots(unsaid | {"robot": "arm"})
    assert [line.split() for line in text.splitlines() if "arm" in line] == [
        ["robot", "arm", "(session", "5)"]
    ]
    assert "<td>robot arm (session 5)</td><td></td>" in page
    text, page = told_by_robots({"robot": "arm"})
    assert "3 holds for 0.00 ms, 0 faults, longest without a new chunk 30.0 ms" in page


def test_a_report_has_one_row_for_each_robot_and_a_limit_on_them() -> None:
    arm = [{"session": k + 1, "robot": "arm", "held_ns": ms(0.1)} for k in range(300)]
    for shown in told_by_robots(*arm, {"session": 400, "robot": "leg"}):
        assert (shown.count("arm ("), shown.count("leg (")) == (1, 1)
        assert "arm (300 sessions)" in shown
        assert "900 holds for 30.0 ms" in shown
    many = [{"session": k + 1, "robot": None, "held_ns": ms(k)} for k in range(ROBOTS_MAX + 3)]
    for shown in told_by_robots(*many):
        assert shown.count("of session") == ROBOTS_MAX
        assert "of session 4 " in " ".join(shown.replace("<", " ").split())  # 3 held for less
        assert "3 others" in shown
        assert "9 holds for 3.00 ms" in shown


def test_ages_of_made_up_input_are_marked() -> None:
    golden = simulate().bend(lambda line: line.update(input_age_ns={"joints": ms(3)}))
    assert "input (synthetic)" in render(report_of(golden))
    golden.manifest["config"] = {"bringup": {"source": "recording"}}
    assert "input (recorded)" in render(report_of(golden))
    ready = simulate(phase="ready").bend(lambda line: line.update(input_age_ns={"joints": ms(3)}))
    assert "input (" not in render(report_of(ready))


def test_cpu_time_and_unnamed_time_are_printed_by_thread_and_stage() -> None:
    golden = simulate(form=PipelineForm("split"))
    golden.bend(lambda line: line.update(busy_link_ns=ms(1), run_delay_ns=ms(0.5), cpu_a_ns=ms(3)))
    for line in golden.policy_lines:
        line |= {"cpu_b_ns": ms(0.3), "run_delay_ns": None}
    text = " ".join(render(report_of(golden)).split())
    assert (
        "unnamed rank 0 A 10% (waits for a CPU: 5%) policy rank 0% (waits for a CPU: unknown)"
        in text
    )
    assert "CPU A 75% of its time B 3% of its time C 100% of its time" in text


def test_a_chain_has_a_bar_and_a_row_for_each_place() -> None:
    lines = render(report_of(simulate(chain(8, 10, 6), PipelineForm("split", d_in=4)))).splitlines()
    assert all(len(line) <= 100 for line in lines)
    bars = [line for line in lines if line.startswith("B of place")]
    assert [bar.split()[-5:-3] for bar in bars] == [
        ["80%", "8.00"],
        ["100%", "10.0"],
        ["60%", "6.00"],
    ]
    text = " ".join(" ".join(lines).split())
    assert "place 0 no parts on cpu alone 5.00 ms" in text
    assert (
        "place 3 part_3 on cpu alone 6.00 ms waits for work 4.00 ms waits for room 0.00 ms "
        "queue 0.00 ms hop 0.20 ms" in text
    )
    assert "B3: envelope 100%" in text


def test_limits_and_what_is_accepted_are_printed() -> None:
    golden = serialized()
    golden.manifest["config"] = {"bringup": {"overlap_min": 0.2, "accept": ["LOW_OVERLAP", "X"]}}
    report = report_of(golden)
    text = render(report)
    assert "S and S alone from 0.20   accepts LOW_OVERLAP" in text
    assert "\nFAIL   LOW_OVERLAP   accepted: SERVING\n" in text
    assert "one rank would take 19.0 ms for A, B and C in turn" in " ".join(text.split())
    assert (report.exit_code, report.as_dict()["accepted"]) == (HEALTHY, ["LOW_OVERLAP"])
    golden.manifest["config"] = {}
    refused = report_of(golden)
    assert refused.exit_code == FAIL
    assert 'serve anyway with bringup.accept = ["LOW_OVERLAP"]' in sentence(refused, "one rank")


def test_terminal_says_what_the_page_draws() -> None:
    golden = simulate(stages(c=20), PipelineForm("split"))
    text = render(report_of(golden.bend(lambda line: line.update(input_age_ns={"joints": ms(3)}))))
    assert re.search(r"period +p50 20\.0 ms", text)
    assert re.search(r"mean of it +A 4\.00 ms .* B 10\.0 ms .* C 20\.0 ms", text, re.DOTALL)
    assert re.search(r"joints +p50 3\.00 ms .* input", text)
    assert "the published score 5.35 is not the primary 1.00" in text


def test_replicas_have_one_bar_and_a_row_each(tmp_path: Path) -> None:
    golden = simulate(stages(a=4, b=18, c=1), PipelineForm(d_in=3, replicas=2))
    text = render(report_of(golden))
    assert text.count("B of 2 replicas") == 1
    for rank in (1, 2):
        assert f"replica {rank}" in text
    page, trace = tmp_path / "page.html", tmp_path / "trace.json"
    folder = golden.write(tmp_path / "run")
    assert main([str(folder), "--html", str(page), "--perfetto", str(trace)]) == 0
    assert "2 replicas: B" in page.read_text()
    for rank in (1, 2):
        assert f"replica {rank}: B" in page.read_text()
    events = json.loads(trace.read_text())["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["rank 0", "replica 1", "replica 2"]
    of_b = {e["pid"]: e["args"]["seq"] % 2 for e in events if e.get("cat") == "B"}
    assert of_b == {2: 0, 3: 1}
