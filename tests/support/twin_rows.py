"""Rows that the compiled core serves and rows that Python serves, and all that they hold."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

from ppstream import native
from ppstream.ingest.ring import RingBank
from ppstream.ingest.rows import RowInput


@contextmanager
def in_python() -> Iterator[None]:
    """What is made meanwhile leaves nothing to the core."""
    with mock.patch.object(native, "is_used", new=False):
        yield


def state_of(row: RowInput, banks: Mapping[str, RingBank]) -> dict[str, Any]:
    """Every number of the rings, their ledgers and their clock, and the memory as bytes."""
    state: dict[str, Any] = {"clock": numbers_of(row.clock, native.Clock)}
    for name, bank in banks.items():
        ring = row.rings[name]
        state[name] = numbers_of(ring, native.Ring), numbers_of(ring.ledger, native.Ledger)
        memory = (bank.values, bank.stamps_ns, bank.count, bank.head)
        state[f"{name} memory"] = [tensor.numpy().tobytes() for tensor in memory]
    return state


def numbers_of(one: object, core: type) -> dict[str, Any]:
    """Numbers of ``one`` by name, in members of ``core`` and beside them.

    Flags only in members, and not ``_takes``, by which the twins differ.
    """
    members = [name for name, kind in vars(core).items() if inspect.ismemberdescriptor(kind)]
    flags = {name for name, found in vars(one).items() if isinstance(found, bool)} | {"_takes"}
    numbers = {name: getattr(one, name) for name in {*members, *vars(one)} - flags}
    return {name: number for name, number in numbers.items() if _is_number(number)}


def _is_number(found: object) -> bool:
    return found is None or isinstance(found, int | dict)
