"""Lines in columns read as they were appended, whatever values and orders a log has."""

from dataclasses import dataclass, fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppstream.analysis.line_columns import BLOCK, Lines

NUMBERS = st.one_of(
    st.none(),
    st.integers(-(1 << 7) - 1, 1 << 7),
    st.integers(-(1 << 31) - 1, 1 << 31),
    st.integers(-(1 << 63) - 1, 1 << 63),  # either end is beyond 64 bits
)


@dataclass
class Told:
    """A line of a log, as others may write it."""

    seq: int
    ns: int | None = None
    text: str | None = None
    ages: dict[str, int] | None = None
    others: tuple["Told | None", ...] = ()

    @property
    def twice(self) -> int | None:
        return None if self.ns is None else 2 * self.ns


def values(line: Told) -> list[object]:
    """Of all fields and of the property; types tell 1 from True."""
    found = [getattr(line, f.name) for f in fields(Told)] + [line.twice]
    return [(type(value), value) for value in found]


def lines_of(told: list[Told], kept: int = 0) -> Lines[Told]:
    lines = Lines(Told, lambda line: (line.seq,), kept)
    for line in told:
        lines.append(line)
    return lines


AGES = st.one_of(st.none(), st.dictionaries(st.sampled_from("ab"), NUMBERS.filter(bool)))
TEXTS = st.sampled_from([None, "", "ready", "stale"])


@given(st.lists(st.builds(Told, st.integers(0, 99), NUMBERS, TEXTS, AGES), max_size=12))
@settings(deadline=None)
def test_rows_are_the_lines_in_their_order(told: list[Told]) -> None:
    """Of equal keys the first appended stays the first, whichever values a block holds."""
    ordered = sorted(told, key=lambda line: line.seq)
    assert [*map(values, lines_of(told))] == [*map(values, ordered)]


@pytest.mark.parametrize("n", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
def test_blocks_change_nothing(n: int) -> None:
    told = [Told(k, k % 3 or None, "ready", {"a": k}) for k in range(n)]
    assert [*map(values, lines_of(told, kept=5))] == [*map(values, told)]
    backwards = lines_of(told[::-1], kept=5)
    assert [*map(values, backwards)] == [*map(values, told)]


@pytest.mark.parametrize("kept", [0, 9, 2 * BLOCK])
def test_rows_are_given_what_they_lack(kept: int) -> None:
    """Their own values stay, and so do those of lines that get none."""
    lines = lines_of([Told(k, None if k % 2 else 7) for k in range(2 * BLOCK)], kept)
    assert lines.has("ns")
    assert not lines.has("text")
    lines.fill(["ns", "text"], lambda line: {"ns": line.seq} if line.seq < BLOCK else {})
    assert [row.ns for row in lines] == [
        (k if k < BLOCK else None) if k % 2 else 7 for k in range(2 * BLOCK)
    ]
    assert not lines.has("text")


@pytest.mark.parametrize(("kept", "theirs"), [(0, 0), (200, 0), (0, 700), (200, 450)])
def test_rows_refer_to_rows_of_other_lines(kept: int, theirs: int) -> None:
    """Of several places each has its own, from whichever block, and None where it has none."""
    lines = lines_of([*map(Told, range(300))], kept)
    others = [*lines_of([*map(Told, range(900))], theirs)]
    first = [None if k % 2 else others[3 * k] for k in range(300)]
    second = [others[899 - k] for k in range(300)]
    lines.refer("others", [first, second])
    seqs = [[other and other.seq for other in row.others] for row in lines]
    assert seqs == [[None if k % 2 else 3 * k, 899 - k] for k in range(300)]
