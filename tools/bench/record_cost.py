"""Cost of recording a run: 10 streams of 1 kHz and 14 values, 50 windows and chunks a second.

``recorder`` is the CPU time of the recorder's thread per second, ``hand-over`` what a message costs
the thread that owns the rings, with the recorder and without. Messages hold 5 ms of a stream, as a
robot's client sends them, or (``--single``) one sample. ``frozen`` writes to a pipe whose reader is
stopped: the hand-over must cost no more, and what does not fit is counted. ``view`` feeds a live
view that nobody looks at. ``cameras`` adds two of 480 x 640 at 30 Hz, ``jpeg`` and ``raw`` record
their frames: ``frame`` is what one costs that thread, ``late`` how long behind its time a turn's
messages were in their rings, median and 99 %; on a busy machine the latter is the machine's.
Needs ``ppstream[view]``.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tools/


import msgspec
import numpy as np
import torch
from claimed_numbers import Claim, bandwidth, ratio, throughput
from real_runs import Target, ending_cleanly, print_environment, print_targets, write_json

from ppstream.config import load
from ppstream.config.schema import ImageConfig, PipelineConfig, RecordConfig, StreamConfig
from ppstream.core.clock import NS_PER_MS, NS_PER_S, now_ns
from ppstream.core.interpreter import set_switch_interval
from ppstream.ingest.intake import build_intake
from ppstream.observe.log_writer import EnvelopeRecord
from ppstream.pipeline.child_process import start_view
from ppstream.pipeline.flight import Owner
from ppstream.recording.item_queue import THREAD
from ppstream.recording.mcap_writer import open_recorder
from ppstream.recording.recorder import Recorder
from ppstream.wire.robot_messages import ActionChunk

STREAMS: Final = 10
RATE_HZ: Final = 1000
DIM: Final = 14
TURN_MS: Final = 5  # between two messages of a stream, unless they hold one sample
WINDOW_TURNS: Final = 4  # a window and a chunk every 20 ms
HORIZON: Final = 16
CAMERAS: Final = ("top", "wrist")
FRAME_HZ: Final = 30
IMAGE: Final = ImageConfig(height=480, width=640)
RECORDER_CPU: Final = 0.05  # of a core


@dataclass(frozen=True)
class Cost:
    """One block."""

    recorder_cpu: float  # of a core
    hand_over_us: float  # per message, on the thread that owns the rings; median over turns
    hand_over_max_us: float  # the mean of a message in the slowest turn
    samples_per_s: float
    dropped: int
    mb_per_s: float
    lasted_s: float
    recorder_s: float  # of CPU time
    samples: int
    recorded_bytes: int
    frame_us: float  # as hand_over_us, of a frame; 0: there is none
    late_us: float  # of turns, behind their time; median,
    late_p99_us: float


class Turn(NamedTuple):
    """Messages of every stream that arrive at once."""

    stamps: list[Any]  # of each message
    values: list[list[Any]]  # of each stream's messages


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="of each block")
    parser.add_argument("--single", action="store_true", help="one sample a message")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    set_switch_interval()
    torch.set_num_threads(1)
    mode = f"{STREAMS} streams of {RATE_HZ} Hz and {DIM} float32, paced, one process"
    print_environment(mode)
    costs: dict[str, Cost] = {}
    with ending_cleanly(), tempfile.TemporaryDirectory(prefix="ppstream-bench-") as name:
        folder = Path(name)
        costs["off"] = block(None, options.seconds, single=options.single)
        file = folder / "run.mcap"
        costs["on"] = block(file, options.seconds, single=options.single)
        with frozen_reader(folder / "viewer") as pipe:
            costs["frozen"] = block(pipe, options.seconds, single=options.single)
        with live_view() as view_fd:
            costs["view"] = block(None, options.seconds, single=options.single, view_fd=view_fd)
        costs["off again"] = block(None, options.seconds, single=options.single)
        for form in ("none", "jpeg", "raw"):
            file = None if form == "none" else folder / f"{form}.mcap"
            name = "cameras" if form == "none" else form
            costs[name] = block(file, options.seconds, single=options.single, frames=form)
    print_costs(costs)
    targets = [Target("recorder's thread, share of a core", RECORDER_CPU, costs["on"].recorder_cpu)]
    print_targets(targets)
    results = {what: msgspec.to_builtins(cost) for what, cost in costs.items()}
    write_json(options.json, mode, targets, claims=claims_of(costs), costs=results)
    return 0


def print_costs(costs: dict[str, Cost]) -> None:
    print(f"{'':10} {'recorder':>9} {'hand-over us':>13} {'slowest':>8} {'samples/s':>10} ", end="")
    print(f"{'dropped':>8} {'MB/s':>6} {'frame us':>9} {'late us':>8} {'99 %':>7}")
    for what, cost in costs.items():
        print(
            f"{what:10} {cost.recorder_cpu:9.1%} {cost.hand_over_us:13.2f} "
            f"{cost.hand_over_max_us:8.1f} {cost.samples_per_s:10.0f} {cost.dropped:8} "
            f"{cost.mb_per_s:6.2f} {cost.frame_us:9.1f} {cost.late_us:8.0f} {cost.late_p99_us:7.0f}"
        )
    without = costs["cameras"]
    for form in ("jpeg", "raw"):
        frame = costs[form].frame_us / without.frame_us
        late = costs[form].late_us / without.late_us
        print(
            f"{form}: a frame costs the loop {frame:.1f} times, turns are {late:.2f} times as late"
        )


def claims_of(costs: dict[str, Cost]) -> list[Claim]:
    """Rates and the recorder's share of a core, from the block's own counts and time."""
    claims = []
    for what, cost in costs.items():
        claims.append(
            throughput(f"{what}: samples/s", cost.samples, cost.lasted_s, cost.samples_per_s)
        )
        if cost.recorder_s:
            name = f"{what}: recorder's thread, share of a core"
            claims.append(ratio(name, cost.recorder_s, cost.lasted_s, cost.recorder_cpu))
        if cost.recorded_bytes:
            per_s = cost.mb_per_s * 1e6
            claims.append(bandwidth(f"{what}: file", cost.recorded_bytes, cost.lasted_s, per_s))
    return claims


def block(
    path: Path | None,
    seconds: float,
    *,
    single: bool,
    view_fd: int | None = None,
    frames: str | None = None,
) -> Cost:
    """Feed the rings for a while; recorded with a path, with a pipe for a live view.

    ``frames``: with cameras, whose frames are recorded in this form; None: without cameras.
    """
    config = settings(path, frames)
    row = build_intake(config).rows[0]
    row.open(1)
    row.robot = "arm"
    recorder = open_recorder(config, "bench", view_fd)
    if recorder is not None:
        recorder.tap([row])
    clock = recorder_clock()
    spent_ns, took_us, turns = -clock(), [], turns_of(config, single=single)
    film, late_ns = Film(config), []
    began = due = now_ns()
    while now_ns() - began < seconds * NS_PER_S:
        turn = next(turns)
        due += TURN_MS * NS_PER_MS
        time.sleep(max(0, due - now_ns()) * 1e-9)
        took_us.append(feed(row, turn))
        film.feed(row, len(took_us))
        late_ns.append(now_ns() - due)
        if recorder is not None and len(took_us) % WINDOW_TURNS == 0:
            answer(recorder, len(took_us), row)
    lasted_s = (now_ns() - began) / NS_PER_S
    spent_ns += clock()
    samples = len(took_us) * STREAMS * RATE_HZ * TURN_MS // 1000
    dropped = 0
    if recorder is not None:
        dropped = sum(queue["dropped"] for queue in recorder.close())
    size = path.stat().st_size if path is not None else 0
    return Cost(
        spent_ns / NS_PER_S / lasted_s,
        float(np.median(took_us)),
        max(took_us),
        samples / lasted_s,
        dropped,
        size / 1e6 / lasted_s,
        lasted_s,
        spent_ns / NS_PER_S,
        samples,
        size,
        float(np.median(film.took_us)) if film.took_us else 0.0,
        *(float(late) / 1000 for late in np.percentile(late_ns, (50, 99))),
    )


class Film:
    """Frames of both cameras, when they are due; pictures with a sensor's noise."""

    def __init__(self, config: PipelineConfig) -> None:
        self.took_us: list[float] = []
        self._cameras = [camera.name for camera in config.cameras]
        self._sent = 0
        y, x = np.mgrid[0 : IMAGE.height, 0 : IMAGE.width]
        waves = 40 * np.sin(x / 5) * np.cos(y / 7) + (x + y) / 5
        noise = np.random.default_rng(0).normal(0, 4, (8, IMAGE.height, IMAGE.width, 3))
        frames = np.clip(waves[None, :, :, None] + noise, 0, 255).astype(np.uint8)
        self._frames = frames.reshape(len(frames), 1, -1)

    def feed(self, row: Any, turns: int) -> None:
        """Give each camera's ring the frame that is due after so many turns, if one is."""
        while self._cameras and self._sent < turns * TURN_MS * FRAME_HZ // 1000:
            stamps = np.array([self._sent * NS_PER_S // FRAME_HZ])
            self._sent += 1
            for camera in self._cameras:
                now, began_ns = now_ns(), time.thread_time_ns()
                row.rings[camera].append(stamps, self._frames[self._sent % 8], now)
                self.took_us.append((time.thread_time_ns() - began_ns) / 1000)


def settings(path: Path | None, frames: str | None) -> PipelineConfig:
    streams = tuple(
        StreamConfig(name=f"s{number}", dim=DIM, rate_hz=RATE_HZ) for number in range(STREAMS)
    )
    if frames is not None:
        streams += tuple(StreamConfig(name=n, rate_hz=FRAME_HZ, image=IMAGE) for n in CAMERAS)
    record = RecordConfig(file=None if path is None else str(path), frames=frames or "none")
    return msgspec.structs.replace(load.read("bench"), streams=streams, record=record)


def turns_of(config: PipelineConfig, *, single: bool) -> Iterator[Turn]:
    rng = np.random.default_rng(0)
    n = RATE_HZ * TURN_MS // 1000
    values = rng.normal(size=(1000, STREAMS, n, DIM)).astype(np.float32)
    cuts = range(n) if single else (slice(None),)
    number = 0
    while True:
        stamps = (np.arange(n, dtype=np.int64) + number * n) * NS_PER_MS
        of_stream = values[number % len(values)]
        parts = [slice(cut, cut + 1) if isinstance(cut, int) else cut for cut in cuts]
        stamped = [stamps[part] for part in parts]
        yield Turn(stamped, [[of[part] for part in parts] for of in of_stream])
        number += 1


def feed(row: Any, turn: Turn) -> float:
    """Give every ring its messages; returns the mean CPU time of one in µs."""
    rings = [ring for ring in row.rings.values() if ring.stream.image is None]
    now = now_ns()
    began_ns = time.thread_time_ns()
    for ring, of in zip(rings, turn.values, strict=True):
        for stamps, values in zip(turn.stamps, of, strict=True):
            ring.append(stamps, values, now)
    return (time.thread_time_ns() - began_ns) / len(rings) / len(turn.stamps) / 1000


def answer(recorder: Recorder, number: int, row: Any) -> None:
    """A window's header and a chunk."""
    now = now_ns()
    record = EnvelopeRecord(phase="ready", tA0=now)
    end_ns = row.reference.newest_ns
    owner = Owner(present=True, episode=(1, 0), window_end_ns=end_ns, expires_ns=end_ns + NS_PER_S)
    recorder.windows(record.tA0, 1, number, record.phase, [owner])
    chunk = ActionChunk(
        session=1,
        session_epoch=0,
        epoch=1,
        seq=number,
        window_end_ns=owner.window_end_ns,
        start_ns=owner.window_end_ns,
        dt_ns=10 * NS_PER_MS,
        expires_ns=owner.expires_ns,
        horizon=HORIZON,
        actions=memoryview(bytes(HORIZON * 7 * 4)),
    )
    recorder.chunk(0, chunk, None)


def recorder_clock() -> Any:
    """CPU time of the recorder's thread so far in ns; of none, always 0."""
    threads = [thread for thread in threading.enumerate() if thread.name == THREAD]
    if not threads:
        return lambda: 0
    clock = time.pthread_getcpuclockid(threads[-1].ident or 0)
    return lambda: time.clock_gettime_ns(clock)


@contextmanager
def frozen_reader(pipe: Path) -> Iterator[Path]:
    """A named pipe whose reader stops as soon as it has seen something."""
    os.mkfifo(pipe)
    read = f"file = open({str(pipe)!r}, 'rb'); file.read(8)"
    code = f"import os, signal; {read}; os.kill(os.getpid(), signal.SIGSTOP)"
    reader = subprocess.Popen([sys.executable, "-c", code])
    try:
        yield pipe
    finally:
        reader.send_signal(signal.SIGKILL)
        reader.wait()


@contextmanager
def live_view() -> Iterator[int]:
    """The pipe of a live view on any free port."""
    view, view_fd = start_view(load.read("bench", ["view.port=0"]))
    try:
        view.check_started()
        yield view_fd
    finally:
        view.close()


if __name__ == "__main__":
    sys.exit(main())
