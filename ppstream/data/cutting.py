"""Windows of episodes as one batch: samples side by side as rings hold them, one op per group.

A row of a batch is a window, where a live run's is a robot: the samples it sees are copied, and the
live op cuts all rows at once. On the CPU each is bit for bit the window that a scheduled replay
cuts; on a GPU within rounding.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch

from ppstream.core.clock import NS_PER_MS, NS_PER_S
from ppstream.ingest.camera_frames import FrameWriter, camera_names, camera_specs
from ppstream.ingest.window import group_names, stream_source
from ppstream_kernels import ResamplePlan, resample_streams

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from ppstream.config.schema import PipelineConfig, StreamConfig
    from ppstream.data.episode import RecordedEpisode
    from ppstream.data.sample_column import SampleColumn
    from ppstream_kernels import StreamSource

CHUNK_VALUES: Final = 1 << 20  # of a batch that an episode is cut in: its copies stay in the caches

ALIGNMENT: Final = 8  # bytes, of tensors in a batch that is packed


class RawStream(NamedTuple):
    """One stream's samples of a batch, oldest first; of a camera values are frames' numbers."""

    values: Tensor  # [B, M, D] float32; of a camera [B, n] int64, -1: there is none
    stamps_ns: Tensor  # [B, M] int64, behind ``held`` anything; of a camera [B, n]
    held: Tensor  # [B] int64, samples of each row


class RawBatch(NamedTuple):
    """Samples of some windows, before resampling; tensors alone, so that it can be pinned."""

    streams: dict[str, RawStream]
    ends_ns: Tensor  # [B] int64
    pixels: dict[str, Tensor]  # by camera [B, n, height * width * 3] uint8; of no frame anything
    position: Tensor  # [3] int64: epoch, batch and index of the first window; of ``Windows``

    def __reduce__(self) -> tuple[Any, ...]:
        """Goes to another process as one tensor and the pixels: each costs half a millisecond."""
        tensors = [*chain(*self.streams.values()), self.ends_ns, self.position]
        packed = torch.cat([_padded(tensor) for tensor in tensors])
        forms = [(tensor.dtype, tensor.shape) for tensor in tensors]
        return _unpacked, (packed, forms, list(self.streams), self.pixels)


class BatchCutter:
    """Makes batches of windows.

    Tensors of a batch are named as in an envelope: for each group g ``g.values [B, T, sum of D]``
    float32, ``g.valid [B, T, S]`` bool and ``g.age_s [B, T, S]`` float32; then
    ``window_end_ns [B]`` int64, and for each camera c with n frames ``c.frame_index [B, n]`` int64
    (-1: none), ``c.valid [B, n]`` bool and ``c.age_s [B, n]`` float32; of those that are shown
    ``c.frames [B, n, 3, H, W]``, as a policy reads them.

    Args:
        config: streams, groups and dt.
        steps: T, if not ``window.steps``.
        shown: cameras whose frames are in a batch, too.
    """

    def __init__(
        self, config: PipelineConfig, steps: int | None = None, shown: Collection[str] = ()
    ) -> None:
        self._config = config
        self._shown = shown
        self.steps = steps or config.window.steps
        dt_ns = round(config.window.dt_ms * NS_PER_MS)
        self._offsets_ns = torch.arange(1 - self.steps, 1) * dt_ns
        self._width = max(1, sum(s.dim for s in config.streams if s.image is None))

    def raw(self, picked: Sequence[tuple[RecordedEpisode, NDArray[np.int64]]]) -> RawBatch:
        """Copies the samples that windows need.

        Args:
            picked: episodes, and numbers of windows in each; rows come in this order.
        """
        ends_ns = np.concatenate([episode.ends_ns[windows] for episode, windows in picked])
        streams, pixels = {}, {}
        for stream in self._config.streams:
            parts = [(one.columns[stream.name], windows) for one, windows in picked]
            if stream.image is None:
                streams[stream.name] = _samples(parts, len(ends_ns), stream.dim)
                continue
            found = streams[stream.name] = _frames(parts, ends_ns, stream.image.frames)
            if stream.name in self._shown:
                pixels[stream.name] = _pixels(stream, picked, found.values.numpy())
        position = torch.zeros(3, dtype=torch.int64)
        return RawBatch(streams, torch.from_numpy(ends_ns), pixels, position)

    def cut(self, raw: RawBatch) -> dict[str, Tensor]:
        """Resamples a batch on the device where it is; freshly allocated."""
        ends_ns = raw.ends_ns
        targets_ns = ends_ns[:, None] + self._offsets_ns.to(ends_ns.device)
        out: dict[str, Tensor] = {}
        for group, streams in self._config.groups.items():
            sources = [_source(stream, raw.streams[stream.name]) for stream in streams]
            out |= dict(zip(group_names(group), self._resample(sources, targets_ns), strict=True))
        out["window_end_ns"] = ends_ns.clone()  # it may outlive the batch, which workers share
        for camera in self._config.cameras:
            found = raw.streams[camera.name]
            if camera.name in raw.pixels:
                out |= _written(camera, raw.pixels[camera.name], found.values >= 0)
            out |= _frame_tensors(camera, found, ends_ns)
        return out

    def chunks(
        self, episode: RecordedEpisode, most: int | None = None
    ) -> Iterator[dict[str, Tensor]]:
        """All windows of an episode in order, some at a time: ``most`` of them."""
        most = min(max(1, CHUNK_VALUES // (self._width * self.steps)), most or episode.windows)
        for begin in range(0, episode.windows, most):
            numbers = np.arange(begin, min(begin + most, episode.windows))
            yield self.cut(self.raw([(episode, numbers)]))

    def _resample(self, sources: list[StreamSource], targets_ns: Tensor) -> Sequence[Tensor]:
        if targets_ns.device.type != "cpu":
            return resample_streams(sources, targets_ns)
        rows, steps = targets_ns.shape
        width = sum(source.values.shape[2] for source in sources)
        values = torch.empty(rows, steps, width)
        valid = torch.empty(rows, steps, len(sources), dtype=torch.bool)
        out = (values, valid, torch.empty(rows, steps, len(sources)))
        ResamplePlan(sources, steps, distinct=True, wide=True)(targets_ns, out)
        return out


def _padded(tensor: Tensor) -> Tensor:
    """Its bytes, up to a multiple of ``ALIGNMENT``."""
    flat = tensor.flatten().view(torch.uint8)
    return torch.nn.functional.pad(flat, (0, -len(flat) % ALIGNMENT))


def _unpacked(
    packed: Tensor,
    forms: Sequence[tuple[torch.dtype, torch.Size]],
    names: Sequence[str],
    pixels: dict[str, Tensor],
) -> RawBatch:
    """Views of what ``RawBatch.__reduce__`` packed."""
    tensors, at = [], 0
    for dtype, shape in forms:
        end = at + shape.numel() * dtype.itemsize
        tensors.append(packed[at:end].view(dtype).view(shape))
        at = end + -end % ALIGNMENT
    *parts, ends_ns, position = tensors
    width = len(RawStream._fields)
    streams = {n: RawStream(*parts[width * i : width * i + width]) for i, n in enumerate(names)}
    return RawBatch(streams, ends_ns, pixels, position)


def to_device(raw: RawBatch, device: torch.device) -> RawBatch:
    """The batch on another device; from pinned memory nothing waits for it."""
    streams = {
        name: RawStream(*(tensor.to(device, non_blocking=True) for tensor in one))
        for name, one in raw.streams.items()
    }
    pixels = {name: one.to(device, non_blocking=True) for name, one in raw.pixels.items()}
    return RawBatch(streams, raw.ends_ns.to(device, non_blocking=True), pixels, raw.position)


def shown_frames(camera: StreamConfig, episode: RecordedEpisode) -> NDArray[np.int64]:
    """Numbers ``[n]`` of the frames that an episode's windows have, rising."""
    assert camera.image is not None
    parts = [(episode.columns[camera.name], np.arange(episode.windows))]
    numbers = np.unique(_frames(parts, episode.ends_ns, camera.image.frames).values.numpy())
    return numbers[numbers >= 0]


