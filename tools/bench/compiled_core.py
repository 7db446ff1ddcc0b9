"""Time of the compiled core's calls beside their Python twins: ``tools/bench/compiled_core.py``.

Each call back to back, and once after a pause of 20 ms, as at 50 Hz, when caches hold other things.
Core and twin alternate in one run, on rings of the same contents; medians of wall time in µs.
A wait takes its bell's slot, too; a ring to a sleeper writes the eventfd, and nobody sleeps on it.
``--json FILE`` writes the table.
"""

from __future__ import annotations

import argparse
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tools/


import numpy as np
import torch
from claimed_numbers import write_audited

from ppstream import native
from ppstream.config.schema import (
    ActionConfig,
    PipelineConfig,
    PolicyConfig,
    ServiceConfig,
    StreamConfig,
    WindowConfig,
)
from ppstream.core.clock import NS_PER_MS, NS_PER_S
from ppstream.core.waiter import PythonWaiter, Waiter
from ppstream.ingest.intake import Intake, build_intake
from ppstream.links.doorbell import SLEEPS, Doorbell, PythonDoorbell, doorbell_bytes
from ppstream.links.slots import SlotLayout
from ppstream.observe.run_folder import hardware
from ppstream.pipeline.action_limits import ActionRules

PAUSE_S: Final = 0.02
PAUSES: Final = 150  # of each twin
CALLS: Final = 3000  # back to back, of each twin
DIM: Final = 14
SLOTS: Final = 4
TWINS: Final = (Waiter, Doorbell), (PythonWaiter, PythonDoorbell)


class TwinCall(NamedTuple):
    """One call in both twins; each is told the number of its turn."""

    what: str
    core: Callable[[int], object]
    python: Callable[[int], object]


def main() -> int:
    """Run all, print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path, help="write the rows here")
    arguments = parser.parse_args()
    if not native.is_used:
        sys.exit(f"nothing to compare: {native.why_not}")
    torch.set_num_threads(1)
    calls = (appends(), *cuts(), limits(), *waits(), *rings())
    rows = [row for timed in calls for row in measure(timed)]
    machine = hardware()
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    print(f"{'':44} {'core µs':>9} {'Python µs':>10} {'Python / core':>14}")
    for row in rows:
        ratio = row["python_us"] / row["core_us"]
        print(f"{row['what']:44} {row['core_us']:9.2f} {row['python_us']:10.2f} {ratio:14.1f}")
    write_audited(arguments.json, {"hardware": machine, "rows": rows}, [])
    return 0


def measure(timed: TwinCall) -> Iterator[dict[str, Any]]:
    """Yields the medians back to back, then after pauses."""
    warm: tuple[list[int], list[int]] = ([], [])
    cold: tuple[list[int], list[int]] = ([], [])
    calls = timed.core, timed.python
    for turn in range(CALLS):
        for call, took in zip(calls, warm, strict=True):
            took.append(_took_ns(call, turn))
    for turn in range(CALLS, CALLS + PAUSES):
        for call, took in zip(calls, cold, strict=True):
            time.sleep(PAUSE_S)
            took.append(_took_ns(call, turn))
    for how, took in (("back to back", warm), ("after 20 ms", cold)):
        core_us, python_us = (float(np.median(each)) / 1e3 for each in took)
        what = f"{timed.what}, {how}"
        yield {"what": what, "core_us": core_us, "python_us": python_us, "n": len(took[0])}


def _took_ns(call: Callable[[int], object], turn: int) -> int:
    began_ns = time.perf_counter_ns()
    call(turn)
    return time.perf_counter_ns() - began_ns


def appends() -> TwinCall:
    """A message of one sample, as a robot without batches sends it; settled now and then."""
    values = np.ones((1, DIM), np.float32)
    return TwinCall(
        "append 1 x 14", *(_append(intake, values) for intake in _intakes(2, _streams(1)))
    )


def _append(intake: Intake, values: Any) -> Callable[[int], object]:
    ring = intake.rows[0].reference
    messages = [np.array([turn * NS_PER_MS]) for turn in range(CALLS + PAUSES)]

    def call(turn: int) -> None:
        at_ns = turn * NS_PER_MS
        ring.append(messages[turn], values, at_ns)
        if turn % 50 == 0:
            ring.settle(at_ns - NS_PER_MS, at_ns)

    return call


def cuts() -> Iterator[TwinCall]:
    """Windows of a full ring, cut and settled into the same slot."""
    for steps, streams in ((2, 1), (32, 3)):
        what = f"cut {steps} x {DIM}, {streams} stream{'s' * (streams > 1)}"
        yield TwinCall(what, *(_cut(intake) for intake in _intakes(steps, _streams(streams))))


def _cut(intake: Intake) -> Callable[[int], object]:
    rings = intake.rows[0].rings.values()
    stamps = np.arange(200, dtype=np.int64) * NS_PER_MS
    for ring in rings:
        ring.append(stamps, np.ones((len(stamps), DIM), np.float32), 0)
    layout = SlotLayout(("index",), intake.cutter.inputs, 1)
    out = layout.views(torch.zeros(layout.slot_bytes, dtype=torch.uint8))
    return lambda turn: intake.cutter.cut(out, (None,), NS_PER_S)


def limits() -> TwinCall:
    """A chunk of 16 actions within its limits."""
    rules = [ActionRules(_config(2, _streams(1)).actions) for _ in range(2)]
    rules[1]._is_compiled = False
    chunk = np.zeros((16, DIM), np.float32)
    core, python = ((lambda _, one=one: one.enforce(chunk)) for one in rules)
    return TwinCall("limits 16 x 14", core, python)


def waits() -> Iterator[TwinCall]:
    """A wait beside a bell that has rung, and one that finds nothing."""
    found, nothing = [_wait(*twins, rings=True) for twins in TWINS], [_wait(*t) for t in TWINS]
    yield TwinCall("wait that finds a bell rung", *found)
    yield TwinCall("wait that times out at 0", *nothing)


def _wait(
    waiters: type[PythonWaiter], bells: type[PythonDoorbell], *, rings: bool = False
) -> Callable[[int], object]:
    waiter = waiters()
    sender, receiver = _hop(bells)
    waiter.register_bell(receiver)

    def call(turn: int) -> None:
        assert waiter.wait(0)
        receiver.pop()

    if not rings:
        return lambda _: waiter.wait(0)
    for index in range(CALLS + PAUSES):
        sender.ring(index, 0, 0)
    return call


def rings() -> Iterator[TwinCall]:
    """A commit's ring to a receiver that sleeps, and to one awake."""
    for what, sleeps in (("ring to a sleeper", 1), ("ring to one awake", 0)):
        yield TwinCall(what, *(_ring(bells, sleeps) for _, bells in TWINS))


