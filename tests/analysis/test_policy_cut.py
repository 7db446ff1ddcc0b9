"""The planner against every cut there is, and against the measured ones of a real policy."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppstream.analysis.period_model import PipelineForm
from ppstream.analysis.policy_cut import Costs, all_cuts, best_cut, cut_table

#: Image encoder, three times six language layers, five times two denoising steps, in ms.
NINE = Costs((3.2, 2.3, 2.3, 1.9, 2.9, 2.9, 2.9, 2.9, 2.9), (0.0,) * 10)


@st.composite
def costs(draw: st.DrawFn) -> tuple[Costs, int]:
    times = st.integers(0, 30)
    parts = draw(st.lists(times, min_size=1, max_size=8))
    hops = draw(st.lists(st.integers(0, 6), min_size=len(parts) + 1, max_size=len(parts) + 1))
    own = draw(times), draw(times)
    sizes = draw(st.sampled_from([(), tuple(draw(st.permutations(range(len(hops)))))]))
    drawn = Costs(tuple(parts), tuple(hops), *own, sizes, draw(st.booleans()))
    return drawn, draw(st.integers(2, len(parts) + 1))


@given(costs())
def test_the_best_cut_has_the_smallest_largest_load_and_then_the_smallest_hops(
    drawn: tuple[Costs, int],
) -> None:
    found = best_cut(*drawn)
    hops = {
        cut.starts: cut.hop_bytes if drawn[0].hop_bytes else cut.hops for cut in all_cuts(*drawn)
    }
    key = {cut.starts: (max(cut.loads), sum(hops[cut.starts])) for cut in all_cuts(*drawn)}
    assert key[found.starts] == min(key.values())


@given(costs())
def test_every_part_and_every_hop_is_somewhere_once(drawn: tuple[Costs, int]) -> None:
    for cut in all_cuts(*drawn):
        assert sum(cut.places) == sum(cut.costs.parts)
        assert sum(cut.loads) == sum(cut.places) + cut.costs.a + cut.costs.c + sum(cut.hops)
        assert list(cut.placement) == sorted(cut.placement)
        assert set(range(1, drawn[1])) <= set(cut.placement)  # rank 0 alone may have none


@pytest.mark.parametrize(
    ("places", "placement", "largest"),
    [
        (2, (0, 0, 0, 0, 0, 1, 1, 1, 1), 12.6),
        (3, (0, 0, 0, 1, 1, 1, 2, 2, 2), 8.7),
        (4, (0, 0, 1, 1, 1, 2, 2, 3, 3), 7.1),
    ],
)
def test_nine_parts_are_cut_as_they_were_measured_best(
    places: int, placement: tuple[int, ...], largest: float
) -> None:
    found = best_cut(NINE, places)
    assert found.placement == placement
    assert max(found.loads) == pytest.approx(largest)


def test_what_rank_0_does_besides_keeps_parts_away_from_it() -> None:
    busy = Costs(NINE.parts, NINE.hops, a=6, c=5)
    assert best_cut(busy, 3).placement[0] == 1


@pytest.mark.parametrize(("sizes", "placement"), [((4, 3), (0, 0, 1)), ((3, 4), (0, 1, 1))])
def test_of_equal_cuts_the_one_with_the_fewest_bytes_is_taken(
    sizes: tuple[int, int], placement: tuple[int, ...]
) -> None:
    costs = Costs((5, 1, 5), (0.0,) * 4, hop_bytes=(9, *sizes, 1))
    found = best_cut(costs, 2)
    assert found.placement == placement
    assert found.hop_bytes == (3, 1)


def test_rank_0_without_parts_leaves_them_all_to_the_policy_ranks() -> None:
    closed = Costs(NINE.parts, NINE.hops, is_front_open=False)
    assert best_cut(closed, 3).placement == (1, 1, 1, 1, 1, 2, 2, 2, 2)
    form = PipelineForm("split", d_in=3)
    assert {row.cut.placement[0] for row in cut_table(closed, 3, form, rows=5)} == {1}


def test_a_dear_hop_is_not_cut() -> None:
    assert best_cut(Costs((5, 5, 5, 5), (0.0,) * 5), 2).starts == (2,)
    assert best_cut(Costs((5, 5, 5, 5), (0.0, 0.0, 9.0, 0.0, 0.0)), 2).starts == (1,)
    assert best_cut(Costs((5, 5, 5, 5), (0.0, 0.0, 0.0, 9.0, 0.0)), 3).starts == (0, 2)


def test_the_table_begins_with_the_best_cut_and_says_what_each_would_give() -> None:
    table = cut_table(NINE, 3, PipelineForm("split", d_in=3), rows=5)
    assert table[0].cut == best_cut(NINE, 3)
    assert len(table) == 5
    assert [row.period for row in table] == sorted(row.period for row in table)
    assert table[0].period == pytest.approx(8.7)
    assert table[0].latency == pytest.approx(26.1, abs=0.1)  # three credits, and no decode


def test_of_very_many_cuts_only_the_best_one_is_shown() -> None:
    many = Costs((1.0,) * 64, (0.0,) * 65)
    (row,) = cut_table(many, 8, PipelineForm("split", d_in=8), rows=5)
    assert row.period == pytest.approx(8)


@pytest.mark.parametrize("places", [1, 11])
def test_more_policy_ranks_than_parts_are_refused(places: int) -> None:
    with pytest.raises(ValueError, match="9 parts on"):
        best_cut(NINE, places)


def test_costs_have_a_hop_around_every_part() -> None:
    with pytest.raises(ValueError, match="1 hops for 2 parts"):
        Costs((1, 2), (1,))
    with pytest.raises(ValueError, match="2 hops for 2 parts"):
        Costs((1, 2), (1, 1, 1), hop_bytes=(1, 1))
