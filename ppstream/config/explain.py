"""``ppstream explain [PATH]``: what a configuration may say, from the docstrings of its keys.

``schema.py`` and ``run_tables.py`` hold a docstring behind each key: its meaning, then, where the
key has a default, when to set it. They are read from the source, which Python keeps nowhere else.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from functools import cache
from itertools import pairwise
from typing import Any, Final, NamedTuple, get_args, get_origin

import msgspec
from msgspec.structs import FieldInfo, fields

from ppstream.config.schema import PipelineConfig
from ppstream.config.to_toml import toml_value
from ppstream.config.validate import is_struct, kind_of, wanted
from ppstream.core.errors import ConfigError

UNITS: Final = {"_ms": "ms", "_s": "s", "_hz": "Hz", "_mb": "MB"}
WIDTH: Final = 80
HOW: Final = "ppstream explain PATH says more of one, ppstream explain --all of every key."


class Key(NamedTuple):
    """A key of a configuration, a value or a table."""

    path: str  # streams.rate_hz: a list's tables have no index
    table: type[msgspec.Struct] | None  # of the table, or of each in the list; None: a value
    wanted: str
    unit: str
    default: str | None  # as TOML; None: it must be stated
    meaning: str


def keys(struct: type[msgspec.Struct] = PipelineConfig, path: str = "") -> Iterator[Key]:
    """Yields each key of ``struct`` in file order, a table's own keys behind it."""
    meanings = docstrings(struct)
    for field in fields(struct):
        here = f"{path}.{field.name}" if path else field.name
        table = _table_of(field.type)
        unit = next((u for end, u in UNITS.items() if field.name.endswith(end)), "")
        words = wanted(kind_of(field.type))
        yield Key(here, table, words, unit, _default(field), meanings.get(field.name, ""))
        if table is not None:
            yield from keys(table, here)


@cache
def docstrings(struct: type) -> dict[str, str]:
    """The text behind each field of ``struct``, on one line."""
    source = textwrap.dedent(inspect.getsource(struct))
    (body,) = (node.body for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    found = {}
    for field, behind in pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            text = behind.value if isinstance(behind, ast.Expr) else None
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                found[field.target.id] = " ".join(text.value.split())
    return found


def explain(path: str) -> str:
    """Explains ``path``: one key, or a table with all below it.

    Raises:
        ConfigError: there is no such key.
    """
    known = {key.path: key for key in keys()}
    if path not in known:
        names = {key.rpartition(".")[2]: key for key in reversed(known)}
        close = get_close_matches(path, known, 1) or get_close_matches(path, names, 1)
        hint = f" (did you mean {names.get(close[0], close[0])!r}?)" if close else ""
        raise ConfigError([f"there is no key {path!r}{hint}"])
    below = [key for key in known.values() if key.path.startswith(f"{path}.")]
    return "\n".join(line for key in (known[path], *below) for line in _lines(key))


def overview() -> str:
    """Every table and top-level value, a line each."""
    top = [key for key in keys() if "." not in key.path]
    width = max(len(key.path) for key in top)
    meanings = (textwrap.wrap(key.meaning, WIDTH - width - 2) for key in top)
    gap = "\n" + " " * (width + 2)
    lines = (f"{key.path:<{width}}  {gap.join(m)}" for key, m in zip(top, meanings, strict=True))
    return "\n".join([*lines, "", HOW])


def markdown() -> str:
    """The reference as a page: a table of keys for each table of the configuration."""
    lines = ["# Configuration reference", "", "Made by `ppstream explain --markdown`.", ""]
    lines += ["Precedence: command line, then file, then default. `none` stands for no value.", ""]
    for heading, rows in _by_table().items():
        lines += [f"## {heading}", "", "| key | wants | default | meaning |", "|---|---|---|---|"]
        for key in rows:
            name = key.path.rpartition(".")[2]
            unit = f", {key.unit}" if key.unit else ""
            default = "must be stated" if key.default is None else f"`{key.default}`"
            row = (f"`{name}`", f"{key.wanted}{unit}", default, key.meaning)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |")
        lines.append("")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints what is asked for; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="ppstream explain",
        description="What a configuration may say: key, type, unit, default, meaning.",
    )
    parser.add_argument("path", nargs="?", help="pipeline, pipeline.d_in, streams.image.mean, ...")
    parser.add_argument("--all", action="store_true", help="every key")
    parser.add_argument("--markdown", action="store_true", help="every key, as a page")
    args = parser.parse_args(argv)
    try:
        if args.markdown:
            print(markdown(), end="")
        elif args.all:
            print("\n".join(line for key in keys() for line in _lines(key)))
        else:
            print(overview() if args.path is None else explain(args.path))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return int(error.exit_code)
    return 0


def _by_table() -> dict[str, list[Key]]:
    """Values by the heading of their table, the whole configuration's own first."""
    found: dict[str, list[Key]] = {}
    tables = {key.path: key for key in keys() if key.table is not None}
    for key in keys():
        if key.table is None:
            path = key.path.rpartition(".")[0]
            is_list = path in tables and tables[path].wanted.startswith("a list")
            heading = f"[[{path}]]" if is_list else f"[{path}]"
            found.setdefault(heading if path else "The run", []).append(key)
    return found


def _lines(key: Key) -> Iterator[str]:
    unit = f", {key.unit}" if key.unit else ""
    must = "must be stated" if key.default is None else f"default {key.default}"
    yield f"{key.path}: {key.wanted}{unit}" + ("" if key.table else f"; {must}")
    yield from textwrap.wrap(key.meaning, WIDTH, initial_indent="    ", subsequent_indent="    ")


def _table_of(annotation: Any) -> type[msgspec.Struct] | None:
    base = kind_of(annotation).base
    inner = get_args(base) if get_origin(base) in (tuple, dict) else (base,)
    return next((kind_of(each).base for each in inner if is_struct(kind_of(each).base)), None)


def _default(field: FieldInfo) -> str | None:
    if field.required:
        return None
    made = field.default_factory
    value = made() if made is not msgspec.NODEFAULT else field.default
    return toml_value(msgspec.to_builtins(value))


if __name__ == "__main__":
    sys.exit(main())