def _source(stream: StreamConfig, raw: RawStream) -> StreamSource:
    return stream_source(stream, raw.values, raw.stamps_ns, raw.held, torch.zeros_like(raw.held))


def _samples(
    parts: Sequence[tuple[SampleColumn, NDArray[np.int64]]], rows: int, dim: int
) -> RawStream:
    counts = [column.end[windows] - column.begin[windows] for column, windows in parts]
    count = np.concatenate(counts)
    most = max(1, int(count.max(initial=1)))
    values = np.zeros((rows, most, dim), np.float32)
    stamps_ns = np.zeros((rows, most), np.int64)
    row = 0
    for (column, windows), held in zip(parts, counts, strict=True):
        if len(column.stamps_ns):
            number = column.begin[windows, None] + np.arange(most)
            np.minimum(number, (column.begin[windows] + held - 1)[:, None], out=number)
            np.maximum(number, 0, out=number)
            part = slice(row, row + len(windows))
            np.take(column.values, number, 0, values[part], "clip")
            np.take(column.stamps_ns, number, 0, stamps_ns[part], "clip")
        row += len(windows)
    return RawStream(*map(torch.from_numpy, (values, stamps_ns, count)))


def _frames(
    parts: Sequence[tuple[SampleColumn, NDArray[np.int64]]], ends_ns: NDArray[np.int64], wanted: int
) -> RawStream:
    """The newest frames that are not newer than a window's end, oldest first."""
    numbers = np.full((len(ends_ns), wanted), -1)
    stamps_ns = np.zeros_like(numbers)
    row = 0
    for column, windows in parts:
        for begin, end in zip(column.begin[windows], column.end[windows], strict=True):
            seen_ns = column.stamps_ns[begin:end]
            newest = begin + int(seen_ns.searchsorted(ends_ns[row], "right"))
            frames = slice(max(begin, newest - wanted), newest)
            if have := frames.stop - frames.start:
                numbers[row, -have:] = column.numbers[frames]
                stamps_ns[row, -have:] = column.stamps_ns[frames]
            row += 1
    count = (numbers >= 0).sum(1)
    return RawStream(*map(torch.from_numpy, (numbers, stamps_ns, count)))


