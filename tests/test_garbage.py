from __future__ import annotations

import gc
import weakref

from ppstream.core.clock import now_ns
from ppstream.core.interpreter import EVERY_NS, OVERDUE_NS, Garbage


class Node:
    def __init__(self) -> None:
        self.itself = self


def test_cycles_wait_until_a_loop_offers_time_and_no_longer() -> None:
    with Garbage() as garbage:
        assert not gc.isenabled()
        lost = weakref.ref(Node())
        garbage.offer(now_ns(), EVERY_NS)
        assert lost() is not None, "it is not due yet"
        garbage.offer(now_ns() + EVERY_NS, EVERY_NS)
        assert lost() is None
        assert garbage.collections == 1
    assert gc.isenabled()


def test_a_collection_that_does_not_fit_waits_but_not_for_ever() -> None:
    with Garbage() as garbage:
        garbage.longest_ns = 1000
        garbage.offer(now_ns() + EVERY_NS, 1999)
        assert garbage.collections == 0
        garbage.offer(now_ns() + OVERDUE_NS, 1999)
        assert garbage.collections == 1


def test_what_exists_before_is_not_looked_at_again() -> None:
    before = gc.get_freeze_count()
    with Garbage():
        assert gc.get_freeze_count() > before
    assert gc.get_freeze_count() == 0


def test_who_has_switched_it_off_finds_it_off_again() -> None:
    gc.disable()
    try:
        with Garbage():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
