"""Device times, clocks and memory of the report: what a log holds is shown, and nothing else."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from faulty_runs import served, stages
from golden_gpus import memory_line, on_gpus
from golden_runs import GoldenRun, ms, simulate
from report_pages import complete, page

from ppstream.analysis.judge import judge
from ppstream.analysis.memory_use import memory_use
from ppstream.report.text import WIDTH, render


def test_page_says_what_device_and_host_disagree_on() -> None:
    text = page(complete())
    assert re.search(r'<td>B</td><td class="n">10\.\d ms</td>.*?<td class="n">\+1%</td>', text)
    assert re.search(r'<td>C</td><td class="n">2\.00 ms</td>.*?<td class="n bad">\+15\d%', text)
    assert "C takes 5.01 ms, the device&#x27;s 2.00 ms." in text
    assert "none wider than 12 µs, at most 1.9 µs off the one before, drift -7.5 ppm" in text


def test_memory_of_every_rank_is_drawn_and_what_grew_while_ready_is_marked() -> None:
    text = page(complete())
    for title in ("RAM", "GPU of rank 0", "GPU of rank 1"):
        assert f'aria-label="memory over time: {title}"' in text
    grew = "segments asked of CUDA while ready</td>"
    assert f'{grew}<td class="n bad">1</td><td class="n bad">1</td>' in text
    assert 'allocation retries</td><td class="n good">0</td><td class="n good">0</td>' in text


def test_page_of_a_run_without_gpu_and_memory_lines_shows_neither() -> None:
    text = page(simulate())
    assert "Memory" not in text
    assert "On the device" not in text


def test_events_that_are_the_only_stamps_are_compared_with_nothing() -> None:
    run = on_gpus(simulate())
    for rank in run.manifest["topology"]["ranks"]:
        rank["stamp_source"] = "device"
    found = {stage.stage: stage for stage in judge(run.parse()).on_device}
    assert [stage.host for stage in found.values()] == [None, None, None]
    assert (found["A"].apart, found["A"].alone_ns) == (None, ms(2.9))
    assert not found["C"].disagrees


def with_memory(*lines: dict[str, Any], ready_s: float = 9.5) -> GoldenRun:
    run = simulate(n=30)
    run.extra.append({"kind": "event", "name": "phase", "phase": "ready", "t": ms(1e3 * ready_s)})
    run.extra += lines
    return run


def test_growth_counts_from_ready_on_and_peaks_from_the_start() -> None:
    lines = [memory_line(second) for second in range(30)]
    lines[3] |= {"resident_bytes": 1 << 33, "segments": 7}
    lines[0] = {"kind": "memory", "t": 0, "resident_bytes": 5}  # before its GPU was asked
    (use,) = memory_use(with_memory(*lines).parse())
    assert use.gpu is not None
    assert (use.resident_max_bytes, use.resident_grown_bytes) == (1 << 33, 0)
    assert use.gpu.segments_grown == 1
    (later,) = memory_use(with_memory(*lines, ready_s=25).parse())
    assert later.gpu is not None
    assert later.gpu.segments_grown == 0
    (never,) = memory_use(with_memory(*lines, ready_s=-1).parse())
    assert never.gpu is not None
    assert never.gpu.segments_grown == 1


def test_what_a_short_warm_up_took_is_no_growth() -> None:
    lines = [memory_line(second) for second in range(10)]
    lines[0] |= {"resident_bytes": 5, "segments": 0}  # before graphs were captured
    (use,) = memory_use(with_memory(*lines, ready_s=0.7).parse())
    assert use.gpu is not None
    assert (use.resident_grown_bytes, use.gpu.segments_grown) == (0, 0)
    (short,) = memory_use(with_memory(*lines, ready_s=60).parse())  # killed at once
    assert short.resident_grown_bytes == 0


def test_nothing_grows_while_ready_in_a_run_that_never_was() -> None:
    lines = [memory_line(second) for second in range(30)]
    lines[29] |= {"resident_bytes": 1 << 33}
    stopped = simulate(n=30)
    stopped.extra += lines
    (use,) = memory_use(stopped.parse())
    assert use.gpu is not None
    assert (use.resident_max_bytes, use.resident_grown_bytes) == (1 << 33, 0)
    assert use.gpu.segments_grown == 0
    stopped.policy_lines.append({"kind": "event", "name": "phase", "phase": "ready", "t": ms(1)})
    (silent,) = memory_use(stopped.parse())  # another rank says that the run was
    assert silent.resident_grown_bytes == (1 << 33) - lines[0]["resident_bytes"]


def test_newest_generation_of_a_rank_is_shown() -> None:
    parsed = with_memory(memory_line(1)).parse()
    (old,) = parsed.memory
    new = replace(old, generation=1, resident_bytes=5)
    (use,) = memory_use(replace(parsed, memory=(old, new)))
    assert use.resident_max_bytes == 5


@pytest.mark.parametrize(("grown_mib", "leaks"), [(60, False), (1000, True)])
def test_ram_that_grows_while_serving_is_said_in_the_terminal(grown_mib: int, leaks: bool) -> None:
    mib = 1 << 20
    lines = [
        {"kind": "memory", "t": ms(1e3 * s), "resident_bytes": (500 + s * grown_mib // 29) * mib}
        for s in range(30)
    ]
    report = judge(with_memory(*lines, ready_s=0).parse())
    assert ("RAM rank 0   grew by" in render(report)) is leaks


def test_terminal_shows_device_times_and_memory_of_gpus_only() -> None:
    text = render(judge(on_gpus(simulate()).parse()))
    assert "device       A 3.00 ms (host 4.00 ms)   B 9.90 ms   C 2.00 ms (host 5.00 ms)" in text
    assert "GPU rank 1   0.13 GiB allocated   0.16 GiB reserved   1.27 GiB not torch's" in text
    assert "   1 segments while ready\n             0 retries" in text
    assert max(map(len, text.splitlines())) <= WIDTH
    plain = render(judge(simulate().parse()))
    assert "GPU rank" not in plain
    assert "device" not in plain


@pytest.mark.parametrize(
    ("ranks", "told"),
    [
        ({0: {}, 1: {"others_bytes": 3 << 30}}, "other programs held 3.00 GiB of rank 1's GPU"),
        ({0: {}, 1: {"others_bytes": 100 << 20, "found_bytes": 3 << 30}}, ""),
        ({0: {"others_bytes": 3 << 30}, 1: {}}, ""),  # the GPU of stages that were not slower
        (
            {0: {"found_bytes": 5 << 30}, 1: {"found_bytes": 3 << 30}},
            "other programs held 3.00 GiB of rank 1's GPU when the run began",
        ),
        ({0: {"found_bytes": 0}, 1: {"found_bytes": 3 << 30}}, ""),  # rank 0's own
        ({0: {}, 1: {"found_bytes": 3 << 30}}, ""),  # rank 0 may have held it
        ({0: {}, 1: {}}, ""),
    ],
)
def test_a_slower_service_names_other_programs_on_its_gpu(
    ranks: dict[int, dict[str, int]], told: str
) -> None:
    golden = served(stages(b=65))
    golden.manifest["topology"]["ranks"] = [{"rank": n, "device": "cuda:0"} for n in (0, 1)]
    for rank, lines in enumerate((golden.extra, golden.policy_lines)):
        lines += [memory_line(second) | ranks[rank] for second in range(30)]
    report = judge(golden.parse())
    (why,) = [text for text in report.statements if "service: B took" in text]
    assert told in why
    assert ("other programs" in why) == bool(told)
    if told:
        assert "other programs 3.00 GiB" in render(report)
