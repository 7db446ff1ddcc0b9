from __future__ import annotations

import numpy as np

from ppstream.recording.sample_numbers import SampleNumbers


def test_what_is_held_of_the_first_samples_is_counted_past_every_gap() -> None:
    rng = np.random.default_rng(3)
    for _ in range(50):
        there = np.flatnonzero(rng.random(60) < 0.6)
        numbers = SampleNumbers()
        for number in there.tolist():
            numbers.add(number, 1)
        assert numbers.end == there[-1] + 1
        assert numbers.lost == numbers.end - len(there)
        for count in range(70):
            assert numbers.held(count) == np.count_nonzero(there < count)


def test_samples_that_come_together_have_no_gap_between_them() -> None:
    numbers = SampleNumbers()
    numbers.add(0, 10)
    numbers.add(10, 5)
    numbers.add(20, 5)
    assert (numbers.lost, numbers.end) == (5, 25)
    assert [numbers.held(count) for count in (0, 14, 18, 22, 99)] == [0, 14, 15, 17, 20]
