from itertools import pairwise

import numpy as np
import pytest

from ppstream.core.durations import (
    BUCKETS_NS,
    LABELS_MAX,
    OTHER,
    RECENT,
    Histograms,
    Recent,
    quantiles_ns,
)

MS = 1_000_000
NONE = np.nan


def test_a_quantile_is_never_far_off_where_stages_and_ages_lie():
    near = [b for b in BUCKETS_NS if MS // 10 <= b <= 100 * MS]
    assert (near[0], near[-1]) == (MS // 10, 100 * MS)
    assert max(after / before for before, after in pairwise(near)) < 1.7


def test_values_fall_into_the_bucket_whose_bound_they_do_not_exceed():
    found = Histograms()
    values = [0, BUCKETS_NS[0], BUCKETS_NS[0] + 1, BUCKETS_NS[-1] + 1, NONE]
    found.add(found.rows("link").repeat(5), np.array(values))
    counts = found.one("link").counts
    assert (counts[0], counts[1], counts[-1], counts.sum()) == (2, 1, 1, 4)
    assert len(counts) == len(BUCKETS_NS) + 1
    assert found.one("link").sum_ns == sum(values[:-1])


def test_a_sum_never_goes_back():
    found = Histograms()
    found.add(found.rows("link").repeat(2), np.array([-5, 3]))
    assert (found.one("link").sum_ns, found.one("link").counts[0]) == (3, 2)


def test_labels_are_told_apart_and_what_was_taken_stays_as_it_was():
    found = Histograms()
    found.add(found.rows("stage", "ABAB"), np.array([1, MS, 2, NONE]))
    before = found.of("stage")
    found.add(np.append(found.rows("link"), found.rows("stage", "BC")), np.array([4, 5, NONE]))
    assert {label: one.sum_ns for label, one in before.items()} == {"A": 3, "B": MS}
    assert before["B"].counts.sum() == 1
    after = {label: (one.counts.sum(), one.sum_ns) for label, one in found.of("stage").items()}
    assert after == {"A": (2, 3), "B": (2, MS + 5)}  # C never had a value
    assert found.one("link").sum_ns == 4
    assert found.one("period").counts.tolist() == [0] * (len(BUCKETS_NS) + 1)


def test_labels_of_one_family_are_bounded():
    many = Histograms()
    labels = [f"stream{n}" for n in range(3 * LABELS_MAX)]
    for queue in ("d_in", "d_out"):
        many.add(many.rows("queue", [queue]), np.ones(1))
        many.add(many.rows("observation_age", labels), np.ones(len(labels)))
    ages = many.of("observation_age")
    assert len(ages) == LABELS_MAX + 1
    assert (ages[OTHER].sum_ns, ages[OTHER].counts.sum()) == (4 * LABELS_MAX, 4 * LABELS_MAX)
    assert list(many.of("queue")) == ["d_in", "d_out"]


@pytest.mark.parametrize("chunk", [1, 7, 128, 2000])
def test_recent_quantiles_are_exact(chunk):
    found = Recent()
    values = np.arange(1.0, 2001.0)
    for first in range(0, 2000, chunk):
        found.add("A", np.append(values[first : first + chunk], NONE))
    assert len(found["A"]) == RECENT
    assert quantiles_ns(found["A"]) == [1500, 1950, 1990]


def test_without_values_there_are_no_quantiles():
    found = Recent()
    found.add("A", np.array([NONE]))
    assert found == {}
    assert quantiles_ns(np.array([])) == []
