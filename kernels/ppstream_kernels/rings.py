"""Searches of rings: the samples at or before a target, the first of equals; for CPU tensors."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from ppstream_kernels.source import Columns

# B=rows T=targets N=slots

Int64s: TypeAlias = NDArray[np.int64]
Uint64s: TypeAlias = NDArray[np.uint64]
Bools: TypeAlias = NDArray[np.bool_]

_LOOKED_AT: Final = 8192  # slots: beyond, a search costs less than a look at all stamps


class Ring(NamedTuple):
    """One stream's stamps, counts and heads, as its owner's memory or as constants."""

    stamps_ns_BN: Int64s
    count_B: Int64s
    head_B: Int64s
    slots: int
    is_plain: bool  # always full and never rotated


def rings_of(columns: Columns) -> list[Ring]:
    """The rings of all streams; nothing is copied."""
    rings = []
    for stamps_ns, count, head in zip(*columns[1:4], strict=True):
        rows, slots = stamps_ns.shape
        count_B = np.full(rows, slots) if count is None else count.numpy()
        head_B = np.zeros(rows, np.int64) if head is None else head.numpy()
        is_plain = count is None and head is None
        rings.append(Ring(stamps_ns.numpy(), count_B, head_B, slots, is_plain))
    return rings


def check_numbers(ring: Ring, counts: list[int], heads: list[int]) -> None:
    """Raises ValueError for a count outside 0..N or a head outside 0..N-1."""
    for name, numbers, highest in (("count", counts, ring.slots), ("head", heads, ring.slots - 1)):
        if numbers and (min(numbers) < 0 or max(numbers) > highest):
            b, number = next((b, n) for b, n in enumerate(numbers) if not 0 <= n <= highest)
            raise ValueError(f"{name}[{b}] is {number}, this ring allows 0..{highest}")


def search_row(stamps_ns_N: Int64s, head: int, count: int, tgt_ns_T: Int64s) -> Int64s:
    """Counts the samples of one row at or before each target."""
    return _search(stamps_ns_N, head, count, tgt_ns_T, "right")


def may_hold_equals(ring: Ring) -> bool:
    """True when two samples may have equal stamps: compares neighbours in the ring's memory.

    Slots that hold nothing are looked at, too, and a long ring is not looked at: it may.
    """
    stamps_ns_BN = ring.stamps_ns_BN
    if ring.slots > _LOOKED_AT:
        return True
    equals = np.count_nonzero(stamps_ns_BN[:, 1:] == stamps_ns_BN[:, :-1])
    return bool(equals or np.count_nonzero(stamps_ns_BN[:, 0] == stamps_ns_BN[:, -1]))


def first_of_equals(stamps_ns_N: Int64s, head: int, count: int, passed_T: Int64s) -> Int64s:
    """Counts the samples of a row older than the newest of each target's ``passed_T``, or 0.

    So it names the first, counted from the oldest, of all with that stamp.
    """
    if not count:
        return np.zeros_like(passed_T)
    newest_T = np.maximum(passed_T - 1, 0) + head
    newest_ns_T = stamps_ns_N.take(newest_T, mode="wrap")
    return _search(stamps_ns_N, head, count, newest_ns_T, "left")


def passed_equals(stamps_ns_N: Int64s, head: int, count: int, number_T: Int64s) -> Int64s:
    """Counts the samples of a row not newer than its sample ``number_T``, counted from the oldest.

    So it names the next sample with another stamp; a number behind the newest names that one.
    """
    newest_T = np.minimum(number_T, count - 1) + head
    return _search(stamps_ns_N, head, count, stamps_ns_N.take(newest_T, mode="wrap"), "right")


def search_rows(ring: Ring, tgt_ns_BT: Int64s, passed_BT: Int64s) -> None:
    """The same for many rows at once; slots that hold nothing repeat the newest sample."""
    stamps_ns, tgt_ns = torch.from_numpy(ring.stamps_ns_BN), torch.from_numpy(tgt_ns_BT)
    passed = torch.from_numpy(passed_BT)
    if ring.is_plain:
        torch.searchsorted(stamps_ns.contiguous(), tgt_ns, right=True, out=passed)
        return
    slots, count_B1, head_B1 = ring.slots, ring.count_B[:, None], ring.head_B[:, None]
    order_BN = np.minimum(np.arange(slots), np.maximum(count_B1 - 1, 0)) + head_B1
    np.subtract(order_BN, slots, out=order_BN, where=order_BN >= slots)
    in_order = stamps_ns.gather(1, torch.from_numpy(order_BN))
    torch.searchsorted(in_order, tgt_ns, right=True, out=passed)
    np.minimum(passed_BT, count_B1, out=passed_BT)


def _search(
    stamps_ns_N: Int64s, head: int, count: int, at_ns_T: Int64s, side: Literal["left", "right"]
) -> Int64s:
    """Counts the samples before ``at_ns_T`` (left), or not behind (right).

    A wrapped ring is two sorted pieces.
    """
    end, slots = head + count, len(stamps_ns_N)
    found_T: Int64s = stamps_ns_N[head:end].searchsorted(at_ns_T, side)
    if end > slots:
        found_T += stamps_ns_N[: end - slots].searchsorted(at_ns_T, side)
    return found_T
