"""Values of JSON that others wrote: of the type that is asked for, or refused. Pure."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Final

from ppstream.analysis.records import Json
from ppstream.core.errors import LogError, printable

INT_MAX: Final = (1 << 63) - 1
TEXT_CHARS: Final = 120  # of a fault or a name that others gave


def int_of(table: Json, key: str, where: str) -> int | None:
    """The integer of ``table`` under ``key``; None: it has none.

    Raises:
        LogError: anything else stands there; names ``where``.
    """
    value = table.get(key)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if value is None or (type(value) is int and -INT_MAX <= value <= INT_MAX):
        return value
    raise LogError(f"{where}: {key} is {value!r:.40}, expected an integer of 64 bits")


def text_of(value: object) -> str | None:
    """Text, kept once, however many lines have it."""
    return None if value is None else sys.intern(str(value))


def mapping_of(value: object) -> Json:
    """A table; empty for anything else."""
    return value if isinstance(value, Mapping) else {}


def shown(text: str) -> str:
    """Text of others as a line of a report can hold it."""
    return printable(text, TEXT_CHARS)
