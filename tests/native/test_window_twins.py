"""The same rows cut by the core and by numpy: equal bytes, counts and ages."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stream_cases import MS, Input, config, stream
from twin_rows import in_python, state_of

from ppstream import native
from ppstream.ingest.window import COMPILED_MODES
from ppstream_kernels import MODES, ResamplePlan
from ppstream_kernels.blend import FEW_ELEMENTS

LEASE = 100 * MS
ORIGINS = (0, -(1 << 61), 1 << 61)
torch.set_num_threads(1)


class Case(NamedTuple):
    dims: list[int]
    modes: list[str]
    group_of: list[str]
    limits_ms: list[tuple[float, float]]
    rows: int
    steps: int
    dt_ms: float
    capacity: int


class Twins:
    """A cutter over rings that the core serves, and one over the same rings of Python's."""

    def __init__(self, case: Case) -> None:
        streams = [
            stream(
                f"s{number}",
                dim,
                interpolation=case.modes[number],
                group=case.group_of[number],
                max_gap_ms=case.limits_ms[number][0],
                max_age_ms=case.limits_ms[number][1],
                reference=number == 0,
            )
            for number, dim in enumerate(case.dims)
        ]
        made = config(*streams, rows=case.rows, steps=case.steps, dt_ms=case.dt_ms)
        compiled = Input(made, capacity=case.capacity)
        with in_python():
            self.inputs = [compiled, Input(made, capacity=case.capacity)]
        slots = [
            torch.full((one.layout.slot_bytes,), 0xCD, dtype=torch.uint8) for one in self.inputs
        ]
        self.slots = slots
        self.views = [one.layout.views(slot) for one, slot in zip(self.inputs, slots, strict=True)]

    def both(self, call: Any) -> None:
        for one in self.inputs:
            call(one)

    def cut(self, ends_ns: list[int | None]) -> None:
        """One window of each: nothing differs."""
        told = [
            one.cutter.cut(views, ends_ns, LEASE)
            for one, views in zip(self.inputs, self.views, strict=True)
        ]
        assert told[0] == told[1]
        for name, tensor in self.views[0].items():
            assert tensor.numpy().tobytes() == self.views[1][name].numpy().tobytes(), name
        assert torch.equal(*self.slots)
        core, python = self.inputs
        assert core.cutter.targets == python.cutter.targets
        assert core.cutter.invalid == python.cutter.invalid
        for row, twin in zip(core.rows, python.rows, strict=True):
            assert state_of(row, core.banks) == state_of(twin, python.banks)
        core.check()


@st.composite
def cases(draw: st.DrawFn) -> Case:
    n = draw(st.integers(1, 4))
    times = st.sampled_from([1.0, 3.0, 8.0, 25.0, 1e9])
    return Case(
        dims=draw(st.lists(st.integers(1, 5), min_size=n, max_size=n)),
        modes=draw(st.lists(st.sampled_from(COMPILED_MODES), min_size=n, max_size=n)),
        group_of=draw(st.lists(st.sampled_from(["state", "tool"]), min_size=n, max_size=n)),
        limits_ms=draw(st.lists(st.tuples(times, times), min_size=n, max_size=n)),
        rows=draw(st.sampled_from([1, 1, 1, 2, 10])),
        steps=draw(st.integers(1, 9)),
        dt_ms=draw(st.sampled_from([1.0, 2.5, 10.0])),
        capacity=draw(st.sampled_from([1, 2, 7, 32])),
    )


values = st.floats(width=32, allow_nan=False, allow_infinity=False)
values |= st.sampled_from([0.0, -0.0, 3.4028234663852886e38, -3.4028234663852886e38, 1e-45])
samples = st.tuples(
    st.just("samples"),
    st.integers(0, 9),  # row
    st.integers(0, 3),  # stream
    st.lists(st.integers(1, 9 * MS), min_size=1, max_size=7)  # steps
    | st.lists(st.integers(1, 9).map(lambda step_ms: step_ms * MS), min_size=1, max_size=7),
    st.lists(values, min_size=1, max_size=9),
)
cuts = st.tuples(st.just("cut"), st.lists(st.none() | st.integers(-40, 40), min_size=1, max_size=3))
turns = st.tuples(st.sampled_from(["episode", "close", "open"]), st.integers(0, 9))


