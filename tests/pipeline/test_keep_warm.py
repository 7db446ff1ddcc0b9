from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from pipeline_in_process import NewestValues, PipelineInProcess, small_config

from ppstream.core.clock import NS_PER_MS, NS_PER_S, now_ns
from ppstream.core.rhythm import AHEAD_NS
from ppstream.core.waiter import Waiter
from ppstream.pipeline.keep_warm import (
    EARLY_NS,
    GATHERED_NS,
    LATE_NS,
    LONGEST_NS,
    LOOK_NS,
    PAUSE_NS,
    SHARED_NS,
    TAKEN_MAX,
    KeepWarm,
)


class Events:
    """The part of a log that is used."""

    def __init__(self) -> None:
        self.told: list[tuple[str, dict[str, Any]]] = []

    def event(self, name: str, **fields: Any) -> None:
        self.told.append((name, fields))


@pytest.fixture(autouse=True)
def _no_spare_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ppstream.pipeline.keep_warm.has_spare_cpus", lambda: False)


@pytest.fixture
def waiter() -> Any:
    waiter = Waiter()
    yield waiter
    waiter.close()


def in_step(warm: KeepWarm, next_ns: int, step_ns: int = 20 * NS_PER_MS) -> None:
    """Envelopes began so often that the next is expected at ``next_ns``."""
    for ago in range(9, 0, -1):
        warm.began(next_ns - ago * step_ns)


def ready_for_one(get_ready: Any) -> tuple[KeepWarm, Events]:
    events = Events()
    log: Any = events
    return KeepWarm(log, get_ready), events


class Coming:
    """A waiter on whose clock something comes ``late_ns`` after each wait began, or nothing."""

    woken = False

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns, self.late_ns = 10**12, 0
        self.awake: list[tuple[int, int]] = []  # spans of waits that did not sleep
        self.dry_runs: list[int] = []
        monkeypatch.setattr("ppstream.pipeline.keep_warm.now_ns", lambda: self.now_ns)

    def wait(self, limit_ns: int) -> list[int]:
        is_there = self.late_ns <= limit_ns
        self.now_ns += min(limit_ns, self.late_ns)
        self.late_ns -= min(limit_ns, self.late_ns)
        return [7] if is_there else []

    def wait_awake(self, limit_ns: int, look_ns: int | None = None) -> list[int]:
        began_ns = self.now_ns
        self.look_ns = look_ns
        found = self.wait(limit_ns)
        self.awake.append((began_ns, self.now_ns))
        return found


def test_a_wait_has_one_dry_run_before_an_envelope_is_expected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    coming, runs = Coming(monkeypatch), list[int]()
    waiter: Any = coming
    coming.late_ns = NS_PER_S

    def get_ready() -> None:
        runs.append(coming.now_ns)
        coming.now_ns += 1

    warm, events = ready_for_one(get_ready)
    began_ns = coming.now_ns
    expected_ns = began_ns + 5 * NS_PER_MS
    in_step(warm, expected_ns, 40 * NS_PER_MS)
    assert [warm.expects(phase) for phase in ("ready", "bring-up")] == [True, False]
    assert not warm.wait(waiter, 20 * NS_PER_MS, "ready")
    assert coming.now_ns >= began_ns + 20 * NS_PER_MS
    assert runs == [expected_ns - AHEAD_NS]
    assert not events.told


def test_of_envelopes_out_of_step_and_in_bring_up_there_is_none(waiter: Waiter) -> None:
    runs: list[int] = []
    warm, _ = ready_for_one(lambda: runs.append(1))
    in_step(warm, now_ns() + 5 * NS_PER_MS)
    warm.wait(waiter, 8 * NS_PER_MS, "bring-up")
    in_step(warm, now_ns() + 5 * NS_PER_MS)
    warm.began(now_ns())
    assert not warm.expects("ready")
    warm.wait(waiter, 8 * NS_PER_MS, "ready")
    assert not runs


@pytest.mark.parametrize(
    ("gathering_ms", "ahead_ms"),
    [(2, 2), (GATHERED_NS / NS_PER_MS, 0)],
    ids=["came for it", "came for another"],
)
def test_an_envelope_is_expected_when_the_first_of_its_samples_comes(
    monkeypatch: pytest.MonkeyPatch, gathering_ms: float, ahead_ms: int
) -> None:
    coming, runs = Coming(monkeypatch), list[int]()
    waiter: Any = coming

    def get_ready() -> None:
        runs.append(coming.now_ns)
        coming.now_ns += 1

    warm, _ = ready_for_one(get_ready)
    for _ in range(9):
        coming.late_ns = round((20 - gathering_ms) * NS_PER_MS)
        assert warm.wait(waiter, 10**9, "ready")
        coming.late_ns = round(gathering_ms * NS_PER_MS)
        assert warm.wait(waiter, 10**9, "ready")
        warm.began(coming.now_ns)
    runs.clear()
    next_ns = coming.now_ns + 20 * NS_PER_MS
    coming.late_ns = 10**9
    warm.wait(waiter, 30 * NS_PER_MS, "ready")
    assert runs == pytest.approx([next_ns - ahead_ms * NS_PER_MS - AHEAD_NS], abs=100, rel=0)


