from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stream_cases import MS, Input, at_ms, config, ramp, stream

from ppstream.config.schema import GroupConfig
from ppstream.core.specs import TensorSpec
from ppstream.ingest.intake import Intake, build_intake, stream_lines
from ppstream.ingest.rows import Need
from ppstream.links.slots import SlotLayout
from ppstream_kernels import MODES, resample

LEASE = 100 * MS
torch.set_num_threads(1)


def push(case: Input, name: str, *times: float, row: int = 0, rx_ns: int = 0) -> None:
    stamps = at_ms(*times)
    ring = case.rows[row].rings[name]
    assert ring.append(stamps, ramp(stamps, ring.stream.dim), rx_ns) == len(stamps)


def one_row(*streams: Any, **settings: Any) -> Input:
    case = Input(config(*streams, **settings))
    case.rows[0].open(7)
    return case


def test_the_inputs_of_a_policy_follow_from_streams_and_window() -> None:
    case = Input(
        config(
            stream("q", dim=7), stream("tip", dim=2, group="vision"), stream("imu", dim=3), steps=5
        )
    )
    assert case.cutter.inputs == (
        TensorSpec("state.values", (5, 10), "float32"),
        TensorSpec("state.valid", (5, 2), "bool"),
        TensorSpec("state.age_s", (5, 2), "float32"),
        TensorSpec("vision.values", (5, 2), "float32"),
        TensorSpec("vision.valid", (5, 1), "bool"),
        TensorSpec("vision.age_s", (5, 1), "float32"),
        TensorSpec("present", (), "bool"),
        TensorSpec("rows", (4,), "int64"),
    )


def test_samples_older_than_any_window_reaches_back_are_refused() -> None:
    case = config(stream("imu", dim=1), steps=3)
    row = build_intake(case).rows[0]
    row.open(7)
    ring, reach_ns = row.rings["imu"], round(case.reach_ms * MS)
    for stamp, rx_ns in ((0, 0), (10 * MS, 11 * MS + reach_ns), (20 * MS, 20 * MS + reach_ns)):
        ring.append(np.array([stamp]), np.zeros((1, 1), np.float32), rx_ns)
    assert (ring.count, ring.ledger.dropped) == (2, {"stale": 1})


def test_a_live_window_ends_at_the_newest_reference_sample() -> None:
    case = one_row(stream("imu", dim=1, rate_hz=100, reference=True), stream("q", dim=2), steps=3)
    push(case, "q", *range(100), rx_ns=5)
    push(case, "imu", 10, 20, 30, 40, 52, rx_ns=9)
    out = case.slot()
    info = case.cutter.cut(out, [None], LEASE)
    assert info.window_end_ns == [52 * MS]
    assert info.newest_rx_ns == 9
    assert info.input_age_ns == {"imu": 0, "q": 0}
    values = out["state.values"][0].numpy()
    np.testing.assert_allclose(values, [[32, 32, 1032], [42, 42, 1042], [52, 52, 1052]], rtol=1e-6)
    assert bool(out["state.valid"].all())
    assert not out["state.age_s"].any()
    assert out["present"].tolist() == [True]
    assert out["rows"].tolist() == [[7, 0, 52 * MS, 52 * MS + LEASE]]
    case.check()


def test_a_stream_behind_is_held_aged_and_masked_when_too_old() -> None:
    slow = stream("slow", dim=1, rate_hz=30, max_age_ms=15.0)
    case = one_row(stream("fast", dim=1), slow, steps=4, dt_ms=10)
    push(case, "fast", *range(101))
    push(case, "slow", 50, 80)
    out = case.slot()
    info = case.cutter.cut(out, [None], LEASE)
    assert info.input_age_ns == {"fast": 0, "slow": 20 * MS}
    np.testing.assert_allclose(out["state.values"][0, :, 1], [70, 80, 80, 80])
    np.testing.assert_allclose(out["state.age_s"][0, :, 1], [0, 0, 0.01, 0.02], atol=1e-7)
    assert out["state.valid"][0, :, 1].tolist() == [True, True, True, False]
    assert out["state.valid"][0, :, 0].all()


