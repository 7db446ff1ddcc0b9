"""Messages of an MCAP file, still encoded, and the decoder of those that other software wrote."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ppstream.core.errors import ConfigError


class FilePosition(NamedTuple):
    """Location of a record in a file: so many records behind one that begins at an offset."""

    offset: int
    behind: int


class EncodedMessage(NamedTuple):
    """One message of a file, still encoded."""

    topic: str
    encoding: str
    schema: Any  # mcap's record
    at_ns: int  # when it was logged
    happened_ns: int  # when it was published; never later
    data: bytes
    number: int  # in its topic, from 1
    position: FilePosition

    @property
    def kind(self) -> str:
        """Name of the message's type; empty: it has none."""
        return "" if self.schema is None else str(self.schema.name)


class MessageDecoder:
    """Decodes the messages of one topic: JSON to mappings, ROS 2's to objects. Pickles.

    Args:
        path: of the file, for errors.
        found: a message of the topic.

    Raises:
        ConfigError: they are encoded otherwise, or a package is missing.
    """

    def __init__(self, path: Path, found: EncodedMessage) -> None:
        self._encoding, self._kind = found.encoding, found.kind
        self._form, self._definition = "", ""
        if found.schema is not None:
            self._form, self._definition = found.schema.encoding, found.schema.data.decode()
        if self._encoding != "json" and (self._encoding != "cdr" or found.schema is None):
            raise ConfigError(
                [f"{path}: {found.topic} is encoded as {found.encoding!r}, want json, or cdr of "
                 "ROS 2"]
            )  # fmt: skip
        self._decode: Callable[[bytes], object] = self._made()

    def __call__(self, data: bytes) -> object:
        return self._decode(data)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_decode"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._decode = self._made()

    def _made(self) -> Callable[[bytes], object]:
        if self._encoding == "json":
            return msgspec.json.Decoder().decode
        from ppstream.recording.ros_reader import cdr_decoder

        return cdr_decoder(self._kind, self._form, self._definition)
