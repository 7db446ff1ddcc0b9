"""The parts of ``dataset.py``, as one of its processes measures them on its GPU (or the CPU)."""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from bench import dataset_files, dataset_frames, dataset_peers
from bench.dataset_rounds import Settings, Taken, Way, rounds_of
from torch import Tensor

from ppstream_kernels import ResamplePlan, StreamSource

PARTS: Final = ("device", "pinned", "safetensors", "mcap", "frames", "rtx", "loop", "peers")
SCALING: Final = ("device", "pinned", "safetensors", "mcap")  # measured on several GPUs, too
SHAPES: Final = ((120, 100, 14), (100, 50, 32))  # samples, targets, values
DTYPES: Final = (torch.bfloat16, torch.float32)
CPU_SCALE: Final = 0.001
CALL_BYTES: Final = 300_000_000
CALL_ROWS: Final = 256
CHUNK_BYTES: Final = 64 << 20
CHUNKS: Final = 24  # of a round
ROUND_S: Final = 0.03  # of calls in graphs: what starting and waiting take is lost in it
BUFFERS: Final = 3
READERS: Final = 4
FILES: Final = 12
RECORDED: Final = 2_000  # trajectories of the MCAP file
RTX: Final = (1_000_000, (120, 100, 14))
STEP_S: Final = 0.18
STEPS: Final = 20
PERIOD_NS: Final = 10_000_000
TRUST_BYTES: Final = 5  # validity and age of a target

Buffers = list[tuple[Tensor, Tensor]]  # values [n, N, D] and stamps [n, N] each


class Case(NamedTuple):
    """A shape of trajectories."""

    slots: int
    targets: int
    dim: int
    dtype: torch.dtype

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.slots}->{self.targets}x{self.dim} {dtype}"

    @property
    def in_bytes(self) -> int:
        return self.slots * (self.dim * self.dtype.itemsize + 8)

    @property
    def out_bytes(self) -> int:
        return self.targets * (self.dim * self.dtype.itemsize + TRUST_BYTES)

    @property
    def moved_bytes(self) -> int:
        """In and out of the device's memory in one call, targets included."""
        return self.in_bytes + self.out_bytes + 8 * self.targets


def run(part: str, rank: int, settings: Settings, gate: Any, answers: Any) -> None:
    """One process's share of a part: a list of ``Taken``, or the text of what went wrong."""
    try:
        torch.set_num_threads(1)
        torch.manual_seed(rank)
        device = torch.device("cuda", rank) if settings.is_gpu else torch.device("cpu")
        if settings.is_gpu:
            torch.cuda.set_device(rank)
        answers.put(list(_MEASURES[part](rank, settings, device, gate)))
    except Exception:  # noqa: BLE001 - told to the parent, whatever it is
        gate.abort()
        answers.put(traceback.format_exc())


def _cases() -> list[Case]:
    return [Case(*shape, dtype) for shape in SHAPES for dtype in DTYPES]


