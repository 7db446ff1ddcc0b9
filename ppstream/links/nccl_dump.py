"""NCCL's flight recorder: torch keeps the newest sends and receives, and a stuck rank writes them.

They say which operation of which direction waits, and since when. Written as JSON, never in torch's
pickled form. Where no NCCL link was opened, or torch is built without it, there is nothing to
write and nothing is said.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Final

KEPT: Final = "256"  # operations: 64 envelopes
SIZE: Final = "TORCH_FR_BUFFER_SIZE"
SIZES: Final = (SIZE, "TORCH_NCCL_TRACE_BUFFER_SIZE")  # the second one is torch's older name
DUMPS: Final = ("_dump_nccl_trace_json", "_dump_fr_trace_json")  # either, by torch's version
NEEDED: Final = b'"entries"'  # absent while nothing was sent
LIMIT_S: Final = 1.0  # it takes locks of a library that may be what is stuck
FILE_MODE: Final = 0o640


def switch_on(environment: MutableMapping[str, str] = os.environ) -> None:
    """Have torch keep operations, as many as somebody asked for; before the first NCCL group."""
    if not any(name in environment for name in SIZES):
        environment[SIZE] = KEPT  # torch warns of the older name


def write(path: Path, environment: MutableMapping[str, str] = os.environ) -> bool:
    """Write what was kept to ``path``; whether there was anything, and ``LIMIT_S`` were enough.

    Raises nothing: the rank ends, whatever is left of it.
    """
    if not any(name in environment for name in SIZES):
        return False
    written = threading.Event()

    def try_to() -> None:
        with suppress(OSError, RuntimeError, TypeError):
            if NEEDED in (trace := _dump()):
                _write(path, trace)
                written.set()

    thread = threading.Thread(target=try_to, name="flight recorder", daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    return written.is_set()


def _dump() -> bytes:
    """Returns what torch kept, as JSON; empty where it keeps nothing."""
    library = importlib.import_module("torch._C._distributed_c10d")
    dumps: list[Callable[[], bytes]] = [
        found for name in DUMPS if (found := getattr(library, name, None)) is not None
    ]
    return dumps[0]() if dumps else b""


def _write(path: Path, trace: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_CREAT, FILE_MODE)
    with os.fdopen(descriptor, "wb") as file:
        file.write(trace)
