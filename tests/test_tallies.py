import threading
from itertools import pairwise

from ppstream.tallies import (
    BUCKETS_NS,
    LABELS_MAX,
    OTHER,
    Histogram,
    Histograms,
    PolicyTally,
    Rank0Tally,
)
from ppstream.timestamps import EnvelopeRecord, Stage1Record, TimestampLog

MS = 1_000_000


def envelope(seq: int, **changes: object) -> EnvelopeRecord:
    """One of a pipeline with A 2, wait 1, B 5, decode wait 1, C 3 ms, and 0.5 ms of transfers."""
    t0 = seq * 6 * MS
    record = EnvelopeRecord(
        kind="envelope",
        epoch=0,
        seq=seq,
        mode="throughput",
        phase="ready",
        tA0=t0,
        tA1=t0 + 2 * MS,
        tSend=t0 + 2 * MS,
        tRecv=t0 + 2 * MS + 6_500_000,
        tDecode=t0 + 2 * MS + 7_500_000,
        tEmit=t0 + 2 * MS + 10_500_000,
        B_ns=5 * MS,
        residence_ns=6 * MS,
        w_input_ns=MS,
        age_rank0_ns=13 * MS,
        window_end_ns=100,
        expires_ns=100 + 20 * MS,
        input_age_ns={"imu": 3 * MS},
    )
    for name, value in changes.items():
        setattr(record, name, value)
    return record


def test_envelope_is_counted_in_every_distribution_it_belongs_to():
    tally = Rank0Tally()
    for seq in range(4):
        tally.record(envelope(seq))
    sums = {stage: found.sum_ns for stage, found in tally.stages.items()}
    assert sums == {"A": 8 * MS, "B": 20 * MS, "C": 12 * MS}
    assert tally.period.sum_ns == 3 * 6 * MS  # of four emits there are three
    assert tally.latency.sum_ns == 4 * 12_500_000
    assert tally.queues["d_in"].sum_ns == 4 * MS
    assert tally.queues["d_out"].sum_ns == 4 * MS
    assert tally.link.sum_ns == 4 * 500_000
    assert tally.waits_ns["input"] == 4 * MS
    assert tally.observation_ages["imu"].sum_ns == 12 * MS
    assert (tally.envelopes, tally.misses, dict(tally.drops)) == (4, 0, {})


def test_no_period_spans_an_epoch():
    tally = Rank0Tally()
    tally.record(envelope(0))
    tally.record(envelope(1, epoch=1))
    assert tally.period.sum_ns == 0
    tally.record(envelope(2, epoch=1))
    assert tally.period.sum_ns == 6 * MS


def test_late_and_expired_envelopes_are_deadline_misses():
    tally = Rank0Tally()
    tally.record(envelope(0, age_rank0_ns=20 * MS))
    assert tally.misses == 0
    tally.record(envelope(1, age_rank0_ns=20 * MS + 1))
    tally.record(envelope(2, drop="expired", tEmit=None, age_rank0_ns=None))
    assert tally.misses == 2
    assert tally.drops == {"expired": 1}
    rows = {"window_end_ns": [100, 0], "expires_ns": [100 + 5 * MS, 0]}  # the second row is empty
    tally.record(envelope(3, **rows))
    assert tally.misses == 3


def test_dropped_envelope_has_no_latency():
    tally = Rank0Tally()
    tally.record(envelope(0, drop="stale", tEmit=None))
    assert tally.latency.sum_ns == 0
    assert tally.drops == {"stale": 1}


def test_oldest_row_is_the_age_of_a_stream():
    tally = Rank0Tally()
    tally.record(envelope(0, input_age_ns={"imu": [3 * MS, None, 7 * MS], "gone": [None]}))
    assert tally.observation_ages["imu"].sum_ns == 7 * MS
    assert "gone" not in tally.observation_ages


