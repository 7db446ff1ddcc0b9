"""The kernel report on what torch.profiler wrote of both ranks of a run on two H200.

``two_gpus`` with ``policy.graph=false``; A and C simulated at 0.4 and 0.1 ms of the device's time.
Rank 1 launches every kernel by itself; rank 0 launches graphs, through the driver.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest
from kernel_traces import event

from ppstream.report.kernels import cli
from ppstream.report.kernels.findings import TraceFindings, bottleneck, enclosing, findings
from ppstream.report.kernels.trace import category

GOLDEN = Path(__file__).parents[2] / "golden"
BLOCKS = ("embed", "encoder", "decoder", "head")
PAGE = Path(__file__).parents[3] / "runbooks/profile.md"
PASSES = 4  # envelopes in rank 1's trace


def found(rank: int) -> TraceFindings:
    return findings(cli.read_trace(GOLDEN / f"kineto-gpu-rank{rank}.json.gz"))


@pytest.fixture(scope="module")
def policy() -> TraceFindings:
    return found(1)


@pytest.fixture(scope="module")
def front() -> TraceFindings:
    return found(0)


def test_policy_launches_the_same_kernels_for_every_envelope(policy: TraceFindings) -> None:
    assert (policy.is_gpu, policy.pass_name, policy.passes) == (True, "B", PASSES)
    assert policy.calls_in_passes == 129 * PASSES
    stages = {s.name: s.calls / PASSES for s in policy.stages}
    assert stages == {"B": 129, "decoder": 72, "encoder": 48, "head": 3, "embed": 2}
    assert {s.name: s.calls for s in policy.ranges} == dict.fromkeys(("B", *BLOCKS), PASSES)
    in_b = [s.calls for s in policy.kernels if s.calls % PASSES == 0]
    outside = [s.name for s in policy.kernels if s.calls % PASSES]
    assert sum(in_b) == 129 * PASSES + PASSES  # and the copy to rank 0, behind B
    assert len(outside) == 2  # of the profiler's own step


def test_shares_of_a_real_trace_add_up(policy: TraceFindings, front: TraceFindings) -> None:
    for f in (policy, front):
        for sums in (f.kernels, f.categories):
            assert sum(s.share for s in sums) == pytest.approx(1)
            assert sum(s.total_ns for s in sums) == f.work_ns
        assert f.busy_ns + f.gaps.total_ns == f.span_ns
    stages = {s.name: s.total_ns for s in policy.stages}
    blocks = sum(stages[name] for name in BLOCKS)
    assert 0.95 * stages["B"] < blocks < stages["B"]  # the rest: copies and checks around them


def test_real_names_of_kernels_fall_into_their_category(policy: TraceFindings) -> None:
    calls: Counter[str] = Counter()
    for s in policy.kernels:
        calls[category(s.name)] += s.calls
    assert calls == {
        "matmul": 62 * PASSES,  # with the sums of its split ones
        "elementwise": 31 * PASSES + 1,
        "reduce": 22 * PASSES,  # 21 layer norms and "is all of it finite?"
        "attention": 12 * PASSES,
        "copy/memset": 2 * PASSES + 1,
        "communication": PASSES,
    }
    shares = {s.name: round(s.share, 2) for s in policy.categories}
    assert (shares["matmul"], shares["reduce"], shares["attention"]) == (0.61, 0.14, 0.13)


def test_copies_of_a_real_trace_are_counted(policy: TraceFindings, front: TraceFindings) -> None:
    assert [(c.kind, c.n, c.bytes) for c in policy.copies] == [
        ("Memcpy DtoD", 4, 4 * 65_536),
        ("Memcpy DtoH", 4, 4 * 32),
        ("Memset", 48, 48 * 4),
    ]
    to_policy = {c.kind: c for c in front.copies}["Memcpy PtoP"]
    assert (to_policy.n, to_policy.bytes) == (3, 3 * 69_952)


def test_a_policy_without_a_graph_is_launch_bound(policy: TraceFindings) -> None:
    kind, why = bottleneck(policy)
    assert (kind, policy.launch_index) == ("launch", pytest.approx(0.88, abs=0.005))
    assert "record a CUDA graph" in why
    assert policy.gaps.longest_ns == pytest.approx(30.6e6, rel=0.01)  # no envelope came
    calls = sum(s.calls for s in policy.kernels)
    assert 4_000 < policy.launch_ns / calls < 8_000  # ns inside one launch call


def test_work_of_graphs_that_the_driver_launched_is_found_in_its_range(
    front: TraceFindings,
) -> None:
    """No call of theirs is in the trace, only the ranges on the device's streams."""
    stages = {s.name: (s.calls, s.total_ns) for s in front.stages}
    assert set(stages) == {"A", "C"}
    assert (front.pass_name, front.passes) == ("A", 3)
    assert front.calls_in_passes == stages["A"][0] == 3 * 129
    assert stages["C"][0] == 3 * 31
    assert stages["A"][1] / 3 == pytest.approx(0.43e6, rel=0.02)  # 0.4 ms simulated, and A's own
    assert bottleneck(front)[0] == "cpu"  # it waits for the policy