def test_targets_that_no_sample_could_fill_are_counted_by_stream_and_robots_that_are_there() -> (
    None
):
    slow = stream("slow", dim=1, rate_hz=30, max_age_ms=15.0, max_gap_ms=12.0)
    case = Input(config(stream("fast", dim=1), slow, steps=4, dt_ms=10, rows=2))
    case.rows[0].open(7)  # nobody has the other row
    push(case, "fast", *range(101))
    push(case, "slow", 60, 70, 80)
    for _ in range(2):
        case.cutter.cut(case.slot(), [None, None], LEASE)  # targets at 70, 80, 90, 100: held 15 ms
    assert (case.cutter.targets, case.cutter.invalid) == (8, {"fast": 0, "slow": 2})
    lines = stream_lines(Intake(tuple(case.rows), case.cutter, case.banks))
    assert lines["slow"]["targets"] == 8
    assert lines["slow"]["invalid"] == 2
    assert (lines["slow"]["holes"], lines["slow"]["longest_hole_ns"]) == (0, 0)
    push(case, "slow", 100)
    lines = stream_lines(Intake(tuple(case.rows), case.cutter, case.banks))
    assert (lines["slow"]["holes"], lines["slow"]["longest_hole_ns"]) == (1, 20 * MS)


def test_a_given_end_counts_and_newer_samples_stay_in_flight() -> None:
    case = one_row(stream(dim=1), steps=2, dt_ms=10)
    push(case, "joints", *range(50))
    out = case.slot()
    info = case.cutter.cut(out, [30 * MS], LEASE)
    assert info.window_end_ns == [30 * MS]
    assert out["state.values"].flatten().tolist() == [20, 30]
    ledger = case.rows[0].reference.ledger
    assert (ledger.used, ledger.in_flight, ledger.dropped) == (11, 19, {"passed_over": 20})
    case.check()


def test_a_row_without_a_robot_is_zero_and_marked() -> None:
    case = Input(config(stream(dim=2), steps=3, rows=2))
    case.rows[1].open(9)
    push(case, "joints", 10, 20, 30, row=1)
    out = case.slot()
    info = case.cutter.cut(out, [None, None], LEASE)
    assert out["present"].tolist() == [False, True]
    assert out["rows"].tolist() == [[0, 0, 0, 0], [9, 0, 30 * MS, 30 * MS + LEASE]]
    assert not out["state.values"][0].any()
    assert not out["state.valid"][0].any()
    assert not out["state.age_s"][0].any()
    assert out["state.values"][1, :, 0].tolist() == [10, 20, 30]
    assert info.window_end_ns == [0, 30 * MS]
    assert info.input_age_ns == {"joints": [None, 0]}


@pytest.mark.parametrize("origin_ms", [0.0, -1e6, 1e9])
def test_a_robot_that_has_not_sent_its_reference_stream_yet_is_absent(origin_ms: float) -> None:
    case = one_row(stream("fast", dim=1), stream("slow", dim=1, rate_hz=1))
    push(case, "slow", origin_ms, origin_ms + 10)
    out = case.slot()
    info = case.cutter.cut(out, [None], LEASE)
    assert out["present"].tolist() == [False]
    assert not out["state.values"].any()
    assert not out["state.valid"].any()
    assert info == ([0], 0, {"fast": None, "slow": None})
    assert case.rows[0].rings["slow"].ledger.in_flight == 2


def test_a_row_that_awaits_its_text_is_absent_until_it_has_it() -> None:
    case = one_row(stream(dim=2), steps=3)
    push(case, "joints", 10, 20, 30)
    case.rows[0].awaits_text = True
    out = case.slot()
    assert case.cutter.cut(out, [None], LEASE) == ([0], 0, {"joints": None})
    assert out["present"].tolist() == [False]
    assert not out["state.values"].any()
    case.rows[0].awaits_text = False
    assert case.cutter.cut(out, [None], LEASE).window_end_ns == [30 * MS]
    assert out["state.values"][0, :, 0].tolist() == [10, 20, 30]
    case.check()


def test_a_rehearsed_window_counts_no_targets() -> None:
    case = one_row(stream(dim=1), steps=4)
    push(case, "joints", 40)
    case.cutter.cut(case.slot(), [None], LEASE)
    assert (case.cutter.targets, case.cutter.invalid) == (4, {"joints": 3})
    case.cutter.rehearse(case.slot())
    assert (case.cutter.targets, case.cutter.invalid) == (4, {"joints": 3})


@pytest.mark.parametrize(("late_ns", "present"), [(0, True), (1, False)])
def test_a_needed_sample_may_be_just_as_old_as_its_maximum_age(
    late_ns: int, *, present: bool
) -> None:
    most_ns = 15 * MS
    streams = stream("fast", dim=1, reference=True), stream("slow", dim=1)
    case = Input(config(*streams), needs={"slow": Need(most_ns)})
    case.rows[0].open(7)
    push(case, "slow", 10)
    push(case, "fast", 10 + (most_ns + late_ns) / MS)
    assert case.rows[0].present is present


