"""Cost of taking samples in and cutting a window on one core: ``python tools/bench/ingest.py``.

Five measurements in CPU time of the thread that does the work, so that other processes matter
little: ``ring.append`` alone; a message from its bytes to the ring (decode, all checks, append);
the whole way from a RobotClient through a socket to the ring; ten streams at 1 kHz in real time;
and cutting a window. Medians of interleaved rounds. A client alone is slower than the receiver,
which then sleeps between messages; so the whole way is also measured while ``WAITING`` of them are
there before the receiver looks. ``--json FILE`` writes the table. With
``--against PATH`` this script measures another checkout's packages in turn with these, ABBA.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tools/


import numpy as np
import torch
from claimed_numbers import ClaimedTime, median_rate, ratio, write_audited

import ppstream
from ppstream.config.load import as_toml
from ppstream.config.schema import (
    ActionConfig,
    PipelineConfig,
    PolicyConfig,
    ServiceConfig,
    StreamConfig,
    WindowConfig,
)
from ppstream.core.clock import NS_PER_MS, NS_PER_S, now_ns
from ppstream.core.waiter import Waiter
from ppstream.ingest.intake import Intake, build_intake
from ppstream.ingest.ring import SensorRing
from ppstream.ingest.synthetic import SyntheticSource
from ppstream.links.slots import SlotLayout
from ppstream.observe.run_folder import hardware
from ppstream.robot.client import RobotClient
from ppstream.sessions.server import Sessions
from ppstream.wire import robot_messages
from ppstream.wire.fields import encoder

Array: TypeAlias = np.ndarray[Any, Any]

SIZES = (1, 10, 100)  # samples per message
DIM = 14
BATCHES = 400  # timed together
ROUNDS = 15
SOCKET_SAMPLES = 100_000
WAITING = 100  # messages; the socket has room for more
ROOT = Path(__file__).resolve().parents[2]
REPLAY = Path(ppstream.__file__).resolve().parents[1] / "tools" / "replay.py"
KHZ_STREAMS = 10
KHZ_SECONDS = 2.0
ATTEMPTS = 3  # of a checkout's run: a busy machine drops samples of those in real time


def main() -> int:
    """Run all, print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--against", type=Path, metavar="PATH", help="another checkout")
    arguments = parser.parse_args()
    if arguments.against is not None:
        return compare(arguments.against, arguments.json)
    torch.set_num_threads(1)
    floods = _floods()
    flood_rows = [_flood_row(*found) for found in floods.items()]
    rows = [*_append_rows(), *flood_rows, *_khz_rows(), *_cut_rows()]
    machine = hardware() | {"torch": torch.__version__, "numpy": np.__version__}
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    print(f"{'':40} {'p50':>12} {'p99':>12} {'worst':>12}")
    for row in rows:
        numbers = " ".join(f"{row[name]:12,.1f}" for name in ("p50", "p99", "worst"))
        print(f"{row['what']:40} {numbers} {row['unit']}, n = {row['n']}")
    pairs = zip(flood_rows, floods.values(), strict=True)
    claims = [median_rate(row["what"], rounds, row["p50"]) for row, rounds in pairs]
    write_audited(arguments.json, {"hardware": machine, "rows": rows}, claims)
    return 0


def compare(other: Path, file: Path | None) -> int:
    """Print each row of both checkouts, and this one's p50 over the other's."""
    roots = {"here": ROOT, "there": other.resolve()}
    found: dict[str, list[dict[str, dict[str, Any]]]] = {side: [] for side in roots}
    for side in ("here", "there", "there", "here"):
        found[side].append(_rows_of(roots[side]))
    shared = [what for what in found["here"][0] if what in found["there"][0]]
    rows, claims = [], []
    print(f"{'p50, mean of 2 runs':40} {'here':>12} {'there':>12} {'here/there':>12}")
    for what in shared:
        here, there = (sum(run[what]["p50"] for run in found[side]) / 2 for side in roots)
        rows.append({"what": what, "here": here, "there": there, "ratio": here / there})
        claims.append(ratio(what, here, there, here / there))
        unit = found["here"][0][what]["unit"]
        print(f"{what:40} {here:12,.1f} {there:12,.1f} {here / there:12.3f} {unit}")
    write_audited(file, {"hardware": hardware(), "against": str(other), "rows": rows}, claims)
    return 0


