"""A training process: prints a digest of each batch, and stores its state after every one.

``training_process.py CONFIG CACHE STATE WORKERS STOP RECORDING...``: goes on from ``STATE`` if that
is there, and after ``STOP`` batches waits to be killed, with its workers at work.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from ppstream.data import Windows

BATCH, SEED = 2, 11


def main(config: str, cache: str, state: str, workers: str, stop: str, *recordings: str) -> None:
    windows = Windows(list(recordings), config, BATCH, seed=SEED, cache=cache)
    file = Path(state)
    if file.exists():
        windows.load_state_dict(json.loads(file.read_text()))
    for done, digest in enumerate(digests(windows, int(workers)), 1):
        scratch = file.with_suffix(".tmp")
        scratch.write_text(json.dumps(windows.state_dict()))
        os.replace(scratch, file)
        print(digest, flush=True)
        if done == int(stop):
            threading.Event().wait()


def digests(windows: Windows, workers: int = 0) -> Iterator[str]:
    """One of each batch, epoch after epoch."""
    while True:
        for batch in windows.batches(workers=workers):
            tensors = b"".join(tensor.numpy().tobytes() for tensor in batch.values())
            yield hashlib.sha256(tensors).hexdigest()


if __name__ == "__main__":
    main(*sys.argv[1:])