def test_a_quantile_is_never_far_off_where_stages_and_ages_lie():
    near = [b for b in BUCKETS_NS if MS // 10 <= b <= 100 * MS]
    assert (near[0], near[-1]) == (MS // 10, 100 * MS)
    assert max(after / before for before, after in pairwise(near)) < 1.7


def test_values_fall_into_the_bucket_whose_bound_they_do_not_exceed():
    found = Histogram()
    for value_ns in (0, BUCKETS_NS[0], BUCKETS_NS[0] + 1, BUCKETS_NS[-1] + 1):
        found.add(value_ns)
    assert (found.counts[0], found.counts[1], found.counts[-1]) == (2, 1, 1)


def test_recent_quantiles_are_exact():
    found = Histogram()
    assert found.quantiles_ns((0.5, 0.99)) == []
    for value in range(1, 2001):
        found.add(value)
    assert found.quantiles_ns((0.5, 0.95, 0.99)) == [1500, 1950, 1990]


def test_labels_are_bounded():
    many = Histograms()
    for number in range(3 * LABELS_MAX):
        many[f"stream{number}"].add(1)
    assert len(many) == LABELS_MAX + 1
    assert many[OTHER].sum_ns == 2 * LABELS_MAX
    tally = Rank0Tally()
    for number in range(3 * LABELS_MAX):
        tally.record(envelope(0, drop=f"reason{number}", tEmit=None))
    assert len(tally.drops) == LABELS_MAX + 1
    assert tally.drops.total() == 3 * LABELS_MAX


def test_lines_tell_phase_verdict_faults_ages_and_ledger():
    tally = PolicyTally()
    tally.line({"kind": "event", "name": "phase", "phase": "ready"})
    tally.line({"kind": "event", "name": "verdict", "verdict": "PASS", "overlap": 0.9})
    tally.line({"kind": "event", "name": "fault", "fault": "exception"})
    tally.line({"kind": "robot", "executed": 0, "age_ns": 9})
    tally.line({"kind": "robot", "executed": 3, "age_ns": 40 * MS})
    balance = {"received": 3, "used": 1, "in_flight": 1, "dropped": {"late": 1}}
    tally.line({"kind": "ledger", "streams": {"imu": balance}, "envelopes": balance})
    tally.line({"kind": "blocks", "blocks": {}})
    assert (tally.phase, tally.verdict, tally.overlap) == ("ready", "PASS", 0.9)
    assert (tally.faults["exception"], tally.executed, tally.action_age.sum_ns) == (1, 1, 40 * MS)
    assert tally.streams["imu"] == balance


def test_policy_rank_counts_what_must_not_happen_once_warm():
    tally = PolicyTally()
    record = Stage1Record(tB0=10, tB1=30, wait_input_ns=5, residence_ns=25, recompiles=1)
    tally.record(record)
    assert tally.stages["B"].sum_ns == 20
    assert (tally.recompiles, tally.waits_ns["input"]) == (1, 5)


class Raising:
    def __init__(self) -> None:
        self.called = threading.Event()

    def record(self, record: object) -> None:
        self.called.set()
        raise ValueError("a bug of whoever watches")

    def line(self, line: object) -> None: ...


def test_log_shows_its_watchers_what_it_writes_and_outlives_them(tmp_path):
    log = TimestampLog(tmp_path / "log", EnvelopeRecord, 64, run_id="r", generation=0)
    broken, tally = Raising(), Rank0Tally()
    log.watchers += [broken, tally]
    for _ in range(3):
        log.commit(log.take())
        assert log.flush()
    log.event("phase", phase="ready")
    assert log.flush()
    log.close()
    assert broken.called.is_set()
    assert log.watchers == [tally]
    assert (tally.envelopes, tally.phase) == (3, "ready")
    assert log.statistics().written == 4


def test_log_writes_its_mode_into_every_record(tmp_path):
    log = TimestampLog(tmp_path / "log", EnvelopeRecord, 64, run_id="r", generation=0)
    log.mode = "trace"
    taken = []
    log.on_take = lambda: taken.append(1)
    record = log.take()
    log.close()
    assert (record.mode, taken) == ("trace", [1])
