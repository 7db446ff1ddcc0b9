"""The exported trace, read by a strict checker; and the checker, shown what it is for."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from golden_gpus import on_gpus
from golden_runs import POLICY_CLOCK_NS, START_NS, GoldenRun, chain, jittered, ms, simulate, stages
from trace_format import problems

from ppstream.analysis.period_model import PipelineForm
from ppstream.report import perfetto
from ppstream.report.cli import main
from ppstream.report.perfetto import trace_events, write_trace

SERIAL_INLINE = PipelineForm("serial", "decode_first")


def inline() -> GoldenRun:
    run = simulate(form=SERIAL_INLINE, n=40)
    run.manifest["topology"]["world_size"] = 1
    return run


def with_events() -> GoldenRun:
    run = simulate(jittered(stages(), 60, 1), PipelineForm("split"))
    at = (ms(3), ms(90), ms(300))
    run.extra += [
        {"kind": "event", "name": "phase", "phase": "warming", "t": START_NS + at[0]},
        {"kind": "event", "name": "phase", "phase": "bring-up", "t": START_NS + at[1]},
        {"kind": "event", "name": "epoch_cut", "epoch": 1, "t": START_NS + at[2]},
    ]
    return run.bend(lambda line: line.update(input_age_ns={"joints": ms(1), "camera": ms(9)}))


def dropped() -> GoldenRun:
    run = simulate(n=60)
    for line in run.lines[20:30]:
        line |= {"drop": "expired", "tEmit": None}
    return run


def lying() -> GoldenRun:
    """Stamps that overlap on one thread: a viewer would misdraw them."""
    return simulate(n=60).bend(lambda line: line.update(tA0=line["tA0"] - ms(6)))


def restarted() -> GoldenRun:
    run, again = simulate(n=40), simulate(n=40, generation=1)
    for line in again.lines + again.policy_lines:
        line |= {k: v + ms(5000) for k, v in line.items() if k[0] == "t" and k[1].isupper()}
    run.lines += again.lines
    run.policy_lines += again.policy_lines
    return run


RUNS: dict[str, Callable[[], GoldenRun]] = {
    "serial": lambda: simulate(n=60),
    "split, deep, decode-bound": lambda: simulate(
        stages(c=20), PipelineForm("split", d_in=4), n=60
    ),
    "jitter": lambda: simulate(jittered(stages(), 80, 2)),
    "input-limited": lambda: simulate(stages(t_in=40), n=40),
    "inline": inline,
    "events": with_events,
    "GPUs": lambda: on_gpus(simulate(n=300)),
    "drops": dropped,
    "restarted": restarted,
    "overlapping stamps": lying,
    "chain": lambda: simulate(chain(8, 10, 6), PipelineForm("split", d_in=4), n=60),
    "no policy lines": lambda: GoldenRun(
        *(vars(simulate(n=30))[k] for k in ("manifest", "lines")), []
    ),
}


def exported(golden: GoldenRun) -> dict[str, Any]:
    return {"traceEvents": json.loads(json.dumps(trace_events(golden.parse())))}


@pytest.mark.parametrize("name", RUNS)
def test_every_kind_of_run_exports_a_trace_that_viewers_draw_as_meant(name: str) -> None:
    trace = exported(RUNS[name]())
    assert problems(trace) == []
    assert sum(event["ph"] == "X" for event in trace["traceEvents"]) > 50


def test_one_track_per_resource_and_an_arrow_per_envelope() -> None:
    events = exported(RUNS["serial"]())["traceEvents"]
    tracks = {
        (event["pid"], event["args"]["name"]) for event in events if event["name"] == "thread_name"
    }
    assert {(1, "A + C"), (1, "link in"), (1, "link out"), (2, "policy B")} <= tracks
    assert {(1, "credit 0"), (1, "credit 1")} <= tracks
    counts = Counter(event["ph"] for event in events)
    assert counts["s"] == counts["t"] == counts["f"] == 60


def test_a_chain_has_a_process_for_each_place_and_arrows_through_all_of_them() -> None:
    golden = RUNS["chain"]().tell({"kind": "event", "name": "warm", "t": START_NS})
    golden.behind[1].append({"kind": "event", "name": "late", "t": START_NS + ms(9)})
    events = exported(golden)["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {
        1: "rank 0",
        2: "place 1 (part_1 on cpu)",
        3: "place 2 (part_2 on cpu)",
        4: "place 3 (part_3 on cpu)",
    }
    tracks = {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"}
    assert {(2, "policy B1"), (3, "policy B2"), (4, "policy B3"), (1, "link 2")} <= tracks
    counts = Counter(event["ph"] for event in events)
    assert (counts["s"], counts["t"], counts["f"]) == (60, 180, 60)
    assert [e["pid"] for e in events if e["ph"] == "i" and e["name"] == "late"] == [4]


def test_generations_of_a_chain_keep_their_processes_apart() -> None:
    first = RUNS["chain"]()
    again = simulate(chain(8, 10, 6), PipelineForm("split", d_in=4), n=60, generation=1)
    for lines, more in zip(first.stamped, again.later(5000).stamped, strict=True):
        lines += more
    events = exported(first)["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert [names[pid].rpartition(", ")[2] for pid in (5, 8)] == ["generation 1"] * 2
    assert problems({"traceEvents": events}) == []


def test_times_are_the_logs_own() -> None:
    golden = RUNS["serial"]()
    events = exported(golden)["traceEvents"]
    a = next(e for e in events if e["name"] == "A 40")
    c = next(e for e in events if e["name"] == "C 40")
    b = next(e for e in events if e["name"] == "B 40")
    line = golden.lines[40]
    assert a["dur"] == 4000
    assert c["ts"] - a["ts"] == pytest.approx((line["tDecode"] - line["tA0"]) / 1e3)
    assert b["dur"] == 10_000
    assert a["ts"] + a["dur"] <= b["ts"] < c["ts"]


def test_the_other_hosts_clock_is_bounded_by_causality_and_marked() -> None:
    events = exported(RUNS["serial"]())["traceEvents"]
    (label,) = [e["args"]["labels"] for e in events if e["name"] == "process_labels"]
    assert "clock offset known to ± 500 µs" in label  # what both links take together


def test_one_host_is_one_clock() -> None:
    golden = simulate(n=60)
    for line in golden.policy_lines:
        line |= {name: line[name] - POLICY_CLOCK_NS + START_NS for name in ("tB0", "tB1")}
    golden.manifest["topology"]["ranks"] = [{"rank": r, "boot_id": "x"} for r in (0, 1)]
    events = exported(golden)["traceEvents"]
    (label,) = [e["args"]["labels"] for e in events if e["name"] == "process_labels"]
    assert label == "one clock"
    assert problems({"traceEvents": events}) == []


def test_counters_follow_queues_and_ages() -> None:
    events = exported(with_events())["traceEvents"]
    values: dict[str, set[float]] = {}
    for event in events:
        if event["ph"] == "C":
            values.setdefault(event["name"], set()).update(event["args"].values())
    assert values["outstanding"] == {0, 1, 2}
    assert values["age of input, ms"] == {1, 9}
    assert min(values["age since arrival, ms"]) > 10
    assert [e["name"] for e in events if e["ph"] == "X" and e["cat"] == "phase"] == [
        "warming",
        "bring-up",
    ]


def test_memory_of_both_ranks_is_counted_while_envelopes_are_on_their_way() -> None:
    golden = on_gpus(simulate(n=300))  # from 1 s to 4 s of rank 0's clock
    for line in golden.policy_lines:
        if line["kind"] == "memory":
            line["t"] += POLICY_CLOCK_NS - START_NS  # its own clock
    events = exported(golden)["traceEvents"]
    found = [event for event in events if event["name"] == "memory, MiB"]
    assert {event["pid"] for event in found} == {1, 2}
    assert found[0]["args"] == {"RAM": 1600, "allocated": 130, "reserved": 144, "not torch's": 1300}
    assert min(event["ts"] for event in found) >= 0
    starts = [event["ts"] for event in events if event["name"].startswith("A ")]
    assert found[0]["ts"] >= min(starts)  # what was logged long before stretches no picture


def test_memory_of_a_rank_without_a_gpu_is_its_ram_alone() -> None:
    golden = simulate(n=300)
    golden.extra.append({"kind": "memory", "t": START_NS + ms(2000), "resident_bytes": 5 << 20})
    events = exported(golden)["traceEvents"]
    assert [e["args"] for e in events if e["name"] == "memory, MiB"] == [{"RAM": 5}]


def test_a_long_run_keeps_its_newest_envelopes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(perfetto, "ENVELOPES_MAX", 50)
    out = tmp_path / "trace.json"
    assert write_trace(out, simulate(n=120).parse()) == 70
    trace = json.loads(out.read_text())
    assert problems(trace) == []
    assert trace["otherData"]["envelopes_left_out"] == 70
    assert {e["name"] for e in trace["traceEvents"] if e["ph"] == "X"} >= {"A 119", "B 119"}
    simulate(n=330).write(tmp_path / "run")
    assert main([str(tmp_path / "run"), "--perfetto", str(out)]) == 0
    assert "newest 50 envelopes, 280 left out" in capsys.readouterr().out


def broken(change: Callable[[list[dict[str, Any]]], object]) -> list[str]:
    trace = copy.deepcopy(exported(RUNS["serial"]()))
    change(trace["traceEvents"])
    return problems(trace)


def first(events: list[dict[str, Any]], ph: str) -> dict[str, Any]:
    return [event for event in events if event["ph"] == ph][20]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda e: first(e, "X").pop("dur"), "keys"),
        (lambda e: first(e, "X").update(ph="Q"), "not used here"),
        (lambda e: first(e, "X").update(dur=-1), "dur is -1"),
        (lambda e: first(e, "X").update(ts="1"), "ts is '1'"),
        (lambda e: next(x for x in e if x["name"] == "A 20").update(dur=6000), "its parent"),
        (lambda e: first(e, "C").update(ts=0), "behind"),
        (lambda e: first(e, "C").update(args={"x": "2"}), "counter"),
        (lambda e: e.remove(first(e, "s")), "arrow"),
        (lambda e: e.remove(first(e, "f")), "arrow"),
        (lambda e: first(e, "f").update(id=10**9), "arrow"),
        (lambda e: first(e, "f").update(id="0.1.7"), "whole numbers"),
        (lambda e: first(e, "t").update(tid=99), "hangs in the air"),
        (lambda e: e.remove(next(x for x in e if x["name"] == "process_name")), "has no name"),
        (lambda e: e.remove([x for x in e if x["name"] == "thread_name"][1]), "has no name"),
        (lambda e: e.append(e[0]), "behind the first event"),
    ],
)
def test_the_checker_catches(change: Callable[[list[dict[str, Any]]], object], said: str) -> None:
    assert any(said in text for text in broken(change)), broken(change)


def test_the_checker_refuses_other_things() -> None:
    assert all(problems(other) for other in ([], {}, {"traceEvents": {}}))
