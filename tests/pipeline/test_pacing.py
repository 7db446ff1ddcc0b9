import numpy as np
import pytest
from pipeline_in_process import small_config

from ppstream.core.clock import NS_PER_MS
from ppstream.ingest.intake import build_intake
from ppstream.pipeline.pacing import OnRows, OnSample, OnTick, Saturated, service_pacing


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


BLIND = {"state": True}  # of a policy that does not look at what is valid


def test_a_sample_begins_a_window_once_the_streams_have_come_that_the_policy_needs():
    (row,) = build_intake(small_config(), BLIND).rows
    row.open(7)
    pacing = OnSample([row], "joints")
    add(row, "joints", 1)
    assert not pacing.due(0)
    pacing.started()  # another row's sample
    add(row, "imu", 1)
    assert pacing.due(0)
    pacing.started()
    assert not pacing.due(0)


@pytest.mark.parametrize("stream", ["joints", None])
def test_samples_of_a_row_that_awaits_its_text_begin_a_window_once_it_has_it(row, stream):
    pacing = OnSample([row], stream)
    row.awaits_text = True
    add(row, "joints", 1)
    assert not pacing.due(0)
    pacing.started()  # another row's sample
    row.awaits_text = False
    assert pacing.due(0)
    pacing.started()
    assert not pacing.due(0)


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


def paced(row, *settings):
    return service_pacing(small_config(*settings), [row], 0, lambda: 0)


@pytest.mark.parametrize(
    ("text", "name"), [("sample", "sample"), ("sample:imu", "sample"), ("free", "free")]
)
def test_configuration_names_the_pacing(row, text, name):
    assert paced(row, f"pipeline.pacing={text}").name == name


def test_plain_sample_means_the_reference_stream(row):
    pacing = paced(row, "pipeline.pacing=sample")
    add(row, "imu", 1)
    assert not pacing.due(0)
    add(row, "joints", 1)
    assert pacing.due(0)


GATHER, LEASE = 10, 100  # ms


class Batch:
    """Three robots under ``OnRows``, in milliseconds; envelopes end when the test says so."""

    def __init__(self):
        self.rows = build_intake(small_config("batch.rows=3")).rows
        self.finished = 40  # of bring-up
        times_ns = (GATHER * NS_PER_MS, LEASE * NS_PER_MS)
        self.pacing = OnRows(self.rows, *times_ns, lambda: self.finished)
        for number, row in enumerate(self.rows):
            row.open(1 + number)

    def send(self, at, *rows):
        for row in rows:
            add(self.rows[row], "joints", at * NS_PER_MS)

    def due(self, at):
        return self.pacing.due(round(at * NS_PER_MS))

    def begin(self, at):
        assert self.due(at)
        assert list(self.pacing.started()) == [None] * 3

    @property
    def due_at(self):
        due_ns = self.pacing.due_ns()
        return None if due_ns is None else due_ns / NS_PER_MS


@pytest.fixture
def batch():
    """All three have sent once, and have their answers."""
    batch = Batch()
    batch.send(1, 0, 1, 2)
    batch.begin(1)
    batch.finished += 1
    assert not batch.due(2)
    assert batch.due_at is None
    return batch


def test_rows_begin_with_the_last_robots_new_sample(batch):
    batch.send(20, 0)
    assert not batch.due(20)
    batch.send(22, 2)
    assert not batch.due(22)
    batch.send(25, 1)
    batch.begin(25)
    assert batch.due_at is None


def test_rows_begin_without_the_rest_gather_ms_behind_the_first_sample(batch):
    batch.send(20, 0)
    assert not batch.due(23)  # looked at late: the time counts from the sample
    batch.send(29, 1, 0)  # further samples gain nobody more time
    assert batch.due_at == 20 + GATHER
    assert not batch.due(29.999)
    batch.begin(20 + GATHER)


