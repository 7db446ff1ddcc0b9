"""A policy and a decoder that have torch refuse to wait for a GPU, on both ranks, for a while.

The decoder, which rank 0 calls once for each envelope, says from when to when by a file that both
ranks see; replayed from a graph, the policy is never called, so its rank looks from a thread. Each
rank notes what torch's allocators had given out at the beginning and at the end.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ppstream.pipeline.decode import CopyDecoder
from ppstream_stages import simulated

FROM, UNTIL = 100, 260  # envelopes: behind warm-up and the stages timed alone, within bring-up
LOOK_S = 0.002


def allocations() -> list[int]:
    """So far: memory given out on this rank's device, and pages that were locked."""
    return [
        torch.cuda.memory_stats()["allocation.all.allocated"],
        torch.cuda.host_memory_stats()["num_host_alloc"],
    ]


class Watch:
    """Of one rank; ``begin`` and ``end`` in turn, once."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.flag = folder / "on"
        self._note = folder / f"rank{rank}.json"
        self._before: list[int] = []

    def begin(self) -> None:
        self._before = allocations()
        torch.cuda.set_sync_debug_mode("error")

    def end(self) -> None:
        torch.cuda.set_sync_debug_mode("default")
        self._note.write_text(json.dumps([self._before, allocations()]))


class Decoder(CopyDecoder):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch, self._calls = watch, 0

    def __call__(self, row: int, result: Mapping[str, Any], actions: Any) -> None:
        super().__call__(row, result, actions)
        self._calls += 1
        if self._calls == FROM:
            self._watch.flag.touch()
            self._watch.begin()
        elif self._calls == UNTIL:
            self._watch.end()
            self._watch.flag.unlink()


def build_decoder(options: Mapping[str, Any], actions: Any) -> Decoder:
    return Decoder(Watch(Path(options["folder"]), 0))


def build_policy(options: Mapping[str, Any], device: torch.device) -> Any:
    """The simulated policy; ``folder`` is where the flag will be."""
    own = {key: value for key, value in options.items() if key != "folder"}
    watch = Watch(Path(options["folder"]), 1)
    threading.Thread(target=_follow, args=(watch, device), daemon=True).start()
    return simulated.build(own, device)


def _follow(watch: Watch, device: torch.device) -> None:
    _until(watch.flag.exists)
    torch.cuda.set_device(device)
    watch.begin()
    _until(lambda: not watch.flag.exists())
    watch.end()


def _until(holds: Any) -> None:
    while not holds():
        time.sleep(LOOK_S)
