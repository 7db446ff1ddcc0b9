"""Pickles read as opcodes: bytes to plain data. Nothing is imported, and nothing of them is called.

Interprets the opcodes with which protocols 2 to 5 write plain data, NumPy arrays and numbers, and
objects of the classes that a caller names. A global is a text, looked up in a table of functions
that stand here; every other global and opcode is refused by name. Bounds hold on opcodes, integers
and texts, and on the result's depth and items, where a value counts each time it occurs.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np

from ppstream.core.errors import ProtocolError
from ppstream.wire.foreign_msgpack import (
    DEPTH_MAX,
    DIMENSIONS_MAX,
    ITEMS_MAX,
    Array,
    as_array,
)

OPCODES_MAX: Final = 65536
INTEGER_BYTES_MAX: Final = 8
TEXT_BYTES_MAX: Final = 65536  # longer ones are bytes, as protocol 2 writes them
PROTOCOLS: Final = range(2, 6)
NAME_MAX: Final = 256  # characters of a global's module, and of its name
NAME_SHOWN: Final = 64  # of them in an error, for a log's line

#: Numbers and truth values; no objects, records, texts, complex numbers or dates.
DTYPE: Final = re.compile(r"b1|[iu][1248]|f[248]")
BYTE_ORDERS: Final = ("<", ">", "|", "=")
ORDERS: Final = ("C", "F")  # of an array's axes
_NAME_LINE: Final = re.compile(rb"([!-~]{1,256})\n([!-~]{1,256})\n")
_BEYOND_LATIN_1: Final = re.compile(rb"[\xc4-\xff]")  # a character's first byte in UTF-8

_DOUBLE: Final = struct.Struct(">d")
_STOP: Final = ord(".")
_CORES: Final = ("numpy.core", "numpy._core")  # before NumPy 2, and since


class Instance(NamedTuple):
    """An object of a class that a caller named: its full name, and what its state says."""

    name: str
    fields: dict[str, Any]


def decode(data: bytes, classes: Collection[str]) -> Any:
    """The plain data of a pickle, nested as sent.

    Args:
        data: the whole pickle; its length is the caller's to bound.
        classes: ``module.name`` of those whose objects are taken, as ``Instance``.

    Returns:
        None, truth values, numbers, texts, bytes, lists, tuples, maps with text keys, ``Instance``,
        and read-only arrays in the dtype and shape that was sent.

    Raises:
        ProtocolError: it is no such pickle, or exceeds a bound; the text says which, and names a
            global that is not taken.
    """
    try:
        return _Tree().plain(_Reader(data, classes).run(), 0)
    except (ValueError, TypeError, IndexError, KeyError, OverflowError) as error:
        raise ProtocolError(f"not a pickle of plain data: {error}") from error


class _Global(NamedTuple):
    name: str


class _Object:
    """An object of a named class; ``state`` comes by BUILD."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.state: dict[str, Any] | None = None

    def build(self, state: Any) -> None:
        if type(state) is not dict:
            raise ValueError(f"the state of a {self.name} is not a map")
        self.state = state


class _DType:
    """A dtype of numbers; its byte order comes by BUILD."""

    def __init__(self, name: Any) -> None:
        if type(name) is not str:
            raise ValueError("a dtype's name is not text")
        if DTYPE.fullmatch(name) is None:
            raise ValueError(f"dtype {name[:NAME_SHOWN]!a} is not taken")
        self._name = name
        self.dtype: np.dtype[Any] = np.dtype(name)

    def build(self, state: Any) -> None:
        if type(state) is not tuple or len(state) < 5:
            raise ValueError("the state of a dtype has fewer than five values")
        if type(state[1]) is not str or state[1] not in BYTE_ORDERS:
            raise ValueError("a dtype's byte order is invalid")
        if any(inner is not None for inner in state[2:5]):
            raise ValueError("a dtype with fields or an inner shape is not taken")
        self.dtype = np.dtype(state[1] + self._name)


