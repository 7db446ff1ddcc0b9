import threading
from collections import Counter

import numpy as np
import pytest
from log_records import LEASE_NS, MS, envelope

from ppstream.core.durations import LABELS_MAX, OTHER, Histogram
from ppstream.core.interpreter import InterpreterPauses
from ppstream.observe.live_counters import (
    BLOCK,
    CHUNK,
    JUDGED,
    WAITS,
    LiveCounters,
    PolicyCounters,
    Rank0Counters,
    pop_all,
)
from ppstream.observe.log_writer import EnvelopeRecord, PolicyRecord, TimestampLog


def counted(records: list[EnvelopeRecord]) -> Rank0Counters:
    tally = Rank0Counters(LEASE_NS)
    for record in records:
        tally.record(record)
    tally.count()
    return tally


def sums_ns(tally: LiveCounters, family: str) -> dict[str, int]:
    return {label: found.sum_ns for label, found in tally.histograms.of(family).items()}


def test_envelope_is_counted_in_every_distribution_it_belongs_to():
    tally = counted([envelope(seq) for seq in range(4)])
    assert sums_ns(tally, "stage") == {"A": 8 * MS, "B": 20 * MS, "C": 12 * MS}
    assert sums_ns(tally, "period") == {"": 3 * 6 * MS}  # of four emits there are three
    assert sums_ns(tally, "latency") == {"": 4 * 12_500_000}
    assert sums_ns(tally, "queue") == {"d_in": 4 * MS, "d_out": 4 * MS}
    assert sums_ns(tally, "link") == {"": 4 * 500_000}
    assert sums_ns(tally, "emit_age") == {"": 4 * 13 * MS}
    assert sums_ns(tally, "observation_age") == {"imu": 12 * MS}
    assert tally.waits_ns["input"] == 4 * MS
    assert (tally.envelopes, tally.misses, dict(tally.drops)) == (4, 0, {})


def test_each_wait_and_the_link_have_their_own_total():
    waits = {f"w_{wait}_ns": 10**n for n, wait in enumerate(WAITS)}
    tally = counted([envelope(0, **waits, busy_link_ns=7), envelope(1, **waits), envelope(2)])
    expected = {wait: 2 * 10**n for n, wait in enumerate(WAITS)} | {"input": 2 + MS}
    assert (tally.waits_ns, tally.link_ns) == (expected, 7)


def test_the_devices_own_measure_counts_where_there_is_one():
    tally = counted([envelope(0, eA_ns=7), envelope(1, eB_ns=8), envelope(2, eC_ns=9)])
    assert sums_ns(tally, "stage") == {"A": 7 + 4 * MS, "B": 8 + 10 * MS, "C": 9 + 6 * MS}


