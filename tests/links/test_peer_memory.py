from __future__ import annotations

import pytest

from ppstream.links.device_link import slot_count
from ppstream.links.peer_memory import PUT_BYTES, put_limit
from ppstream.links.slots import LinkShape, SlotLayout

LARGE = 1 << 24


@pytest.mark.parametrize(
    ("d_in", "slot_bytes", "is_put"),
    [(1, 64, True), (1, LARGE, True), (2, PUT_BYTES, True), (2, PUT_BYTES + 1, False)],
)
def test_a_lone_slot_of_any_size_and_else_a_small_one_goes_by_a_kernel(
    d_in: int, slot_bytes: int, is_put: bool
) -> None:
    assert (slot_bytes <= put_limit(d_in, slot_bytes)) is is_put


@pytest.mark.parametrize(
    ("d_in", "d_out", "ahead", "slots"),
    [(1, 1, 6, 8), (2, 2, 6, 9), (1, 6, 6, 9), (3, 9, 6, 14), (2, 2, 0, 6), (3, 1, 0, 6)],
)
def test_there_is_a_slot_more_than_can_be_needed(
    d_in: int, d_out: int, ahead: int, slots: int
) -> None:
    layout = SlotLayout(("index",), (), 1)
    assert slot_count(LinkShape(layout, layout, d_in, d_out, ahead=ahead)) == slots