def test_work_without_a_call_is_of_the_innermost_range_on_its_stream(tmp_path: Path) -> None:
    """Host: A, with frames inside. Streams: kernels that no call in the trace has launched."""
    spans = [
        ("ProfilerStep#1", 0, 90, 0),
        ("ppstream:A", 10, 50, 1),
        ("ppstream:frames", 20, 30, 2),
    ]
    events = [
        event("user_annotation", name, start, end, tid=1, args={"External id": number})
        for name, start, end, number in spans
    ]
    for name, start, end, stream, number in (
        ("ppstream:A", 100, 190, 7, 1),
        ("ppstream:frames", 120, 140, 7, 2),
        ("ProfilerStep#1", 150, 160, 7, 0),
        ("ProfilerStep#1", 100, 190, 8, 0),
    ):
        more = {"tid": stream, "args": {"External id": number}}
        events.append(event("gpu_user_annotation", name, start, end, **more))
    for start, stream in ((100, 7), (120, 7), (155, 7), (155, 8), (300, 7)):
        events.append(event("kernel", f"k{start}.{stream}", start, start + 5, tid=stream))
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    trace = cli.read_trace(path)
    within = enclosing(trace.ranges, trace.work)
    assert within == [("A",), ("A", "frames"), ("A",), (), ()]


def test_text_of_a_real_trace_tells_its_kernels_apart(
    policy: TraceFindings, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([str(GOLDEN / "kineto-gpu-rank1.json.gz"), "--top", "99"]) == 0
    text = capsys.readouterr().out.splitlines()
    assert "passes 4 of range B: 129.0 kernels and 375.8 us of work an envelope" in text
    begin = next(k for k, line in enumerate(text) if line.startswith("by kernel"))
    rows = text[begin + 1 : begin + 1 + len(policy.kernels)]
    shown = [row[: cli.NAME_WIDTH] for row in rows]
    assert len(set(shown)) == len(policy.kernels)
    heads = [line for line in text if " share " in line]
    assert len({line.index(" share ") for line in heads}) == 1  # all tables in the same columns


def test_runbook_quotes_this_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = tmp_path / "profile.rank1.gen0.0.json"
    plain.write_bytes(gzip.decompress((GOLDEN / "kineto-gpu-rank1.json.gz").read_bytes()))
    assert cli.main([str(plain)]) == 0
    said = capsys.readouterr().out.splitlines()
    quote = PAGE.read_text().partition(f"```\n{plain.name}")[2].partition("\n```")[0]
    lines = (plain.name + quote).splitlines()
    assert len(lines) == 6
    assert [line for line in lines if not any(s.startswith(line) for s in said)] == []
