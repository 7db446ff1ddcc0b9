"""The closed forms against the recurrence, and the recurrence against what a pipeline may do."""

from __future__ import annotations

import random

import pytest

from ppstream.analysis.period_model import (
    Deeper,
    PipelineForm,
    StageTimes,
    deeper,
    latency,
    limiting_term,
    period,
    recurrence,
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
    )
    return times, form


def measured(times: StageTimes, form: PipelineForm, n: int) -> tuple[float, float]:
    """Mean period and latency of the last cycle that is followed by another envelope."""
    z = recurrence([times] * n, form)
    last, first = n - 2, n - 2 - CYCLE
    mean = sum(z.c1[k] - z.a0[k] for k in range(first + 1, last + 1)) / CYCLE
    return (z.c1[last] - z.c1[first]) / CYCLE, mean


def test_period_formula_equals_the_recurrence_on_thousands_of_configurations() -> None:
    source = random.Random(20)
    for _ in range(3000):
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
    for _ in range(1500):
        times, form = drawn(source)
        formula = latency(times, form)
        resources = sorted([times.a, times.b, times.c])
        clear = resources[2] > 1.2 * resources[1] and limiting_term(times, form) in "ABC"
        serial = form.threads == "serial"
        if formula is None or times.t_in or not (clear or serial):
            continue
        assert measured(times, form, 300)[1] == pytest.approx(formula, abs=1e-6), f"{times} {form}"
        checked += 1
    assert checked > 300


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


def test_input_slower_than_everything_sets_the_period() -> None:
    slow = StageTimes(4, 10, 5, 0.5, 0.5, t_in=40)
    assert period(slow, PipelineForm()) == 40
    assert limiting_term(slow, PipelineForm()) == "T_in"


def test_depth_beyond_w_star_never_shortens_the_period() -> None:
    source = random.Random(22)
    for _ in range(500):
        times, form = drawn(source)

        def at(d_in: int, times: StageTimes = times, form: PipelineForm = form) -> float:
            deeper = PipelineForm(form.threads, form.order, form.credit, d_in, form.d_out)
            return period(times, deeper)

        enough = window_star(times, form)
        assert at(enough) == pytest.approx(at(enough + 10))
        if enough > 1:
            assert at(enough - 1) > at(enough)


@pytest.mark.parametrize(
    ("d_in", "error", "found"),
    [
        (1, 0.1, Deeper(2, gain=5, older=5, is_worth=True)),
        (1, 6, Deeper(2, gain=5, older=5, is_worth=False)),
        (2, 0.1, None),
    ],
)
def test_a_deeper_queue_has_its_gain_and_its_price(
    d_in: int, error: float, found: Deeper | None
) -> None:
    form = PipelineForm("split", d_in=d_in)
    assert deeper(EXAMPLE, form, error) == found


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
