import gzip
import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kernel_traces import COPIES, CPU_TRACE, ENCODE, KERNELS, RANGES, US, event, nsys

from ppstream.core.errors import LogError
from ppstream.report.kernels import cli
from ppstream.report.kernels.findings import TraceFindings, bottleneck, findings
from ppstream.report.kernels.trace import Trace, TraceRange, Work, category

ROOT = Path(__file__).resolve().parents[3]


def found(path: Path, **options: Any) -> TraceFindings:
    return findings(cli.read_trace(path), **options)


# ---- a real trace of the CPU --------------------------------------------------------------------


def test_real_cpu_trace_is_read_with_passes_and_without_warm_up() -> None:
    f = found(CPU_TRACE)
    assert not f.is_gpu
    assert (f.pass_name, f.passes) == ("B", 4)
    assert f.skipped == f.calls_in_passes / 4 == 28
    assert sum(s.share for s in f.kernels) == pytest.approx(1)
    assert sum(s.share for s in f.categories) == pytest.approx(1)
    stages = {s.name: s for s in f.stages}
    assert stages["B"].calls == 112
    assert 0 < stages["encode"].share < stages["B"].share == pytest.approx(1)
    calls = {s.name: s.calls for s in f.kernels}
    assert (calls["aten::addmm"], calls["aten::gelu"], calls["aten::_softmax"]) == (8, 4, 4)


def test_own_times_of_nested_operators_add_up_to_their_union() -> None:
    f = found(CPU_TRACE)
    assert f.work_ns == pytest.approx(f.busy_ns, rel=0.01)  # one thread: no time is counted twice


def test_skip_pattern_and_pass_can_be_chosen() -> None:
    f = found(CPU_TRACE, pass_name="encode", skip="nothing")
    assert (f.passes, f.skipped) == (5, 0)


# ---- traces of a GPU, in both forms --------------------------------------------------------------


def kineto(path: Path) -> Path:
    events: list[dict[str, Any]] = []
    for name, start, end, stream, grid, at, correlation in KERNELS:
        where = {"device": 0, "stream": stream, "correlation": correlation}
        shape = {"grid": [grid, 1, 1], "block": [128, 1, 1]}
        events.append(event("kernel", name, start, end, tid=stream, args=where | shape))
        call = {"correlation": correlation}
        events.append(event("cuda_runtime", "cudaLaunchKernel", at, at + 4, tid=1, args=call))
    for name, start, end in RANGES + ENCODE:
        events.append(event("user_annotation", f"ppstream:{name}", start, end, tid=1))
    for correlation, asked in COPIES:
        copy = {"bytes": 4000, "correlation": correlation}
        name = "Memcpy HtoD (Pinned -> Device)"
        events.append(event("gpu_memcpy", name, asked + 9, asked + 13, tid=9, args=copy))
        call = {"correlation": correlation}
        events.append(event("cuda_runtime", "cudaMemcpyAsync", asked, asked + 2, tid=1, args=call))
    events.append({"ph": "M", "name": "process_name", "pid": 1, "args": {}})
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    return path