def inputs(case: Case, rows: int, device: torch.device, *, pinned: bool = False) -> Any:
    """Values ``[rows, N, D]`` and stamps ``[rows, N]``, jittered by up to half a period."""
    values = torch.randn(rows, case.slots, case.dim, device=device).to(case.dtype)
    stamps_ns = torch.arange(case.slots, device=device) * PERIOD_NS
    stamps_ns = stamps_ns + torch.randint(0, PERIOD_NS // 2, (rows, case.slots), device=device)
    return (values.pin_memory(), stamps_ns.pin_memory()) if pinned else (values, stamps_ns)


def targets_of(case: Case, rows: int, device: torch.device) -> Tensor:
    """A regular grid over the trajectory."""
    span_ns = case.slots * PERIOD_NS
    grid = torch.arange(1, case.targets + 1, device=device) * (span_ns // case.targets)
    return grid.repeat(rows, 1)


def outputs(case: Case, rows: int, device: torch.device, *, pinned: bool = False) -> Any:
    kinds: dict[str, Any] = {"device": device, "pin_memory": pinned}
    return (
        torch.empty(rows, case.targets, case.dim, dtype=case.dtype, **kinds),
        torch.empty(rows, case.targets, 1, dtype=torch.bool, **kinds),
        torch.empty(rows, case.targets, 1, **kinds),
    )


# ---- On the device.


def _device(_: int, settings: Settings, device: torch.device, gate: Any) -> Iterator[Taken]:
    for case in _cases():
        rows = settings.scaled(CALL_BYTES // case.moved_bytes + 1, CALL_ROWS)
        ways = {"one call": _calls(case, rows, device)}
        ways["copy"] = _copies(case, rows, device)
        ways[f"{CALL_ROWS} a call"] = _calls(case, CALL_ROWS, device)
        for name, formula in dataset_peers.formulas(device):
            given = (*inputs(case, rows, device), targets_of(case, rows, device))
            calls = _graphed([lambda f=formula, g=given: f(*g)], device)
            ways[name] = Way(calls[0], rows * calls[1], case.moved_bytes * rows * calls[1])
        yield from rounds_of(case, ways, settings, gate)


def _copies(case: Case, rows: int, device: torch.device) -> Way:
    """As many bytes as a call moves, half of them read and half written."""
    size = case.moved_bytes * rows // 2
    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    run, count = _graphed([lambda: target.copy_(source)], device)
    return Way(run, rows * count, 2 * size * count)


def _calls(case: Case, rows: int, device: torch.device) -> Way:
    """Over as many sets of inputs as leave nothing in a GPU's L2."""
    sets = max(2, min(128, 200_000_000 // (case.moved_bytes * rows) + 1))
    sets = sets if device.type == "cuda" else 2
    tgt_ns = targets_of(case, rows, device)
    calls = []
    for _ in range(sets):
        plan = ResamplePlan([StreamSource(*inputs(case, rows, device))], case.targets)
        calls.append(plan.bind(tgt_ns, outputs(case, rows, device)))
    run, count = _graphed(calls, device)
    return Way(run, rows * count, case.moved_bytes * rows * count)


def _graphed(calls: list[Callable[[], object]], device: torch.device) -> tuple[Any, int]:
    """A round of these calls in turn and how many it makes: on a GPU one graph, replayed."""
    if device.type == "cpu":
        return (lambda: [call() for call in calls]), len(calls)
    from bench import gpu_timing

    graph, count = gpu_timing.capture(calls)

    def run(replays: int, _memory: object = calls) -> None:  # which the graph does not keep
        for _ in range(replays):
            graph.replay()
        torch.cuda.synchronize()

    run(1)
    began = time.perf_counter()
    run(1)
    replays = max(1, round(ROUND_S / (time.perf_counter() - began)))
    return partial(run, replays), count * replays


# ---- From the host's memory.


class Conveyor:
    """Chunks of trajectories from the host through the device, and back if wanted.

    Copies in, calls and copies out have a stream each; ``BUFFERS`` chunks are on their way.
    """

    def __init__(self, case: Case, rows: int, device: torch.device) -> None:
        self.case, self.rows, self.device = case, rows, device
        self._is_gpu = device.type == "cuda"
        self._tgt_ns = targets_of(case, rows, device)
        self._buffers = [inputs(case, rows, device) for _ in range(BUFFERS)]
        self._out = [outputs(case, rows, device) for _ in range(BUFFERS)]
        self.results = [
            outputs(case, rows, torch.device("cpu"), pinned=self._is_gpu) for _ in range(BUFFERS)
        ]
        self._calls = [
            ResamplePlan([StreamSource(*buffer)], case.targets).bind(self._tgt_ns, out)
            for buffer, out in zip(self._buffers, self._out, strict=True)
        ]
        if self._is_gpu:
            self._streams = [torch.cuda.Stream() for _ in range(3)]
            self._events = [[torch.cuda.Event() for _ in range(3)] for _ in range(BUFFERS)]

    def run(
        self, chunks: Iterator[Any], *, calls: bool = True, back: Callable[[Any], object] | None
    ) -> None:
        """Every chunk; ``back`` is given each result once it is in the host's memory.

        Without ``calls`` chunks are copied, and no more.
        """
        waiting: list[int] = []
        for number, chunk in enumerate(chunks):
            at = number % BUFFERS
            if len(waiting) == BUFFERS:
                self._take(waiting.pop(0), back)
            self._send(at, chunk, calls=calls, is_back=back is not None)
            waiting.append(at)
        for at in waiting:
            self._take(at, back)

    def _send(self, at: int, chunk: Any, *, calls: bool, is_back: bool) -> None:
        if not self._is_gpu:
            self._copy(self._buffers[at], chunk)
            if calls:
                self._calls[at]()
            if is_back:
                self._copy(self.results[at], self._out[at])
            return
        incoming, computing, outgoing = self._streams
        copied, computed, returned = self._events[at]
        with torch.cuda.stream(incoming):
            self._copy(self._buffers[at], chunk)
            copied.record(incoming)
        last = incoming
        if calls:
            computing.wait_event(copied)
            with torch.cuda.stream(computing):
                self._calls[at]()
                computed.record(computing)
            last = computing
        if is_back:
            outgoing.wait_event(computed)
            with torch.cuda.stream(outgoing):
                self._copy(self.results[at], self._out[at])
            last = outgoing
        returned.record(last)

    def _take(self, at: int, back: Callable[[Any], object] | None) -> None:
        if self._is_gpu:
            self._events[at][2].synchronize()
        if back is not None:
            back(self.results[at])

    def _copy(self, to: Any, source: Any) -> None:
        for one, other in zip(to, source, strict=True):
            one.copy_(other, non_blocking=True)


def _pinned(_: int, settings: Settings, device: torch.device, gate: Any) -> Iterator[Taken]:
    for case in _cases():
        rows, chunks = settings.scaled(CHUNK_BYTES // case.in_bytes), CHUNKS
        yield from rounds_of(case, _from_memory(case, rows, chunks, device), settings, gate)


def _from_memory(case: Case, rows: int, chunks: int, device: torch.device) -> dict[str, Way]:
    conveyor, host = Conveyor(case, rows, device), torch.device("cpu")
    held = [inputs(case, rows, host, pinned=device.type == "cuda") for _ in range(BUFFERS)]
    all_rows = rows * chunks

    def run(**options: Any) -> Callable[[], None]:
        return lambda: conveyor.run(islice(cycle(held), chunks), **options)

    both = case.in_bytes + case.out_bytes
    return {
        "copy": Way(run(calls=False, back=None), all_rows, all_rows * case.in_bytes),
        "resampled": Way(run(back=None), all_rows, all_rows * case.in_bytes),
        "resampled, and back": Way(run(back=lambda _: None), all_rows, all_rows * both),
    }


def _rtx(_: int, settings: Settings, device: torch.device, gate: Any) -> Iterator[Taken]:
    all_rows, shape = settings.scaled(RTX[0]), RTX[1]
    for dtype in DTYPES:
        case = Case(*shape, dtype)
        rows = min(all_rows, settings.scaled(CHUNK_BYTES // case.in_bytes))
        chunks = -(-all_rows // rows)
        note = f"{rows * chunks:,} trajectories in {chunks} chunks"
        yield from rounds_of(case, _from_memory(case, rows, chunks, device), settings, gate, note)


# ---- From files.


def _own_folder(settings: Settings, rank: int) -> Path:
    folder = Path(settings.folder) / f"rank{rank}"
    folder.mkdir(exist_ok=True)
    return folder


def _safetensors(rank: int, settings: Settings, device: torch.device, gate: Any) -> Iterator[Taken]:
    for case in _cases():
        rows = settings.scaled(CHUNK_BYTES // case.in_bytes)
        folder = _own_folder(settings, rank)
        files = [folder / f"{number}.safetensors" for number in range(FILES)]
        for file in files:
            dataset_files.write_safetensors(file, *inputs(case, rows, torch.device("cpu")))
        memory = [
            inputs(case, rows, torch.device("cpu"), pinned=device.type == "cuda")
            for _ in range(READERS + BUFFERS)
        ]
        conveyor, count = Conveyor(case, rows, device), rows * FILES
        size = sum(file.stat().st_size for file in files)
        result = folder / "result.safetensors"

        def chunks(
            files: list[Path] = files,
            memory: Buffers = memory,
            read: Any = dataset_files.read_safetensors,
        ) -> Iterator[Any]:
            if settings.is_cold:
                dataset_files.drop_from_cache(files)
            return _read_ahead(files, memory, read)

        def read(chunks: Any = chunks) -> None:
            for _ in chunks(read=dataset_files.read_plainly):
                pass

        def write(out: Any, result: Path = result) -> None:
            dataset_files.write_safetensors(result, out[0], out[2], out[1])

        both = size + case.out_bytes * count
        ways = {
            "plain read": Way(read, count, size),
            "resampled": Way(lambda c=conveyor, g=chunks: c.run(g(), back=None), count, size),
            "resampled, written": Way(
                lambda c=conveyor, g=chunks, w=write: c.run(g(), back=w), count, both
            ),
        }
        note = "cold" if settings.is_cold else "warm"
        yield from rounds_of(case, ways, settings, gate, note)
        for file in (*files, result):
            file.unlink()


def _read_ahead(files: list[Path], memory: Buffers, read: Callable[..., Any]) -> Iterator[Any]:
    """Chunks in order, while ``READERS`` threads read the next; one is used at a time.

    A chunk's memory is read into again once ``BUFFERS`` more were taken: by then it was copied.
    """
    with ThreadPoolExecutor(READERS) as readers:
        coming: list[Future[Any]] = []
        for number, file in enumerate(files):
            if number >= READERS:
                yield coming.pop(0).result()
            to = memory[number % len(memory)]
            coming.append(readers.submit(read, file, to))
        for one in coming:
            yield one.result()


def _mcap(rank: int, settings: Settings, device: torch.device, gate: Any) -> Iterator[Taken]:
    folder = _own_folder(settings, rank)
    for shape in SHAPES:
        case = Case(*shape, torch.float32)
        rows, file = settings.scaled(RECORDED, 4), folder / "recorded.mcap"
        dataset_files.write_mcap(file, *inputs(case, rows, torch.device("cpu")))
        conveyor = Conveyor(case, rows, device)
        result = folder / "result.safetensors"

        def chunks(file: Path = file) -> Iterator[Any]:
            if settings.is_cold:
                dataset_files.drop_from_cache([file])
            yield dataset_files.read_mcap_chunk(file)

        def write(out: Any, result: Path = result) -> None:
            dataset_files.write_safetensors(result, out[0], out[2], out[1])

        size = file.stat().st_size
        ways = {
            "decoder alone": Way(lambda g=chunks: list(g()), rows, size),
            "resampled": Way(lambda c=conveyor, g=chunks: c.run(g(), back=None), rows, size),
            "resampled, written": Way(
                lambda c=conveyor, g=chunks, w=write: c.run(g(), back=w), rows, size
            ),
        }
        taken = list(rounds_of(case, ways, settings, gate))
        share = statistics.median(taken[0].seconds) / statistics.median(taken[1].seconds)
        yield from (one._replace(note=f"decoder {share:.0%} of resampled") for one in taken)


# ---- Beside a training step.


def _loop(_: int, settings: Settings, device: torch.device, gate: Any) -> Iterator[Taken]:
    """Batches of 256 come from the host while the step before computes on the same GPU."""
    case = Case(*SHAPES[1], torch.bfloat16)
    steps = STEPS if settings.is_gpu else 3
    step_s = STEP_S if settings.is_gpu else 0.01
    step = dataset_peers.training_step(step_s, device)
    host = torch.device("cpu")
    held = [inputs(case, CALL_ROWS, host, pinned=settings.is_gpu) for _ in range(BUFFERS)]
    tgt_ns = targets_of(case, CALL_ROWS, device)
    waits, whole = [], []
    loader = torch.cuda.Stream() if settings.is_gpu else None

    def load(number: int) -> Any:
        values, stamps_ns = (one.to(device, non_blocking=True) for one in held[number % len(held)])
        out = outputs(case, CALL_ROWS, device)
        ResamplePlan([StreamSource(values, stamps_ns)], case.targets)(tgt_ns, out)
        return out

    def load_beside(number: int) -> Any:
        if loader is None:
            return load(number)
        with torch.cuda.stream(loader):
            out = load(number)
        loader.synchronize()
        return out

    load_beside(0)
    with ThreadPoolExecutor(1) as ahead:
        coming = ahead.submit(load_beside, 0)
        for number in range(steps):
            began = time.perf_counter()
            batch = coming.result()
            waited = time.perf_counter()
            coming = ahead.submit(load_beside, number + 1)
            step(batch)
            waits.append(waited - began)
            whole.append(time.perf_counter() - began)
        coming.result()
    case_name = f"{case}, step of {step_s * 1e3:.0f} ms"
    note = f"{steps} steps, mean of all but the first"
    for name, seconds in (("wait", waits), ("step", whole)):
        yield Taken(case_name, name, CALL_ROWS, 0, [statistics.mean(seconds[1:])], note)


def _peers(_: int, settings: Settings, device: torch.device, gate: Any) -> Iterator[Taken]:
    for shape in SHAPES:
        case = Case(*shape, torch.float32)
        given = (*inputs(case, CALL_ROWS, torch.device("cpu")),)
        arrays = [one.numpy() for one in (*given, targets_of(case, CALL_ROWS, torch.device("cpu")))]
        way = Way(lambda a=arrays: dataset_peers.by_numpy(*a), CALL_ROWS, 0)
        yield from rounds_of(case, {"numpy": way}, settings, gate, "one thread")


_MEASURES: Final[dict[str, Callable[..., Iterator[Taken]]]] = {
    "device": _device,
    "pinned": _pinned,
    "safetensors": _safetensors,
    "mcap": _mcap,
    "frames": dataset_frames.measure,
    "rtx": _rtx,
    "loop": _loop,
    "peers": _peers,
}
assert tuple(_MEASURES) == PARTS
