"""A camera's tensors in an envelope, and their CPU implementation: the newest frames, normalised.

Frames arrive as ``[height, width, 3]`` uint8. A policy reads the newest ``n`` that are not newer
than the window's end, oldest first: ``<camera>.frames [n, 3, H, W]``, pixels scaled to 0..1, then
``(pixel - mean) / std``; ``.valid [n]`` and ``.age_s [n]``, the window's end minus the frame's
stamp. A frame that is missing is zeros and invalid. Resizing is bilinear between pixel centres,
without smoothing: shrink by more than two on the robot, where it also saves the wire.
On a GPU ``ppstream_kernels/rings.cu`` does the same.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch.nn.functional import interpolate

from ppstream.config.schema import CHANNELS
from ppstream.core.clock import NS_PER_MS, NS_PER_S
from ppstream.core.specs import AGE_S, FRAMES, VALID, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from ppstream.config.schema import ImageConfig, StreamConfig
    from ppstream.ingest.ring import RingBank, SensorRing

WHITE: Final = 255.0

# n=frames C=channels H W


class CameraNames(NamedTuple):
    """Of the tensors of one camera."""

    frames: str
    valid: str
    age_s: str


def camera_names(stream: StreamConfig) -> CameraNames:
    return CameraNames(stream.name + FRAMES, stream.name + VALID, stream.name + AGE_S)


def camera_specs(stream: StreamConfig) -> tuple[TensorSpec, ...]:
    """Returns the specs of one camera's tensors in an envelope."""
    image, names = _image(stream), camera_names(stream)
    return (
        TensorSpec(names.frames, (image.frames, CHANNELS, *image.size), image.dtype),
        TensorSpec(names.valid, (image.frames,), "bool"),
        TensorSpec(names.age_s, (image.frames,)),
    )


class Affine(NamedTuple):
    """Takes a pixel of 0..255 to what a policy reads, by channel: times scale, plus shift."""

    scale: tuple[float, ...]
    shift: tuple[float, ...]


def affine(image: ImageConfig) -> Affine:
    return Affine(
        tuple(1 / (WHITE * std) for std in image.std),
        tuple(-mean / std for mean, std in zip(image.mean, image.std, strict=True)),
    )


class FrameWriter:
    """Makes of a frame's pixels what a policy reads, in memory that it keeps for the next frame.

    Args:
        image: of the camera.
        device: of the pixels and of what is written.
    """

    def __init__(self, image: ImageConfig, device: torch.device | str = "cpu") -> None:
        self._image = image
        shape_HWC = (image.height, image.width, CHANNELS)
        self._is_resized = image.size != (image.height, image.width)
        self._shape_HWC = shape_HWC
        empty = partial(torch.empty, device=device)
        if self._is_resized:
            self._pixels_HWC = empty(shape_HWC)
        else:  # of bytes: floats take four times as long to reorder
            self._pixels_CHW = empty((CHANNELS, *image.size), dtype=torch.uint8)
        self._wide_CHW = empty((CHANNELS, *image.size))
        scale, shift = affine(image)
        self._scale = torch.tensor(scale, device=device).view(CHANNELS, 1, 1)
        self._shift = torch.tensor(shift, device=device).view(CHANNELS, 1, 1)

    def write(self, pixels: Tensor, out_CHW: Tensor) -> None:
        """Writes one frame, whose pixels are ``[height * width * 3]`` uint8."""
        is_wide = out_CHW.dtype == torch.float32
        wide_CHW = out_CHW if is_wide else self._wide_CHW
        frame_HWC = pixels.view(self._shape_HWC)
        if self._is_resized:
            self._pixels_HWC.copy_(frame_HWC)
            frame_CHW = self._pixels_HWC.permute(2, 0, 1)
            size = self._image.size
            wide_CHW.copy_(
                interpolate(frame_CHW[None], size, mode="bilinear", align_corners=False)[0]
            )
        else:
            wide_CHW.copy_(self._pixels_CHW.copy_(frame_HWC.permute(2, 0, 1)))
        wide_CHW.mul_(self._scale).add_(self._shift)
        if not is_wide:
            out_CHW.copy_(wide_CHW)


class CameraViews(NamedTuple):
    """One camera's tensors in one envelope, made ready to be written again and again."""

    frames: Sequence[Sequence[Tensor]]  # each [3, H, W], by row and position
    valid: NDArray[np.bool_]  # [B, n]
    age_s: NDArray[np.float32]  # [B, n]


class CameraCutter:
    """Writes one camera's tensors for one row at a time, on the CPU."""

    def __init__(self, stream: StreamConfig, bank: RingBank) -> None:
        self._wanted = (image := _image(stream)).frames
        self._names = camera_names(stream)
        self._max_age_ns = round(stream.max_age_ms * NS_PER_MS)
        self._capacity = bank.capacity
        self._pixels = [row.unbind() for row in bank.values]
        self._stamps_ns: NDArray[np.int64] = bank.stamps_ns.numpy()
        self._writer = FrameWriter(image)

    def views(self, out: Mapping[str, Tensor]) -> CameraViews:
        """Returns what ``cut`` writes of an envelope's tensors."""
        frames, valid, age_s = (out[name] for name in self._names)
        return CameraViews([row.unbind() for row in frames], valid.numpy(), age_s.numpy())

    def cut(self, views: CameraViews, row: int, ring: SensorRing, end_ns: int | None) -> None:
        """Write the row's frames as of ``end_ns``, robot clock; None: there are none."""
        frames, valid, age_s = views.frames[row], views.valid[row], views.age_s[row]
        newest = -1 if end_ns is None else self._newest(row, ring, end_ns)
        wanted = self._wanted
        for position in range(wanted):
            number = newest - (wanted - 1 - position)
            if end_ns is None or number < ring.accepted - ring.count:
                frames[position].zero_()
                valid[position], age_s[position] = False, 0.0
                continue
            slot = number % self._capacity
            self._writer.write(self._pixels[row][slot], frames[position])
            age_ns = end_ns - int(self._stamps_ns[row, slot])
            valid[position] = age_ns <= self._max_age_ns
            age_s[position] = age_ns / NS_PER_S

    def _newest(self, row: int, ring: SensorRing, end_ns: int) -> int:
        """The number of the newest frame that is not newer than the end; -1 below all held."""
        stamps_ns = self._stamps_ns[row]
        number = ring.accepted - 1
        oldest = ring.accepted - ring.count
        while number >= oldest and stamps_ns[number % self._capacity] > end_ns:
            number -= 1
        return number


def _image(stream: StreamConfig) -> ImageConfig:
    assert stream.image is not None, f"stream {stream.name!r} is no camera"
    return stream.image
