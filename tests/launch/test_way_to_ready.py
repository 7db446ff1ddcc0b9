"""What rank 0 says of its bring-up, by a clock that is passed in."""

from __future__ import annotations

from ppstream.core.clock import NS_PER_S
from ppstream.launch.way_to_ready import PhaseProgress


def told(progress: PhaseProgress, *looks: tuple[float, int, dict[str, int]]) -> str:
    """What is said last of looks: second, envelopes that are done, and those that were dropped."""
    text = ""
    for second, finished, dropped in looks:
        text = progress.text(finished, dropped, 40.0, round(second * NS_PER_S))
    return text


def warming(total: int = 400) -> PhaseProgress:
    return PhaseProgress("warming", 0, {}, total, 0)


def test_a_first_envelope_that_takes_long_is_timed() -> None:
    assert told(warming(), (1, 0, {}), (75, 0, {})) == "0 of at most 400 envelopes after 75 s"


def test_what_is_left_follows_from_the_time_of_one_behind_the_first() -> None:
    """The first one compiled for ten minutes."""
    text = told(warming(), (600, 1, {}), (606, 2, {}), (612, 3, {}))
    assert text == "3 of at most 400 envelopes, 6.0 s each, 40 min left"


def test_the_pace_is_that_of_the_newest_envelopes() -> None:
    slow, fast = [(60 * k, k, {}) for k in range(9)], [(480 + k, 8 + 50 * k, {}) for k in range(20)]
    text = told(warming(1000), *slow, *fast)
    assert text == "958 of at most 1000 envelopes, 20 ms each, 840 ms left"


def test_envelopes_that_all_expire_are_told_with_the_limit() -> None:
    text = told(warming(), (2, 2, {"expired": 2}), (4, 4, {"expired": 4}))
    assert text == (
        "4 of at most 400 envelopes, 4 older than actions.lease_ms = 40, 1.0 s each, 7 min left"
    )


def test_other_drops_are_told_where_they_are_most_of_a_phase() -> None:
    bring_up = PhaseProgress("bring-up", 20, {"stale": 20}, 460, 0)
    assert told(bring_up, (1, 24, {"stale": 22})) == "4 of 460 envelopes"
    text = told(bring_up, (2, 26, {"stale": 22, "decoder_error": 4}))
    assert text.startswith("6 of 460 envelopes, 4 dropped as decoder_error, ")


def test_envelopes_before_and_behind_a_phase_are_none_of_it() -> None:
    """The thread that tells may have counted before the phase began; stages are timed behind it."""
    bring_up = PhaseProgress("bring-up", 20, {}, 460, 0)
    assert told(bring_up, (1, 19, {})) == "0 of 460 envelopes after 1.0 s"
    assert told(bring_up, (5, 20 + 460, {}), (6, 20 + 460 + 30, {})).startswith("460 of 460 ")
