"""The handshake: ranks compare what they resolved before any tensor moves.

Facts are compared by key class: ``equal`` must agree on all ranks; ``informational`` ones of the
policy rank are kept in run.json.
What only rank 0 reads (sensors' service, bring-up, decode, logs) is not compared.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import msgspec

import ppstream
from ppstream.config.schema import PipelineConfig
from ppstream.core.errors import HandshakeError
from ppstream.observe.run_folder import boot_id
from ppstream.wire.messages import WIRE_MAJOR, WIRE_MINOR

RANK0_ONLY: Final = frozenset({"service", "bringup", "decode", "log", "demo", "simulate"})
TEST_HOOK_PREFIX: Final = "PPSTREAM_TEST_"


def facts(config: PipelineConfig) -> dict[str, dict[str, Any]]:
    """This rank's resolved facts, by key class."""
    tables = msgspec.json.decode(msgspec.json.encode(config))  # as the other rank will see it
    equal = {
        f"config.{path}": value
        for path, value in _flatten(tables)
        if path.partition(".")[0] not in RANK0_ONLY
    }
    equal["config.policy.weights"] = _fingerprint(config.policy.weights)
    equal["protocol"] = WIRE_MAJOR
    equal["ppstream"] = ppstream.__version__
    equal["test_hooks"] = sorted(
        f"{key}={value}" for key, value in os.environ.items() if key.startswith(TEST_HOOK_PREFIX)
    )
    return {
        "equal": equal,
        "informational": {
            "protocol_minor": WIRE_MINOR,
            "host": platform.node(),
            "boot_id": boot_id(),
            "pid": os.getpid(),
            "python": platform.python_version(),
            "torch": version("torch"),
        },
    }


def difference(
    mine: Mapping[str, Any], theirs: Mapping[str, Any], my_rank: int, their_rank: int
) -> list[str]:
    """One line for each key on which two ranks disagree; empty when they agree."""
    lines = []
    for key in sorted(mine.keys() | theirs.keys()):
        here, there = mine.get(key, "(absent)"), theirs.get(key, "(absent)")
        if here != there:
            lines.append(f"{key}: rank {my_rank} has {here!r}, rank {their_rank} has {there!r}")
    return lines


def compare(mine: Mapping[str, Any], theirs: Mapping[str, Any], their_rank: int) -> None:
    """Raise HandshakeError with the per-rank difference unless the ``equal`` facts agree."""
    lines = difference(mine["equal"], theirs.get("equal", {}), 0, their_rank)
    if lines:
        raise HandshakeError("\n".join(lines))


def _fingerprint(path: str | None) -> str | None:
    """What the weights are, wherever each host keeps them."""
    if path is None:
        return None
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flatten(value: Any, path: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        parts = [(f"{path}.{key}" if path else str(key), item) for key, item in value.items()]
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        parts = [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    else:
        return [(path, value)]
    return [pair for key, item in parts for pair in _flatten(item, key)]
