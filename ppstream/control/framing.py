"""FrameReader: a byte stream cut into frames of a 4-byte little-endian length and that many bytes.

It owns the receive buffer and knows nothing of sockets or of what a frame means.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

from ppstream.core.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Iterator

LENGTH: Final = struct.Struct("<I")
FRAME_BYTES_MAX: Final = 1 << 20  # checked before anything is allocated for the frame
BUFFER_BYTES: Final = 1 << 16


class FrameReader:
    """Receive into ``room()``, tell how much with ``frames(taken)``, and use what it yields."""

    def __init__(self) -> None:
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._filled = 0

    def room(self) -> memoryview:
        """Where the next bytes go; never empty."""
        return self._buffer[self._filled :]

    def frames(self, taken: int) -> Iterator[memoryview]:
        """Each whole frame, after ``taken`` bytes were written into ``room()``.

        A frame is a view into the buffer, valid until the next one is asked for. To be exhausted
        before the next ``room()``.

        Raises:
            ProtocolError: a frame announces more than ``FRAME_BYTES_MAX`` bytes.
        """
        self._filled += taken
        start = needed = 0
        while self._filled - start >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._buffer, start)
            if length > FRAME_BYTES_MAX:
                raise ProtocolError(
                    f"a frame of {length} bytes was announced, limit {FRAME_BYTES_MAX}"
                )
            needed = LENGTH.size + length
            if self._filled - start < needed:
                break
            yield self._buffer[start + LENGTH.size : start + needed]
            start += needed
        self._keep(start, needed)

    def _keep(self, start: int, needed: int) -> None:
        """Move what is left to the front, into a buffer that holds the frame it begins."""
        if start == self._filled and len(self._buffer) == BUFFER_BYTES:
            self._filled = 0  # nothing is left: the usual case
            return
        rest = bytes(self._buffer[start : self._filled])
        self._filled = len(rest)
        wanted = max(BUFFER_BYTES, needed) if rest else BUFFER_BYTES
        if wanted != len(self._buffer):
            self._buffer = memoryview(bytearray(wanted))
        if rest:
            self._buffer[: len(rest)] = rest
