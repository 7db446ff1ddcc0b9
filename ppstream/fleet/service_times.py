"""Measured durations of a pipeline's stages, to draw from: of flags, of a report or of a run.

A report has means, so each draw is the mean. A run's folder has every duration that was measured.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ppstream.analysis.log_reader import read_run
from ppstream.analysis.records import Envelope
from ppstream.analysis.segments import select_window
from ppstream.core.errors import ConfigError

MS_PER_NS: Final = 1e-6
MEASURED_MIN: Final = 20  # envelopes of a run; fewer say nothing of how durations spread
SHAPE: Final = "want MEDIAN or MEDIAN:P99 in ms, such as 20 or 20:24"

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Duration:
    """A duration in ms by its quantiles: ``values_ms`` at ``shares``, straight between them."""

    values_ms: tuple[float, ...]
    shares: tuple[float, ...] = (0.0, 1.0)

    @classmethod
    def constant(cls, ms: float) -> Duration:
        return cls((ms, ms))

    @classmethod
    def parse(cls, text: str) -> Duration:
        """Of a flag: half of all draws are the median, the others rise evenly to the p99.

        Raises:
            ConfigError: the text is no such duration.
        """
        try:
            median, *p99 = map(float, text.split(":"))
        except ValueError:
            raise ConfigError([f"got {text!r}, {SHAPE}"]) from None
        top = p99[0] if len(p99) == 1 else median
        if len(p99) > 1 or not 0 <= median <= top < float("inf"):
            raise ConfigError([f"got {text!r}, {SHAPE}"])
        return cls((median, median, top, top), (0.0, 0.5, 0.99, 1.0))

    @classmethod
    def measured(cls, values_ms: Sequence[float]) -> Duration:
        """Each value that was seen is as likely as another."""
        ordered = tuple(sorted(values_ms))
        return cls(ordered, tuple(np.linspace(0.0, 1.0, len(ordered))))

    @property
    def mean_ms(self) -> float:
        middles = np.convolve(self.values_ms, (0.5, 0.5), "valid")
        return float(np.dot(middles, np.diff(self.shares)))

    def drawn(self, n: int, rng: np.random.Generator) -> Floats:
        """``n`` independent draws, in ms."""
        return np.interp(rng.random(n), self.shares, self.values_ms)


@dataclass(frozen=True)
class ServiceTimes:
    """Durations of one envelope: A and C on rank 0, B of each place, and the hops between.

    ``hops`` has one more than ``places``: to each place in order, and back to rank 0. ``d_in``
    envelopes at most are committed and not answered.
    """

    a: Duration
    places: tuple[Duration, ...]
    c: Duration
    hops: tuple[Duration, ...]
    d_in: int
    rows: int  # of an envelope: B takes as long whether a row is taken or not
    mesh: int = 1  # ranks that compute a place together, each on a GPU

    def __post_init__(self) -> None:
        if len(self.hops) != len(self.places) + 1:
            raise ValueError(f"{len(self.places)} places have {len(self.places) + 1} hops")


def of_report(file: Path) -> ServiceTimes:
    """Means of the newest run of a report's JSON, or what a run's folder has measured.

    The rows of a report are not in it: 1.

    Raises:
        ConfigError: there is no such report, or it has no times of its stages.
        LogError: the folder is no run.
    """
    if file.is_dir():
        return of_run(file)
    try:
        run = json.loads(file.read_text())["runs"][-1]
        alone, places = run["alone"], run["places"]
        stages = {s: ms * alone["stretch"].get(s, 1.0) for s, ms in alone["times_ms"].items()}
        policy = [Duration.constant(place["busy_ns"] * MS_PER_NS) for place in places[1:]]
        hops = [Duration.constant((place["hop_ns"] or 0.0) * MS_PER_NS) for place in places]
        return ServiceTimes(
            Duration.constant(stages["A"]),
            tuple(policy),
            Duration.constant(stages["C"]),
            tuple(hops),
            int(run["queues"]["d_in"]),
            rows=1,
            mesh=1 + len(places[1].get("members", ())) // len(places[1].get("ranks") or (1,)),
        )
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            [
                f"{file}: no times of stages in it ({type(error).__name__}: {error}); want the "
                "file of ppstream report FOLDER --json FILE of a run with a bring-up, or FOLDER"
            ]
        ) from error


def of_run(folder: Path, phase: str | None = None) -> ServiceTimes:
    """Every duration that a run's envelopes of ``phase`` took; None: of bring-up.

    Raises:
        ConfigError: too few envelopes were measured.
        LogError: the folder is no run.
    """
    run = read_run(folder)
    window = select_window(run, phase)
    found = [e for e in window.emitted if _is_whole(e, window.topology.places)]
    if len(found) < MEASURED_MIN:
        raise ConfigError([f"{folder}: got {len(found)} envelopes, want {MEASURED_MIN} or more"])
    ranks = range(window.topology.places)
    way = _measured(found, _way_ms)
    return ServiceTimes(
        _measured(found, lambda e: _ms(e.tA0, e.tA1)),
        tuple(_measured(found, _of_place(k)) for k in ranks),
        _measured(found, lambda e: _ms(e.tDecode, e.tEmit)),
        (Duration.constant(0.0),) * len(ranks) + (way,),
        window.topology.d_in,
        rows_of(run.config),
        1 + len(window.topology.members) // window.topology.replicas,
    )


def rows_of(config: Mapping[str, object]) -> int:
    """Rows of an envelope, of a logged configuration."""
    batch = config.get("batch")
    return int(batch.get("rows", 1)) if isinstance(batch, Mapping) else 1


def _is_whole(envelope: Envelope, places: int) -> bool:
    lines = envelope.places[:places]
    return len(lines) == places and all(line and line.B_ns is not None for line in lines)


def _measured(found: Sequence[Envelope], duration: Callable[[Envelope], float]) -> Duration:
    return Duration.measured([duration(envelope) for envelope in found])


def _of_place(place: int) -> Callable[[Envelope], float]:
    def duration(envelope: Envelope) -> float:
        line: Any = envelope.places[place]
        return float(line.B_ns) * MS_PER_NS

    return duration


def _way_ms(envelope: Envelope) -> float:
    """From commit to receipt, but for the policy ranks; 0.0 where rank 0 was late to receive."""
    inside = sum(line.residence_ns or 0 for line in envelope.places if line is not None)
    return max(0.0, _ms(envelope.tSend, envelope.tRecv) - inside * MS_PER_NS)


def _ms(begin: int | None, end: int | None) -> float:
    return 0.0 if begin is None or end is None else (end - begin) * MS_PER_NS
