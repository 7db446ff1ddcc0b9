"""What crashes, full disks, restarts and other writers leave behind can be read, or is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import reduce
from itertools import cycle, pairwise
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
from faulty_runs import chunks, event, machine, robot, said, served
from golden_runs import Fields, GoldenRun, chain, ms, simulate, stages, write_lines
from hypothesis import given, settings
from hypothesis import strategies as st
from judging import sentence

from ppstream.analysis.judge import judge
from ppstream.analysis.log_reader import LogFile, find_runs, log_files, read_lines, read_run
from ppstream.analysis.period_model import PipelineForm
from ppstream.core.errors import LogError
from ppstream.report.cli import main
from ppstream.report.text import render

HEALTHY = 0
FAIL = 1
INCONCLUSIVE = 2
BAD_INPUT = 3


def test_torn_last_line_is_left_out_and_said(tmp_path: Path) -> None:
    simulate().write(tmp_path)
    log = tmp_path / "rank0.gen0.jsonl"
    *envelopes, _ledger, _ = log.read_bytes().split(b"\n")
    log.write_bytes(b"\n".join(envelopes)[:-40])
    run = read_run(tmp_path)
    assert run.torn_lines == 1
    assert len(run.envelopes) == 329
    assert sentence(judge(run), "1 torn log line")


@pytest.mark.parametrize("served", [True, False])
def test_a_service_whose_log_stops_in_a_line_is_no_pass(*, served: bool, tmp_path: Path) -> None:
    """Its disk was full to the end: run.json and exit.json could not be written, either."""
    golden = simulate()
    if served:
        golden.tell({"kind": "event", "name": "phase", "phase": "ready", "t": 1, "generation": 0})
    log = golden.write(tmp_path) / "rank0.gen0.jsonl"
    log.write_bytes(log.read_bytes() + b'{"kind":"ledger","run_id":"gol')
    report = judge(read_run(tmp_path))
    if served:
        assert report.reasons == ["MISSING_LOGS"]
        assert "the log stops in the middle of a line: its disk was full, or" in report.sentence
        assert report.figures[-1].is_bad
    assert report.exit_code == (INCONCLUSIVE if served else HEALTHY)


def test_line_torn_inside_a_character_or_by_a_full_disk_is_only_one_line(tmp_path: Path) -> None:
    simulate().write(tmp_path)
    log = tmp_path / "rank0.gen0.jsonl"
    lines = log.read_bytes().split(b"\n")
    lines[50] = lines[50][:70]
    log.write_bytes(b"\n".join(lines) + '{"kind":"event","name":"é'.encode()[:-1])
    run = read_run(tmp_path)
    assert run.torn_lines == 2
    assert len(judge(run).window.segments) == 2


@pytest.mark.parametrize(
    ("torn", "seqs"),
    [
        (lambda lines: [*lines, b"\0" * 300], 330),
        (lambda lines: [*lines, b'{"kind":"enve' + b"\0" * 300], 330),
        (lambda lines: [*lines[:90], b"\0" * 300 + lines[90][100:], *lines[91:]], 329),
        (lambda lines: [b"\0" * 4096], 0),
    ],
    ids=["behind the last line", "in the last line", "in the middle", "of nothing else"],
)
def test_zeros_that_a_power_cut_leaves_are_a_torn_line(
    torn: Callable[[list[bytes]], list[bytes]], seqs: int, tmp_path: Path
) -> None:
    """A file system keeps the new length, and not yet what was written."""
    simulate().write(tmp_path)
    log = tmp_path / "rank0.gen0.jsonl"
    lines = log.read_bytes().rstrip().split(b"\n")
    log.write_bytes(b"\n".join(torn(lines)))
    run = read_run(tmp_path)
    assert (run.torn_lines, len(run.envelopes)) == (1, seqs)
    report = judge(run)
    assert sentence(report, "1 torn log line")
    assert report.exit_code == (HEALTHY if seqs else INCONCLUSIVE)


@pytest.mark.parametrize("text", [b"Segmentation fault\n", b"\0\0\x01\0\n\x7f\0\n"])
def test_what_is_no_log_is_refused_with_its_place(text: bytes, tmp_path: Path) -> None:
    simulate(n=12).write(tmp_path)
    with (tmp_path / "rank0.gen0.jsonl").open("ab") as log:
        log.write(text)
    with pytest.raises(LogError, match=r"rank0.gen0.jsonl:1[45]: not JSON"):
        read_run(tmp_path)


def test_value_of_a_wrong_type_is_refused_with_its_place(tmp_path: Path) -> None:
    golden = simulate(n=12)
    golden.lines[4]["tRecv"] = "soon"
    golden.write(tmp_path)
    with pytest.raises(LogError, match=r"rank0.gen0.jsonl:5: tRecv is 'soon'"):
        read_run(tmp_path)


def test_missing_policy_file_is_said_and_its_durations_are_not_believed(tmp_path: Path) -> None:
    simulate().write(tmp_path, policy_file=False)
    report = judge(read_run(tmp_path))
    assert report.reasons == ["NOT_AUDITED"]
    assert sentence(report, "no log file of rank 1")


def test_missing_durations_and_policy_file_are_missing_logs(tmp_path: Path) -> None:
    golden = simulate().bend(lambda line: line.pop("B_ns"))
    golden.write(tmp_path, policy_file=False)
    report = judge(read_run(tmp_path))
    assert report.reasons[0] == "MISSING_LOGS"
    assert "B_ns" in sentence(report, "MISSING_LOGS")
    assert render(report)


def test_missing_rank0_file_is_missing_logs(tmp_path: Path) -> None:
    simulate().write(tmp_path)
    (tmp_path / "rank0.gen0.jsonl").unlink()
    report = judge(read_run(tmp_path))
    assert report.reasons[0] == "MISSING_LOGS"
    assert "rank 0's file" in sentence(report, "MISSING_LOGS")


def test_foreign_log_with_keys_of_its_own_is_judged(tmp_path: Path) -> None:
    golden = simulate()
    golden.manifest |= {"writer": {"name": "another runtime"}, "config": None}
    golden.manifest["topology"] |= {"colour": "blue"}

    def foreign(line: Fields) -> None:
        line |= {"gpu_temperature": [70, 71.5], "vendor": {"a": None}}
        line["tC0"] = line.pop("tDecode")  # the older name
        line["tA0"] = float(line["tA0"])
        for name in ("lane", "mode", "pacing", "epoch", "drop", "busy_link_ns"):
            line.pop(name)

    golden.bend(foreign)
    golden.extra += [{"kind": "weather", "rain": True}, {"hello": 1}]
    golden.write(tmp_path)
    run = read_run(tmp_path)
    assert run.ignored_lines == 2
    assert judge(run).exit_code == HEALTHY


@pytest.mark.parametrize(
    ("table", "complaint"),
    [
        ({"d_in": None}, "topology.d_in is None"),
        ({"d_out": 0}, "topology.d_out is 0"),
        ({"threads": "many"}, "topology.threads is 'many'"),
        ({"world_size": 1_000_000_000}, "topology.world_size is 1000000000, expected 1 to 1024"),
        ({"world_size": -1}, "topology.world_size is -1"),
        ({"d_in": 10**9}, "topology.d_in is 1000000000, expected 1 to 4096"),
        ({"replicas": -2}, "topology.replicas is -2"),
    ],
)
def test_unusable_topology_is_refused(table: Fields, complaint: str, tmp_path: Path) -> None:
    golden = simulate(n=12)
    golden.manifest["topology"] |= table
    golden.write(tmp_path)
    with pytest.raises(LogError, match=re.escape(complaint)):
        read_run(tmp_path)


def test_line_nested_beyond_any_log_is_refused_with_its_place(tmp_path: Path) -> None:
    simulate(n=12).write(tmp_path)
    with (tmp_path / "rank0.gen0.jsonl").open("a") as log:
        log.write("[" * 100_000 + "\n")
    with pytest.raises(LogError, match=r"rank0.gen0.jsonl:14: .* nested too deeply"):
        read_run(tmp_path)


@pytest.mark.parametrize("value", [1 << 63, -(1 << 63), 1e300])
def test_number_that_no_clock_shows_is_refused(value: float, tmp_path: Path) -> None:
    golden = simulate(n=12)
    golden.lines[4]["tEmit"] = value
    golden.write(tmp_path)
    with pytest.raises(LogError, match=r"rank0.gen0.jsonl:5: tEmit is .* integer of 64 bits"):
        read_run(tmp_path)


def every_kind_of_line() -> GoldenRun:
    golden = served(stages(), n=12, bring_up=simulate(n=30))
    golden.put(window_end_ns=[ms(1)], expires_ns=[ms(101)], session=[5], session_epoch=[0])
    golden.put(input_age_ns={"joints": [5]}).set("config.simulate", {"a_ms": 0.5})
    golden.set("config.streams", [{"name": "joints", "rate_hz": 50.0}, {"name": "imu"}])
    golden.set("config.actions", {"lease_ms": 300.0, "dt_ms": 2.0, "horizon": 4})
    book = golden.book() | {"streams": {"joints": golden.book()["envelopes"] | {"holes": 0}}}
    rules = {"chunks": 9, "clipped_chunks": 1, "clipped_values": 1, "refused": {"speed": 1}}
    counts = {"requests": 5, "answered": 4, "errors": {"busy": 1}, "max_ns": 9, "bins": {"9": 4}}
    cores = machine(4, others_cpus=0.1, thread_cpus={"r0": [0, 1], "mesh": [2]})
    golden.tell(cores, said("PASS"), event("epoch_cut", to=1), event("fault", rank=0, stage="B"))
    golden.tell(event("robot_left", session=5, heard_ns=9), robot(robot="arm"))
    golden.tell(*chunks([(ms(4), 1, ms(5))]), book | {"actions": rules})
    return golden.tell({"kind": "memory", "resident_bytes": 9}, {"kind": "requests"} | counts)


def numbers_in(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields where the numbers stand in a decoded line."""
    if type(value) in (int, float):
        yield at
    elif isinstance(value, dict | list):
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from numbers_in(one, (*at, key))


