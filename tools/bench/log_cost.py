"""Cost of the time-stamp log: per record on the loop's side, and in a real loop, on and off.

``take + fill + commit`` is what a loop does for an envelope; it is timed in CPU time of the calling
thread, at a pace the drain thread keeps up with. ``sustained`` is how many records a second reach
the file when the loop does nothing else. The real loop is the unpipelined twin with stages that do
no work: one thread, so what the log adds is added to every envelope. It runs in short blocks, log
on and a log that keeps nothing in turn; the drain thread's share is in there, too.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, fields
from pathlib import Path
from statistics import median
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tools/


import torch
from claimed_numbers import throughput
from real_runs import (
    Spread,
    ending_cleanly,
    print_environment,
    spread,
    write_json,
)

from ppstream.analysis.records import EnvelopeLine
from ppstream.config import load
from ppstream.config.schema import PipelineConfig
from ppstream.core.clock import now_ns
from ppstream.core.interpreter import set_switch_interval
from ppstream.core.simulated_delay import Delay
from ppstream.core.waiter import Waiter
from ppstream.ingest.intake import build_intake
from ppstream.ingest.synthetic import SyntheticSource
from ppstream.links.headers import link_shape
from ppstream.links.slots import new_slots
from ppstream.observe.log_writer import EnvelopeRecord, TimestampLog
from ppstream.pipeline.credits import CreditLedger
from ppstream.pipeline.decode import CopyDecoder
from ppstream.pipeline.inline_executor import InlineExecutor
from ppstream.pipeline.loop import Rank0Loop
from ppstream.pipeline.pacing import Saturated
from ppstream.pipeline.stage_a import StageA
from ppstream.pipeline.stage_b import StageB
from ppstream.pipeline.stage_c import StageC
from ppstream.policy.compatibility import build_parts

RING: Final = 8192
BATCH: Final = 200  # records timed together
PACE_S: Final = 0.02  # between batches: about the log's own interval
SUSTAINED_RECORDS: Final = 60_000
WARM: Final = 200  # envelopes
US: Final = 1e-3  # per ns
ENVELOPE_US: Final = 100.0  # what an envelope without any stage work may cost in all
#: Fields of EnvelopeRecord that a loop fills with integers, one by one.
FILLED: Final = tuple(
    field.name
    for field in fields(EnvelopeLine)
    if field.name.startswith(("t", "w_")) or field.name.endswith("_ns")
)


class NullLog:
    """A log of the same interface that keeps nothing and needs no thread."""

    def __init__(self) -> None:
        self._record = EnvelopeRecord()

    def acquire(self) -> EnvelopeRecord:
        return self._record

    def commit(self, record: EnvelopeRecord) -> None:
        """Nobody reads it."""

    def event(self, name: str, **fields: Any) -> None:
        """Nobody reads it."""

    def line(self, kind: str, **fields: Any) -> None:
        """Nobody reads it."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--batches", type=int, default=100, help=f"of {BATCH} records")
    parser.add_argument("--blocks", type=int, default=20, help="of the real loop, each way")
    parser.add_argument("--block", type=int, default=500, help="envelopes of a block")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    set_switch_interval()
    mode = f"one process, drain thread running, loop of {options.block} envelopes in turn"
    print_environment(mode)
    with ending_cleanly(), tempfile.TemporaryDirectory(prefix="ppstream-bench-") as name:
        cost_us = spread(records_us(Path(name), options.batches))
        written, seconds = sustained(Path(name))
        loop_us = loop_periods_us(Path(name), options.blocks, options.block)
    spreads = {name: spread(values) for name, values in loop_us.items()}
    pairs = zip(loop_us["log on"], loop_us["no log"], strict=True)
    added_us = median(on - off for on, off in pairs)
    rate = written / seconds
    print_results(cost_us, rate, spreads, added_us)
    write_json(
        options.json,
        mode,
        (),
        claims=[throughput("sustained records a second", written, seconds, rate)],
        record_us=asdict(cost_us),
        sustained_records_per_s=rate,
        loop_us={name: asdict(found) for name, found in spreads.items()},
        added_us=added_us,
    )
    return 0