def _rows_of(root: Path) -> dict[str, dict[str, Any]]:
    """Rows of one run over the checkout's packages, by what they measure."""
    path = os.pathsep.join(str(root / room) for room in ("", "kernels", "stages"))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rows.json")
        command = [sys.executable, __file__, "--json", str(file)]
        environment = os.environ | {"PYTHONPATH": path}
        for _ in range(ATTEMPTS):
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            if done.returncode == 0:
                return {row["what"]: row for row in json.loads(file.read_text())["rows"]}
        raise SystemExit(f"{root}: no run of {ATTEMPTS} ended well:\n{done.stderr}")


def _row(what: str, values: list[float], unit: str) -> dict[str, Any]:
    """``p99``: 99 % of ``values`` are at least as good."""
    quantiles = (50, 1, 0) if unit == "samples/s" else (50, 99, 100)
    p50, p99, worst = (float(np.percentile(values, q)) for q in quantiles)
    return {"what": what, "p50": p50, "p99": p99, "worst": worst, "unit": unit, "n": len(values)}


# ---- from arrays, and from bytes, to the ring -------------------------------------------------


def _append_rows() -> list[dict[str, Any]]:
    config = _config((_stream("joints", DIM),))
    append_us: dict[int, list[float]] = {size: [] for size in SIZES}
    whole_us: dict[int, list[float]] = {size: [] for size in SIZES}
    bad_us: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for size in SIZES:
            ring = _open(build_intake(config)).rows[0].rings["joints"]
            arrays = _messages(size, BATCHES)
            frames = [_encoded(stamps, values) for stamps, values in arrays]
            append_us[size].append(_mean_us(partial(_append, ring), arrays))
            ring.clear("bench")
            whole_us[size].append(_mean_us(partial(_append_frame, ring), frames))
        for bad, arrays in _bad_messages().items():
            ring = _open(build_intake(config)).rows[0].rings["joints"]
            bad_us.setdefault(bad, []).append(_mean_us(partial(_append, ring), arrays))
    return [
        _row(f"{what}, {size} x {DIM}", each, "µs/message")
        for what, took_us in (("append", append_us), ("decode + append", whole_us))
        for size, each in took_us.items()
    ] + [
        _row(f"append, {SIZES[-1]} x {DIM}, {bad}", us, "µs/message") for bad, us in bad_us.items()
    ]


def _mean_us(call: Callable[[Any], object], arguments: list[Any]) -> float:
    began_ns = time.thread_time_ns()
    for argument in arguments:
        call(argument)
    return (time.thread_time_ns() - began_ns) / len(arguments) / 1e3


def _append(ring: SensorRing, arrays: tuple[Array, Array]) -> int:
    return ring.append(*arrays, now_ns())


def _append_frame(ring: SensorRing, frame: bytes) -> int:
    message = robot_messages.from_robot.decode(frame)
    assert isinstance(message, robot_messages.Samples)
    stamps = np.frombuffer(message.stamps, np.int64)
    values = np.frombuffer(message.values, np.float32).reshape(len(stamps), DIM)
    return ring.append(stamps, values, now_ns())


def _encoded(stamps: Array, values: Array) -> bytes:
    return encoder.encode(robot_messages.Samples(1, 0, stamps.data, values.data))


def _messages(size: int, count: int) -> list[tuple[Array, Array]]:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((size, DIM)).astype(np.float32)
    steps = np.arange(size, dtype=np.int64)
    return [((steps + index * size) * NS_PER_MS, values) for index in range(count)]