def test_a_robot_that_lacks_a_stream_has_its_window_once_that_has_come(batch):
    batch.rows = build_intake(small_config("batch.rows=3"), BLIND).rows
    batch.pacing = OnRows(batch.rows, GATHER * NS_PER_MS, LEASE * NS_PER_MS, lambda: batch.finished)
    for number, row in enumerate(batch.rows):
        row.open(1 + number)
    add(batch.rows[0], "imu", 1 * NS_PER_MS)
    batch.send(1, 0, 1)
    batch.begin(1)  # without the second: its other stream is on its way
    batch.finished += 1
    assert not batch.due(2)
    add(batch.rows[1], "imu", 1 * NS_PER_MS)
    batch.begin(1 + GATHER)


def test_a_robot_whose_answer_is_under_way_is_waited_for_until_gather_ms_behind_it(batch):
    batch.send(20, 0, 1)
    assert not batch.due(20)
    batch.begin(30)
    batch.send(31, 2)
    assert not batch.due(69)  # an envelope now could not overtake theirs
    assert batch.due_at is None  # the answer ends the wait, not the clock
    batch.finished += 1
    assert not batch.due(70)
    assert batch.due_at == 70 + GATHER
    batch.send(75, 0, 1)
    batch.begin(75)  # together from now on
    batch.finished += 1
    batch.send(90, 0)
    batch.send(92, 2)
    assert not batch.due(95)
    assert batch.due_at == 90 + GATHER  # no answer was seen under way: from the first sample


def test_who_does_not_come_back_behind_an_answer_costs_gather_ms(batch):
    batch.send(20, 0, 1)
    assert not batch.due(20)
    batch.begin(30)
    batch.send(31, 2)
    assert not batch.due(60)
    batch.finished += 1
    assert not batch.due(70)
    batch.begin(70 + GATHER)


def test_one_answer_of_several_under_way_does_not_begin_the_time(batch):
    batch.send(20, 0)
    assert not batch.due(20)
    batch.begin(30)
    batch.send(31, 1)
    batch.finished += 1
    assert not batch.due(32)
    batch.begin(42)  # robot 2 has no answer to wait for
    batch.send(43, 0)
    assert not batch.due(60)
    assert batch.due_at is None
    batch.finished += 1
    assert not batch.due(61)
    assert batch.due_at == 61 + GATHER


def test_robots_that_send_by_themselves_wait_for_no_answer(batch):
    for at in (20, 40, 60):
        batch.send(at, 0, 1, 2)
        batch.begin(at)  # though nothing is finished


def test_a_robot_that_was_silent_for_a_lease_is_not_waited_for(batch):
    batch.send(20, 0, 1)
    assert not batch.due(20)
    batch.begin(30)
    batch.finished += 1
    batch.send(LEASE, 0, 1)
    assert not batch.due(LEASE)  # robot 2 sent at 1
    assert batch.due(1 + LEASE)


@pytest.mark.parametrize("leave", ["close", "new_episode"])
def test_a_robot_that_leaves_or_begins_anew_is_not_waited_for(batch, leave):
    batch.send(20, 0, 1)
    assert not batch.due(20)
    getattr(batch.rows[2], leave)()
    batch.begin(21)
    batch.send(22, 2) if leave == "new_episode" else batch.rows[2].open(9)
    batch.finished += 1
    batch.send(23, 0, 1)
    batch.begin(23)


def test_a_robot_that_leaves_with_the_only_new_sample_begins_nothing(batch):
    batch.send(20, 0)
    assert not batch.due(20)
    batch.rows[0].new_episode()
    assert not batch.due(60)
    assert batch.due_at is None


def test_the_configuration_sets_the_times_of_rows(row):
    pacing = paced(row, "pipeline.pacing=rows", "pipeline.gather_ms=7")
    add(row, "imu", 1)
    assert not pacing.due(1)
    add(row, "joints", 1)
    assert pacing.due(1)  # the only robot waits for nobody
    assert pacing.due_ns() == 7 * NS_PER_MS + 1
