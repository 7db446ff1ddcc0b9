"""Outbox: checks what a robot pushes and, when asked to, gathers samples before they are sent.

Plain logic under one lock: it sends nothing and reads no clock. Who sends what it gives holds that
lock until it is sent, so that nothing newer overtakes it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from math import prod
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np

from ppstream.core.errors import SpecError, counted
from ppstream.wire.fields import MAX_AXES, MAX_PUSH_BYTES, MAX_SAMPLE_BYTES
from ppstream.wire.robot_messages import PARTS_BYTES, StreamDeclaration

Values: TypeAlias = np.ndarray[Any, Any]
Dim: TypeAlias = int | tuple[int, ...]  #: values of a sample, or its shape
#: name and values per sample; the dtype is float32 unless given: ("wrist", 6, "float64")
#: a camera has its frames' shape: ("front", (224, 224, 3), "uint8")
#: and its encoding is raw unless given: ("front", (224, 224, 3), "uint8", "jpeg")
Stream: TypeAlias = tuple[str, Dim] | tuple[str, Dim, str] | tuple[str, Dim, str, str]

DTYPES: Final = ("float32", "float64", "uint8")
ENCODINGS: Final = ("raw", "jpeg")
BATCH_SAMPLES: Final = 256  # a full batch leaves before its time
MIN_NS, MAX_NS = -(2**63), 2**63 - 1  # that an int64 holds
UINT8_MAX: Final = 255
STAMP_BYTES: Final = 8  # of each sample


class Batch(msgspec.Struct, frozen=True):
    """Samples to send: the stream's index, int64 stamps and values, as bytes, and how many."""

    stream: int
    stamps: memoryview
    values: memoryview
    samples: int


class Outbox:
    """The declared streams of one robot; ``batch_ns`` 0 gives every push back at once.

    Raises:
        SpecError: a stream is declared twice, without a value, or with an unknown dtype.
    """

    def __init__(self, streams: Sequence[Stream], batch_ns: int) -> None:
        self.declarations = tuple(_declaration(stream) for stream in streams)
        shapes = [_shape(stream[1]) for stream in streams]
        self._gathering = {
            declared.name: _Gathering(index, declared, shapes[index])
            for index, declared in enumerate(self.declarations)
        }
        if len(self._gathering) != len(self.declarations):
            raise SpecError(f"stream names must be unique, got {[s[0] for s in streams]}")
        self._batch_ns = batch_ns
        self.lock = threading.RLock()  # of all that is gathered, until it is sent
        self.due_ns: int | None = None  # when the oldest gathered sample must leave

    def add(self, stream: str, stamp_ns: int | Values, values: Any, now_ns: int) -> list[Batch]:
        """Take one sample ``[dim]`` or several ``[n, dim]`` with stamps ``[n]``.

        A stream that was declared with a shape takes ``[*shape]`` and ``[n, *shape]`` as well.
        Returns what must be sent now, each stream's oldest first; nothing for no samples.

        Raises:
            SpecError: unknown stream, wrong shape, stamps that are no int64, too much at once.
        """
        gathering = self._gathering.get(stream)
        if gathering is None:
            raise SpecError(f"stream {stream!r} is not declared; declared: {[*self._gathering]}")
        if not self._batch_ns and type(stamp_ns) is int and gathering.is_plain(stamp_ns, values):
            stamp = stamp_ns.to_bytes(8, "little", signed=True)
            # of an array's own memory a view is slower to get than a few bytes are to copy
            is_small = values.nbytes < PARTS_BYTES
            data = memoryview(values.tobytes()) if is_small else values.reshape(-1).data
            return [Batch(gathering.index, memoryview(stamp), data, 1)]
        stamps, array = gathering.checked(stamp_ns, values)
        if not len(stamps):
            return []
        if not self._batch_ns:
            return [Batch(gathering.index, stamps.data, array.data, len(stamps))]
        with self.lock:
            if len(stamps) <= gathering.room:
                gathering.put(stamps, array, now_ns)
                if self.due_ns is None:
                    self.due_ns = now_ns + self._batch_ns
                return self._pop_due(now_ns)
            full = [*gathering.pop(), Batch(gathering.index, stamps.data, array.data, len(stamps))]
            self.due_ns = self._oldest_due_ns()
            return [*full, *self._pop_due(now_ns)]

    def encoded(self, stream: str, stamp_ns: int, data: bytes) -> Batch:
        """One encoded frame to send, never gathered.

        Raises:
            SpecError: the stream is not declared so, there is nothing or too much in ``data``, or
                the stamp is no int64.
        """
        gathering = self._gathering.get(stream)
        if gathering is None or not gathering.is_encoded:
            names = [name for name, one in self._gathering.items() if one.is_encoded]
            raise SpecError(f"stream {stream!r} is not declared as encoded; such are: {names}")
        if not 1 <= len(data) <= gathering.bytes_max:
            raise SpecError(
                f"stream {stream!r}: a frame of {len(data)} bytes, want 1 to {gathering.bytes_max}"
            )
        if not _is_int64(stamp_ns):
            raise SpecError(f"stream {stream!r}: stamp {stamp_ns} does not fit int64 nanoseconds")
        stamp = stamp_ns.to_bytes(8, "little", signed=True)
        return Batch(gathering.index, memoryview(stamp), memoryview(data), 1)

    def pop_due(self, now_ns: int, *, everything: bool = False) -> list[Batch]:
        """All gathered samples once the oldest is due, or ``everything`` now."""
        with self.lock:
            return self._pop() if everything else self._pop_due(now_ns)

    def _oldest_due_ns(self) -> int | None:
        begun = (gathering.since_ns for gathering in self._gathering.values())
        oldest = min((since_ns for since_ns in begun if since_ns is not None), default=None)
        return None if oldest is None else oldest + self._batch_ns

    def _pop_due(self, now_ns: int) -> list[Batch]:
        return [] if self.due_ns is None or now_ns < self.due_ns else self._pop()

    def _pop(self) -> list[Batch]:
        self.due_ns = None
        return [batch for gathering in self._gathering.values() for batch in gathering.pop()]