def _pixels(
    camera: StreamConfig,
    picked: Sequence[tuple[RecordedEpisode, NDArray[np.int64]]],
    numbers: NDArray[np.int64],
) -> Tensor:
    """Reads the frames of these numbers ``[B, n]``; each once, where windows share it."""
    pixels = np.zeros((*numbers.shape, camera.dim), np.uint8)
    row = 0
    for episode, windows in picked:
        part = slice(row, row + len(windows))
        frames = episode.frames[camera.name]
        for number in np.unique(numbers[part]):
            if number >= 0:
                pixels[part][numbers[part] == number] = frames.pixels(number).reshape(-1)
        row += len(windows)
    return torch.from_numpy(pixels)


def _written(camera: StreamConfig, pixels: Tensor, is_there: Tensor) -> Mapping[str, Tensor]:
    """One by one, as a run writes them: so the bits are the same."""
    assert camera.image is not None
    spec = camera_specs(camera)[0]
    rows, frames, _ = pixels.shape
    shape, dtype = (rows * frames, *spec.shape[1:]), getattr(torch, spec.dtype)
    out = torch.empty(shape, dtype=dtype, device=pixels.device)
    writer = FrameWriter(camera.image, pixels.device)
    for one, written in zip(pixels.flatten(0, 1), out, strict=True):
        writer.write(one, written)
    out.masked_fill_(~is_there.flatten()[:, None, None, None], 0)
    return {spec.name: out.view(rows, frames, *spec.shape[1:])}


def _frame_tensors(camera: StreamConfig, raw: RawStream, ends_ns: Tensor) -> Mapping[str, Tensor]:
    names, is_there = camera_names(camera), raw.values >= 0
    age_ns = torch.where(is_there, ends_ns[:, None] - raw.stamps_ns, 0)
    max_age_ns = round(camera.max_age_ms * NS_PER_MS)
    return {
        f"{camera.name}.frame_index": raw.values.clone(),
        names.valid: is_there & (age_ns <= max_age_ns),
        names.age_s: (age_ns.double() / NS_PER_S).float(),
    }
