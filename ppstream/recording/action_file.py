"""ActionFile: collects every emitted action chunk and writes them as one ``.npz`` at the end.

For runs on a recording: two runs are compared bit for bit through these files.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from ppstream.core.errors import ConfigError
from ppstream.wire.robot_messages import ActionChunk


class ActionFile:
    """An emitter; ``close`` writes ``window_end_ns [n]``, ``row [n]``, ``actions [n, H, dim]``."""

    def __init__(self, path: Path, action_dim: int) -> None:
        self._path = path
        self._action_dim = action_dim
        self._ends_ns: list[int] = []
        self._rows: list[int] = []
        self._actions: list[np.ndarray[Any, Any]] = []

    def emit(self, row: int, chunk: ActionChunk) -> str | None:
        values = np.frombuffer(chunk.actions, dtype=np.float32).copy()
        self._ends_ns.append(chunk.window_end_ns)
        self._rows.append(row)
        self._actions.append(values.reshape(chunk.horizon, self._action_dim))
        return None

    def close(self) -> None:
        """Write what was emitted; an empty run writes empty arrays.

        Raises:
            ConfigError: the disk is full or gone; what was in the file is there still.
        """
        horizon = self._actions[0].shape[0] if self._actions else 0
        empty = np.zeros((0, horizon, self._action_dim), np.float32)
        partial = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            with partial.open("wb") as file:
                np.savez(
                    file,
                    window_end_ns=np.asarray(self._ends_ns, dtype=np.int64),
                    row=np.asarray(self._rows, dtype=np.int64),
                    actions=np.stack(self._actions) if self._actions else empty,
                )
            partial.replace(self._path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            why = f"cannot write to {self._path}: {error.strerror or error}"
            lost = f"its {len(self._actions)} chunks are lost"
            raise ConfigError(
                [f"service.actions_file: {why}; {lost}: make room, and replay again"]
            ) from error