def test_nothing_of_an_older_episode_is_in_a_window() -> None:
    case = one_row(stream(dim=1), steps=4)
    push(case, "joints", 10, 20, 30)
    case.rows[0].new_episode()
    push(case, "joints", 40)
    out = case.slot()
    case.cutter.cut(out, [None], LEASE)
    assert out["state.values"].flatten().tolist() == [40, 40, 40, 40]
    assert out["state.valid"].flatten().tolist() == [False, False, False, True]
    assert out["rows"].tolist()[0][:2] == [7, 1]


def test_rows_of_a_batch_have_clocks_of_their_own() -> None:
    case = Input(config(stream(dim=2), steps=3, rows=3))
    for row, origin in enumerate((0.0, 1e12, -1e12)):
        case.rows[row].open(row + 1)
        push(case, "joints", *(origin + np.arange(40)), row=row, rx_ns=row)
    out = case.slot()
    info = case.cutter.cut(out, [None] * 3, LEASE)
    assert info.window_end_ns == at_ms(39, 1e12 + 39, -1e12 + 39).tolist()
    assert info.newest_rx_ns == 2
    assert out["state.values"].shape == (3, 3, 2)
    assert out["state.valid"].all()
    case.check()


def test_an_image_stream_is_one_more_tensor_of_an_envelope() -> None:
    case = Input(config(stream(dim=3), steps=4, rows=2))
    camera = (
        TensorSpec("front.frames", (2, 3, 48, 64), "uint8"),
        TensorSpec("front.valid", (2,), "bool"),
        TensorSpec("front.age_s", (2,), "float32"),
    )
    layout = SlotLayout(("index", "seq"), case.cutter.inputs + camera, rows=2)
    out = layout.views(torch.zeros(layout.slot_bytes, dtype=torch.uint8))
    assert out["front.frames"].shape == (2, 2, 3, 48, 64)
    assert out["front.frames"].dtype == torch.uint8
    assert out["front.frames"].is_contiguous()
    out["front.frames"].fill_(255)
    case.cutter.cut(out, [None, None], LEASE)
    assert int(out["front.frames"].to(torch.int64).sum()) == 255 * 2 * 2 * 3 * 48 * 64
    assert out["state.values"].shape == (2, 4, 3)


# ---- properties ------------------------------------------------------------------------------


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[int], int]:
    """Strictly increasing stamps in ms, and the origin they are shifted by."""
    gaps = draw(st.lists(st.integers(1, 60), min_size=1, max_size=60))
    return np.cumsum(gaps).tolist(), draw(st.sampled_from([0, -(10**12), 10**12]))


@settings(max_examples=150, deadline=None)
@given(histories(), st.integers(1, 12), st.integers(1, 30), st.integers(0, 80))
def test_a_window_equals_float64_interpolation(
    history: tuple[list[int], int], steps: int, dt_ms: int, behind_ms: int
) -> None:
    times, origin_ms = history
    limits = {"max_age_ms": 1e9, "max_gap_ms": 1e9}
    case = Input(config(stream(dim=1, **limits), steps=steps, dt_ms=dt_ms), capacity=17)
    case.rows[0].open(7, is_real_time=False)
    stamps = at_ms(*times) + origin_ms * MS
    values = np.sin(np.arange(len(times)) * 1.7)
    ring = case.rows[0].reference
    for begin in range(0, len(times), 7):
        part = slice(begin, begin + 7)
        ring.append(stamps[part], values[part, None].astype(np.float32), 0)
    end = int(stamps[-1]) - behind_ms * MS
    out = case.slot()
    case.cutter.cut(out, [end], LEASE)
    targets_ms = (end - origin_ms * MS) / MS - dt_ms * np.arange(steps)[::-1]
    times, values = times[-17:], values[-17:]  # the ring has wrapped
    wanted = np.interp(targets_ms, times, values)
    np.testing.assert_allclose(out["state.values"][0, :, 0], wanted, atol=2e-7)
    np.testing.assert_array_equal(out["state.valid"][0, :, 0], targets_ms >= times[0])
    case.check()


