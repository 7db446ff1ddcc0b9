"""Rows that the compiled core serves and rows that Python serves, and all that they hold."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from ppstream import native
from ppstream.ingest.ring import RingBank
from ppstream.ingest.rows import RowInput


def by_python(row: RowInput) -> RowInput:
    """The same row, whose rings leave nothing to the core from now on."""
    for ring in row.rings.values():
        ring._takes = ring._is_compiled = False
    return row


def state_of(row: RowInput, banks: Mapping[str, RingBank]) -> dict[str, Any]:
    """Every number of the rings, their ledgers and their clock, and the memory as bytes."""
    state: dict[str, Any] = {"clock": _numbers(row.clock, native.Clock)}
    for name, bank in banks.items():
        ring = row.rings[name]
        state[name] = _numbers(ring, native.Ring), _numbers(ring.ledger, native.Ledger)
        memory = (bank.values, bank.stamps_ns, bank.count, bank.head)
        state[f"{name} memory"] = [tensor.numpy().tobytes() for tensor in memory]
    return state


def _numbers(one: object, core: type) -> dict[str, Any]:
    members = [name for name, kind in vars(core).items() if inspect.ismemberdescriptor(kind)]
    names = [*members, *(vars(one).keys() - members - {"_takes", "_is_compiled"})]
    numbers = {name: getattr(one, name) for name in names}
    return {name: number for name, number in numbers.items() if _is_number(number)}


def _is_number(found: object) -> bool:
    return found is None or isinstance(found, int | dict)
