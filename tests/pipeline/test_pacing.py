import numpy as np
import pytest
from pipeline_in_process import small_config

from ppstream.core.clock import NS_PER_MS
from ppstream.ingest.intake import build_intake
from ppstream.pipeline.pacing import OnSample, OnTick, Saturated, service_pacing


@pytest.fixture
def row():
    (row,) = build_intake(small_config()).rows
    row.open(7)
    return row


def add(row, stream: str, stamp_ns: int) -> None:
    ring = row.rings[stream]
    values = np.zeros((1, 3 if stream == "joints" else 2), np.float32)
    assert ring.append(np.array([stamp_ns]), values, stamp_ns) == 1


def test_saturated_needs_data_once_and_never_again(row):
    pacing = Saturated([row])
    assert not pacing.due(0)
    add(row, "joints", 1)
    assert pacing.due(0)
    assert list(pacing.started()) == [None]
    assert pacing.due(0)


def test_sample_pacing_starts_once_per_new_sample_of_its_stream(row):
    pacing = OnSample([row], "joints")
    add(row, "imu", 1)
    assert not pacing.due(0)
    add(row, "joints", 1)
    add(row, "joints", 2)
    assert pacing.due(0)
    pacing.started()
    assert not pacing.due(0)  # both samples are in the window: the newest wins
    add(row, "joints", 3)
    assert pacing.due(0)


def test_free_pacing_starts_on_any_stream(row):
    pacing = OnSample([row], None)
    add(row, "joints", 1)
    pacing.started()
    add(row, "imu", 2)
    assert pacing.due(0)


def test_ticks_that_pass_while_a_cannot_start_are_counted_as_missed(row):
    add(row, "joints", 1)
    pacing = OnTick([row], tick_hz=100, start_ns=0)
    assert not pacing.due(9 * NS_PER_MS)
    assert pacing.due(10 * NS_PER_MS)
    assert pacing.due(35 * NS_PER_MS)  # not started yet: two more went by
    assert pacing.missed == 2
    pacing.started()
    assert not pacing.due(36 * NS_PER_MS)
    assert pacing.due_ns() == 40 * NS_PER_MS


@pytest.mark.parametrize(
    ("text", "name"), [("sample", "sample"), ("sample:imu", "sample"), ("free", "free")]
)
def test_configuration_names_the_pacing(row, text, name):
    assert service_pacing(small_config(f"pipeline.pacing={text}"), [row], 0).name == name


def test_plain_sample_means_the_reference_stream(row):
    pacing = service_pacing(small_config("pipeline.pacing=sample"), [row], 0)
    add(row, "imu", 1)
    assert not pacing.due(0)
    add(row, "joints", 1)
    assert pacing.due(0)
