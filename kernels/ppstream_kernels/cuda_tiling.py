"""Tiling of a launch, one tile per block: a rule of sizes, not a table of shapes.

An item is what a thread reads and writes at once. Where few items meet many multiprocessors, the
chain stamps -> search -> samples -> store is the cost: one item per thread, spread evenly. Where
bandwidth is the cost, several items per thread share a search. Many small blocks beat few large
ones throughout: while one waits for stamps, another moves samples.

Narrow samples are the exception: words as wide as they are aligned move too few bytes each. Where
rows alone fill the GPU, a block takes a row whole and moves it in words of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

STAGED_STAMPS: Final = 2048  # of a ring in shared memory at most
WHOLE_MOST_BYTES: Final = 16 << 10  # of shared memory: beyond, too few blocks lie side by side
PREFETCH_MOST_BYTES: Final = 40 << 20  # beyond, samples would leave L2 before they are read

_WARP: Final = 32
_MOST_THREADS: Final = 256
_FEWEST_THREADS: Final = 128  # fewer take long to bring the stamps
_MOST_ITEMS: Final = 1024  # per block
_BLOCKS_EACH: Final = 16  # that a multiprocessor works off before blocks grow
_BLOCKS_EACH_MIXED: Final = 4  # of several streams: blocks that differ do not end together anyway


class Load(NamedTuple):
    """One stream of a launch."""

    items: int  # per target
    slots: int
    place_words: int = 1  # of 16 bytes of shared memory, per target
    whole_bytes: int = 0  # of shared memory behind the stamps, for samples and results; 0: unfit


class Tiling(NamedTuple):
    """Block size, and targets per tile of each stream: at most one per thread."""

    threads: int
    tile_targets: list[int]
    shared_bytes: int
    is_whole: list[bool]  # of each stream: its rows' samples are staged, a thread blends a target


def choose_tiles(rows: int, targets: int, loads: Sequence[Load], multiprocessors: int) -> Tiling:
    """The tiles of ``rows`` x ``targets`` (both at least 1) of these streams."""
    all_items = rows * targets * sum(load.items for load in loads)
    per_multiprocessor = -(-all_items // multiprocessors)
    items = min(per_multiprocessor, _MOST_THREADS)
    blocks_each = _BLOCKS_EACH if len(loads) == 1 else _BLOCKS_EACH_MIXED
    items = min(max(items, per_multiprocessor // blocks_each, _FEWEST_THREADS), _MOST_ITEMS)
    fills = rows >= _BLOCKS_EACH * multiprocessors
    is_whole = [fills and _is_taken_whole(targets, load) for load in loads]
    tile_targets = [
        targets if whole else _tile_targets(targets, items, load)
        for load, whole in zip(loads, is_whole, strict=True)
    ]
    tile_items = [
        n if whole else n * max(1, load.items)
        for n, load, whole in zip(tile_targets, loads, is_whole, strict=True)
    ]
    threads = min(_MOST_THREADS, max(_rounded_up(max(tile_items), _WARP), _FEWEST_THREADS))
    shared_bytes = [
        _whole_shared_bytes(n, load) if whole else _shared_bytes(n, load)
        for n, load, whole in zip(tile_targets, loads, is_whole, strict=True)
    ]
    return Tiling(threads, tile_targets, max(shared_bytes), is_whole)


def _is_taken_whole(targets: int, load: Load) -> bool:
    """True for rings of which nearly all is wanted, and which leave room for other blocks."""
    return (
        load.whole_bytes > 0
        and targets <= _MOST_THREADS
        and load.slots <= min(2 * targets, STAGED_STAMPS)
        and _whole_shared_bytes(targets, load) <= WHOLE_MOST_BYTES
    )


def _tile_targets(targets: int, items: int, load: Load) -> int:
    """Equal tiles rather than full ones and a rest."""
    fitting = max(1, min(targets, _MOST_THREADS, items // max(1, load.items)))
    tiles = -(-targets // fitting)
    return -(-targets // tiles)


def _shared_bytes(tile_targets: int, load: Load) -> int:
    return 16 * load.place_words * tile_targets + 8 * (
        ((load.slots - 1) >> stage_shift(load.slots)) + 1
    )


def _whole_shared_bytes(targets: int, load: Load) -> int:
    """Samples and results begin at a multiple of 16 bytes."""
    return _rounded_up(_shared_bytes(targets, load), 16) + load.whole_bytes


def stage_shift(slots: int) -> int:
    """Of every 2^n samples one stamp is staged, so that they fit."""
    return max(0, (slots - 1) // STAGED_STAMPS).bit_length()


def _rounded_up(number: int, step: int) -> int:
    return -(-number // step) * step
