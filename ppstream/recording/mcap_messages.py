"""Messages of an MCAP file, still encoded, and the decoder of those that other software wrote.

A message of ROS 2 or protobuf is decoded by the definition that the file has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from ppstream.core.errors import ConfigError

if TYPE_CHECKING:
    from google.protobuf.descriptor_pb2 import FileDescriptorProto

DEFINED: Final = {"cdr": "ros2msg", "protobuf": "protobuf"}  # by encoding the form of definitions


class FilePosition(NamedTuple):
    """Location of a record in a file: so many records behind one that begins at an offset."""

    path: Path
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
    """Decodes the messages of one topic: JSON to mappings, others to objects. Pickles.

    Args:
        path: of the file, for errors.
        found: a message of the topic.

    Raises:
        ConfigError: they are encoded or defined otherwise, or a package is missing.
    """

    def __init__(self, path: Path, found: EncodedMessage) -> None:
        self._encoding, self._kind = found.encoding, found.kind
        self._definition: bytes = b"" if found.schema is None else found.schema.data
        form = "" if found.schema is None else found.schema.encoding
        about = f"{path}: {found.topic} is "
        if self._encoding != "json" and self._encoding not in DEFINED:
            raise ConfigError(
                [f"{about}encoded as {self._encoding!r}, want json, protobuf, or cdr of ROS 2"]
            )
        if form != DEFINED.get(self._encoding, form):
            raise ConfigError([f"{about}defined as {form!r}, want {DEFINED[self._encoding]}"])
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
        if self._encoding == "protobuf":
            return protobuf_decoder(self._kind, self._definition)
        from ppstream.recording.ros_reader import cdr_decoder

        return cdr_decoder(self._kind, self._definition.decode())


def protobuf_decoder(name: str, definition: bytes) -> Callable[[bytes], object]:
    """Decodes messages of one type of protobuf.

    Args:
        name: ``foxglove.RawImage``.
        definition: a FileDescriptorSet with the type and all that it is made of.

    Raises:
        ConfigError: ``protobuf`` is not installed, or the type is not defined.
    """
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    except ModuleNotFoundError as error:
        raise ConfigError(
            ["protobuf messages need a package that is not installed: "
             "pip install 'ppstream[replay]'"]
        ) from error  # fmt: skip
    files = {
        file.name: file for file in descriptor_pb2.FileDescriptorSet.FromString(definition).file
    }
    pool = descriptor_pool.DescriptorPool()
    for file in _parts_first(files):
        pool.Add(file)
    kind: Any = message_factory.GetMessageClass(pool.FindMessageTypeByName(name))
    decode: Callable[[bytes], object] = kind.FromString
    return decode


def _parts_first(files: dict[str, FileDescriptorProto]) -> Iterator[FileDescriptorProto]:
    """Each file of types behind those that it needs."""
    left = dict(files)
    while left:
        ready = [name for name, file in left.items() if left.keys().isdisjoint(file.dependency)]
        if not ready:
            raise ValueError(f"types in {', '.join(left)} need each other")
        for name in ready:
            yield left.pop(name)
