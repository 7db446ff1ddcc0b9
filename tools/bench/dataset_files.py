"""Files of ``dataset.py``: trajectories as safetensors and as a recording of ppstream's own."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from ppstream.recording.mcap_messages import EncodedMessage
from ppstream.recording.mcap_reader import read_mcap
from ppstream.recording.mcap_schema import SAMPLES, SampleBatch, json_schema, schema_name, topic
from ppstream.recording.mcap_writer import McapMessage

NAMES: Final = ("values", "stamps_ns", "valid")
HEADER_BYTES: Final = 8  # of a safetensors file: how long the table behind them is


def write_safetensors(file: Path, *tensors: Tensor) -> None:
    """Values, stamps or ages, and validity if there is."""
    named = dict(zip(NAMES, tensors, strict=False))
    safetensors.torch.save_file({name: one.contiguous() for name, one in named.items()}, file)


def read_safetensors(file: Path, to: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Values and stamps straight into ``to``, without a copy between or a fault for each page."""
    with file.open("rb", buffering=0) as opened:
        size = int.from_bytes(opened.read(HEADER_BYTES), "little")
        header: dict[str, Any] = json.loads(opened.read(size))
        for name, tensor in zip(NAMES, to, strict=False):
            opened.seek(HEADER_BYTES + size + header[name]["data_offsets"][0])
            _fill(opened, tensor)
    return to


def read_plainly(file: Path, to: tuple[Tensor, ...]) -> None:
    """The whole file, whatever it holds, into the memory of ``to``."""
    with file.open("rb", buffering=0) as opened:
        for tensor in to:
            _fill(opened, tensor)


def _fill(opened: Any, tensor: Tensor) -> None:
    memory = memoryview(tensor.view(-1).view(torch.uint8).numpy())
    while len(memory):
        if not (count := opened.readinto(memory)):
            return
        memory = memory[count:]


def drop_from_cache(files: Iterable[Path]) -> None:
    """Has the next read come from the disk."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def write_mcap(file: Path, values: Tensor, stamps_ns: Tensor) -> None:
    """A message for each trajectory, as the recorder writes a stream's samples."""
    from mcap.writer import Writer

    with file.open("wb") as output:
        writer = Writer(output)
        writer.start()
        data = json_schema(SampleBatch)
        schema = writer.register_schema(schema_name(SampleBatch), "jsonschema", data)
        name = topic("arm", SAMPLES, "state")
        channel = writer.register_channel(name, "json", schema)
        slots, dim = values.shape[1:]
        for number, (row, stamps) in enumerate(zip(values, stamps_ns.tolist(), strict=True)):
            flat = row.flatten().tolist()
            batch = SampleBatch(number * slots, dim, stamps, stamps, flat, flat[-dim:])
            message = McapMessage.of(stamps[-1], name, batch)
            writer.add_message(channel, message.at_ns, message.data, message.at_ns)
        writer.finish()


def read_mcap_chunk(file: Path) -> tuple[Tensor, Tensor]:
    """Values ``[n, N, D]`` float32 and stamps ``[n, N]`` of all messages."""
    import msgspec

    decoder: Any = msgspec.json.Decoder(SampleBatch)
    batches = [
        decoder.decode(one.data) for one in read_mcap(file) if isinstance(one, EncodedMessage)
    ]
    values = np.array([one.values for one in batches], np.float32)
    stamps_ns = torch.from_numpy(np.array([one.stamps_ns for one in batches], np.int64))
    rows, slots = stamps_ns.shape
    return torch.from_numpy(values).view(rows, slots, -1), stamps_ns