@pytest.mark.parametrize("looks", [1, 3, 7, 2 * CHUNK])
def test_however_often_somebody_looks_the_numbers_are_the_same(looks):
    """Chunks end anywhere: amid an epoch, behind a drop, before a stream that is new."""
    changes = [{}, {"drop": "stale", "tEmit": None}, {"input_age_ns": {"arm": 1, "imu": 5}}]
    changes += [{"epoch": 1}, {"epoch": 1, "drop": "expired"}, {"epoch": 2, "input_age_ns": None}]
    records = [envelope(n, **changes[n // 2 % len(changes)]) for n in range(3 * CHUNK)]
    whole, often = counted(records), Rank0Counters(LEASE_NS)
    for number, record in enumerate(records):
        often.record(record)
        if number % looks == 0:
            often.count()
    often.count()
    families = ("stage", "queue", "link", "period", "latency", "emit_age", "observation_age")
    for family in families:
        found, expected = (t.histograms.of(family) for t in (often, whole))
        assert found.keys() == expected.keys() != set()
        for label, one in expected.items():
            assert found[label].sum_ns == one.sum_ns
            assert found[label].counts.tolist() == one.counts.tolist()
    for stage in "ABC":
        assert np.array_equal(often.recent[stage], whole.recent[stage])
    assert (
        [r.seq for r in often.newest]
        == [r.seq for r in whole.newest]
        == list(range(3 * CHUNK - JUDGED, 3 * CHUNK))
    )
    assert (often.misses, often.drops, often.waits_ns) == (
        whole.misses,
        whole.drops,
        whole.waits_ns,
    )
    assert often.envelopes == 3 * CHUNK


def test_what_is_kept_is_bounded_though_nobody_looks():
    tally = Rank0Counters(LEASE_NS)
    for seq in range(CHUNK + 1):
        tally.record(envelope(seq))
    assert tally.envelopes == CHUNK
    policy = PolicyCounters()
    for _ in range(CHUNK + 1):
        policy.line({"kind": "robot", "executed": 1, "age_ns": MS})
    assert sums_ns(policy, "action_age") == {"": CHUNK * MS}


def test_looking_from_another_thread_loses_nothing_and_counts_nothing_twice():
    tally, over = Rank0Counters(LEASE_NS), threading.Event()
    seen: list[Histogram] = []

    def look() -> None:
        while not over.is_set():
            tally.count()
            seen.append(tally.histograms.one("latency"))

    thread = threading.Thread(target=look)
    thread.start()
    records = [envelope(seq) for seq in range(20_000)]
    for record in records:
        tally.record(record)
    over.set()
    thread.join()
    tally.count()
    assert tally.envelopes == 20_000
    seen.append(tally.histograms.one("latency"))
    assert seen[-1].counts.sum() == 20_000
    assert all(one.sum_ns == one.counts.sum() * 12_500_000 for one in seen)  # of one moment
    totals = [one.sum_ns for one in seen]
    assert totals == sorted(totals)


def test_counting_leaves_the_loops_their_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    tally = Rank0Counters(LEASE_NS)
    for seq in range(4 * BLOCK):
        tally.record(envelope(seq))
    done: Counter[tuple[str, ...]] = Counter()  # what was counted by a pause

    def pause(pieces: InterpreterPauses) -> None:
        families = filter(tally.histograms.of, ("stage", "observation_age"))
        done[(*families, *tally.recent)] += 1

    monkeypatch.setattr(InterpreterPauses, "pause", pause)
    tally.count()
    assert done == {
        (): 4 + 2,  # while records are read, behind their drops, and before histograms
        ("stage",): 4 + 1,  # while ages are read, and before they are counted
        ("stage", "observation_age"): 1,
    }
    done.clear()
    for seq in range(4 * BLOCK):
        tally.record(envelope(seq, input_age_ns={"imu": [1, 2], "arm": [3, None]}))
    tally.count()
    assert done.total() == 12 + 2 * 4  # ages by row are gone through, too


class Growing(list[int]):
    """Another thread appends to it just behind the look."""

    def __getitem__(self, index: object) -> list[int]:
        found = super().__getitem__(index)
        self.append(9)
        return found


def test_what_comes_while_all_is_taken_stays():
    kept = Growing([1, 2])
    assert (pop_all(kept), list(kept)) == ([1, 2], [9])


def test_no_period_spans_an_epoch():
    records = [envelope(0), envelope(1, epoch=1)]
    assert sums_ns(counted(records), "period") == {}
    records += [envelope(2, epoch=1, drop="stale"), envelope(3, epoch=1)]
    assert sums_ns(counted(records), "period") == {"": 12 * MS}


def test_late_and_expired_envelopes_are_deadline_misses():
    assert counted([envelope(0, age_rank0_ns=LEASE_NS)]).misses == 0
    assert counted([envelope(1, age_rank0_ns=LEASE_NS + 1)]).misses == 1
    assert counted([envelope(1, age_rank0_ns=None)]).misses == 0
    expired = counted([envelope(2, drop="expired", tEmit=None, age_rank0_ns=2 * LEASE_NS)])
    assert (expired.misses, expired.drops) == (1, {"expired": 1})


def test_chunks_that_reach_a_robot_past_their_lease_are_deadline_misses():
    tally = Rank0Counters(LEASE_NS)
    for executed, age_ns in ((0, LEASE_NS), (0, LEASE_NS + 1), (2, LEASE_NS + 1)):
        tally.line({"kind": "robot", "executed": executed, "age_ns": age_ns})
    assert tally.misses == 1


def test_dropped_envelope_has_no_latency():
    tally = counted([envelope(0, drop="stale", eC_ns=9)])
    assert [sums_ns(tally, family) for family in ("latency", "emit_age")] == [{}, {}]
    assert sums_ns(tally, "stage") == {"A": 2 * MS, "B": 5 * MS}
    assert tally.drops == {"stale": 1}


def test_oldest_row_is_the_age_of_a_stream():
    ages = {"imu": [3 * MS, None, 7 * MS], "gone": [None, None, None]}
    assert sums_ns(counted([envelope(0, input_age_ns=ages)]), "observation_age") == {"imu": 7 * MS}


def test_windows_of_one_row_and_of_several_are_counted_together():
    ages = ({"imu": 1}, {"imu": [None, 2]}, {"imu": [3, 4, 5]}, {"imu": None, "arm": 6})
    tally = counted([envelope(seq, input_age_ns=each) for seq, each in enumerate(ages)])
    assert sums_ns(tally, "observation_age") == {"arm": 6, "imu": 1 + 2 + 5}


def test_spans_that_cannot_be_take_nothing_from_a_sum():
    shorter = envelope(0, residence_ns=4 * MS)  # than B
    longer = envelope(1, residence_ns=7 * MS)  # than from send to receive
    tally = counted([shorter, longer, envelope(2)])
    assert sums_ns(tally, "queue")["d_in"] == (0 + 2 + 1) * MS
    assert sums_ns(tally, "link") == {"": 2_500_000 + 0 + 500_000}


def test_reasons_are_bounded():
    tally = counted([envelope(0, drop=f"reason{n}", tEmit=None) for n in range(3 * LABELS_MAX)])
    assert len(tally.drops) == LABELS_MAX + 1
    assert tally.drops[OTHER] == 2 * LABELS_MAX


def test_lines_tell_phase_verdict_faults_ages_and_ledger():
    tally = PolicyCounters()
    tally.line({"kind": "event", "name": "phase", "phase": "ready"})
    tally.line({"kind": "event", "name": "verdict", "verdict": "PASS", "overlap": 0.9})
    tally.line({"kind": "event", "name": "fault", "fault": "exception"})
    tally.line({"kind": "robot", "executed": 0, "age_ns": 9})
    tally.line({"kind": "robot", "executed": 3, "age_ns": 40 * MS})
    balance = {"received": 3, "used": 1, "in_flight": 1, "dropped": {"late": 1}}
    tally.line({"kind": "ledger", "streams": {"imu": balance}, "envelopes": balance, "actions": {}})
    tally.line({"kind": "blocks", "blocks": {}})
    tally.count()
    assert (tally.phase, tally.verdict, tally.overlap) == ("ready", "PASS", 0.9)
    assert (tally.faults["exception"], tally.executed) == (1, 1)
    assert sums_ns(tally, "action_age") == {"": 40 * MS}
    assert tally.streams["imu"] == balance


def test_policy_rank_counts_what_must_not_happen_once_warm():
    tally = PolicyCounters()
    tally.record(PolicyRecord(tB0=10, tB1=30, wait_input_ns=5, residence_ns=25, recompiles=1))
    tally.record(PolicyRecord(eB_ns=7, tB0=10, tB1=30, wait_output_ns=2, idle_ns=4, busy_link_ns=3))
    tally.count()
    assert sums_ns(tally, "stage") == {"B": 27}
    assert sums_ns(tally, "residence") == {"": 25}
    assert (tally.recompiles, tally.idle_ns, tally.link_ns) == (1, 4, 3)
    assert tally.waits_ns == {"input": 5, "output": 2}


class Raising:
    def __init__(self) -> None:
        self.called = threading.Event()

    def record(self, record: object) -> None:
        self.called.set()
        raise ValueError("a bug of whoever watches")

    def line(self, line: object) -> None: ...


def test_log_shows_its_watchers_what_it_writes_and_outlives_them(tmp_path):
    log = TimestampLog(tmp_path / "log", EnvelopeRecord, 64, run_id="r", generation=0)
    broken, tally = Raising(), Rank0Counters(LEASE_NS)
    log.watchers += [broken, tally]
    for _ in range(3):
        log.commit(log.acquire())
        assert log.flush()
    log.event("phase", phase="ready")
    assert log.flush()
    log.close()
    assert broken.called.is_set()
    assert log.watchers == [tally]
    tally.count()
    assert (tally.envelopes, tally.phase) == (3, "ready")
    assert log.statistics().written == 4


def test_log_writes_its_mode_into_every_record(tmp_path):
    log = TimestampLog(tmp_path / "log", EnvelopeRecord, 64, run_id="r", generation=0)
    log.mode = "trace"
    taken = []
    log.on_acquire = lambda: taken.append(1)
    record = log.acquire()
    log.close()
    assert (record.mode, taken) == ("trace", [1])
