"""Frames in an MCAP file: the records that hold them, and the cameras that ppstream recorded."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from ppstream.recording.camera_images import OwnImages, image_facts, need_jpeg
from ppstream.recording.file_frames import FileFrames
from ppstream.recording.mcap_schema import FOXGLOVE, CompressedImage
from ppstream.recording.recording import Track
from ppstream.recording.sample_numbers import SampleNumbers

if TYPE_CHECKING:
    from ppstream.recording.mcap_messages import EncodedMessage, FilePosition


class McapRecords:
    """Reads messages of MCAP files again. Pickles without what it holds.

    The records of the chunk that was read last are kept: most frames are asked for in order.
    """

    def __init__(self) -> None:
        self._chunk: tuple[Path, int] | None = None  # of which the records are held
        self._records: list[Any] = []

    def __getstate__(self) -> dict[str, Any]:
        return {"_chunk": None, "_records": []}

    def __call__(self, position: FilePosition) -> bytes:
        chunk = position.path, position.offset
        if self._chunk != chunk:
            self._chunk, self._records = chunk, self._records_at(*chunk)
        data: bytes = self._records[position.behind].data
        return data

    def _records_at(self, path: Path, offset: int) -> list[Any]:
        from mcap.records import Chunk
        from mcap.stream_reader import StreamReader, breakup_chunk

        with path.open("rb") as file:
            file.seek(offset)
            found = StreamReader(file, skip_magic=offset > 0, emit_chunks=True).records
            record = next(iter(found))
        return breakup_chunk(record) if isinstance(record, Chunk) else [record]


class OwnCamera:
    """Frames of one camera, as ppstream recorded them.

    Args:
        path: of the file.
        topic: of the camera.
        begins_late: as of ``SampleNumbers``.
    """

    def __init__(self, path: Path, topic: str, *, begins_late: bool = False) -> None:
        self.topic = topic
        self.numbers = SampleNumbers(begins_late=begins_late)
        self._path = path
        self._schema = ""
        self._size: tuple[int, int] | None = None
        self._stamps, self._arrivals = array("q"), array("q")
        self._frames = FileFrames(path, topic, McapRecords())

    @property
    def count(self) -> int:
        return len(self._frames)

    def add(self, found: EncodedMessage) -> None:
        """Raises ConfigError when the message is no frame, or not as those before."""
        self._schema = found.kind
        if self._schema == FOXGLOVE[CompressedImage] and not self.count:
            need_jpeg(f"{self._path}: {self.topic}")
        number = self.count + 1
        try:
            facts = image_facts(self._schema, found.data)
            if self._size not in (None, facts.size):
                raise ValueError(f"got height and width {facts.size}, {self._size} before")
        except (ValueError, msgspec.MsgspecError) as error:
            raise self._frames.unreadable(number, error) from error
        self._size = facts.size
        self.numbers.add(found.number - 1, 1)
        self._stamps.append(facts.stamp_ns)
        self._arrivals.append(found.happened_ns)
        self._frames.add(number, found.position)

    def track(self) -> Track:
        """With arrivals on rank 0's clock."""
        assert self._size is not None, "a camera is made with its first frame"
        stamps, received = (np.frombuffer(t, np.int64) for t in (self._stamps, self._arrivals))
        decoder = OwnImages(self._schema, self._size)
        return Track(stamps, self._frames.frames(self._size, decoder), received)