def records_us(folder: Path, batches: int) -> list[float]:
    """CPU time of the calling thread per record, one value a batch."""
    log = _log(folder / "records.jsonl")
    taken_us = []
    for _ in range(batches):
        began_ns = time.thread_time_ns()
        write(log, BATCH)
        taken_us.append((time.thread_time_ns() - began_ns) / BATCH * US)
        time.sleep(PACE_S)
    log.close()
    return taken_us


def sustained(folder: Path) -> tuple[int, float]:
    """Records that reach the file, and in how many seconds; nothing else is done, none is lost."""
    log = _log(folder / "sustained.jsonl")
    began_ns = time.monotonic_ns()
    written = 0
    while written < SUSTAINED_RECORDS:
        write(log, RING // 2)
        written += RING // 2
        log.flush()
    seconds = (time.monotonic_ns() - began_ns) / 1e9
    log.close()
    if (lost := log.statistics().lost) > 0:
        raise SystemExit(f"{lost} records were lost though the ring was never full")
    return written, seconds


def write(log: TimestampLog, count: int) -> None:
    """Does what a loop does for ``count`` envelopes, and nothing else."""
    for seq in range(count):
        record = log.acquire()
        record.epoch, record.seq, record.phase, record.pacing = 0, seq, "ready", "sample"
        now = now_ns()
        for name in FILLED:
            setattr(record, name, now)
        log.commit(record)


# ---- the real loop ----------------------------------------------------------------------------


def loop_periods_us(folder: Path, blocks: int, block: int) -> dict[str, list[float]]:
    """Mean µs per envelope of each block, with the log and without, in ABBA order."""
    config = load.read("bench", ("simulate.a_ms=0", "simulate.c_ms=0", "policy.options.b_ms=0"))
    found: dict[str, list[float]] = {"log on": [], "no log": []}
    with ExitStack() as stack:
        log = _log(folder / "loop.jsonl")
        stack.callback(log.close)
        waiter = Waiter()
        stack.callback(waiter.close)
        loop = _loop(config, log, waiter)
        logs: dict[str, Any] = {"log on": log, "no log": NullLog()}
        loop.run(WARM)
        for number in range(blocks):
            for name in ("log on", "no log") if number % 2 else ("no log", "log on"):
                log.flush()  # what was written before is no burden on this block
                loop.log = logs[name]
                began_ns = time.monotonic_ns()
                loop.run(block)
                found[name].append((time.monotonic_ns() - began_ns) / block * US)
        loop.log = log
    return found


def _loop(config: PipelineConfig, log: TimestampLog, waiter: Waiter) -> Rank0Loop:
    intake = build_intake(config)
    (policy,) = build_parts(config, torch.device("cpu"))
    shape = link_shape(config, intake.cutter.inputs, policy.outputs, 0)
    executor = InlineExecutor(
        StageB(policy, config.batch.rows),
        envelope=new_slots(shape.envelope, 1)[0],
        result=new_slots(shape.result, 1)[0],
    )
    loop = Rank0Loop(
        config,
        StageA(config, Delay(0)),
        StageC(config, CopyDecoder(), Delay(0)),
        CreditLedger(config.pipeline.d_in, config.pipeline.d_out),
        log,
        waiter,
        executor=executor,
    )
    source = SyntheticSource(config, intake.rows[0], seed=0, start_ns=now_ns())
    loop.enter("ready", intake=intake, source=source, pacing=Saturated(intake.rows))
    return loop


def _log(path: Path) -> TimestampLog:
    return TimestampLog(path, EnvelopeRecord, RING, run_id="bench", generation=0)


def print_results(
    cost_us: Spread, rate: float, spreads: dict[str, Spread], added_us: float
) -> None:
    print(f"{'us':44} {'p50':>8} {'p99':>8} {'max':>8} {'n':>5}")
    what = f"take + fill {len(FILLED)} fields + commit, CPU time"
    for name, found in {what: cost_us, **{f"envelope, {k}": v for k, v in spreads.items()}}.items():
        print(f"{name:44} {found.p50:8.2f} {found.p99:8.2f} {found.max:8.2f} {found.n:5}")
    print(
        f"the log adds {added_us:.2f} us to an envelope (median of paired blocks): "
        f"{added_us / ENVELOPE_US:.0%} of the {ENVELOPE_US:g} us that one without stage work may "
        "cost; the log has no target of its own"
    )
    print(f"sustained {rate:,.0f} records/s into the file, none lost")


if __name__ == "__main__":
    sys.exit(main())
