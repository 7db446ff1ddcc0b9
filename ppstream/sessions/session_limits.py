"""How much a robot may send: the largest frame, frames and samples per second, how long they take.

Every limit has a reason in what the declared streams need, with room for a robot that sends each
sample alone, in bursts, somewhat faster than it said.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Final

import numpy as np

from ppstream.core.clock import NS_PER_MS

if TYPE_CHECKING:
    from ppstream.config.schema import PipelineConfig, StreamConfig

PUSH_BYTES: Final = 1 << 20  # a robot sends no more samples at once than fit
HEADER_BYTES: Final = 1 << 16  # of any message, beside its samples
RATE_MARGIN: Final = 4.0  # times the nominal rates, each sample a frame of its own
OTHER_FRAMES_PER_S: Final = 400  # reports, prefixes, pings, instructions
STRANGER_FRAMES_PER_S: Final = 500  # of all connections without a session together
DRAIN_NS: Final = NS_PER_MS  # then what comes waits until results were looked at
DRAIN_FRAMES: Final = 16  # read at once, between two looks at the clock


def frame_bytes_max(config: PipelineConfig) -> int:
    """A larger frame loses its sender the connection before memory is taken for it."""
    largest = max(stream.dim * np.dtype(stream.dtype).itemsize for stream in config.streams)
    return max(PUSH_BYTES, largest) + HEADER_BYTES


def frames_per_second(config: PipelineConfig) -> int:
    """What one robot may send; the rest is dropped unread.

    A lone robot may send all it can, a recording at full speed for one: there is nobody to delay.
    """
    if config.batch.rows == 1:
        return sys.maxsize
    samples_per_s = sum(stream.rate_hz for stream in config.streams)
    return OTHER_FRAMES_PER_S + math.ceil(RATE_MARGIN * samples_per_s)


def samples_per_second(config: PipelineConfig, stream: StreamConfig) -> int:
    """What one robot may send of a stream; a frame that goes beyond it is refused whole.

    A ring full comes on top: a robot may send at once what it has kept while it had no connection.
    """
    if config.batch.rows == 1:
        return sys.maxsize
    return config.ring_samples(stream) + math.ceil(RATE_MARGIN * stream.rate_hz)
