from ppstream.core.durations import Durations
from ppstream.core.quantiles import Quantiles


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
