"""Resampling of irregular sensor streams: torch ops, their CPU implementation, a reference."""

from __future__ import annotations

from ppstream_kernels import cuda_ops  # noqa: F401  it registers itself
from ppstream_kernels.plan import ResamplePlan
from ppstream_kernels.quantisation import scale_for
from ppstream_kernels.resampling import Resampled, resample, resample_streams
from ppstream_kernels.source import MODES, Mode, StreamSource

__all__ = [
    "MODES",
    "Mode",
    "ResamplePlan",
    "Resampled",
    "StreamSource",
    "resample",
    "resample_streams",
    "scale_for",
]
