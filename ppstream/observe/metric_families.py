"""Numbers to Prometheus families: base units, bounded labels. The names stand in ``metrics.py``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.samples import Sample

from ppstream.core.durations import BUCKETS_NS, PERCENTS, Histogram, Values, quantiles_ns
from ppstream.core.interpreter import InterpreterPauses

S: Final = 1e-9  # per ns
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
    family.samples = _samples(name, {}, found)
    return family


def histograms(name: str, text: str, label: str, found: Mapping[str, Histogram]) -> Metric:
    """One such distribution for each value of ``label``."""
    family = HistogramMetricFamily(name, text, labels=[label])
    for key, one in found.items():
        family.samples += _samples(name, {label: key}, one)
    return family


def recent(name: str, text: str, label: str, found: Mapping[str, Values]) -> Metric:
    """Exact quantiles of the newest values, where a histogram only knows its buckets."""
    family = GaugeMetricFamily(name, text, labels=[label, "quantile"])
    for key, newest_ns in sorted(found.items()):
        for percent, value_ns in zip(PERCENTS, quantiles_ns(newest_ns), strict=True):
            family.add_metric([key, f"{percent / 100:g}"], value_ns * S)
    return family


class _InPieces(list[Sample]):
    """The samples of a family; the writer pauses between some."""

    def __init__(self, samples: Iterable[Sample], pieces: InterpreterPauses) -> None:
        super().__init__(samples)
        self._pieces = pieces

    def __iter__(self) -> Iterator[Sample]:
        for sample in super().__iter__():
            self._pieces.pause()
            yield sample


def in_pieces(families: Iterable[Metric]) -> Iterator[Metric]:
    """The families as they are made, so that the loops run between a few samples and the next."""
    pieces = InterpreterPauses()
    for family in families:
        family.samples = _InPieces(family.samples, pieces)
        yield family


def _samples(name: str, labels: dict[str, str], found: Histogram) -> list[Sample]:
    """As the family's ``add_metric`` makes them, in a fraction of its time."""
    bucket, totals = f"{name}_bucket", found.counts.cumsum().tolist()
    return [
        *(Sample(bucket, {**labels, "le": edge}, n) for edge, n in zip(EDGES, totals, strict=True)),
        Sample(f"{name}_count", labels, totals[-1]),
        Sample(f"{name}_sum", labels, found.sum_ns * S),
    ]
