"""Generation: the number of one start of all ranks, chosen by rank 0 and told to every other rank.

A launcher has an agent on each host, and each agent counts its own restarts. The counts soon
differ: one agent sees its rank fail, the other one sees only that the first waits for it, and
counts nothing; an agent that replaces a lost one begins at 0. No number of torchrun's own reaches
the ranks of all hosts. So rank 0 chooses one, larger from start to start.

The store outlives a start, and so does all that was written into it. A policy rank therefore asks
with a new random word: the answer to that word can only be meant for that rank, and an answer to a
rank of an earlier start is read by no rank.
"""

from __future__ import annotations

import secrets
import time
from typing import Final

from ppstream.control.launcher_store import LauncherStore, QuietLimit
from ppstream.core.errors import PeerLostError

NEWEST: Final = "generation"
ASKED: Final = "generation/asked"  # by rank, the word
ANSWERED: Final = "generation/answered"  # by word, the number
HEARD: Final = "generation/heard"  # by word, the number that the rank which asked has
BUSY: Final = "generation/busy"  # a random word of the rank that told last; below, by rank, its own
LOOK_S: Final = 0.01


def begin_generation(store: LauncherStore, at_least: int) -> int:
    """On rank 0: the number of this start, larger than all that this store was ever given.

    Args:
        store: the whole of it.
        at_least: from what else rank 0 knows of earlier starts.

    Raises:
        PeerLostError: the store is gone.
    """
    newest = store.peek(NEWEST)
    number = at_least if newest is None else max(at_least, int(newest) + 1)
    store.set(NEWEST, str(number))
    return number


def tell_busy(store: LauncherStore) -> None:
    """Before a rank meets others: have those that wait for it wait on, from now.

    Args:
        store: the whole of it.

    Raises:
        PeerLostError: the store is gone.
    """
    word = secrets.token_hex(8)
    store.set(f"{BUSY}/{store.rank}", word)
    store.set(BUSY, word)


def tell_generation(
    store: LauncherStore, number: int, rank: int, limit_s: float, name: str = "policy rank"
) -> None:
    """On rank 0: tell a policy rank the number; returns once that rank has it.

    Args:
        store: the whole of it.
        number: of this start.
        rank: the policy rank's.
        limit_s: how long it may take to ask, or be silent when it is busy.
        name: how the error calls it.

    Raises:
        PeerLostError: it did not ask within ``limit_s``, or the store is gone.
    """
    silence = QuietLimit(store, f"{BUSY}/{rank}", limit_s)
    told = None
    while not silence.is_over():
        word = store.peek(f"{ASKED}/{rank}")
        if word is not None and store.peek(f"{HEARD}/{word}") == str(number):
            return
        if word is not None and word != told:  # a later word is of a rank that started later
            store.set(f"{ANSWERED}/{word}", str(number))
            told = word
        time.sleep(LOOK_S)
    if silence.is_broken:
        raise PeerLostError(
            f"{name} was silent for {limit_s:.1f} s while it read policy.weights: does its process "
            "run, and answers its disk?"
        )
    raise PeerLostError(
        f"no {name.removeprefix('the ')} connected within {limit_s:.1f} s: did its process start?"
    )


def ask_generation(store: LauncherStore, limit_s: float) -> LauncherStore:
    """On a policy rank: this start's part of the store, once rank 0 has told its number.

    Args:
        store: the whole of it.
        limit_s: how long rank 0, and the policy ranks before this one, may take; it begins anew
            whenever a rank says that it is busy.

    Raises:
        PeerLostError: rank 0 did not answer within ``limit_s``, or the store is gone.
    """
    word = secrets.token_hex(16)
    store.set(f"{ASKED}/{store.rank}", word)
    try:
        number = int(store.get(f"{ANSWERED}/{word}", limit_s, busy=BUSY))
    except PeerLostError as error:
        raise PeerLostError(
            f"rank 0 did not answer within {limit_s:.1f} s: did it start, and each rank before "
            "this one?"
        ) from error
    store.set(f"{HEARD}/{word}", str(number))
    return store.of_generation(number)
