from __future__ import annotations

import math

import numpy as np
import pytest
from stream_cases import MS, Input, config, held, stream

from ppstream.config.schema import ImageConfig
from ppstream.ingest.sources import Source
from ppstream.ingest.synthetic import CLOCK_OFFSET_NS, SyntheticRobots, SyntheticSource

S = 1000 * MS
HOST = 5_000 * S


def open_case(seed: int = 0) -> tuple[SyntheticSource, Input]:
    case = Input(
        config(
            stream("fast", dim=3, rate_hz=1000, jitter_ms=0.2, reference=True),
            stream("slow", dim=2, rate_hz=30, jitter_ms=500, dtype="float64"),
            stream("turn", dim=4, rate_hz=100, interpolation="slerp"),
            stream("wrap", dim=2, rate_hz=100, interpolation="angle"),
        ),
        capacity=4096,
    )
    return SyntheticSource(case.config, case.rows[0], seed, HOST), case


def test_all_streams_come_at_their_rates_with_none_dropped() -> None:
    source, case = open_case()
    as_protocol: Source = source
    assert as_protocol.drain(HOST + 2 * S) > 0
    counts = {name: ring.accepted for name, ring in case.rows[0].rings.items()}
    assert counts == {
        "fast": pytest.approx(2000, abs=2),
        "slow": pytest.approx(60, abs=2),
        "turn": pytest.approx(200, abs=2),
        "wrap": pytest.approx(200, abs=2),
    }
    assert all(ring.ledger.dropped == {} for ring in case.rows[0].rings.values())
    case.check()


def test_of_a_stream_on_request_there_is_one_sample_a_look_and_it_wakes_nobody() -> None:
    asked = {"rate_hz": None, "max_request_hz": 250.0}
    image = ImageConfig(height=4, width=6)
    case = Input(
        config(stream("q", reference=True, **asked), stream("eye", 0, image=image, **asked))
    )
    source = SyntheticSource(case.config, case.rows[0], 0, HOST)
    assert source.next_due_ns() == HOST  # the first is waited for
    rings = case.rows[0].rings
    for at_ms, accepted in ((0, 1), (3.9, 1), (4, 2), (50.5, 3), (51.9, 3), (52, 4)):
        source.drain(HOST + round(at_ms * MS))
        assert {ring.accepted for ring in rings.values()} == {accepted}
        assert source.next_due_ns() is None
    for ring in rings.values():
        stamps_ms = (np.array(held(ring)[0]) - HOST - CLOCK_OFFSET_NS) / MS
        assert stamps_ms.tolist() == [0, 4, 48, 52]
    frames = case.banks["eye"].values[0, :4]
    assert (frames[2] - frames[1] == 11).all()  # as if none had been left out
    case.check()


def test_a_look_at_the_moment_of_a_sample_ends_where_its_number_is_rounded_down() -> None:
    case = Input(config(stream("q", reference=True, rate_hz=None, max_request_hz=26.0)))
    source = SyntheticSource(case.config, case.rows[0], 0, HOST)
    source.drain(HOST)
    assert source.drain(HOST + 9500 * MS) == 1  # 247 periods
    assert source.drain(HOST + 9500 * MS + 1) <= 1
    case.check()


def test_jitter_is_as_declared_and_never_breaks_the_order() -> None:
    source, case = open_case()
    source.drain(HOST + 2 * S)
    rings = case.rows[0].rings
    for name, period_ms, jitter_ms in (
        ("fast", 1, 0.2),
        ("slow", 1000 / 30, 15.1),
        ("turn", 10, 0),
    ):
        stamps_ms = (np.array(held(rings[name])[0]) - HOST - CLOCK_OFFSET_NS) / MS
        off = np.abs(stamps_ms - period_ms * np.arange(len(stamps_ms)))
        assert off.max() <= jitter_ms + 1e-5
        assert off.max() >= 0.7 * jitter_ms


def test_a_sample_is_due_at_its_stamp_in_the_robot_s_own_clock() -> None:
    source, case = open_case()
    ring = case.rows[0].reference
    now = HOST
    for _ in range(700):  # across blocks
        source.drain(now)
        assert ring.newest_ns <= now + CLOCK_OFFSET_NS
        due = source.next_due_ns()
        assert due is not None
        assert due > now
        now = due
    assert ring.accepted > 500


def test_another_seed_gives_other_samples() -> None:
    (one, first), (other, second) = open_case(seed=3), open_case(seed=4)
    one.drain(HOST + S)
    other.drain(HOST + S)
    assert held(first.rows[0].reference)[1] != held(second.rows[0].reference)[1]


def test_values_are_smooth_and_of_their_kind() -> None:
    source, case = open_case()
    source.drain(HOST + 2 * S)
    values = {name: np.array(held(ring)[1]) for name, ring in case.rows[0].rings.items()}
    assert np.abs(np.diff(values["fast"], axis=0)).max() < 0.05
    assert np.linalg.norm(values["turn"], axis=1) == pytest.approx(1, abs=1e-6)
    assert np.abs(values["wrap"]).max() <= math.pi + 1e-6
    turned = (np.diff(values["wrap"], axis=0) + math.pi) % (2 * math.pi) - math.pi
    assert np.abs(turned).max() < 0.3


def test_a_batch_has_a_robot_in_every_row_at_moments_of_its_own() -> None:
    settings = config(stream("joints", rate_hz=100.0), rows=3)
    given = Input(settings)
    source = SyntheticRobots(settings, given.rows, seed=0, start_ns=0)
    source.drain(50 * MS)
    assert all(row.present for row in given.rows)
    assert len({row.reference.newest_ns for row in given.rows}) == 3
    source.close()
    assert not any(row.present for row in given.rows)