@settings(max_examples=100, deadline=None)
@given(cases(), st.sampled_from(ORIGINS), st.lists(samples | samples | cuts | turns, max_size=30))
def test_whatever_is_held_both_cut_the_same(
    case: Case, origin_ns: int, events: list[tuple[Any, ...]]
) -> None:
    twins = Twins(case)
    for index in range(case.rows):
        if index != 3:
            twins.both(lambda one: one.rows[index].open(index + 1, is_real_time=False))  # noqa: B023
    for what, *details in [*events, ("cut", [None])]:
        if what == "cut":
            ends = [
                None if shift is None else origin_ns + shift * MS for shift in details[0]
            ] * case.rows
            twins.cut(ends[: case.rows])
            continue
        index = details[0] % case.rows
        if what == "samples":
            fill(twins, index, origin_ns, *details[1:])
        elif what == "episode":
            twins.both(lambda one: one.rows[index].new_episode())  # noqa: B023
        elif what == "close":
            twins.both(lambda one: one.rows[index].close())  # noqa: B023
        elif twins.inputs[0].rows[index].session == 0:
            twins.both(lambda one: one.rows[index].open(77, is_real_time=False))  # noqa: B023


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("unit_ns", [1, MS])
def test_many_digits_and_targets_just_at_a_limit_are_cut_the_same(rows: int, unit_ns: int) -> None:
    rng = np.random.default_rng(5)
    limits = [(8.0, 5.0)] * len(COMPILED_MODES)
    groups = ["state", "state", "tool"]
    case = Case([4, 3, 5], list(COMPILED_MODES), groups, limits, rows, 32, 1.0, 64)
    twins = Twins(case)
    for index in range(rows):
        twins.both(lambda one: one.rows[index].open(1, is_real_time=False))  # noqa: B023
    for _ in range(40):
        for index in range(rows):
            for number in range(len(case.dims)):
                steps_ns = rng.integers(1, 12 * MS // unit_ns, 7) * unit_ns
                fill(twins, index, 0, number, steps_ns.tolist(), rng.standard_normal(35).tolist())
        twins.cut([None] * rows)


def fill(
    twins: Twins, index: int, origin_ns: int, number: int, steps_ns: list[int], sent: list[float]
) -> None:
    for one in twins.inputs:
        ring = list(one.rows[index].rings.values())[number % len(one.banks)]
        newest_ns = ring.newest_ns if ring.count else origin_ns
        stamps = newest_ns + np.cumsum(steps_ns, dtype=np.int64)
        filled = np.resize(np.array(sent, np.float32), (len(stamps), ring.stream.dim))
        ring.append(stamps, filled, 0)


def case_of(mode: str, *, dim: int = 4, steps: int = 8, rows: int = 1) -> Twins:
    limits = [(1e9, 1e9)]
    return Twins(Case([dim], [mode], ["state"], limits, rows, steps, 10.0, 16))


@pytest.fixture
def resampled(monkeypatch: pytest.MonkeyPatch) -> list[ResamplePlan]:
    """A plan for each time that a window was cut in Python."""
    plans: list[ResamplePlan] = []
    bind = ResamplePlan.bind

    def noting(plan: ResamplePlan, *given: Any) -> Any:
        run = bind(plan, *given)
        return lambda: plans.append(plan) or run()

    monkeypatch.setattr(ResamplePlan, "bind", noting)
    return plans


@pytest.mark.parametrize("mode", MODES)
def test_only_modes_of_the_core_are_cut_by_it(mode: str, resampled: list[ResamplePlan]) -> None:
    one = case_of(mode).inputs[0]
    one.cutter.cut(one.slot(), [None], LEASE)
    assert (not resampled) == (mode in COMPILED_MODES)


@pytest.mark.parametrize(
    ("mode", "steps", "by_core"),
    [
        ("linear", FEW_ELEMENTS // 4, True),
        ("linear", FEW_ELEMENTS // 4 + 1, False),
        ("previous", FEW_ELEMENTS // 4 + 1, True),
    ],
)
def test_a_large_linear_stream_is_left_to_torch_which_rounds_otherwise(
    mode: str, steps: int, by_core: bool, resampled: list[ResamplePlan]
) -> None:
    twins = case_of(mode, steps=steps)
    twins.both(lambda one: one.rows[0].open(1, is_real_time=False))
    fill(twins, 0, 0, 0, [MS] * 16, [0.1, 0.7, -0.3])
    twins.cut([None])
    assert len(resampled) == (1 if by_core else 2)


def test_the_core_cuts_a_window_without_torch(resampled: list[ResamplePlan]) -> None:
    case = case_of("linear").inputs[0]
    case.rows[0].open(1, is_real_time=False)
    case.rows[0].reference.append(np.arange(9) * 10 * MS, np.ones((9, 4), np.float32), 0)
    out = case.slot()
    assert case.cutter.cut(out, [None], LEASE).window_end_ns == [80 * MS]
    assert out["state.valid"].all()
    assert out["state.values"].unique().tolist() == [1]
    assert not resampled


@pytest.mark.parametrize("wrong", ["steps", "width", "dtype", "valid"])
def test_a_line_is_written_only_where_it_fits(wrong: str) -> None:
    ring = case_of("linear").inputs[0].rows[0].reference
    values = np.zeros((8, 3 if wrong == "width" else 4), float if wrong == "dtype" else np.float32)
    valid = np.zeros(8, np.int8 if wrong == "valid" else np.bool_)
    age_s = np.zeros(7 if wrong == "steps" else 8, np.float32)
    with pytest.raises(ValueError, match="needs"):
        ring.cut(8, MS, 0, 0, 0, values.data, valid.data, age_s.data, None)


def test_a_ring_without_values_is_never_cut() -> None:
    none = np.zeros(0, np.float32).data
    with pytest.raises(ValueError, match="no values"):
        native.Ring().cut(0, MS, 0, 0, 0, none, none, none, None)
