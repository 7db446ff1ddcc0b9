"""The effective configuration as TOML that reads back to the same configuration.

Not a general TOML writer: it knows the few kinds of value a configuration holds. A list stays on
one line, as people write limits of joints and as ``--set`` takes it; tomli-w gives each element a
line of its own, which makes the document of a run with cameras half as long again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from ppstream.config.schema import PipelineConfig
from ppstream.config.validate import NONE, normalise


def as_tables(config: PipelineConfig) -> dict[str, Any]:
    """``config`` as another rank, and a reader of run.json, see it: dictionaries and lists."""
    tables: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(config))
    return tables


def as_toml(config: PipelineConfig, folder: Path | None = None) -> str:
    """Every value of ``config``, defaults included, as a TOML document.

    Args:
        config: to be written.
        folder: that its relative paths are meant from; None: they are written as they are.
    """
    table = msgspec.to_builtins(config)
    if folder is not None:
        table = normalise(table, PipelineConfig, folder)
    return "\n".join(table_lines(table)) + "\n"


def table_lines(table: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """A struct's values first, its tables and lists of tables behind them."""
    for key, value in table.items():
        if not _has_own_heading(value, path):
            yield f"{_key(key)} = {toml_value(value)}"
    for key, value in table.items():
        if not _has_own_heading(value, path):
            continue
        for entry in value if isinstance(value, list | tuple) else [value]:
            heading = f"[[{key}]]" if isinstance(value, list | tuple) else f"[{key}]"
            yield f"\n{heading}"
            yield from table_lines(entry, key)


def _has_own_heading(value: Any, path: str) -> bool:
    """Tables of the first level and lists of tables there; deeper ones are written inline."""
    if path:
        return False
    if isinstance(value, list | tuple):
        return bool(value) and all(isinstance(entry, Mapping) for entry in value)
    return isinstance(value, Mapping)


def toml_value(value: Any) -> str:
    if value is None:
        return f'"{NONE}"'
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(k)} = {toml_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _text(value)
    return str(value)  # whole numbers and numbers, inf and nan included, are written as in Python


def _key(key: str) -> str:
    plain = key.isascii() and key.replace("_", "").replace("-", "").isalnum()
    return key if plain else _text(key)


def _text(text: str) -> str:
    # JSON's escapes are TOML's; DEL is the one character that only TOML refuses unescaped.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