def _bad_messages() -> dict[str, list[tuple[Array, Array]]]:
    """The largest size, as one who floods would send them."""
    good = _messages(SIZES[-1], BATCHES)
    holed = good[0][1].copy()
    holed[::2] = np.nan
    return {
        "half of it NaN": [(stamps, holed) for stamps, _ in good],
        "newest first": [(stamps[::-1].copy(), values) for stamps, values in good],
    }


# ---- through sockets --------------------------------------------------------------------------


class _Receiver:
    """Sessions on a thread of its own, as rank 0 polls and drains them; counts its CPU time."""

    def __init__(self, config: PipelineConfig) -> None:
        self.intake = build_intake(config)
        self.sessions = Sessions(config, self.intake.rows)
        self.sessions.set_phase("ready")
        self.cpu_ns = 0
        self._waiter = Waiter()
        self.sessions.set_wake(self._waiter.wake)
        for fd in self.sessions.fds:
            self._waiter.register(fd)
        self.turn = threading.Lock()  # held by who sends: then it does not read
        self._stopped = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def accepted(self) -> int:
        return sum(ring.accepted for row in self.intake.rows for ring in row.rings.values())

    def stop(self) -> None:
        self._stopped = True
        self._waiter.wake()
        self._thread.join(10)
        self.sessions.close()
        self._waiter.close()

    def _run(self) -> None:
        while not self._stopped:
            self._waiter.wait(NS_PER_S // 10)
            with self.turn:
                self.sessions.drain(now_ns())
            self.cpu_ns = time.thread_time_ns()


def _floods() -> dict[tuple[int, int], list[ClaimedTime]]:
    """By samples a message, and messages that wait; 0: what a client sends without a pause."""
    found: dict[tuple[int, int], list[ClaimedTime]] = {
        (size, waiting): [] for waiting in (0, WAITING) for size in SIZES[:2]
    }
    for _ in range(5):
        for flood, measured in found.items():
            with tempfile.TemporaryDirectory() as folder:
                measured.append(_flood(_config((_stream("joints", DIM),), folder), *flood))
    return found


def _flood_row(flood: tuple[int, int], rounds: list[ClaimedTime]) -> dict[str, Any]:
    size, waiting = flood
    how = f", {waiting} wait" if waiting else ""
    what = f"socket to ring, {size} x {DIM}{how}"
    return _row(what, [each.rate for each in rounds], "samples/s")


def _flood(config: PipelineConfig, size: int, waiting: int) -> ClaimedTime:
    """Samples, and the CPU time of the thread that receives them."""
    count = SOCKET_SAMPLES * size // 10
    receiver = _Receiver(config)
    joints = config.streams[0]
    with RobotClient(
        receiver.sessions.endpoint,
        robot="bench",
        streams=[(joints.name, joints.dim)],
        actions=config.actions.names,
        real_time=False,
    ) as client:
        client.connect()
        assert client.wait_ready(5.0)
        before_ns = receiver.cpu_ns
        messages = _messages(size, count // size)
        _send(client, receiver, messages, waiting)
        while receiver.accepted() < count:
            time.sleep(0.001)
        time.sleep(0.02)
        spent_ns = receiver.cpu_ns - before_ns
    receiver.stop()
    return ClaimedTime(count, spent_ns / NS_PER_S)


def _send(
    client: RobotClient, receiver: _Receiver, messages: list[tuple[Array, Array]], waiting: int
) -> None:
    if not waiting:
        for message in messages:
            while not client.push("joints", *message):
                time.sleep(0.0002)
        return
    before, size = receiver.accepted(), len(messages[0][0])
    for first in range(0, len(messages), waiting):
        sent = messages[first : first + waiting]
        with receiver.turn:
            assert all(client.push("joints", *message) for message in sent)
        while receiver.accepted() - before < (first + len(sent)) * size:
            time.sleep(0.0002)


def _khz_rows() -> list[dict[str, Any]]:
    """A robot in a process of its own: all streams at 1 kHz in real time."""
    shares: dict[int, list[float]] = {5: [], 10: []}
    for _ in range(3):
        for batch_ms, measured in shares.items():
            measured.append(_share_at_khz(batch_ms))
    return [
        _row(f"{KHZ_STREAMS} x 1 kHz, {batch_ms} samples a message", measured, "% of a core")
        for batch_ms, measured in shares.items()
    ]


def _share_at_khz(batch_ms: int) -> float:
    streams = tuple(_stream(f"s{index}", DIM) for index in range(KHZ_STREAMS))
    [(stamps, values)] = _messages(round(KHZ_SECONDS * 1000), 1)
    arrays = {f"{stream.name}.stamps_ns": stamps for stream in streams}
    arrays |= {f"{stream.name}.values": values for stream in streams}
    with tempfile.TemporaryDirectory() as folder:
        config = _config(streams, folder)
        Path(folder, "run.toml").write_text(as_toml(config))
        np.savez(Path(folder, "run.npz"), allow_pickle=False, **arrays)
        options = f"{folder}/run.npz --config {folder}/run.toml --batch-ms {batch_ms}"
        receiver = _Receiver(config)
        subprocess.run(
            [sys.executable, REPLAY, *options.split()], check=True, stdout=subprocess.DEVNULL
        )
        receiver.stop()
    assert receiver.accepted() == len(stamps) * KHZ_STREAMS
    return 100 * receiver.cpu_ns / (KHZ_SECONDS * NS_PER_S)


# ---- cutting ----------------------------------------------------------------------------------


def _cut_rows() -> list[dict[str, Any]]:
    """Three streams, 32 steps of 10 ms, one row, a new window every 10 ms of sensor time."""
    streams = (
        StreamConfig(name="encoder", dim=2, rate_hz=1000.0, jitter_ms=0.1, reference=True),
        StreamConfig(name="imu", dim=6, rate_hz=200.0, jitter_ms=0.5),
        StreamConfig(name="slow", dim=1, rate_hz=30.0, jitter_ms=3.0, interpolation="previous"),
    )
    config = _config(streams)
    intake = build_intake(config)
    source = SyntheticSource(config, intake.rows[0], 0, 0)
    layout = SlotLayout(("index",), intake.cutter.inputs, 1)
    out = layout.views(torch.zeros(layout.slot_bytes, dtype=torch.uint8))
    drain_us, cut_us = [], []
    for turn in range(1, 2001):
        began_ns = time.thread_time_ns()
        source.drain(turn * 10 * NS_PER_MS)
        drained_ns = time.thread_time_ns()
        intake.cutter.cut(out, (None,), NS_PER_S)
        cut_us.append((time.thread_time_ns() - drained_ns) / 1e3)
        drain_us.append((drained_ns - began_ns) / 1e3)
    return [
        _row("synthetic drain, 3 streams, 12 samples", drain_us[100:], "µs"),
        _row("cut, 3 streams, T = 32, B = 1", cut_us[100:], "µs"),
    ]


# ---- what all of them run on ------------------------------------------------------------------


def _stream(name: str, dim: int) -> StreamConfig:
    return StreamConfig(name=name, dim=dim, rate_hz=1000.0)


def _config(streams: tuple[StreamConfig, ...], folder: str = "/nowhere") -> PipelineConfig:
    return PipelineConfig(
        name="bench-ingest",
        streams=streams,
        window=WindowConfig(steps=32, dt_ms=10.0),
        actions=ActionConfig(
            names=("a",), horizon=1, dt_ms=10.0, low=(-1.0,), high=(1.0,), lease_ms=100.0
        ),
        policy=PolicyConfig(target="nobody:build"),
        service=ServiceConfig(endpoint=f"unix://{folder}/robots"),
    )


def _open(intake: Intake) -> Intake:
    for row in intake.rows:
        row.open(1, is_real_time=False)
    return intake


if __name__ == "__main__":
    sys.exit(main())