def test_a_dry_run_begins_so_early_that_it_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    coming, ends_ns = Coming(monkeypatch), list[int]()
    waiter: Any = coming

    def takes_long() -> None:
        coming.now_ns += 8 * LONGEST_NS // 10
        coming.late_ns = max(0, coming.late_ns - 8 * LONGEST_NS // 10)
        ends_ns.append(coming.now_ns)

    warm, _ = ready_for_one(takes_long)
    for _ in range(60):
        coming.late_ns = 20 * NS_PER_MS
        assert warm.wait(waiter, 10**9, "ready")
        warm.began(coming.now_ns)
    assert len(ends_ns) > 50
    assert coming.now_ns - ends_ns[-1] == pytest.approx(AHEAD_NS, rel=0.1)


def awake_for_envelopes(
    monkeypatch: pytest.MonkeyPatch, *, taken: list[bool], late_ns: int = 0, has_cpus: bool = True
) -> list[tuple[int, int]]:
    """Of each envelope, one a list item, 20 ms apart: since the expected instant, the span awake.

    Another thread takes the CPU in those that say so.
    """
    monkeypatch.setattr("ppstream.pipeline.keep_warm.has_spare_cpus", lambda: has_cpus)
    coming, count, takes = Coming(monkeypatch), [0, 0], [False]
    waiter: Any = coming

    def preemptions() -> int:  # before each wait and behind it
        count[0] += 1
        count[1] += count[0] % 2 == 0 and takes[0]
        return count[1]

    monkeypatch.setattr("ppstream.pipeline.keep_warm.preemptions", preemptions)

    def get_ready() -> None:
        coming.now_ns += 1
        coming.late_ns -= 1

    warm, _ = ready_for_one(get_ready)
    spans = []
    for takes[0] in taken:
        expected_ns = coming.now_ns + 20 * NS_PER_MS
        in_step(warm, expected_ns)
        coming.late_ns = 20 * NS_PER_MS + late_ns
        coming.awake.clear()
        assert warm.wait(waiter, NS_PER_S, "ready") == [7]
        assert coming.now_ns == expected_ns + late_ns
        spans += [(a - expected_ns, b - expected_ns) for a, b in coming.awake] or [(0, 0)]
    assert not any(map(any, spans)) or coming.look_ns == LOOK_NS
    return spans


def test_between_a_dry_run_and_its_envelope_a_cpu_to_spare_stays_awake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quiet, begins_ns = [False] * 4, 1 - AHEAD_NS
    awake = awake_for_envelopes(monkeypatch, taken=quiet)
    assert awake == [(pytest.approx(begins_ns, abs=9), 0)] * 4
    awake = awake_for_envelopes(monkeypatch, taken=quiet, late_ns=3 * LATE_NS)
    assert awake == [(pytest.approx(begins_ns, abs=9), LATE_NS)] * 4
    assert awake_for_envelopes(monkeypatch, taken=quiet, has_cpus=False) == [(0, 0)] * 4


def test_a_cpu_that_another_thread_takes_again_and_again_is_left_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    awake = (pytest.approx(1 - AHEAD_NS, abs=9), 0)
    now_and_then = ([True] * (TAKEN_MAX - 1) + [False]) * 3
    spans = awake_for_envelopes(monkeypatch, taken=now_and_then)
    assert spans == [awake] * len(now_and_then)
    paused = SHARED_NS // (20 * NS_PER_MS)
    spans = awake_for_envelopes(monkeypatch, taken=[True] * TAKEN_MAX + [False] * (paused + 5))
    assert spans[:TAKEN_MAX] == [awake] * TAKEN_MAX
    assert spans[TAKEN_MAX : TAKEN_MAX + paused - 2] == [(0, 0)] * (paused - 2)
    assert spans[-3:] == [awake] * 3


def with_one_on_its_way(coming: Coming, took_ms: float, dry_run_ms: float = 0) -> KeepWarm:
    """Results take ``took_ms``; one envelope has just left, and a dry run took ``dry_run_ms``."""

    def get_ready() -> None:
        coming.dry_runs.append(coming.now_ns)
        coming.now_ns += 1 + round(dry_run_ms * NS_PER_MS)

    waiter: Any = coming
    warm, _ = ready_for_one(get_ready)
    for _ in range(3):
        warm.sent_ns = coming.now_ns
        warm.answered(coming.now_ns + round(took_ms * NS_PER_MS))
    coming.late_ns = 10**12
    in_step(warm, coming.now_ns + 2 * NS_PER_MS, 60 * NS_PER_MS)
    warm.wait(waiter, 3 * NS_PER_MS, "ready")
    in_step(warm, coming.now_ns + 50 * NS_PER_MS, 60 * NS_PER_MS)
    warm.sent_ns = coming.now_ns
    coming.dry_runs.clear()
    return warm


@pytest.mark.parametrize(("took_ms", "dry_runs"), [(0.1, 0), (5, 1)])
def test_a_result_is_awaited_awake_and_warm_about_when_it_is_due(
    monkeypatch: pytest.MonkeyPatch, took_ms: float, dry_runs: int
) -> None:
    coming = Coming(monkeypatch)
    waiter: Any = coming
    warm, began_ns = with_one_on_its_way(coming, took_ms), coming.now_ns
    assert not warm.wait(waiter, 20 * NS_PER_MS, "ready")
    due_ns = began_ns + round(took_ms * NS_PER_MS)
    awake_ns = max(began_ns, due_ns - EARLY_NS)
    assert coming.awake == [pytest.approx((awake_ns, due_ns + LATE_NS), abs=9, rel=0)]
    assert coming.dry_runs == pytest.approx([awake_ns] * dry_runs, abs=9, rel=0)
    assert coming.now_ns == began_ns + 20 * NS_PER_MS
    assert not warm.wait(waiter, 2 * NS_PER_MS, "ready")
    assert len(coming.awake) == 1  # so late it may take any time


@pytest.mark.parametrize("next_ms", [5.3, 5.7, 9])
def test_the_cpu_stays_awake_for_who_asks_again_at_the_answer(
    monkeypatch: pytest.MonkeyPatch, next_ms: float
) -> None:
    monkeypatch.setattr("ppstream.pipeline.keep_warm.has_spare_cpus", lambda: True)
    coming = Coming(monkeypatch)
    waiter: Any = coming
    warm, began_ns = with_one_on_its_way(coming, 5), coming.now_ns
    expected_ns = began_ns + round(next_ms * NS_PER_MS)
    in_step(warm, expected_ns, 60 * NS_PER_MS)
    coming.late_ns = 5 * NS_PER_MS
    while not warm.wait(waiter, 20 * NS_PER_MS, "ready"):
        pass
    warm.answered(coming.now_ns)
    answered_ns, coming.late_ns = coming.now_ns, 10**12
    coming.awake.clear()
    assert not warm.wait(waiter, 20 * NS_PER_MS, "ready")
    begin_ns, end_ns = coming.awake[0]
    assert end_ns == pytest.approx(expected_ns + LATE_NS, abs=9, rel=0)
    is_at_once = next_ms < 9
    assert begin_ns == pytest.approx(
        answered_ns if is_at_once else expected_ns - AHEAD_NS, abs=9, rel=0
    )
    assert len(coming.dry_runs) == (1 if is_at_once else 2)


@pytest.mark.parametrize("case", ["none", "in bring-up", "dry runs take long", "not yet"])
def test_of_no_result_that_is_due_soon_the_wait_sleeps(
    monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    coming = Coming(monkeypatch)
    waiter: Any = coming
    warm = with_one_on_its_way(coming, 5, dry_run_ms=16 if case == "dry runs take long" else 0)
    if case == "none":
        warm.sent_ns = None
    limit_ms = 4 if case == "not yet" else 20
    warm.wait(waiter, limit_ms * NS_PER_MS, "bring-up" if case == "in bring-up" else "ready")
    assert not coming.awake


def test_a_result_that_was_late_hardly_counts_and_a_slower_policy_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    coming = Coming(monkeypatch)
    waiter: Any = coming
    warm = with_one_on_its_way(coming, 5)
    warm.answered(coming.now_ns + 500 * NS_PER_MS)

    def due_ms() -> float:
        warm.sent_ns, began_ns = coming.now_ns, coming.now_ns
        in_step(warm, coming.now_ns + 150 * NS_PER_MS, 160 * NS_PER_MS)
        warm.wait(waiter, 100 * NS_PER_MS, "ready")
        return (coming.awake.pop()[0] + EARLY_NS - began_ns) / NS_PER_MS

    assert due_ms() == pytest.approx(5, rel=0.05)
    for _ in range(200):
        warm.sent_ns = coming.now_ns
        warm.answered(coming.now_ns + 40 * NS_PER_MS)
    assert due_ms() == pytest.approx(40, rel=0.05)


@pytest.mark.parametrize(
    ("more", "cpus", "is_awaited"),
    [
        ("pipeline.d_in=1", {0, 1}, True),
        ("pipeline.d_in=1", {0}, False),
        ("pipeline.d_in=2", {0, 1}, False),
        ("pipeline.d_in=1 pipeline.threads=split", {0, 1}, False),
    ],
    ids=["alone", "the policy rank's CPU", "several under way", "another thread receives"],
)
def test_rank_0_looks_for_the_result_of_a_lone_envelope_beside_the_policy_rank(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    more: str,
    cpus: set[int],
    *,
    is_awaited: bool,
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: cpus)
    monkeypatch.setattr("ppstream.pipeline.host_executor.thread_cpus", lambda _: {"r1": [0]})
    looked_for, answered = list[bool](), KeepWarm.answered

    def note(warm: KeepWarm, at_ns: int) -> None:
        looked_for.append(warm.sent_ns is not None)
        answered(warm, at_ns)

    monkeypatch.setattr(KeepWarm, "answered", note)
    config = small_config("simulate.a_ms=0", "simulate.c_ms=0", *more.split())
    policy = NewestValues(lambda _: time.sleep(0.01))  # the next is there before its result
    with PipelineInProcess(config, policy, tmp_path) as pipeline:
        pipeline.saturate()
        pipeline.rank0.run(5)
    assert looked_for == [is_awaited] * 5


def test_what_comes_before_an_expected_envelope_ends_the_wait_without_a_dry_run(
    waiter: Waiter,
) -> None:
    runs: list[int] = []
    warm, _ = ready_for_one(lambda: runs.append(1))
    in_step(warm, now_ns() + 500 * NS_PER_MS, 600 * NS_PER_MS)
    waiter.wake()
    assert not warm.wait(waiter, 10**12, "ready")
    assert waiter.woken
    assert not runs


class UnreadableError(Exception):
    """Its text cannot be had."""

    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (ValueError("no more"), "ValueError: no more"),
        (ValueError("caf\udce9.npz"), "ValueError: caf\\udce9.npz"),
        (UnreadableError(), "UnreadableError: <its text cannot be shown: RuntimeError>"),
    ],
)
def test_a_dry_run_before_an_envelope_that_raises_was_the_last(
    monkeypatch: pytest.MonkeyPatch, error: Exception, why: str
) -> None:
    def raises() -> None:
        raise error

    coming = Coming(monkeypatch)
    waiter: Any = coming
    coming.late_ns = NS_PER_S
    warm, events = ready_for_one(raises)
    in_step(warm, coming.now_ns + 2 * NS_PER_MS)
    warm.wait(waiter, 4 * NS_PER_MS, "ready")
    assert events.told == [("keep_warm_ended", {"why": why})]
    assert not warm.expects("ready")


