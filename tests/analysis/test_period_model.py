"""The closed forms against the recurrence, and the recurrence against what a pipeline may do."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ppstream.analysis.period_model import (
    Deeper,
    PipelineForm,
    StageTimes,
    deeper,
    latency,
    limiting_term,
    period,
    period_terms,
    recurrence,
    settled_latency,
    shallower,
    window_star,
)

CYCLE = 24  # envelopes: a multiple of every number of tokens drawn here
EXAMPLE = StageTimes(a=4, b=10, c=5, x_in=0.5, x_out=0.5)


def drawn(source: random.Random) -> tuple[StageTimes, PipelineForm]:
    times = StageTimes(
        a=source.randint(0, 40) / 2,
        b=source.randint(0, 40) / 2,
        c=source.randint(0, 40) / 2,
        x_in=source.randint(0, 8) / 2,
        x_out=source.randint(0, 8) / 2,
        t_in=source.choice([0, 0, source.randint(0, 40) / 2]),
    )
    form = PipelineForm(
        threads=source.choice(["serial", "split"]),
        order="decode_first" if source.random() < 0.1 else "send_first",
        credit=source.choice(["before_window", "after_window"]),
        d_in=source.randint(1, 4),
        d_out=source.randint(1, 4),
        replicas=source.choice([1, 1, 2, 3]),
    )
    return times, form


def measured(
    times: StageTimes, form: PipelineForm, n: int, cycle: int = CYCLE
) -> tuple[float, float]:
    """Mean period and latency of the last cycle that is followed by further envelopes."""
    z = recurrence([times] * n, form)
    last = n - 1 - len(times.places) * form.replicas
    first = last - cycle
    mean = sum(z.c1[k] - z.a0[k] for k in range(first + 1, last + 1)) / cycle
    return (z.c1[last] - z.c1[first]) / cycle, mean


def test_period_formula_equals_the_recurrence_wherever_it_settles() -> None:
    source = random.Random(20)
    for _ in range(600):
        times, form = drawn(source)
        formula = period(times, form)
        # near-equal circuits take long to settle
        found = next(
            (
                p
                for n in (120, 1200, 6000)
                if abs((p := measured(times, form, n)[0]) - formula) < 1e-6
            ),
            None,
        )
        assert found is not None, f"{times} {form}: formula {formula}"


def test_latency_formula_equals_the_recurrence_where_one_stage_leads_clearly() -> None:
    source = random.Random(21)
    checked = 0
    for _ in range(500):
        times, form = drawn(source)
        formula = latency(times, form)
        resources = sorted([times.a, times.b, times.c])
        clear = resources[2] > 1.2 * resources[1] and limiting_term(times, form) in "ABC"
        serial = form.threads == "serial"
        if formula is None or times.t_in or not (clear or serial):
            continue
        assert measured(times, form, 300)[1] == pytest.approx(formula, abs=1e-6), f"{times} {form}"
        checked += 1
    assert checked > 100


@pytest.mark.parametrize(
    ("form", "p", "l"),
    [
        (PipelineForm("split", d_in=1), 15, 20),
        (PipelineForm("split", d_in=2), 10, 25),
        (PipelineForm("split", d_in=4), 10, 45),
        (PipelineForm("split", credit="after_window", d_in=2), 10, 35),
        (PipelineForm("serial", "decode_first"), 20, 20),
        (PipelineForm("serial", credit="after_window"), 10, 20),
        (PipelineForm("serial"), 10, None),
    ],
)
def test_worked_example(form: PipelineForm, p: float, l: float | None) -> None:  # noqa: E741
    assert period(EXAMPLE, form) == p
    assert latency(EXAMPLE, form) == l


@pytest.mark.parametrize(
    ("replicas", "d_in", "p"),
    [(1, 2, 20), (2, 2, 12.5), (2, 3, 10), (3, 3, 25 / 3), (3, 4, 20 / 3), (4, 5, 5), (5, 6, 5)],
)
def test_each_replica_shortens_the_period_until_a_sets_it(
    replicas: int, d_in: int, p: float
) -> None:
    form = PipelineForm("split", d_in=d_in, replicas=replicas)
    assert period(StageTimes(a=5, b=20, c=1), form) == p


def test_a_slow_replica_holds_all_back() -> None:
    form = PipelineForm("split", d_in=4, replicas=3)
    slow = [StageTimes(a=5, b=30 if k % 3 == 1 else 18, c=1) for k in range(400)]
    z = recurrence(slow, form)
    assert (z.c1[390] - z.c1[90]) / 300 == pytest.approx(10)


def test_input_slower_than_everything_sets_the_period() -> None:
    slow = StageTimes(4, 10, 5, 0.5, 0.5, t_in=40)
    assert period(slow, PipelineForm()) == 40
    assert limiting_term(slow, PipelineForm()) == "T_in"


def test_depth_beyond_w_star_never_shortens_the_period() -> None:
    source = random.Random(22)
    for _ in range(200):
        times, form = drawn(source)

        def at(d_in: int, times: StageTimes = times, form: PipelineForm = form) -> float:
            return period(times, replace(form, d_in=d_in))

        enough = window_star(times, form)
        assert at(enough) == pytest.approx(at(enough + 10))
        if enough > 1:
            assert at(enough - 1) > at(enough)


@pytest.mark.parametrize(
    ("d_in", "error", "found"),
    [
        (1, 0.1, Deeper(2, gain=5, older=5, is_seen=True, is_worth=True)),
        (1, 6, Deeper(2, gain=5, older=5, is_seen=False, is_worth=False)),
        (2, 0.1, None),
    ],
)
def test_a_deeper_queue_has_its_gain_and_its_price(
    d_in: int, error: float, found: Deeper | None
) -> None:
    form = PipelineForm("split", d_in=d_in)
    assert deeper(EXAMPLE, form, error) == found


@pytest.mark.parametrize("form", [PipelineForm(), PipelineForm("split", d_in=3)])
def test_a_shallower_queue_is_named_where_it_costs_little(form: PipelineForm) -> None:
    less = shallower(StageTimes(a=1, b=50, c=2), form)
    one = replace(form, d_in=1)
    assert less is not None
    assert (less.d_in, less.cost) == (1, 1)
    before, behind = (settled_latency(StageTimes(1, 50, 2), each) for each in (form, one))
    assert less.younger == pytest.approx(before - behind)
    assert less.overlap == pytest.approx(2 / 3)  # A is in turn with B, C is not
    assert shallower(StageTimes(a=10, b=50, c=2), form) is None  # a fifth of the rate
    assert shallower(StageTimes(a=1, b=50, c=2), one) is None


@pytest.mark.parametrize("a", [1, 3])
def test_what_one_depth_advises_the_other_does_not_take_back(a: float) -> None:
    times = StageTimes(a=a, b=50, c=6)
    assert shallower(times, PipelineForm()) is not None
    back = deeper(times, PipelineForm(d_in=1), error=0.1)
    assert back is not None
    assert (back.is_seen, back.is_worth) == (True, False)


def test_no_depth_is_advised_for_what_the_model_cannot_tell() -> None:
    times = StageTimes(a=5, b=10, c=1, x_in=2.6, x_out=2.6)  # the loop is more than 2 * B
    assert window_star(times, PipelineForm("split")) == 3
    first = deeper(times, PipelineForm("split", d_in=1), 0.5)
    assert first is not None
    assert (first.d_in, first.is_worth) == (2, True)  # 3 would gain 0.1 more
    second = deeper(times, PipelineForm("split", d_in=2), 0.5)
    assert second is not None
    assert (second.d_in, second.is_worth) == (3, False)
    assert second.gain == pytest.approx(0.1)
    assert second.older == pytest.approx(30 - 20.2)


def test_decode_first_does_not_gain_from_depth() -> None:
    for d_in in (1, 2, 4):
        form = PipelineForm("serial", "decode_first", d_in=d_in)
        assert period(EXAMPLE, form) == 20
        assert measured(EXAMPLE, form, 100)[0] == pytest.approx(20)
    assert window_star(EXAMPLE, form) == 1


def test_recurrence_keeps_integers_and_both_bounds() -> None:
    source = random.Random(23)
    for form in (PipelineForm("split", d_in=3, d_out=2), PipelineForm(d_in=2, d_out=1)):
        each = [
            StageTimes(source.randint(1, 9), source.randint(1, 9), source.randint(1, 9), 1, 1)
            for _ in range(200)
        ]
        z = recurrence(each, form)
        assert all(type(t) is int for t in z.c1)
        for k in range(200):
            if k >= form.d_in:
                assert z.s0[k] >= z.o1[k - form.d_in]
            if k >= form.d_out:
                assert z.o1[k] >= z.c0[k - form.d_out]


def test_arrivals_hold_a_back() -> None:
    z = recurrence([EXAMPLE] * 3, PipelineForm(), arrivals=[0, 100, 200])
    assert z.a0 == [0, 100, 200]


# ---- chains of places ---------------------------------------------------------------------------


def drawn_chain(source: random.Random) -> tuple[StageTimes, PipelineForm]:
    n = source.randint(2, 4)
    times, form = drawn(source)
    places = [source.randint(0, 40) / 2 for _ in range(n)]
    hops = [source.randint(0, 8) / 2 for _ in range(n + 1)]
    times = StageTimes.of_chain(times.a, places, times.c, hops, times.t_in)
    return times, replace(form, d_in=source.randint(1, n + 2))


@settings(max_examples=60)
@given(st.randoms(use_true_random=False))
def test_period_formula_of_a_chain_equals_the_recurrence(source: random.Random) -> None:
    times, form = drawn_chain(source)
    cycle = 60  # a multiple of every number of tokens
    found = [measured(times, form, n, cycle)[0] for n in (200, 2000)]
    assert period(times, form) == pytest.approx(found[0], abs=1e-6) or (
        period(times, form) == pytest.approx(found[1], abs=1e-6)
    )


@settings(max_examples=60)
@given(st.randoms(use_true_random=False))
def test_latency_formula_of_a_chain_equals_the_recurrence(source: random.Random) -> None:
    times, form = drawn_chain(source)
    formula = latency(times, form)
    terms = sorted(period_terms(times, form).values())
    assume(formula is not None)
    assume(not times.t_in)
    assume(terms[-1] > 1.2 * terms[-2])  # of two equal circuits the start decides which one fills
    assume(limiting_term(times, form)[0] in "ABC" or form.is_unpipelined)
    assert measured(times, form, 500, 60)[1] == pytest.approx(formula, abs=1e-6)


@settings(max_examples=60)
@given(st.randoms(use_true_random=False))
def test_depth_beyond_w_star_of_a_chain_never_shortens_the_period(source: random.Random) -> None:
    times, form = drawn_chain(source)
    star = window_star(times, form)
    periods = [period(times, replace(form, d_in=d)) for d in range(1, star + 5)]
    assert periods[star - 1] == pytest.approx(min(periods))
    assert star == 1 or periods[star - 2] > periods[star - 1]


@pytest.mark.parametrize("threads", ["serial", "split"])
@pytest.mark.parametrize("places", [3, 4])
def test_equal_places_share_their_time_by_the_credits(threads: str, places: int) -> None:
    times = StageTimes.of_chain(10, [10] * (places - 1), 0)
    periods = [period(times, PipelineForm(threads, d_in=d)) for d in range(1, places + 3)]
    assert periods == [max(10, 10 * places / d) for d in range(1, places + 3)]
    assert window_star(times, PipelineForm(threads)) == places


def test_one_policy_rank_is_the_shortest_chain() -> None:
    source = random.Random(24)
    for _ in range(500):
        times, _ = drawn(source)
        hops = (times.x_in, times.x_out)
        assert StageTimes.of_chain(times.a, [times.b], times.c, hops, times.t_in) == times
        assert times.stages == {"A": times.a, "B": times.b, "C": times.c}


def test_a_chain_s_period_is_never_shorter_than_any_place_or_hop() -> None:
    times = StageTimes.of_chain(1, [4, 9, 2], 1, [0.5, 11, 0.5, 0.5])
    form = PipelineForm("split", d_in=4)
    assert (limiting_term(times, form), period(times, form)) == ("x_1", 11)
    assert list(times.stages) == ["A", "B1", "B2", "B3", "C"]


def test_a_result_s_place_may_stand_behind_the_a_that_its_credit_allows() -> None:
    times = StageTimes.of_chain(10, [1, 1], 0, [0, 0, 8])
    forms = [PipelineForm(d_in=d, d_out=1) for d in (1, 2, 3)]
    assert [period(times, form) for form in forms] == [20, 18, 10]
    assert [measured(times, form, 200, 60)[0] for form in forms] == [20, 18, 10]
    assert window_star(times, forms[0]) == 3  # where the circuits over D_in alone say 2