@pytest.mark.parametrize("numbers", [["9" * 400], ["-" + "9" * 400, "NaN", "1e999"]])
def test_a_number_beyond_any_log_costs_its_line_and_ends_no_report(
    numbers: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    golden = every_kind_of_line()
    folder, html, found = golden.write(tmp_path / "run"), tmp_path / "r.html", tmp_path / "r.json"
    tried, beyond = set(), cycle(numbers)
    for name in ("run.json", "rank0.gen0.jsonl", "rank1.gen0.jsonl"):
        whole = (folder / name).read_text()
        lines = whole.splitlines()
        for k, line in enumerate(map(json.loads, lines)):
            for *path, last in numbers_in(line):
                place = (line.get("kind"), line.get("name"), *path, last)
                if place in tried:
                    continue
                tried.add(place)
                changed = deepcopy(line)
                reduce(getitem, path, changed)[last] = "here"
                text = json.dumps(changed).replace('"here"', next(beyond))
                (folder / name).write_text("\n".join([*lines[:k], text, *lines[k + 1 :]]))
                code = main([str(folder), "--html", str(html), "--json", str(found)])
                out = capsys.readouterr().out
                assert (code == BAD_INPUT) == (name == "run.json"), place
                assert ("1 torn log line" in out) != (name == "run.json"), place
        (folder / name).write_text(whole)
    assert len(tried) > 100


UNTIL_READY, LONGER = "; let it run until it is ready", "; let it run longer"


def test_exit_codes_are_read_and_a_torn_file_says_nothing(tmp_path: Path) -> None:
    simulate().write(tmp_path)
    ends = tmp_path / "exit.json"
    ends.write_text('{"0": {"code": 30, "generation": 0}}')
    assert judge(read_run(tmp_path)).reasons == ["CONTRADICTED"]
    ends.write_text('{"0": {"code": 30,')
    assert judge(read_run(tmp_path)).exit_code == HEALTHY


@pytest.mark.parametrize(
    ("phases", "ends", "reasons", "says", "remedy"),
    [
        (["warming"], None, ["TOO_FEW"], "the run is, or was killed, in warming, before it",
            UNTIL_READY),
        (["warming"], {"code": 26}, ["TOO_FEW"], "rank 0 ended with 26", ""),
        ([], {"code": 11}, ["TOO_FEW"], "rank 0 ended with 11", ""),
        (["warming", "bring-up"], {"code": 0, "reason": "SIGTERM"}, ["TOO_FEW"],
            "the run was stopped in bring-up (SIGTERM), before it was ready: 0 envelopes",
            UNTIL_READY),
        (["warming", "bring-up"], None, ["MISSING_LOGS", "TOO_FEW"], "MISSING_LOGS", LONGER),
        (["warming", "ready"], {"code": 0}, ["MISSING_LOGS", "TOO_FEW"], "MISSING_LOGS", LONGER),
    ],
)  # fmt: skip
def test_a_run_that_ended_before_its_bring_up_lacks_no_lines(
    phases: list[str],
    ends: Fields | None,
    reasons: list[str],
    says: str,
    remedy: str,
    tmp_path: Path,
) -> None:
    golden = simulate()
    golden.lines, golden.policy_lines = [], []
    golden.extra += [
        {"kind": "event", "name": "phase", "phase": phase, "t": t} for t, phase in enumerate(phases)
    ]
    golden.manifest["finished_utc"] = None if ends is None else "2026-01-01T00:00:00Z"
    golden.write(tmp_path)
    if ends is not None:
        (tmp_path / "exit.json").write_text(json.dumps({"0": {"generation": 0} | ends}))
    report = judge(read_run(tmp_path))
    assert report.reasons == reasons
    assert sentence(report, says)
    has_failed = says.startswith("rank 0")
    assert (f"drive a robot: {says}" in report.sentence) is has_failed
    assert sentence(report, "TOO_FEW").endswith(f"0 envelopes after warm-up, 100 needed{remedy}")
    assert ("nothing was measured after" in report.sentence) is says.startswith("the run")
    assert render(report)


def test_run_without_any_envelope_is_judged_not_crashed(tmp_path: Path) -> None:
    golden = simulate()
    golden.lines, golden.policy_lines = [], []
    golden.write(tmp_path)
    report = judge(read_run(tmp_path))
    assert report.exit_code == INCONCLUSIVE
    assert report.reasons == ["MISSING_LOGS", "TOO_FEW"]
    assert render(report)


@settings(max_examples=6, deadline=None, derandomize=True)
@given(st.sets(st.integers(1, 149), max_size=4))
def test_report_does_not_depend_on_how_a_log_is_split_into_files(
    tmp_path_factory: pytest.TempPathFactory, cuts: set[int]
) -> None:
    golden = simulate(n=150)
    whole = golden.write(tmp_path_factory.mktemp("whole"))
    parts = golden.write(tmp_path_factory.mktemp("parts"))
    (parts / "rank0.gen0.jsonl").unlink()
    ends = [0, *sorted(cuts), len(golden.lines)]
    lines = golden.rank0()
    for i, (start, end) in enumerate(pairwise([*ends, len(lines)])):
        write_lines(parts / f"rank0.gen0.part{i}.jsonl", lines[start:end])
    assert judge(read_run(parts)).as_dict() == judge(read_run(whole)).as_dict()


def test_files_of_two_generations_stay_apart(tmp_path: Path) -> None:
    old, new = simulate(n=150), simulate(n=250, generation=1)
    old.write(tmp_path)
    new.generation = 1
    new.write(tmp_path)
    report = judge(read_run(tmp_path))
    assert report.window.n == 239
    assert sentence(report, "2 generations")


def test_generations_ranks_and_parts_are_read_in_order_of_their_numbers(tmp_path: Path) -> None:
    starts = [f"rank{rank}.gen{generation}" for rank in (2, 10) for generation in (2, 10)]
    names = [f"{start}{part}.jsonl" for start in starts for part in ("", ".part2", ".part10")]
    for name in (*names, "exit.json"):
        (tmp_path / name).write_text("")
    assert [path.name for path in log_files(tmp_path)] == names


def test_links_and_files_beside_the_runs_are_no_runs(tmp_path: Path) -> None:
    simulate(n=12).write(tmp_path / "run")
    (tmp_path / "run.txt").write_text("not a run")
    (tmp_path / "latest").symlink_to("run")
    assert find_runs(tmp_path) == [tmp_path / "run"]


# ---- chains: a log of each policy rank ----------------------------------------------------------

CHAIN = PipelineForm(d_in=3)
TOLD = ("B_ns", "residence_ns", "wait_input_ns", "wait_output_ns", "idle_ns")


def test_lines_of_every_policy_rank_are_joined_by_envelope(tmp_path: Path) -> None:
    golden = simulate(chain(9, 6), CHAIN, n=12)
    run = read_run(golden.write(tmp_path))
    assert run.topology.places == 2
    assert run.topology.title(2) == "place 2 (part_2 on cpu)"
    assert run.missing_ranks == ()
    for k, envelope in enumerate(run.envelopes):
        found = [line.tB0 for line in envelope.places if line is not None]
        assert found == [lines[k]["tB0"] for lines in golden.policies]
        assert envelope.stage1 is not None
        assert envelope.stage1.tB0 == found[-1]


def test_rank_0_s_line_is_filled_from_the_lines_of_a_chain_as_it_writes_them(
    tmp_path: Path,
) -> None:
    golden = simulate(chain(9, 6, 7), PipelineForm(d_in=4), n=12)
    told = [{name: line[name] for name in TOLD} for line in golden.lines]
    run = read_run(golden.lose(*TOLD).write(tmp_path))
    assert [{name: getattr(e, name) for name in TOLD} for e in run.envelopes] == told


def test_a_rank_of_a_chain_without_a_log_is_named_and_its_times_are_not_made_up(
    tmp_path: Path,
) -> None:
    golden = simulate(chain(9, 6, 7), PipelineForm(d_in=4)).lose(rank=2)
    run = read_run(golden.lose("B_ns", "residence_ns").write(tmp_path))
    assert run.missing_ranks == (2,)
    assert all(e.places[1] is None and e.places[2] is not None for e in run.envelopes)
    assert all(e.B_ns is None and e.residence_ns is None for e in run.envelopes)


def test_lines_of_a_rank_that_is_no_place_are_counted(tmp_path: Path) -> None:
    folder = simulate(chain(9, 6), CHAIN, n=12).write(tmp_path)
    (folder / "rank2.gen0.jsonl").rename(folder / "rank7.gen0.jsonl")
    run = read_run(folder)
    assert (run.ignored_lines, run.missing_ranks) == (12, (2,))


def test_replicas_are_one_place(tmp_path: Path) -> None:
    golden = simulate(n=12).set("topology.replicas", 2).set("topology.world_size", 3)
    golden.behind = [golden.policy_lines[1::2]]
    golden.policy_lines = golden.policy_lines[::2]
    run = read_run(golden.write(tmp_path))
    assert run.topology.places == 1
    assert all(e.stage1 is not None and e.stage1.seq == e.seq for e in run.envelopes)


@pytest.mark.parametrize(
    ("row", "is_whole"),
    [
        ('{"t":12}', True),
        (' {"t":12}', True),
        ('{"t":12} \r', True),
        ('{"t":12,"n":99999999999999999999}', True),  # of 20 digits
        ('{"t":12,"n":-99999999999999999999}', False),
        ('{"t":12,"n":0.123456789012345678901234}', True),
        ('{"t":12,"text":"123456789012345678901234567890"}', True),
        ('{"t":12,"n":1e400}', False),
        ('{"t":12,"n":NaN}', False),
        ('{"t":12}{"t":13}', False),
        ('{"t":12}x', False),
        ('{"t":1', False),
    ],
)
def test_a_row_is_read_or_torn_whichever_way_it_is_decoded(
    tmp_path: Path, row: str, is_whole: bool
) -> None:
    torn: list[str] = []
    path = tmp_path / "rank0.gen0.jsonl"
    path.write_text(f'{row}\n{{"t":14}}')
    lines = [*read_lines({path: LogFile(0, 0)}, torn)]
    assert [line.fields["t"] for line in lines] == ([12, 14] if is_whole else [14])
    assert len(torn) == (not is_whole and row[0] == "{")