def test_behind_dry_runs_before_envelopes_that_take_long_there_is_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    coming, ends_ns = Coming(monkeypatch), list[int]()
    waiter: Any = coming
    coming.late_ns = NS_PER_S

    def takes_long() -> None:
        coming.now_ns += 16 * LONGEST_NS
        ends_ns.append(coming.now_ns)

    warm, events = ready_for_one(takes_long)
    in_step(warm, coming.now_ns + 2 * NS_PER_MS)
    warm.wait(waiter, 60 * NS_PER_MS, "ready")
    assert not warm.expects("ready")
    in_step(warm, ends_ns[-1] + PAUSE_NS - NS_PER_MS, 40 * NS_PER_MS)
    assert not warm.expects("ready")
    in_step(warm, ends_ns[-1] + PAUSE_NS + 10 * NS_PER_MS, 40 * NS_PER_MS)
    assert warm.expects("ready")
    assert not events.told
    assert len(ends_ns) == 1


def test_a_window_and_a_policy_get_ready_and_nothing_is_accounted_for(tmp_path: Path) -> None:
    config, policy = small_config("simulate.a_ms=0", "simulate.c_ms=0"), NewestValues()
    with PipelineInProcess(config, policy, tmp_path) as pipeline:
        pipeline.saturate()
        pipeline.rank0.run(5)
        rings = [ring for row in pipeline.intake.rows for ring in row.rings.values()]
        cutter = pipeline.intake.cutter

        def counts() -> list[Any]:
            ledgers = [ring.ledger.as_dict() for ring in rings]
            return [ledgers, cutter.targets, dict(cutter.invalid), pipeline.rank0.started]

        before, calls = counts(), policy.calls
        pipeline.rank0.stage_a.rehearse()
        pipeline.rank0.stage_c.rehearse()
        pipeline.policy_loop.stage_b.get_ready()
        assert policy.calls == calls
        assert counts() == before
        pipeline.rank0.run(5)
        drops = [line.get("drop") for line in pipeline.envelopes()]
    assert drops == [None] * 10
