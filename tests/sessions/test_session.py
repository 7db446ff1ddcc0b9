from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ppstream.sessions.session import READINGS, OffsetEstimate

TRUE_OFFSET = -(10**15)
DELAYS = st.lists(st.tuples(st.integers(0, 10**8), st.integers(0, 10**8)), min_size=1, max_size=40)


@given(DELAYS)
def test_the_true_offset_lies_within_the_uncertainty(delays: list[tuple[int, int]]) -> None:
    estimate = OffsetEstimate()
    now_ns = 0
    for there_ns, back_ns in delays:
        heard_ns = now_ns + there_ns + back_ns
        found = estimate.add(now_ns, now_ns + there_ns + TRUE_OFFSET, heard_ns)
        assert found is not None
        assert abs(found.offset_ns - TRUE_OFFSET) <= found.uncertainty_ns
        now_ns = heard_ns + 1
    best_ns = min(sum(pair) for pair in delays[-READINGS:])
    assert found.uncertainty_ns == (best_ns + 1) // 2


def test_an_answer_from_before_its_question_is_none() -> None:
    assert OffsetEstimate().add(asked_ns=5, robot_ns=0, heard_ns=4) is None
