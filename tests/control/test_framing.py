from __future__ import annotations

import pytest

from ppstream.control.framing import FRAME_BYTES_MAX, LENGTH, FrameReader
from ppstream.core.errors import ProtocolError


def feed(reader: FrameReader, data: bytes) -> list[int]:
    """Lengths of the frames that ``data`` completes."""
    found: list[int] = []
    while data:
        room = reader.room()
        taken = min(len(room), len(data))
        room[:taken] = data[:taken]
        found += [len(frame) for frame in reader.frames(taken)]
        data = data[taken:]
    return found


@pytest.mark.parametrize(("over", "fits"), [(-1, True), (0, True), (1, False)])
def test_a_control_frame_has_a_largest_size(over: int, fits: bool) -> None:
    size = FRAME_BYTES_MAX + over
    if fits:
        assert feed(FrameReader(), LENGTH.pack(size) + bytes(size)) == [size]
    else:
        with pytest.raises(ProtocolError, match=f"a frame of {size} bytes was announced"):
            feed(FrameReader(), LENGTH.pack(size))  # before any of it came