class _Gathering:
    """One stream's declaration and the samples gathered for it."""

    def __init__(self, index: int, declared: StreamDeclaration, shape: tuple[int, ...]) -> None:
        self.index = index
        self._declared = declared
        self.is_encoded = declared.encoding != ENCODINGS[0]
        self._dtype = np.dtype(declared.dtype)
        self._shape = shape
        sample_bytes = declared.dim * self._dtype.itemsize
        self.bytes_max = max(MAX_PUSH_BYTES, sample_bytes)  # of an encoded frame
        self._samples_max = max(1, MAX_PUSH_BYTES // (sample_bytes + STAMP_BYTES))
        self._capacity = min(BATCH_SAMPLES, self._samples_max)
        self._stamps = np.empty(self._capacity, dtype=np.int64)
        self._values = np.empty((self._capacity, declared.dim), dtype=declared.dtype)
        self._count = 0
        self.since_ns: int | None = None  # when the oldest of them was put here

    @property
    def room(self) -> int:
        return self._capacity - self._count

    def is_plain(self, stamp_ns: int, values: Any) -> bool:
        """True when one sample can be sent as it is: the quick way for the common case."""
        return (
            type(values) is np.ndarray
            and values.dtype == self._dtype
            and values.shape == self._shape
            and not self.is_encoded
            and MIN_NS <= stamp_ns <= MAX_NS
            and (values.nbytes < PARTS_BYTES or values.flags.c_contiguous)  # few are copied
        )

    def checked(self, stamp_ns: int | Values, values: Any) -> tuple[Values, Values]:
        """Stamps ``[n]`` int64 and values ``[n, dim]``, contiguous, in the declared dtype."""
        declared = self._declared
        if self.is_encoded:
            raise SpecError(f"stream {declared.name!r} is declared as {declared.encoding}")
        try:
            array = np.ascontiguousarray(values)
            if array.dtype != self._dtype:
                array = self._cast(array)
            stamps = _stamps(stamp_ns)
        except (ValueError, TypeError, OverflowError) as error:
            raise SpecError(
                f"stream {declared.name!r}: not numbers of one shape: {error}"
            ) from error
        if array.shape in (self._shape, (declared.dim,)):
            array = array[None]
        if array.shape not in ((len(stamps), *self._shape), (len(stamps), declared.dim)):
            several = ", ".join(map(str, self._shape))
            raise SpecError(
                f"stream {declared.name!r}: got values {np.shape(values)} with "
                f"{counted(len(stamps), 'stamp')}, expected {self._shape} with one or "
                f"(n, {several}) with n"
            )
        array = array.reshape(len(stamps), declared.dim)
        if len(stamps) > self._samples_max:
            raise SpecError(
                f"stream {declared.name!r}: {len(stamps)} samples in one push, limit "
                f"{self._samples_max}; push fewer at once"
            )
        return stamps, array

    def _cast(self, array: Values) -> Values:
        """``array`` in the declared dtype; raises SpecError where that would say something else."""
        kind = array.dtype.kind
        try:
            if self._dtype.kind == "f" and kind in "biuf":
                with np.errstate(over="raise"):
                    return array.astype(self._dtype)
            is_integer = kind in "biu"
            if not array.size or (is_integer and array.min() >= 0 and array.max() <= UINT8_MAX):
                return array.astype(self._dtype)
        except FloatingPointError:  # too large
            pass
        reach = f" from {array.min()} to {array.max()}" if kind in "iuf" else ""
        helps = "convert them before push"
        if self._dtype.kind == "u" and kind == "f":
            helps = "push an integer dtype, of pixels from 0 to 1 np.rint(255 * x).astype('uint8')"
        raise SpecError(
            f"stream {self._declared.name!r}: {array.dtype} values{reach} are not numbers that "
            f"{self._dtype} holds; {helps}"
        )

    def put(self, stamps: Values, values: Values, now_ns: int) -> None:
        if self.since_ns is None:
            self.since_ns = now_ns
        end = self._count + len(stamps)
        self._stamps[self._count : end] = stamps
        self._values[self._count : end] = values
        self._count = end

    def pop(self) -> list[Batch]:
        """The gathered samples, copied; empty when there are none."""
        count, self._count, self.since_ns = self._count, 0, None
        if not count:
            return []
        stamps, values = self._stamps[:count].tobytes(), self._values[:count].tobytes()
        return [Batch(self.index, memoryview(stamps), memoryview(values), count)]


def _stamps(stamp_ns: int | Values) -> Values:
    if isinstance(stamp_ns, int):
        return np.array((stamp_ns,), dtype=np.int64)
    stamps = np.atleast_1d(np.asarray(stamp_ns))
    if stamps.dtype.kind not in "iu" or stamps.ndim != 1:
        raise SpecError(
            f"stamps must be integer nanoseconds, got {stamps.dtype} {stamps.shape}; "
            "convert seconds with round(t * 1e9)"
        )
    if stamps.dtype == np.uint64 and stamps.size and not _is_int64(int(stamps.max())):
        raise SpecError(f"stamp {stamps.max()} does not fit int64 nanoseconds")
    return np.ascontiguousarray(stamps, dtype=np.int64)


def _is_int64(stamp_ns: int) -> bool:
    return MIN_NS <= stamp_ns <= MAX_NS


def _shape(dim: Dim) -> tuple[int, ...]:
    return (dim,) if isinstance(dim, int) else tuple(dim)


def _declaration(stream: Stream) -> StreamDeclaration:
    name, dim, *rest = stream
    shape = () if isinstance(dim, int) else tuple(dim)
    declared = StreamDeclaration(name, prod(_shape(dim)), *(rest or DTYPES[:1]))
    declared = msgspec.structs.replace(declared, shape=shape)
    if (
        min(_shape(dim), default=0) < 1
        or len(shape) > MAX_AXES
        or declared.dtype not in DTYPES
        or declared.encoding not in ENCODINGS
    ):
        raise SpecError(
            f"{declared}: dim must be 1 or more, of at most {MAX_AXES} axes, dtype one of "
            f"{', '.join(DTYPES)}, encoding one of {', '.join(ENCODINGS)}"
        )
    size = declared.dim * np.dtype(declared.dtype).itemsize
    if size > MAX_SAMPLE_BYTES:
        helps = "send less"
        if len(shape) == 3 and declared.dtype != "uint8":
            helps = f"declare frames of bytes as ({name!r}, {shape}, 'uint8')"
        raise SpecError(f"{declared}: {size} bytes a sample, limit {MAX_SAMPLE_BYTES}; {helps}")
    return declared
