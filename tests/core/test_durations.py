from itertools import pairwise

import numpy as np
import pytest

from ppstream.core.durations import (
    BUCKETS_NS,
    LABELS_MAX,
    OTHER,
    RECENT,
    Durations,
    Histograms,
    Recent,
    quantiles_ns,
)
from ppstream.core.quantiles import (
    BIN_RATIO,
    BINS,
    Quantiles,
    bin_of,
    binned_quantiles,
    quantiles,
)


def test_nothing_measured_is_all_zero() -> None:
    assert Durations().quantiles() == Quantiles(0, 0, 0, 0, 0)


def test_quantiles_are_durations_that_were_seen() -> None:
    durations = Durations()
    for duration_ns in range(100, 0, -1):
        durations.add(duration_ns)
    assert durations.quantiles() == Quantiles(100, 50, 95, 99, 100)


def test_quantiles_cover_the_last_ones_and_the_maximum_all() -> None:
    durations = Durations(keep=4)
    for duration_ns in (1000, 1, 2, 3, 4):
        durations.add(duration_ns)
    assert durations.quantiles() == Quantiles(5, 2, 4, 4, 1000)


def test_a_negative_maximum_is_kept() -> None:
    durations = Durations()
    durations.add(-5)
    assert durations.quantiles().max_ns == -5


def test_the_histogram_counts_all_durations_also_those_no_longer_kept() -> None:
    durations = Durations(keep=2)
    assert durations.histogram() == ()
    for duration_ns in (1000, 1001, 2000, 9_000, 2 * 10**9):
        durations.add(duration_ns)
    histogram = {found.upto_ns: found.n for found in durations.histogram() if found.n}
    assert histogram == {1000: 1, 2000: 2, 10_000: 1, None: 1}
    ends = [found.upto_ns for found in durations.histogram()]
    assert ends[:3] == [1000, 2000, 5000]


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


@pytest.mark.parametrize("n", [1, 2, 3, 99, 1000, 5000])
def test_a_quantile_of_bins_is_at_most_one_bin_too_long_however_they_were_added(n: int) -> None:
    values = [round(v) for v in np.random.default_rng(n).lognormal(16, 3, n)]
    bins: dict[int, int] = {}
    for value in values:
        bins[bin_of(value)] = bins.get(bin_of(value), 0) + 1
    exact, found = quantiles(values), binned_quantiles(bins, max(values))
    assert exact is not None
    assert found is not None
    assert (found.count, found.max_ns) == (exact.count, exact.max_ns)
    for name in ("p50_ns", "p95_ns", "p99_ns"):
        assert getattr(exact, name) - 1 <= getattr(found, name)
        assert getattr(found, name) <= BIN_RATIO * getattr(exact, name) + 1


def test_every_duration_has_a_bin() -> None:
    bins = [bin_of(value) for value in (-5, 0, 1, 2, 1000, 10**9, 10**17, 1 << 62)]
    assert bins == sorted(bins)
    assert (bins[0], bins[-1]) == (0, BINS - 1)
    assert binned_quantiles({}, 0) is None
