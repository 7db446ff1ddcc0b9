"""Check plain TOML values against the configuration's structs: every problem, each at its path.

msgspec stops at the first error; this walks on. It only judges values one by one: what they must
agree on stands in ``rules.py``.
"""

from __future__ import annotations

import math
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, Union, get_args, get_origin

import msgspec
from msgspec import Meta
from msgspec.structs import FieldInfo

NONE: Final = "none"  # TOML has no null: this text stands for it where a field may be without value
INT_MIN, INT_MAX = -(2**63), 2**63 - 1

_KINDS: Final = {float: "a number", int: "a whole number", str: "text", bool: "true or false"}


class FieldType(NamedTuple):
    """A field's type, taken apart."""

    base: Any  # without Annotated and None: a struct, a scalar, Literal[...], tuple[...] or dict
    optional: bool  # None is allowed
    bounds: tuple[Meta, ...]
    words: tuple[str, ...] = ()  # texts that may stand in its place


def kind_of(annotation: Any) -> FieldType:
    """``annotation`` without its ``Annotated`` and ``None`` parts, which are told apart."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner = kind_of(annotation.__origin__)
        metas = tuple(m for m in annotation.__metadata__ if isinstance(m, Meta))
        return inner._replace(bounds=inner.bounds + metas)
    if origin in (Union, types.UnionType):
        some = [part for part in get_args(annotation) if part is not type(None)]
        *texts, main = sorted(some, key=lambda part: not _is_literal(part))
        words = tuple(word for text in texts for word in get_args(text))
        is_optional = type(None) in get_args(annotation)
        return kind_of(main)._replace(optional=is_optional, words=words)
    return FieldType(annotation, optional=False, bounds=())


def normalise(value: Any, annotation: Any, folder: Path) -> Any:
    """A copy of ``value``: ``"none"`` becomes None where allowed, paths absolute under ``folder``.

    For a list it is one without items.

    Values of the wrong kind are returned as they are, for ``find_problems`` to report.
    """
    kind = kind_of(annotation)
    if kind.optional and value == NONE:
        return None
    if is_struct(kind.base) and isinstance(value, Mapping):
        declared = {name: field.type for name, field in _fields(kind.base).items()}
        return {k: normalise(v, declared.get(k, Any), folder) for k, v in value.items()}
    if get_origin(kind.base) is dict and isinstance(value, Mapping):
        return {k: normalise(v, get_args(kind.base)[1], folder) for k, v in value.items()}
    if isinstance(value, str) and any((m.extra or {}).get("one") for m in kind.bounds):
        value = [value]
    if get_origin(kind.base) is tuple and value == NONE:
        return []
    if get_origin(kind.base) is tuple and isinstance(value, list | tuple):
        return [normalise(item, get_args(kind.base)[0], folder) for item in value]
    if value and isinstance(value, str) and _is_path(kind):
        with suppress(RuntimeError):  # no such user
            return str(folder / Path(value).expanduser())
    return value


def find_problems(value: Any, annotation: Any, path: str = "") -> Iterator[str]:
    """Every problem of ``value`` as ``path: got ..., want ...``, in the order of the struct."""
    kind = kind_of(annotation)
    if (value is None and kind.optional) or value in kind.words:
        return
    if is_struct(kind.base):
        yield from _table_problems(value, kind.base, path)
    elif get_origin(kind.base) is tuple:
        yield from _list_problems(value, kind, path)
    elif _is_table_of_tables(kind.base) and isinstance(value, Mapping):
        for name, item in value.items():
            yield from find_problems(item, get_args(kind.base)[1], _join(path, name))
    elif isinstance(value, float) and not math.isfinite(value):
        if not _may_be_infinite(kind):
            yield _line(path, value, f"{wanted(kind)}, finite")
        elif not value > 0:
            yield _line(path, value, wanted(kind))
    elif isinstance(value, str) and "\0" in value:
        yield _line(path, value, "text without a NUL character")
    elif _is_path(kind) and isinstance(value, str) and value.startswith("~"):
        yield _line(path, value, "a path: that user's home is not known")
    else:
        try:
            msgspec.convert(value, annotation)
        except msgspec.ValidationError:
            yield _line(path, value, wanted(kind)) + suggestion(value, _choices(kind))
        else:
            yield from _long_numbers(value, path, kind)


def _long_numbers(value: Any, path: str, kind: FieldType | None = None) -> Iterator[str]:
    """Whole numbers that TOML's own range has no room for: ranks could not send them either.

    ``kind``: what the value was checked as; None: a user's own options take any.
    """
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _long_numbers(item, _join(path, name))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _long_numbers(item, f"{path}[{index}]")
    elif isinstance(value, int) and not INT_MIN <= value <= INT_MAX:
        words = f"a whole number from {INT_MIN} to {INT_MAX}"
        if kind is not None and kind.bounds:  # its own bound is nearer than the lowest number
            words = wanted(kind._replace(bounds=(*kind.bounds, Meta(le=INT_MAX))))
        yield _line(path, value, words)


def _table_problems(value: Any, struct: type[msgspec.Struct], path: str) -> Iterator[str]:
    if not isinstance(value, Mapping):
        yield _line(path, value, "a table")
        return
    known = _fields(struct)
    for name, field in known.items():
        if name in value:
            yield from find_problems(value[name], field.type, _join(path, name))
        elif field.required:
            yield f"{_join(path, name)}: missing, want {wanted(kind_of(field.type))}"
    for name in value:
        if name not in known:
            yield f"{_join(path, name)}: unknown key{_key_suggestion(name, struct, known)}"


@cache
def _fields(struct: type[msgspec.Struct]) -> Mapping[str, FieldInfo]:
    """By name; msgspec evaluates all annotations at each call."""
    return {field.encode_name: field for field in msgspec.structs.fields(struct)}


def _list_problems(value: Any, kind: FieldType, path: str) -> Iterator[str]:
    if not isinstance(value, list):
        yield _line(path, value, wanted(kind))
        return
    if len(value) < max((meta.min_length or 0 for meta in kind.bounds), default=0):
        yield _line(path, value, wanted(kind))
    for index, item in enumerate(value):
        yield from find_problems(item, get_args(kind.base)[0], f"{path}[{index}]")


def _line(path: str, got: Any, wanted: str) -> str:
    return f"{path or 'configuration'}: got {got!r}, want {wanted}"


def wanted(kind: FieldType) -> str:
    """Words what would be right: ``a whole number, at least 1, at most 64, or "none"``."""
    if wants := [meta.extra["want"] for meta in kind.bounds if meta.extra and "want" in meta.extra]:
        text = str(wants[0])
    elif choices := _choices(kind):
        text = "one of " + ", ".join(choices) if len(choices) > 1 else repr(choices[0])
    elif is_struct(kind.base) or get_origin(kind.base) is dict:
        text = "a table"
    elif get_origin(kind.base) is tuple:
        text = f"a list, each {wanted(kind_of(get_args(kind.base)[0]))}"
    else:
        text = _KINDS.get(kind.base, "a value")
    for meta in kind.bounds:
        text += "".join(f", {words}" for words in _bound_words(meta))
    text += ", or inf: no limit" if _may_be_infinite(kind) else ""
    words = (*kind.words, NONE) if kind.optional else kind.words
    return text + "".join(f', or "{word}"' for word in words)


def _bound_words(meta: Meta) -> Iterator[str]:
    for words, limit in (
        ("above", meta.gt),
        ("at least", meta.ge),
        ("below", meta.lt),
        ("at most", meta.le),
    ):
        if limit is not None:
            yield f"{words} {limit if isinstance(limit, int) else format(limit, 'g')}"
    if meta.min_length:
        yield "not empty"


def _choices(kind: FieldType) -> tuple[str, ...]:
    return get_args(kind.base) if _is_literal(kind.base) else ()


def suggestion(value: Any, choices: Sequence[str]) -> str:
    """Words which of ``choices`` was meant, in brackets; empty: none is close."""
    close = get_close_matches(str(value), choices, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _key_suggestion(name: str, struct: type, known: Mapping[str, FieldInfo]) -> str:
    close = get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else f" (known: {', '.join(known)})"


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _is_path(kind: FieldType) -> bool:
    return any((meta.extra or {}).get("path") for meta in kind.bounds)


def _may_be_infinite(kind: FieldType) -> bool:
    return any((meta.extra or {}).get("infinite") for meta in kind.bounds)


def _is_table_of_tables(base: Any) -> bool:
    return get_origin(base) is dict and is_struct(get_args(base)[1])


def _is_literal(base: Any) -> bool:
    return get_origin(base) is Literal


def is_struct(base: Any) -> bool:
    return isinstance(base, type) and issubclass(base, msgspec.Struct)
