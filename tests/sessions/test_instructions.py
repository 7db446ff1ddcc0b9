from __future__ import annotations

from typing import Any

import pytest
from robot_rig import make_config, make_rows

from ppstream.ingest.rows import RowInput
from ppstream.sessions.instructions import TEXTS_MAX, Instructions


class Policy:
    """Confirms what it is told, when told to."""

    def __init__(self, *, answers: bool = True) -> None:
        self.told: list[tuple[int, str]] = []
        self.answers = answers
        self.instructions = Instructions(self.tell)

    def tell(self, number: int, text: str) -> None:
        self.told.append((number, text))
        if self.answers:
            self.instructions.confirm(number)

    def news(self) -> list[tuple[Any, ...]]:
        return [(c.conditioning_epoch, c.instruction_id, c.fault) for c in
                self.instructions.pop_changes()]  # fmt: skip


@pytest.fixture
def rows() -> list[RowInput]:
    rows = make_rows(make_config(rows=2))
    for session, row in enumerate(rows, 1):
        row.open(session)
    return rows


def test_a_text_is_told_once_whoever_wants_it(rows: list[RowInput]) -> None:
    policy = Policy()
    for epoch, text in enumerate(("pick", "place", "pick"), 1):
        for row in rows:
            assert policy.instructions.request(row, epoch, text)
    assert policy.told == [(1, "pick"), (2, "place")]
    assert len(policy.news()) == 2  # a row's newest wish stands for those before it
    assert [(row.instruction_id, row.conditioning_epoch) for row in rows] == [(1, 3), (1, 3)]


def test_no_row_names_a_text_before_the_policy_knows_it(rows: list[RowInput]) -> None:
    policy = Policy(answers=False)
    policy.instructions.request(rows[0], 1, "pick")
    assert policy.news() == []
    assert rows[0].instruction_id == 0
    policy.instructions.confirm(1)
    assert rows[0].instruction_id == 0  # confirmed on another thread: the owner takes the news
    assert policy.news() == [(1, 1, "")]
    assert rows[0].instruction_id == 1


def test_an_instruction_that_is_not_newer_is_ignored(rows: list[RowInput]) -> None:
    policy = Policy()
    assert policy.instructions.request(rows[0], 5, "pick")
    policy.news()
    for epoch in (0, 4, 5):
        assert not policy.instructions.request(rows[0], epoch, "place")
    assert policy.told == [(1, "pick")]


def test_the_newest_wish_wins_though_an_older_one_is_confirmed_later(rows: list[RowInput]) -> None:
    policy = Policy(answers=False)
    policy.instructions.request(rows[0], 1, "pick")
    policy.instructions.request(rows[0], 2, "place")
    policy.instructions.confirm(2)
    assert policy.news() == [(2, 2, "")]
    policy.instructions.confirm(1)
    assert policy.news() == []
    assert rows[0].instruction_id == 2


def test_what_the_policy_cannot_take_leaves_the_row_as_it_was(rows: list[RowInput]) -> None:
    policy = Policy(answers=False)
    policy.instructions.request(rows[0], 1, "pick")
    policy.instructions.confirm(1)
    policy.news()
    policy.instructions.request(rows[0], 2, "?")
    policy.instructions.confirm(2, "no such word")
    assert policy.news() == [(2, 1, "no such word")]
    assert (rows[0].instruction_id, rows[0].conditioning_epoch) == (1, 2)
    policy.instructions.request(rows[1], 1, "?")  # it is not asked again
    assert policy.news() == [(1, 0, "no such word")]
    assert len(policy.told) == 2


def test_no_text_is_an_instruction_too(rows: list[RowInput]) -> None:
    policy = Policy()
    policy.instructions.request(rows[0], 1, "pick")
    policy.instructions.request(rows[0], 2, "")
    policy.news()
    assert (rows[0].instruction_id, rows[0].conditioning_epoch) == (0, 2)
    assert policy.told == [(1, "pick")]


def test_a_robot_that_left_gets_nothing_and_its_successor_neither(rows: list[RowInput]) -> None:
    policy = Policy(answers=False)
    policy.instructions.request(rows[0], 1, "pick")
    rows[0].close()
    rows[0].open(9)
    policy.instructions.confirm(1)
    assert policy.news() == []
    assert rows[0].instruction_id == 0


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_a_run_has_a_largest_number_of_texts(rows: list[RowInput], extra: int) -> None:
    policy = Policy()
    for number in range(1, TEXTS_MAX + extra + 1):
        policy.instructions.request(rows[0], number, str(number))
    faults = [fault for _, _, fault in policy.news() if fault]
    assert len(policy.told) == TEXTS_MAX + min(extra, 0)
    assert len(faults) == max(extra, 0)
    assert all("start the run again" in fault for fault in faults)
    policy.instructions.request(rows[0], TEXTS_MAX + 3, "7")  # is followed still
    assert policy.news()[-1][1:] == (7, "")
