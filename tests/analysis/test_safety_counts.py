"""Counts that must be zero are counted over the whole run, and nothing else trips them."""

from __future__ import annotations

from golden_runs import GoldenRun, ms, simulate

from ppstream.analysis.judge import judge
from ppstream.analysis.safety_counts import safety_counts
from ppstream.analysis.verdict import Verdict


def counts(golden: GoldenRun) -> dict[str, int]:
    return safety_counts(golden.parse())


def fails_for(golden: GoldenRun, reason: str) -> bool:
    """True when the run fails, and for this reason first, whose text names the count."""
    report = judge(golden.parse())
    (text,) = [text for text in report.statements if text.startswith(f"{reason}: ")]
    assert str(counts(golden)[reason]) in text
    return report.verdict is Verdict.FAIL and report.reasons[0] == reason


def test_healthy_run_counts_nothing() -> None:
    assert counts(simulate()) == {}


def test_queue_over_its_bound_fails_even_outside_the_window() -> None:
    golden = simulate()
    golden.lines[3] |= {"outstanding_max": 4, "phase": "warming"}
    assert counts(golden) == {"QUEUE_BOUND": 2}
    assert fails_for(golden, "QUEUE_BOUND")


def test_queue_bound_is_taken_from_stamps_where_no_counter_was_logged() -> None:
    golden = simulate()
    golden.bend(lambda line: line.pop("outstanding_max"))
    assert counts(golden) == {}
    golden.manifest["topology"]["d_in"] = 1
    assert counts(golden) == {"QUEUE_BOUND": 1}


def test_emit_of_an_old_epoch_behind_the_cut_is_stale() -> None:
    golden = simulate()
    cut_ns = golden.lines[300]["tEmit"]
    golden.extra.append({"kind": "event", "name": "epoch_cut", "epoch": 1, "t": cut_ns})
    assert counts(golden) == {"STALE_EMIT": 29}
    assert fails_for(golden, "STALE_EMIT")
    for line in golden.lines[301:]:
        line["drop"] = "stale"
    assert counts(golden) == {}


def test_old_epoch_emitted_after_a_new_one_is_stale_without_any_event() -> None:
    golden = simulate(n=120)
    for line in golden.lines[60:]:
        line["epoch"] = 1
    golden.lines[59]["tEmit"] = golden.lines[70]["tEmit"] + 1
    assert counts(golden) == {"STALE_EMIT": 1}


def test_emits_out_of_order_or_twice_fail() -> None:
    golden = simulate()
    golden.lines[50]["tEmit"], golden.lines[51]["tEmit"] = (
        golden.lines[51]["tEmit"],
        golden.lines[50]["tEmit"],
    )
    assert counts(golden) == {"ORDER": 1}
    assert fails_for(golden, "ORDER")
    twice = simulate()
    twice.lines.append(dict(twice.lines[-1]))
    assert counts(twice) == {"ORDER": 1}


def test_action_older_than_its_lease_at_emit_fails_in_service_only() -> None:
    def leased(phase: str) -> GoldenRun:
        golden = simulate(phase=phase)
        end_ns = 123 * ms(1)  # robot clock: only the difference counts
        return golden.bend(
            lambda line: line.update(window_end_ns=[end_ns, 0], expires_ns=[end_ns + ms(15), 0])
        )

    assert counts(leased("ready")) == {"EXPIRED_EMIT": 330}
    assert counts(leased("bring-up")) == {}
    assert counts(leased("ready").bend(lambda line: line.update(drop="expired"))) == {}
    replayed = leased("ready")
    replayed.manifest["config"] = {"pipeline": {"windows": "scheduled"}}
    assert counts(replayed) == {}
