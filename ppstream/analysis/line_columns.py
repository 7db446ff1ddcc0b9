"""Lines of a log in columns: a day's log has a million, and an object for each value is too much.

A row reads as the line that was appended, and nothing changes it but ``Lines``. They are packed in
blocks: a column with one value all through a block, as most have, takes next to nothing. The first
lines stay objects: those of bring-up are asked for everything, again and again. Pure.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import cache, lru_cache
from itertools import chain
from operator import attrgetter
from sys import intern
from types import NoneType
from typing import Any, Final, Generic, TypeVar, cast

KEPT: Final = 1024  # the first lines, which stay objects
BLOCK: Final = 256  # lines; Python keeps each number below once
_WIDTHS: Final = {code: -1 << 8 * array(code).itemsize - 1 for code in "bhiq"}  # and the least

_HASHABLE: Final = {bool, int, str, NoneType, tuple}

Line = TypeVar("Line")
Column = Any  # has a value at the place of each row


class LineRow:
    """One line of a block: a class for each dataclass gives it the fields and properties."""

    __slots__ = ("at", "columns")

    def __init__(self, columns: list[Column], at: int) -> None:
        self.columns = columns
        self.at = at


class Lines(Generic[Line]):
    """Lines of one dataclass.

    Args:
        kind: the dataclass.
        key: of a line: nearly all are appended in its order.
        kept: so many lines stay objects.
    """

    def __init__(
        self, kind: type[Line], key: Callable[[Line], tuple[int, ...]], kept: int = KEPT
    ) -> None:
        self._names = [f.name for f in fields(cast(Any, kind))]
        self._values, self._key = attrgetter(*self._names), key
        self._row = _row_class(cast(Any, kind))
        self._kept: list[Line] = []
        self._most_kept = kept
        self._blocks: list[tuple[int, list[Column]]] = []  # lines, and their columns
        self._unpacked: list[tuple[Any, ...]] = []
        self._last: tuple[int, ...] = ()
        self._is_ordered = True

    def append(self, line: Line) -> None:
        key = self._key(line)
        if key < self._last:
            self._is_ordered = False
        self._last = key
        if len(self._kept) < self._most_kept:
            self._kept.append(line)
            return
        self._unpacked.append(self._values(line))
        if len(self._unpacked) == BLOCK:
            self._pack()

    def __iter__(self) -> Iterator[Line]:
        """All lines by their keys; of equal ones the first appended comes first."""
        self._pack()
        blocks = (self._rows(*block) for block in self._blocks)
        rows = chain.from_iterable(chain([self._kept], blocks))
        return rows if self._is_ordered else iter(sorted(rows, key=self._key))

    def has(self, name: str) -> bool:
        """False where no line has that field; properties are not looked at."""
        self._pack()
        if name not in self._names or any(getattr(line, name) is not None for line in self._kept):
            return True
        at = self._names.index(name)
        return any(columns[at] is not same(None) for _, columns in self._blocks)

    def refer(self, name: str, others: Sequence[Iterable[Any]]) -> None:
        """Make the field a tuple of rows of other lines, or of None.

        Args:
            name: of the field.
            others: for each place in the tuple, what belongs to each of these lines, by the key.
        """
        at = self._names.index(name)
        for row, *found in zip(self, *others, strict=False):
            if not isinstance(row, LineRow):
                setattr(row, name, tuple(found))
                continue
            column = row.columns[at]
            if not isinstance(column, _References):
                column = row.columns[at] = _References(len(others))
            column.set(row.at, found)

    def fill(self, names: Sequence[str], values_of: Callable[[Line], Mapping[str, Any]]) -> None:
        """Give lines in which these fields are None what ``values_of`` has for them."""
        for line in self._kept:
            lacking = [name for name in names if getattr(line, name) is None]
            theirs = values_of(line) if lacking else {}
            for name in lacking:
                setattr(line, name, theirs.get(name))
        self._pack()
        for block in self._blocks:
            rows, (_, columns) = self._rows(*block), block
            own = {name: [getattr(row, name) for row in rows] for name in names}
            lacking = [name for name in names if None in own[name]]
            found = [values_of(row) for row in rows] if lacking else []
            for name in lacking:
                values = zip(own[name], found, strict=True)
                columns[self._names.index(name)] = packed(
                    [theirs.get(name) if mine is None else mine for mine, theirs in values]
                )

    def _rows(self, count: int, columns: list[Column]) -> list[Line]:
        return cast(list[Line], [self._row(columns, at) for at in range(count)])

    def _pack(self) -> None:
        if self._unpacked:
            columns = [*map(packed, zip(*self._unpacked, strict=True))]
            self._blocks.append((len(self._unpacked), columns))
            self._unpacked.clear()


@cache
def _row_class(kind: type) -> type[LineRow]:
    def field_at(at: int) -> property:
        return property(lambda row: row.columns[at][row.at])

    known = {name: getattr(kind, name) for name in dir(kind)}
    members = {name: found for name, found in known.items() if isinstance(found, property)}
    members |= {f.name: field_at(at) for at, f in enumerate(fields(kind))}
    return type(kind.__name__, (LineRow,), {"__slots__": (), **members})


def packed(values: Sequence[Any]) -> Column:
    """Values of a column in as little memory as they need."""
    kinds, first = {*map(type, values)}, values[0]
    if len(kinds) == 1 and kinds <= _HASHABLE and values.count(first) == len(values):
        return same(first)
    if kinds <= {int, NoneType}:
        for code, none in _WIDTHS.items():
            with suppress(OverflowError):
                if kinds == {int}:
                    return array(code, values)
                if none not in values:
                    return _Optional(
                        array(code, [none if value is None else value for value in values]), none
                    )
    if dict in kinds:
        return _Mappings.of(values)
    return tuple([intern(value) if type(value) is str else value for value in values])


@lru_cache(maxsize=4096, typed=True)
def same(value: Any) -> Column:
    """A column of one value; blocks share it."""
    return (value,) * BLOCK


class _Optional:
    """A column of integers and None, for which one stands that is no value."""

    __slots__ = ("_none", "_values")

    def __init__(self, values: array[int], none: int) -> None:
        self._values, self._none = values, none

    def __getitem__(self, at: int) -> int | None:
        value = self._values[at]
        return None if value == self._none else value


class _Mappings:
    """A column of mappings with the same keys, and None."""

    __slots__ = ("_columns", "_names")

    def __init__(self, names: Sequence[str], columns: Sequence[Column]) -> None:
        self._names, self._columns = names, columns

    @classmethod
    def of(cls, values: Sequence[Mapping[str, int] | None]) -> Column:
        """The column; a tuple of mappings whose keys differ."""
        names, *others = {tuple(value) for value in values if value is not None}
        if others or not names:
            return tuple(values)
        rows = [dict.fromkeys(names) if value is None else value for value in values]
        return cls(names, [packed([row[name] for row in rows]) for name in names])

    def __getitem__(self, at: int) -> Mapping[str, int] | None:
        found = [column[at] for column in self._columns]
        return None if found[0] is None else dict(zip(self._names, found, strict=True))


class _References:
    """A column of tuples, each of rows of other lines or of None."""

    __slots__ = ("_each",)

    def __init__(self, count: int) -> None:
        self._each = [_Reference() for _ in range(count)]

    def set(self, at: int, rows: Sequence[Any]) -> None:
        for reference, row in zip(self._each, rows, strict=True):
            if row is not None:
                reference.set(at, row)

    def __getitem__(self, at: int) -> tuple[Any, ...]:
        return tuple([reference[at] for reference in self._each])


class _Reference:
    """A column of rows of other lines; they lie in few blocks."""

    __slots__ = ("_blocks", "_places", "_row")

    def __init__(self) -> None:
        self._blocks: list[Any] = [None]  # columns, or a line that stayed an object
        self._places = array("i", bytes(4 * BLOCK))  # number of the block, place in it

    def set(self, at: int, row: Any) -> None:
        block, place = row, 0
        if isinstance(row, LineRow):
            self._row = type(row)
            block, place = row.columns, row.at
        if block is not self._blocks[-1]:
            self._blocks.append(block)
        self._places[at] = (len(self._blocks) - 1) * BLOCK + place

    def __getitem__(self, at: int) -> Any:
        number, place = divmod(self._places[at], BLOCK)
        block = self._blocks[number]
        return self._row(block, place) if isinstance(block, list) else block
