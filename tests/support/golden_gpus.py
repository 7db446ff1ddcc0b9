"""What ranks with a GPU log beside what the recurrence knows: device times, clocks, memory."""

from __future__ import annotations

from golden_runs import Fields, GoldenRun, ms


def on_gpus(run: GoldenRun) -> GoldenRun:
    """Device durations, clock anchors and memory, as ranks with a GPU log them."""
    run.bend(lambda line: line.update(eA_ns=ms(3), eB_ns=line["B_ns"] - ms(0.1), eC_ns=ms(2)))
    run.manifest["standalone"] = {"A_ns": ms(2.9), "B_ns": ms(9), "C_ns": ms(2)}
    anchor = {"kind": "event", "name": "clock", "bracket_ns": 12_000, "drift_ppb": -7_500}
    run.extra.append(anchor | {"surprise_ns": -1_900, "t": ms(1)})
    for lines in (run.extra, run.policy_lines):
        lines.append({"kind": "event", "name": "phase", "phase": "ready", "t": ms(9_500)})
        lines += [memory_line(second) for second in range(30)]
    return run


def memory_line(second: int) -> Fields:
    """Steady but for one segment that CUDA is asked for 20 s in."""
    segments, mib = 9 + (second >= 20), 1 << 20
    held = {"allocated_bytes": 130 * mib, "allocated_max_bytes": 131 * mib, "segments": segments}
    held |= {"reserved_bytes": 16 * mib * segments, "non_torch_bytes": 1300 * mib}
    held |= {"free_bytes": 90_000 * mib, "total_bytes": 100_000 * mib, "alloc_retries": 0}
    return {"kind": "memory", "t": ms(1000 * second), "resident_bytes": 1600 * mib} | held
