"""Logs of a working day: what a report of them holds in memory, and that it is the same report."""

import tracemalloc
from pathlib import Path

from golden_runs import GoldenRun, simulate

from ppstream.analysis.judge import judge
from ppstream.analysis.log_reader import read_run

SERVICE = 200  # envelopes of the run that is repeated
TIMES = 40
READ_MAX = 450  # bytes for an envelope of both ranks, once a log is read
JUDGED_MAX = 700  # and at most while it is judged
TOTALS = ("outstanding_ns_total", "q_decode_ns_total")


def long_run() -> GoldenRun:
    """Bring-up and a long service: one of ``SERVICE`` envelopes, ``TIMES`` times in a row."""
    golden = simulate(n=200 + SERVICE)
    service = {"phase": "ready", "pacing": "sample", "session": 5, "session_epoch": 1}
    golden.put(0, slice(200, None), window_end_ns=lambda line: line["tA0"], **service)
    golden.put(0, slice(200, None), expires_ns=lambda line: line["tA0"] + 90_000_000)
    golden.put(0, input_age_ns=lambda line: {"arm": line["seq"] % 7, "camera": 1_000_000})
    golden.put(1, slice(200, None), phase="ready")
    before, last = golden.lines[199], golden.lines[-1]
    by_ns = last["tEmit"] - before["tEmit"]
    totals = {name: last[name] - before[name] for name in TOTALS}
    for lines in golden.stamped:
        repeated = lines[200:]
        for k in range(1, TIMES):
            for line in repeated:
                moved = {"seq": line["seq"] + k * SERVICE}
                moved |= {
                    n: v + k * by_ns for n, v in line.items() if n[0] == "t" and n[1].isupper()
                }
                moved |= {n: line[n] + k * per for n, per in totals.items() if n in line}
                lines.append(line | moved)
    return golden


def test_a_log_of_a_day_fits_in_the_memory_of_a_robots_computer(tmp_path: Path) -> None:
    """1.44 million envelopes, which is eight hours at 50 Hz, take less than a gigabyte."""
    folder = long_run().write(tmp_path)
    n = 200 + SERVICE * TIMES
    tracemalloc.start()
    try:
        run = read_run(folder)
        read, _ = tracemalloc.get_traced_memory()
        report = judge(run)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(run.envelopes) == n
    assert report.verdict.name == "PASS", report.reasons
    assert read / n < READ_MAX
    assert most / n < JUDGED_MAX