class _Shell:
    """An array of which dtype, shape and bytes come by BUILD."""

    array: Array | None = None

    def build(self, state: Any) -> None:
        if type(state) is not tuple or len(state) != 5:
            raise ValueError("the state of an array does not have five values")
        _, shape, dtype, is_fortran, data = state
        self.array = _array(data, dtype, shape, "F" if is_fortran is True else "C")


class _Reader:
    """Interpreter of one pickle: a stack of stacks, one for each mark, and the memo."""

    def __init__(self, data: bytes, classes: Collection[str]) -> None:
        self._data, self._at = data, 0
        self._classes = classes
        self._stacks: list[list[Any]] = [[]]
        self._memo: dict[int, Any] = {}
        self._copied = 0  # bytes that were texts

    def run(self) -> Any:
        for _ in range(OPCODES_MAX):
            code = self.number(1)
            if code == _STOP:
                values, *marked = self._stacks
                if marked or len(values) != 1 or self._at < len(self._data):
                    raise ValueError("it does not hold exactly one value")
                return values[0]
            step = _STEPS.get(code)
            if step is None:
                raise ValueError(f"opcode {code:#04x} at byte {self._at - 1} is not taken")
            step(self)
        raise ValueError(f"more than {OPCODES_MAX} opcodes")

    # ---- arguments of opcodes ------------------------------------------------------------------

    def read(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._data):
            raise ValueError("it ends too early")
        found, self._at = self._data[self._at : end], end
        return found

    def number(self, width: int) -> int:
        return int.from_bytes(self.read(width), "little")

    def text(self, width: int) -> None:
        raw = self.read(self.number(width))
        if len(raw) > TEXT_BYTES_MAX and _BEYOND_LATIN_1.search(raw):
            raise ValueError(f"a text of {len(raw)} bytes, at most {TEXT_BYTES_MAX} are taken")
        self.push(raw.decode())

    def integer(self, width: int) -> None:
        if width > INTEGER_BYTES_MAX:
            raise ValueError(f"an integer of {width} bytes, at most {INTEGER_BYTES_MAX} are taken")
        self.push(int.from_bytes(self.read(width), "little", signed=True))

    def double(self) -> None:
        self.push(_DOUBLE.unpack(self.read(_DOUBLE.size))[0])

    def protocol(self) -> None:
        version = self.number(1)
        if version not in PROTOCOLS:
            raise ValueError(f"protocol {version} is not taken")

    def frame(self) -> None:
        self.read(8)  # its length: its bytes are here already

    # ---- stack and memo ------------------------------------------------------------------------

    def push(self, value: Any) -> None:
        self._stacks[-1].append(value)

    def pop(self) -> Any:
        return self._stacks[-1].pop()

    def top(self) -> Any:
        return self._stacks[-1][-1]

    def mark(self) -> None:
        self._stacks.append([])

    def since_mark(self) -> list[Any]:
        if len(self._stacks) == 1:
            raise ValueError("an opcode needs a mark, and there is none")
        return self._stacks.pop()

    def put(self, index: int | None = None) -> None:
        self._memo[len(self._memo) if index is None else index] = self.top()

    def get(self, index: int) -> None:
        if index not in self._memo:
            raise ValueError(f"no value is stored under {index}")
        self.push(self._memo[index])

    # ---- values made of values -----------------------------------------------------------------

    def gather(self, count: int) -> None:
        self.push(tuple(reversed([self.pop() for _ in range(count)])))

    def append(self, values: list[Any]) -> None:
        target = self.top()
        if type(target) is not list:
            raise ValueError("a value is appended to an object that is not a list")
        target.extend(values)

    def set_items(self, values: list[Any]) -> None:
        target = self.top()
        keys = values[::2]
        if type(target) is not dict or len(values) % 2 or not all(type(k) is str for k in keys):
            raise ValueError("a map has keys that are not text")
        target.update(zip(keys, values[1::2], strict=True))

    def name_global(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise ValueError("a global's name is not text")
        full = f"{module[:NAME_MAX]}.{name[:NAME_MAX]}"
        if full not in self._classes and full not in _CALLS and full != _NDARRAY:
            raise ValueError(f"the global {full[:NAME_SHOWN]!a} is not taken")
        self.push(_Global(full))

    def name_line(self) -> None:
        match = _NAME_LINE.match(self._data, self._at)
        if match is None:
            raise ValueError("a global's name is not a line of text")
        self._at = match.end()
        self.name_global(match[1].decode(), match[2].decode())

    def name_of_stack(self) -> None:
        name, module = self.pop(), self.pop()
        self.name_global(module, name)

    def reduce(self) -> None:
        values, function = self.pop(), self.pop()
        call = _CALLS.get(function.name) if type(function) is _Global else None
        if call is None or type(values) is not tuple:
            raise ValueError("a call of an object that is not a function")
        self.push(call(self, *values))

    def new_object(self) -> None:
        values, kind = self.pop(), self.pop()
        if type(kind) is not _Global or kind.name not in self._classes:
            raise ValueError("an instance of an object that is not a class")
        if type(values) is not tuple or values:
            raise ValueError(f"a {kind.name} is constructed from values, want a state")
        self.push(_Object(kind.name))

    def build(self) -> None:
        state, target = self.pop(), self.top()
        if not isinstance(target, _Object | _DType | _Shell):
            raise ValueError("a state for an object that has none")
        target.build(state)

    # ---- functions that a pickle may name ------------------------------------------------------

    def encoded(self, text: Any, codec: Any) -> bytes:
        """Bytes as protocol 2 has them: a text of as many characters."""
        if type(text) is not str or type(codec) is not str or codec != "latin1":
            raise ValueError("bytes are not latin-1 text")
        self._copied += len(text)
        if self._copied > len(self._data):
            raise ValueError("the same text is converted to bytes repeatedly")
        return text.encode("latin-1")

    def shell(self, kind: Any, _shape: Any, _code: Any) -> _Shell:
        if type(kind) is not _Global or kind.name != _NDARRAY:
            raise ValueError("an array is not NumPy's")
        return _Shell()

    def dtype(self, name: Any, _align: Any, _copy: Any) -> _DType:
        return _DType(name)

    def filled(self, data: Any, dtype: Any, shape: Any, order: Any) -> Array:
        return _array(data, dtype, shape, order)

    def scalar(self, dtype: Any, data: Any) -> Any:
        return _array(data, dtype, (), "C")[()]


def _array(data: Any, dtype: Any, shape: Any, order: Any) -> Array:
    """A read-only view of ``data``."""
    if type(data) is not bytes or type(dtype) is not _DType:
        raise ValueError("an array needs bytes as data, and a dtype")
    if type(order) is not str or order not in ORDERS:
        raise ValueError("an array's order is invalid")
    if type(shape) is not tuple or len(shape) > DIMENSIONS_MAX:
        raise ValueError(f"an array's shape is not up to {DIMENSIONS_MAX} numbers")
    if not all(type(one) is int and one >= 0 for one in shape):
        raise ValueError("an array's shape has sizes that are not integers of 0 or more")
    return as_array(data, dtype.dtype, shape, order)


class _Tree:
    """Copies the result, and counts what is in it: a value that is remembered counts each time."""

    def __init__(self) -> None:
        self._items = 0

    def plain(self, value: Any, depth: int) -> Any:
        self._items += 1
        if self._items > ITEMS_MAX:
            raise ValueError(f"more than {ITEMS_MAX} items; send numbers as NumPy arrays")
        if depth > DEPTH_MAX:
            raise ValueError(f"nested deeper than {DEPTH_MAX}")
        if type(value) is dict:
            return {key: self.plain(one, depth + 1) for key, one in value.items()}
        if type(value) is list:
            return [self.plain(one, depth + 1) for one in value]
        if type(value) is tuple:
            return tuple(self.plain(one, depth + 1) for one in value)
        if isinstance(value, _Object):
            return Instance(value.name, self.plain(value.state or {}, depth + 1))
        if isinstance(value, _Shell):
            if value.array is None:
                raise ValueError("an array has no data")
            return value.array
        if isinstance(value, _Global | _DType):
            raise ValueError("a class, function or dtype in place of data")
        return value


_NDARRAY: Final = "numpy.ndarray"
#: By full name: what we do when a pickle says that a function is called.
_CALLS: Final[dict[str, Callable[..., Any]]] = {
    "numpy.dtype": _Reader.dtype,
    "_codecs.encode": _Reader.encoded,
    **{f"{core}.multiarray._reconstruct": _Reader.shell for core in _CORES},
    **{f"{core}.multiarray.scalar": _Reader.scalar for core in _CORES},
    **{f"{core}.numeric._frombuffer": _Reader.filled for core in _CORES},
}
#: By opcode, with its name in Python's own list.
_STEPS: Final[dict[int, Callable[[_Reader], None]]] = {
    0x80: _Reader.protocol,  # PROTO
    0x95: _Reader.frame,  # FRAME
    ord("N"): partial(_Reader.push, value=None),  # NONE
    0x88: partial(_Reader.push, value=True),  # NEWTRUE
    0x89: partial(_Reader.push, value=False),  # NEWFALSE
    ord("J"): lambda reader: reader.integer(4),  # BININT
    ord("K"): lambda reader: reader.push(reader.number(1)),  # BININT1
    ord("M"): lambda reader: reader.push(reader.number(2)),  # BININT2
    0x8A: lambda reader: reader.integer(reader.number(1)),  # LONG1
    ord("G"): _Reader.double,  # BINFLOAT
    0x8C: lambda reader: reader.text(1),  # SHORT_BINUNICODE
    ord("X"): lambda reader: reader.text(4),  # BINUNICODE
    0x8D: lambda reader: reader.text(8),  # BINUNICODE8
    ord("C"): lambda reader: reader.push(reader.read(reader.number(1))),  # SHORT_BINBYTES
    ord("B"): lambda reader: reader.push(reader.read(reader.number(4))),  # BINBYTES
    0x8E: lambda reader: reader.push(reader.read(reader.number(8))),  # BINBYTES8
    0x96: lambda reader: reader.push(reader.read(reader.number(8))),  # BYTEARRAY8
    ord("]"): lambda reader: reader.push([]),  # EMPTY_LIST
    ord("a"): lambda reader: reader.append([reader.pop()]),  # APPEND
    ord("e"): lambda reader: reader.append(reader.since_mark()),  # APPENDS
    ord("}"): lambda reader: reader.push({}),  # EMPTY_DICT
    ord("s"): lambda reader: reader.set_items([reader.pop(), reader.pop()][::-1]),  # SETITEM
    ord("u"): lambda reader: reader.set_items(reader.since_mark()),  # SETITEMS
    ord(")"): lambda reader: reader.push(()),  # EMPTY_TUPLE
    0x85: lambda reader: reader.gather(1),  # TUPLE1
    0x86: lambda reader: reader.gather(2),  # TUPLE2
    0x87: lambda reader: reader.gather(3),  # TUPLE3
    ord("t"): lambda reader: reader.push(tuple(reader.since_mark())),  # TUPLE
    ord("("): _Reader.mark,  # MARK
    0x94: lambda reader: reader.put(),  # MEMOIZE
    ord("q"): lambda reader: reader.put(reader.number(1)),  # BINPUT
    ord("r"): lambda reader: reader.put(reader.number(4)),  # LONG_BINPUT
    ord("h"): lambda reader: reader.get(reader.number(1)),  # BINGET
    ord("j"): lambda reader: reader.get(reader.number(4)),  # LONG_BINGET
    ord("c"): _Reader.name_line,  # GLOBAL
    0x93: _Reader.name_of_stack,  # STACK_GLOBAL
    ord("R"): _Reader.reduce,  # REDUCE
    0x81: _Reader.new_object,  # NEWOBJ
    ord("b"): _Reader.build,  # BUILD
}
