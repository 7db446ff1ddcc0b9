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
from pathlib import Path

from ppstream.data import Windows

BATCH, SEED = 2, 11


def main(config: str, cache: str, state: str, workers: str, stop: str, *recordings: str) -> None:
    windows = Windows(list(recordings), config, BATCH, seed=SEED, cache=cache)
    file = Path(state)
    if file.exists():
        windows.load_state_dict(json.loads(file.read_text()))
    done = 0
    while True:
        for batch in windows.batches(workers=int(workers)):
            digest = hashlib.sha256(b"".join(t.numpy().tobytes() for t in batch.values()))
            scratch = file.with_suffix(".tmp")
            scratch.write_text(json.dumps(windows.state_dict()))
            os.replace(scratch, file)
            print(digest.hexdigest(), flush=True)
            done += 1
            if done == int(stop):
                threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