@pytest.fixture(params=["kineto", "nsys"])
def gpu_trace(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    make = {"kineto": kineto, "nsys": nsys}[request.param]
    return make(tmp_path / f"trace.{'json' if request.param == 'kineto' else 'sqlite'}")


def test_gpu_trace_gives_the_same_findings_in_both_forms(gpu_trace: Path) -> None:
    f = found(gpu_trace)
    assert f.is_gpu
    assert (f.pass_name, f.passes, f.calls_in_passes, f.skipped) == ("B", 2, 8, 4)
    assert f.work_ns == 2 * (200 + 10 + 50 + 50) * US
    assert (
        f.busy_ns == 2 * (240 + 50) * US
    )  # two streams overlap; 10 us of the small one are hidden
    assert f.span_ns == 1340 * US
    shares = {s.name: round(s.share * 620) for s in f.categories}
    assert shares == {"matmul": 420, "elementwise": 100, "communication": 100}
    stages = {s.name: s.total_ns // US for s in f.stages}
    assert {s.name: (s.calls, s.total_ns // US) for s in f.ranges}["B"] == (2, 1700)
    assert stages == {"B": 620, "encode": 2 * 260}  # by where it was launched, not where it ran
    assert (f.gaps.n, f.gaps.total_ns, f.gaps.longest_ns) == (3, 760 * US, 660 * US)
    assert f.gaps.short_ns == 0
    (copies,) = f.copies
    assert (copies.n, copies.bytes, copies.total_ns) == (1, 4000, 4 * US)
    assert copies.kind in ("Memcpy HtoD", "Memcpy Host-to-Device")
    assert f.launch_ns == 12 * 4 * US


def test_two_launch_shapes_of_one_kernel_are_no_warm_up() -> None:
    work = [kernel(k * 100, 40 if k % 2 else 10, grid=64 if k % 2 else 2) for k in range(20)]
    (modes,) = findings(trace(work)).modes
    assert (modes.slow_ns, modes.fast_ns) == (40 * US, 10 * US)
    assert "64x1x1 blocks of 128x1x1 or 2x1x1" in modes.why


def test_two_speeds_of_one_launch_are_told_apart_from_jitter() -> None:
    slow = [kernel(k * 100, 40 if k % 4 == 0 else 10, grid=8) for k in range(40)]
    (modes,) = findings(trace(slow)).modes
    assert "one launch" in modes.why
    jitter = [kernel(k * 100, 10 + k % 31, grid=8) for k in range(62)]
    assert findings(trace(jitter)).modes == []


def kernel(start: int, took: int, *, grid: int = 1, name: str = "gemm") -> Work:
    shape = (grid, 1, 1, 128, 1, 1)
    span = (start * US, (start + took) * US)
    return Work(name, *span, took * US, "device 0 stream 7", shape, start * US, 1)


def trace(work: list[Work], **more: Any) -> Trace:
    return Trace("made", is_gpu=True, work=work, copies=[], ranges=[], **more)


@pytest.mark.parametrize(
    ("work", "kind"),
    [
        ([kernel(k * 100, 95) for k in range(20)], "compute"),
        ([kernel(k * 100, 95, name="vectorized_elementwise") for k in range(20)], "memory"),
        ([kernel(k * 12, 4) for k in range(20)], "launch"),
        ([kernel(k * 1000, 95) for k in range(20)], "cpu"),
        ([kernel(k * 100, 95, name="mystery") for k in range(20)], "mixed"),
    ],
)
def test_bottleneck_is_named_with_its_evidence(work: list[Work], kind: str) -> None:
    named, why = bottleneck(findings(trace(work)))
    assert named == kind
    assert "%" in why


def test_launches_of_another_thread_are_not_inside_a_range() -> None:
    here, there = kernel(10, 5), kernel(20, 5)._replace(thread=2)
    made = Trace("made", True, [here, there], [], [TraceRange("B", 0, 100 * US, 1)])
    assert [s.calls for s in findings(made).stages] == [1]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sm90_xmma_gemm_bf16bf16_bf16f32", "matmul"),
        ("cutlass_80_wmma_tensorop_s161616gemm", "matmul"),
        ("flash_fwd_kernel<Flash_fwd_kernel_traits>", "attention"),
        ("void at::native::(anonymous namespace)::cunn_SoftMaxForward", "softmax"),
        ("void at::native::reduce_kernel<512, 1>", "reduce"),
        ("void at::native::vectorized_layer_norm_kernel", "reduce"),
        ("void at::native::CatArrayBatchedCopy", "copy/memset"),
        ("triton_poi_fused_add_gelu_0", "elementwise"),
        ("ncclDevKernel_AllReduce_Sum_bf16", "communication"),
        ("ppstream_resample_bf16", "resample"),
        ("begin", "resample"),  # a window's own kernels, as kernels/ names them
        ("put", "communication"),
        ("put_stamped", "communication"),
        ("nvjet_tst_128x64_64x8_1x2_h_bz_TNT", "matmul"),  # of cuBLAS on Hopper
        ("triton_tem_fused_mm_3", "matmul"),
        ("vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>", "copy/memset"),
        ("void at::native::vectorized_gather_kernel<16, long>", "copy/memset"),
        ("aten::addmm", "matmul"),
        ("aten::mul", "elementwise"),
        ("aten::empty", "other"),
    ],
)
def test_names_fall_into_their_category(name: str, kind: str) -> None:
    assert category(name) == kind


# ---- exports that must not be believed -----------------------------------------------------------


def test_stale_export_is_refused_with_the_command_that_renews_it(tmp_path: Path) -> None:
    export = nsys(tmp_path / "run.sqlite")
    report = tmp_path / "run.nsys-rep"
    report.write_bytes(b"x")
    before = export.stat().st_mtime
    os.utime(report, (before + 10, before + 10))
    with pytest.raises(LogError, match=r"older than run\.nsys-rep.*--force-overwrite true"):
        cli.read_trace(export)
    os.utime(report, (before - 10, before - 10))
    assert cli.read_trace(export).is_gpu


def test_placeholders_and_broken_files_are_named(tmp_path: Path) -> None:
    whole = kineto(tmp_path / "whole.json").read_bytes()
    empty_sqlite = tmp_path / "no_kernels.sqlite"
    connection = sqlite3.connect(empty_sqlite)
    connection.execute("CREATE TABLE StringIds (id INTEGER, value TEXT)")
    connection.commit()
    connection.close()
    cases = {
        "empty.json": (b"", "empty"),
        "pointer.sqlite": (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
            "git lfs pull",
        ),
        "torn.json": (whole[:200], "incomplete JSON"),
        "torn.json.gz": (gzip.compress(whole)[:200], "incomplete JSON"),
        "no_end.json": (whole.replace(b'"dur"', b'"end"'), "an event lacks 'dur'"),
        "other.json": (b'{"a": 1}', "not a trace of torch.profiler"),
        "idle.json": (b'{"traceEvents": []}', "neither kernels, operators nor"),
        "run.nsys-rep": (b"NVIDIA...", "nsys export --type sqlite"),
        "notes.txt": (b"hello", "neither torch.profiler"),
        "no_kernels.sqlite": (empty_sqlite.read_bytes(), "--trace=cuda,nvtx"),
        "damaged.sqlite": (nsys(tmp_path / "ok.sqlite").read_bytes()[:3000], "damaged"),
    }
    for name, (content, text) in cases.items():
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(LogError, match=text):
            cli.read_trace(path)
    with pytest.raises(LogError, match="No such file"):
        cli.read_trace(tmp_path / "nowhere")


# ---- the tool ------------------------------------------------------------------------------------


def test_tool_needs_nothing_installed_and_writes_json(tmp_path: Path) -> None:
    command = [sys.executable, "-S", str(ROOT / "tools/kernel_report.py"), str(CPU_TRACE)]
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "out.json"), "--top", "3"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "passes 4 of range B: 28.0 operators" in done.stdout
    assert "more" in done.stdout
    out = json.loads((tmp_path / "out.json").read_text())
    assert (out["schema"], out["passes"]) == ("ppstream.kernels/1", 4)


def test_a_folder_has_a_row_for_each_rank_of_its_newest_trace(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "profile.rank0.gen0.0.json").write_text("of an older cycle")
    for name in ("profile.rank0.gen0.1.json", "profile.rank2.gen0.0.json"):
        (tmp_path / name).write_bytes(gzip.decompress(CPU_TRACE.read_bytes()))
    kineto(tmp_path / "profile.rank1.gen0.0.json")
    ranks = [{"rank": n, "parts": parts} for n, parts in enumerate(([], ["a"], ["b", "c"]))]
    (tmp_path / "run.json").write_text(json.dumps({"topology": {"ranks": ranks}}))
    out = tmp_path / "out.json"
    assert cli.main([str(tmp_path), "--json", str(out)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:4]]
    assert [row[:2] for row in rows] == [["0", "4"], ["1", "a"], ["2", "b,"]]
    assert rows[0][1:6] == ["4", "of", "B", "28.0", rows[2][7]]
    assert rows[1][2:6] == ["2", "of", "B", "4.0"]
    assert json.loads(out.read_text())["ranks"]["1"]["passes"] == 2


def test_a_wrong_pattern_and_a_folder_that_is_not_there_are_refused(
    tmp_path: Path, capsys: Any
) -> None:
    with pytest.raises(SystemExit):
        cli.main([str(CPU_TRACE), "--skip", "("])
    assert "argument --skip: '(' is no pattern: missing )" in capsys.readouterr().err
    nowhere = tmp_path / "nowhere" / "x.json"
    assert cli.main([str(CPU_TRACE), "--json", str(nowhere)]) == 3
    assert f"cannot write {nowhere}: No such file" in capsys.readouterr().err


def test_a_folder_without_a_trace_says_how_one_is_made(tmp_path: Path, capsys: Any) -> None:
    assert cli.main([str(tmp_path)]) == 3
    assert "SIGUSR2" in capsys.readouterr().err


def test_bad_input_is_exit_3_and_one_line(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "x.json").write_bytes(gzip.compress(b"no"))
    assert cli.main([str(tmp_path / "x.json")]) == 3
    assert capsys.readouterr().err.count("\n") == 1


def test_text_of_a_gpu_trace_shows_everything(gpu_trace: Path, capsys: Any) -> None:
    assert cli.main([str(gpu_trace)]) == 0
    text = capsys.readouterr().out
    for part in ("left out: 4 kernels", "launch-bound index", "passes 2 of range B: 4.0 kernels"):
        assert part in text
    assert "GB/s" in text