@pytest.mark.parametrize("mode", MODES)
def test_a_window_follows_the_rules_of_the_op_on_all_that_was_sent(mode: str) -> None:
    """Repeated stamps, quaternions of length 0, holes, and an end beyond the newest sample."""
    limits = {"max_age_ms": 12.0, "max_gap_ms": 8.0}
    case = one_row(stream(dim=4, interpolation=mode, **limits), steps=40, dt_ms=1)
    times = [2, 4, 4, 4, 9, 11, 11, 20, 22, 24, 26]
    values = np.random.default_rng(3).normal(size=(len(times), 4)).astype(np.float32)
    values[8] = 0
    stamps = at_ms(*times)
    for number in range(len(times)):  # each a message of its own, as a driver that repeats sends
        case.rows[0].reference.append(stamps[number : number + 1], values[number : number + 1], 0)
    assert case.rows[0].reference.ledger.dropped == {"duplicate": 3}
    out = case.slot()
    case.cutter.cut(out, [40 * MS], LEASE)
    sent = (torch.from_numpy(values)[None], torch.from_numpy(stamps)[None])
    targets = torch.arange(1, 41)[None] * MS
    wanted = resample(*sent, targets, mode=mode, max_gap_ns=8 * MS, max_age_ns=12 * MS)
    assert torch.equal(out["state.values"], wanted.values)
    assert torch.equal(out["state.valid"][..., 0], wanted.valid)
    assert torch.equal(out["state.age_s"][..., 0], wanted.age_s)
    held = wanted.valid[0, 26:]  # at 27 ms and on: held beyond the newest
    assert int(held.sum()) == (8 if mode in ("previous", "nearest") else 12)


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["fast", "slow", "cut", "episode"]),
        st.integers(-5, 20),
        st.integers(1, 5),
        st.booleans(),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(EVENTS)
def test_ledgers_balance_after_any_mixture_of_samples_and_windows(
    events: list[tuple[str, int, int, bool]],
) -> None:
    case = Input(config(stream("fast", dim=1), stream("slow", dim=1, rate_hz=30)), capacity=9)
    case.rows[0].open(7)
    out = case.slot()
    now_ms = 0
    for what, shift, count, spoiled in events:
        now_ms += 5
        if what == "cut":
            info = case.cutter.cut(out, [None if spoiled else (now_ms + shift) * MS], LEASE)
            assert all(math.isfinite(value) for value in out["state.values"].flatten().tolist())
            assert len(info.window_end_ns) == 1
        elif what == "episode":
            case.rows[0].new_episode()
        else:
            stamps = at_ms(*(now_ms + shift + 3 * np.arange(count)))
            values = ramp(stamps, 1)
            values[-1] = np.nan if spoiled else 0
            case.rows[0].rings[what].append(stamps, values, now_ms * MS)
        case.check()
    case.rows[0].close()
    case.check()
    assert all(ring.ledger.in_flight == 0 for ring in case.rows[0].rings.values())


SCALED = (("int8", 127.0), ("float8_e4m3fn", 448.0))


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(("dtype", "largest"), SCALED)
def test_a_window_in_8_bits_is_that_of_the_op_and_comes_with_its_scale(
    dtype: str, largest: float, rows: int
) -> None:
    limits = {"max_age_ms": 12.0, "max_gap_ms": 8.0}
    narrow = stream("a", dim=2, low=(-2.0, 0.0), high=(1.0, 3.0), **limits)
    wide = stream("b", dim=1, group="wide", **limits)
    plain = config(narrow, wide, steps=40, dt_ms=1, rows=rows)
    groups = {"state": GroupConfig(dtype=dtype)}
    window = msgspec.structs.replace(plain.window, groups=groups)
    case = Input(msgspec.structs.replace(plain, window=window))
    case.rows[-1].open(7)
    stamps = at_ms(*range(0, 44, 4))
    values = np.random.default_rng(3).normal(size=(len(stamps), 2)).astype(np.float32) * 2
    case.rows[-1].rings["a"].append(stamps, values, 0)
    case.rows[-1].rings["b"].append(stamps, values[:, :1].copy(), 0)
    out = case.slot()
    case.cutter.cut(out, [40 * MS] * rows, LEASE)
    scale = torch.tensor([2 / largest, 3 / largest])
    assert torch.equal(out["state.scale"], scale.repeat(rows, 1))
    targets = torch.arange(1, 41)[None] * MS
    wanted = resample(
        torch.from_numpy(values)[None],
        torch.from_numpy(stamps)[None],
        targets,
        max_gap_ns=8 * MS,
        max_age_ns=12 * MS,
        dtype=getattr(torch, dtype),
        scale=scale,
    )
    assert out["state.values"].dtype is getattr(torch, dtype)
    assert torch.equal(out["state.values"][-1:].float(), wanted.values.float())
    assert torch.equal(out["state.valid"][-1:, :, 0], wanted.valid)
    assert out["wide.values"].dtype is torch.float32
    read = out["state.values"][-1].float() * out["state.scale"][-1]
    clipped = out["wide.values"][-1, :, 0].clamp(-2, 2)
    assert ((read[:, 0] - clipped).abs() <= clipped.abs() / 16 + scale[0] / 2).all()
    if rows == 2:
        assert not out["state.values"][0].float().any()