def _ring(bells: type[PythonDoorbell], sleeps: int) -> Callable[[int], object]:
    sender, receiver = _hop(bells)
    words = receiver._words

    def call(turn: int) -> None:
        words[SLEEPS] = sleeps
        sender.ring(turn, 0, 0)

    return call


def _hop(bells: type[PythonDoorbell]) -> tuple[PythonDoorbell, PythonDoorbell]:
    memory = mmap.mmap(-1, doorbell_bytes(SLOTS))
    fd = os.eventfd(0, os.EFD_NONBLOCK)
    return bells(memory, SLOTS, fd), bells(memory, SLOTS, fd)


def _intakes(steps: int, streams: tuple[StreamConfig, ...]) -> tuple[Intake, Intake]:
    """The core's, and Python's."""
    core, python = (build_intake(_config(steps, streams)) for _ in range(2))
    python.cutter._is_compiled = False
    for intake in (core, python):
        intake.rows[0].open(1, is_real_time=False)
    for ring in python.rows[0].rings.values():
        ring._takes = ring._is_compiled = False
    return core, python


def _streams(count: int) -> tuple[StreamConfig, ...]:
    return tuple(StreamConfig(name=f"s{i}", dim=DIM, rate_hz=1000.0) for i in range(count))


def _config(steps: int, streams: tuple[StreamConfig, ...]) -> PipelineConfig:
    return PipelineConfig(
        name="bench-core",
        streams=streams,
        window=WindowConfig(steps=steps, dt_ms=5.0),
        actions=ActionConfig(
            names=tuple(f"a{i}" for i in range(DIM)),
            horizon=16,
            dt_ms=10.0,
            low=(-1.0,) * DIM,
            high=(1.0,) * DIM,
            lease_ms=100.0,
        ),
        policy=PolicyConfig(target="nobody:build"),
        service=ServiceConfig(endpoint=None),
    )


if __name__ == "__main__":
    sys.exit(main())
