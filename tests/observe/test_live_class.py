from itertools import groupby

import pytest
from log_records import MS, envelope

from ppstream.core.clock import NS_PER_S, ManualClock
from ppstream.core.interpreter import InterpreterPauses
from ppstream.observe import live_class
from ppstream.observe.live_class import REFRESH_NS, LiveBottleneck
from ppstream.observe.live_counters import Rank0Counters

TOPOLOGY = {"world_size": 2, "d_in": 2, "d_out": 2, "threads": "serial"}
MANIFEST = {"schema": "ppstream.log/1", "topology": TOPOLOGY}


def tallied(envelopes: int, **changes: object) -> Rank0Counters:
    tally = Rank0Counters(20 * MS)
    for seq in range(envelopes):
        tally.record(envelope(seq, **changes))
    tally.count()
    return tally


def test_newest_envelopes_are_classified_as_the_report_would():
    live = LiveBottleneck(lambda: MANIFEST)
    found = live.now(tallied(300))  # a sixth of each period is a wait for input
    assert found.name == "input-limited"
    assert 0.8 < found.utilisation["mesh"] < 0.9
    assert (
        LiveBottleneck(lambda: MANIFEST).now(tallied(300, w_input_ns=0)).name == "overhead-limited"
    )


def test_few_envelopes_say_nothing():
    assert LiveBottleneck(lambda: MANIFEST).now(tallied(50)).name is None
    assert LiveBottleneck(lambda: MANIFEST).now(Rank0Counters(20 * MS)).name is None


def test_only_the_newest_phase_counts():
    tally = tallied(200, phase="bring-up")
    for seq in range(200, 250):
        tally.record(envelope(seq))
    tally.count()
    assert LiveBottleneck(lambda: MANIFEST).now(tally).name is None


def test_answer_is_kept_for_a_while():
    clock = ManualClock(NS_PER_S)
    live = LiveBottleneck(lambda: MANIFEST, clock)
    assert live.now(tallied(10)).name is None
    assert live.now(tallied(300)).name is None
    clock.advance(REFRESH_NS)
    assert live.now(tallied(300)).name == "input-limited"


def test_judging_leaves_the_loops_their_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    tally = tallied(300)
    done: list[str] = []
    pieces: set[InterpreterPauses] = set()

    def told(name: str) -> None:
        step = getattr(live_class, name)

        def run(*args: object, **options: object) -> object:
            found = step(*args, **options)
            done.append(name)
            return found

        monkeypatch.setattr(live_class, name, run)

    steps = ("parse_run", "select_window", "primary", "classify")
    for name in steps:
        told(name)
    monkeypatch.setattr(
        InterpreterPauses, "pause", lambda one: (pieces.add(one), done.append("pause"))
    )
    assert LiveBottleneck(lambda: MANIFEST).now(tally).name == "input-limited"
    assert [name for name, _ in groupby(done)] == [each for s in steps for each in ("pause", s)]
    assert done.index("parse_run") == 300  # a pause for each envelope
    assert len(pieces) == 1
