"""Numbers to Prometheus families: base units, bounded labels. The names stand in ``metrics.py``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from ppstream.tallies import BUCKETS_NS, Histogram

S: Final = 1e-9  # per ns
QUANTILES: Final = (0.5, 0.95, 0.99)
EDGES: Final = (*(f"{bound * S:g}" for bound in BUCKETS_NS), "+Inf")


def gauge(name: str, text: str, value: float) -> Metric:
    """One number that may go up and down."""
    return GaugeMetricFamily(name, text, value)


def gauges(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    """One such number for each value of ``label``."""
    family = GaugeMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def state(name: str, text: str, label: str, known: Iterable[str], now: str | None) -> Metric:
    """1 for the state that holds, 0 for every other known one; all 0: not known yet."""
    return gauges(name, text, label, {key: float(key == now) for key in known})


def info(name: str, text: str, /, **labels: str) -> Metric:
    """A constant 1 with what people want to know."""
    family = GaugeMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), 1)
    return family


def counter(name: str, text: str, value: float) -> Metric:
    """One number that only rises; ``_total`` is added to its name."""
    return CounterMetricFamily(name, text, value)


def counters(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    """One such number for each value of ``label``."""
    family = CounterMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def dropped(found: Mapping[str, Mapping[str, float]]) -> Metric:
    """``ppstream_dropped_total`` by where and why."""
    family = CounterMetricFamily(
        "ppstream_dropped", "What went nowhere, by where and why.", labels=["where", "reason"]
    )
    for where, reasons in found.items():
        for reason, count in reasons.items():
            family.add_metric([where, reason], count)
    return family


def histogram(name: str, text: str, found: Histogram) -> Metric:
    """One distribution of durations, in seconds."""
    family = HistogramMetricFamily(name, text)
    family.add_metric([], _buckets(found), found.sum_ns * S)
    return family


def histograms(name: str, text: str, label: str, found: Mapping[str, Histogram]) -> Metric:
    """One such distribution for each value of ``label``."""
    family = HistogramMetricFamily(name, text, labels=[label])
    for key, one in sorted(found.items()):
        family.add_metric([key], _buckets(one), one.sum_ns * S)
    return family


def recent(name: str, text: str, label: str, found: Mapping[str, Histogram]) -> Metric:
    """Exact quantiles of the newest values, where a histogram only knows its buckets."""
    family = GaugeMetricFamily(name, text, labels=[label, "quantile"])
    for key, one in sorted(found.items()):
        values_ns = one.quantiles_ns(QUANTILES)
        for share, value_ns in zip(QUANTILES, values_ns, strict=bool(values_ns)):
            family.add_metric([key, f"{share:g}"], value_ns * S)
    return family


def _buckets(found: Histogram) -> list[tuple[str, float]]:
    total, buckets = 0, []
    for edge, count in zip(EDGES, found.counts, strict=True):
        total += count
        buckets.append((edge, float(total)))
    return buckets
