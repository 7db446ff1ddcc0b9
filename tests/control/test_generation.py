"""Starts of ranks whose agents count differently, over a store as an agent of torchrun has it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from ppstream.control.generation import (
    ANSWERED,
    ASKED,
    ask_generation,
    begin_generation,
    tell_busy,
    tell_generation,
)
from ppstream.control.launcher_store import LauncherStore, open_store
from ppstream.core.errors import PeerLostError

LIMIT_S = 60.0


def agents_store() -> Any:
    return vars(dist)["TCPStore"]("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def opened(agent: Any, rank: int, counted: int = 0, world_size: int = 2) -> LauncherStore:
    """The store as a rank opens it that an agent has started for the ``counted``-th time."""
    return open_store(
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(agent.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": str(counted),
        }
    )


def start(agent: Any, counted: Sequence[int]) -> list[LauncherStore]:
    """The stores of ranks that have met, by rank; ``counted`` is by rank, too."""
    first, *others = (
        opened(agent, rank, count, len(counted)) for rank, count in enumerate(counted)
    )
    with ThreadPoolExecutor() as threads:
        asking = [threads.submit(ask_generation, store, LIMIT_S) for store in others]
        number = begin_generation(first, first.generation)
        for store in others:
            tell_generation(first, number, store.rank, LIMIT_S)
        return [first.of_generation(number), *(found.result(LIMIT_S) for found in asking)]


@pytest.fixture
def agent() -> Any:
    return agents_store()


@pytest.mark.parametrize(
    ("counts", "numbers"),
    [
        ([(0, 0), (1, 1), (2, 2)], [0, 1, 2]),
        ([(0, 0), (0, 1), (0, 2), (1, 2)], [0, 1, 2, 3]),  # rank 0's counts less
        ([(0, 0), (1, 0), (2, 0)], [0, 1, 2]),
        ([(0, 0), (2, 2), (2, 0)], [0, 2, 3]),  # a start that met nobody; an agent that is new
        ([(0, 0, 0, 0), (0, 1, 1, 0), (1, 1, 1, 0)], [0, 1, 2]),
    ],
)
def test_all_ranks_of_a_start_have_one_number_and_the_next_start_a_larger_one(
    agent: Any, counts: list[tuple[int, ...]], numbers: list[int]
) -> None:
    for counted, number in zip(counts, numbers, strict=True):
        stores = start(agent, counted)
        assert [store.generation for store in stores] == [number] * len(counted)
        assert [store.peek("word") for store in stores] == [None] * len(counted)
        stores[-1].set("word", f"of {number}")
        assert stores[0].get("word", LIMIT_S) == f"of {number}"


def test_a_store_that_is_new_goes_on_where_rank_0_knows_that_the_last_one_ended(agent: Any) -> None:
    assert begin_generation(opened(agent, 0), 3) == 3
    assert begin_generation(opened(agent, 0), 0) == 4


def test_an_answer_to_a_rank_that_is_gone_is_not_taken_for_one_to_its_successor(agent: Any) -> None:
    gone, rank0 = opened(agent, 1), opened(agent, 0)
    with pytest.raises(PeerLostError, match=r"rank 0 did not answer within 0\.1 s"):
        ask_generation(gone, 0.1)
    number = begin_generation(rank0, 7)
    with ThreadPoolExecutor() as threads:
        telling = threads.submit(tell_generation, opened(agent, 0), number, 1, LIMIT_S)
        rank0.get(f"{ANSWERED}/{rank0.peek(f'{ASKED}/1')}", LIMIT_S)
        assert not telling.done()
        assert ask_generation(opened(agent, 1), LIMIT_S).generation == number
        telling.result(LIMIT_S)


def test_what_a_rank_of_an_earlier_start_has_heard_is_not_of_this_start(agent: Any) -> None:
    start(agent, (0, 0))
    rank0 = opened(agent, 0)
    with pytest.raises(PeerLostError, match="no policy rank connected"):
        tell_generation(rank0, begin_generation(rank0, 0), 1, 0.2)
    assert [store.generation for store in start(agent, (0, 0))] == [2, 2]


def test_a_rank_that_was_told_and_is_gone_leaves_its_successor_the_same_number(agent: Any) -> None:
    """Its agent restarted it alone, as agents do that have not met since."""
    first = start(agent, (0, 0))
    with ThreadPoolExecutor() as threads:
        asking = threads.submit(ask_generation, opened(agent, 1, 1), LIMIT_S)
        number = begin_generation(opened(agent, 0, 1), 1)
        tell_generation(opened(agent, 0, 1), number, 1, LIMIT_S)
        assert asking.result(LIMIT_S).generation == number > first[0].generation


@pytest.mark.parametrize(
    ("name", "told"),
    [("the policy rank", "no policy rank connected"), ("policy rank 2", "no policy rank 2 connec")],
)
def test_a_rank_that_does_not_ask_is_lost(agent: Any, name: str, told: str) -> None:
    with pytest.raises(PeerLostError, match=f"{told}.*within 0.1 s: did its process start"):
        tell_generation(opened(agent, 0), 0, 1, 0.1, name)


def busy_until(done: Callable[[], bool], store: LauncherStore, seconds: float = LIMIT_S) -> None:
    """Has a rank say that it is busy, as one does that reads gigabytes."""
    until = time.monotonic() + seconds
    while not done() and time.monotonic() < until:
        tell_busy(store)
        time.sleep(0.02)


def test_a_rank_that_says_it_is_busy_is_waited_for_by_all_and_one_that_fell_silent_is_not(
    agent: Any,
) -> None:
    rank0, *others = (opened(agent, rank, world_size=3) for rank in range(3))
    limit_s = 1.0
    with ThreadPoolExecutor() as threads:
        asking = [threads.submit(ask_generation, store, limit_s) for store in others[:1]]
        busy_until(lambda: False, opened(agent, 0), 2 * limit_s)
        number = begin_generation(rank0, 0)
        tell_generation(rank0, number, 1, limit_s)
        assert asking[0].result(LIMIT_S).generation == number
        telling = threads.submit(tell_generation, rank0, number, 2, limit_s, "policy rank 2")
        busy_until(telling.done, others[1], 2 * limit_s)
        assert not telling.done()
        with pytest.raises(PeerLostError, match=r"policy rank 2 was silent for 1\.0 s while"):
            telling.result(LIMIT_S)


def test_a_rank_that_does_not_ask_is_lost_though_another_one_is_busy(agent: Any) -> None:
    with ThreadPoolExecutor() as threads:
        telling = threads.submit(tell_generation, opened(agent, 0), 0, 1, 0.2)
        busy_until(telling.done, opened(agent, 2, world_size=3))
        with pytest.raises(PeerLostError, match="no policy rank connected within"):
            telling.result()


def test_a_store_that_is_gone_is_a_lost_peer() -> None:
    agent = agents_store()
    store = opened(agent, 0)
    del agent
    with pytest.raises(PeerLostError, match="the launcher's store does not answer"):
        begin_generation(store, 0)
    with pytest.raises(PeerLostError, match="the launcher's store does not answer"):
        store.set("word", "said")


def test_a_rank_that_waits_for_rank_0_hears_a_signal_at_once(agent: Any) -> None:
    class Heard(Exception):
        pass

    def hear(number: int, _frame: object) -> None:
        raise Heard(number)

    store = opened(agent, 1)
    before = signal.signal(signal.SIGUSR1, hear)
    stop = threading.Timer(0.1, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1))
    began = time.monotonic()
    try:
        stop.start()
        with pytest.raises(Heard):
            ask_generation(store, LIMIT_S / 2)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert time.monotonic() - began < LIMIT_S / 4
