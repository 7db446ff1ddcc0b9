"""Live counters of a rank's log, for observers of the running pipeline. Pure.

The log's drain thread calls ``record`` and ``line`` for everything it writes; the loops never come
here. Records are kept and counted ``CHUNK`` at a time with numpy, or when somebody who wants to
look calls ``count``: one by one they would take ten times as much of the loops' interpreter.
``metrics.py`` shows the counts. Any thread reads, without a lock: a scrape may see one batch half
counted, never a torn number.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from ppstream.core.durations import LABELS_MAX, OTHER, Histograms, Recent, Values
from ppstream.core.interpreter import InterpreterPauses

if TYPE_CHECKING:
    from ppstream.observe.log_writer import EnvelopeRecord, PolicyRecord

CHUNK: Final = 512  # records: as many again would save little, and each is 2 KB that is kept
BLOCK: Final = 8  # of them are read in one go: some 30 µs, so a piece is little more than 100
JUDGED: Final = 300  # envelopes that the live class is made from
WAITS: Final = ("input", "credit", "slot", "result", "emit")
STAGES: Final = ("A", "B", "C")
QUEUES: Final = ("d_in", "d_out")
SPANS: Final = ("link", "period", "latency", "emit_age")

T = TypeVar("T")

_drop_of: Final = attrgetter("drop")
_ages_of: Final = attrgetter("input_age_ns")


class LiveCounters(ABC):
    """Counters of both kinds of rank: phases, events, drops, robots and ledgers from lines.

    Args:
        waits: causes, each the name of a wait.
        numbers: fields of a record that are counted, those of the waits first.
    """

    def __init__(self, waits: Iterable[str], numbers: Sequence[str]) -> None:
        self.phase = "starting"
        self.verdict: str | None = None  # of bring-up
        self.overlap: float | None = None  # the score that bring-up proved
        self.histograms = Histograms()
        self.recent = Recent()  # of the stages
        self.waits_ns = dict.fromkeys(waits, 0)
        self.link_ns = 0  # inside send and receive calls
        self.envelopes = 0
        self.drops: Counter[str] = Counter()
        self.events: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.ledger: Mapping[str, Any] = {}
        self.streams: Mapping[str, Any] = {}
        self.actions: Mapping[str, Any] = {}  # what the action rules did to chunks
        self.executed = 0  # action chunks that robots used
        self._numbers_of = attrgetter(*numbers)
        self._width = len(numbers)
        self._records: list[Any] = []
        self._action_ages_ns: list[int] = []
        self._counting = threading.Lock()

    def record(self, record: Any) -> None:
        """One envelope that ended here, emitted or dropped."""
        self._records.append(record)
        if len(self._records) >= CHUNK:
            self.count()

    def line(self, line: Mapping[str, Any]) -> None:
        """One line that is no envelope."""
        kind = line["kind"]
        if kind == "event":
            self._event(line)
        elif kind == "ledger":
            self.streams, self.ledger = line["streams"], line["envelopes"]
            self.actions = line["actions"]
        elif kind == "robot" and line["executed"]:  # a chunk that was superseded has no such age
            self.executed += 1
            self._action_ages_ns.append(line["age_ns"])
            if len(self._action_ages_ns) >= CHUNK:
                self.count()

    def _event(self, line: Mapping[str, Any]) -> None:
        name = str(line["name"])
        bump(self.events, name)
        if name == "phase":
            self.phase = str(line["phase"])
        elif name == "fault":
            bump(self.faults, str(line.get("fault", "unknown")))
        elif name == "verdict":
            self.verdict, self.overlap = str(line["verdict"]), line.get("overlap")

    def count(self) -> None:
        """Count what is kept; to be called before a look, by any thread."""
        with self._counting:
            pieces = InterpreterPauses()
            records, ages_ns = pop_all(self._records), pop_all(self._action_ages_ns)
            if ages_ns:
                rows = np.repeat(self.histograms.rows("action_age"), len(ages_ns))
                self.histograms.add(rows, np.array(ages_ns, np.float64))
            if records:
                columns = self._columns(records, pieces)
                drops = list(map(_drop_of, records))
                for reason, found in Counter(filter(None, drops)).items():
                    bump(self.drops, reason, found)
                pieces.pause()
                self._count(records, drops, columns, pieces)
                self.envelopes += len(records)

    def _columns(self, records: Sequence[Any], pieces: InterpreterPauses) -> Values:
        """[numbers, n]; None becomes NaN."""
        flat = chain.from_iterable(map(self._numbers_of, _in_blocks(records, pieces)))
        numbers = np.fromiter(flat, np.float64, len(records) * self._width)
        return np.ascontiguousarray(numbers.reshape(-1, self._width).T)

    @abstractmethod
    def _count(
        self,
        records: list[Any],
        drops: list[str | None],
        columns: Values,
        pieces: InterpreterPauses,
    ) -> None:
        """Add these envelopes; ``columns`` are their numbers, in the order that was asked for."""

    def _add_totals(self, totals: NDArray[np.float64]) -> None:
        """Of the waits, and of the link."""
        for wait, waited_ns in zip((*self.waits_ns,), totals[:-1], strict=True):
            self.waits_ns[wait] += int(waited_ns)
        self.link_ns += int(totals[-1])


class Rank0Counters(LiveCounters):
    """Rank 0: stages A, B and C, period, latency, queues, ages, deadlines."""

    NUMBERS: Final = (
        *(f"w_{wait}_ns" for wait in WAITS),
        *("busy_link_ns", "epoch", "eA_ns", "eB_ns", "eC_ns", "B_ns", "residence_ns"),
        *("tA0", "tA1", "tSend", "tRecv", "tDecode", "tEmit", "tPick", "age_rank0_ns"),
    )

    def __init__(self, lease_ns: int) -> None:
        super().__init__(WAITS, self.NUMBERS)
        self.misses = 0
        self.newest: deque[EnvelopeRecord] = deque(maxlen=JUDGED)
        self._lease_ns = lease_ns
        labelled = self.histograms.rows("stage", STAGES), self.histograms.rows("queue", QUEUES)
        self._rows = np.concatenate((*labelled, *map(self.histograms.rows, SPANS)))
        self._emit_before = (np.nan, np.nan)  # epoch, tEmit

    def line(self, line: Mapping[str, Any]) -> None:
        super().line(line)
        if line["kind"] == "robot" and not line["executed"] and line["age_ns"] > self._lease_ns:
            with self._counting:
                self.misses += 1  # in time on leaving, late on arrival

    def _count(
        self,
        records: list[EnvelopeRecord],
        drops: list[str | None],
        columns: Values,
        pieces: InterpreterPauses,
    ) -> None:
        self.newest.extend(records)
        self._add_totals(_totals(columns[: len(WAITS) + 1]))
        epoch, device_a, device_b, device_c, b, residence = columns[len(WAITS) + 1 : -8]
        a0, a1, send, received, decode, emit, pick, age = columns[-8:]
        late = age > self._lease_ns  # certainly: the age counts from arrival here
        if any(drops):
            late |= np.array([drop == "expired" for drop in drops])
            emit[[drop is not None for drop in drops]] = np.nan
        self.misses += int(np.count_nonzero(late))
        gone = np.isnan(emit)
        device_c[gone] = age[gone] = np.nan
        stages = (
            _first(device_a, a1 - a0),
            _first(device_b, b),
            _first(device_c, emit - decode),
        )
        queued, links = residence - b, received - send - residence
        periods = self._periods(epoch, emit)
        latency = np.where(np.isnan(pick), emit, np.where(gone, np.nan, pick)) - a0
        values = (*stages, queued, decode - received, links, periods, latency, age)
        rows = np.repeat(self._rows, len(records))
        pieces.pause()
        self.histograms.add(rows, np.concatenate(values))
        self._add_ages([ages for ages in map(_ages_of, records) if ages], pieces)
        pieces.pause()
        for stage, taken in zip(STAGES, stages, strict=True):
            self.recent.add(stage, taken)

    def _add_ages(self, windows: Sequence[dict[str, Any]], pieces: InterpreterPauses) -> None:
        """By stream; where a window has several rows, the oldest."""
        if not windows:
            return
        names: list[str] = []
        ages: list[Any] = []
        for each in _in_blocks(windows, pieces):
            names += each
            ages += each.values()
        one = [*windows[0]]
        if names == one * len(windows):  # a run's windows all have the same streams
            rows = np.tile(self.histograms.rows("observation_age", one), len(windows))
        else:
            rows = self.histograms.rows("observation_age", names)
        if list in map(type, ages):
            ages = [*map(_oldest, _in_blocks(ages, pieces))]
        values_ns = np.array(ages, np.float64)
        pieces.pause()
        self.histograms.add(rows, values_ns)

    def _periods(self, epoch: Values, emit: Values) -> Values:
        """From one emit to the next of the same epoch; NaN where nothing is emitted."""
        emitted = np.flatnonzero(emit == emit)
        found = np.full(len(emit), np.nan)
        if len(emitted):
            names, ends = epoch[emitted], emit[emitted]
            name, end = self._emit_before
            same = names == np.concatenate(([name], names[:-1]))
            found[emitted] = np.where(same, np.diff(ends, prepend=end), np.nan)
            self._emit_before = names[-1], ends[-1]
        return found


class PolicyCounters(LiveCounters):
    """A policy rank: stage B, its waits, and what it must not do once warm."""

    NUMBERS: Final = (
        *("wait_input_ns", "wait_output_ns", "busy_link_ns", "idle_ns", "recompiles"),
        *("eB_ns", "tB0", "tB1", "residence_ns"),
    )

    def __init__(self) -> None:
        super().__init__(("input", "output"), self.NUMBERS)
        self.idle_ns = 0
        self.recompiles = 0
        self._rows = np.concatenate(
            (self.histograms.rows("stage", "B"), self.histograms.rows("residence"))
        )

    def _count(
        self,
        records: list[PolicyRecord],
        drops: list[str | None],
        columns: Values,
        pieces: InterpreterPauses,
    ) -> None:
        *totals, idle, recompiles = _totals(columns[:5])
        self._add_totals(np.array(totals))
        self.idle_ns += int(idle)
        self.recompiles += int(recompiles)
        device_b, b0, b1, residence = columns[5:]
        taken = _first(device_b, b1 - b0)
        rows = np.repeat(self._rows, len(records))
        self.histograms.add(rows, np.concatenate((taken, residence)))
        self.recent.add("B", taken)


def bump(counter: Counter[str], label: str, by: int = 1) -> None:
    """Count under ``label``, or under OTHER when there are too many labels already."""
    counter[label if label in counter or len(counter) < LABELS_MAX else OTHER] += by


def pop_all(kept: list[Any]) -> list[Any]:
    """All of it, and gone from there; another thread may append meanwhile."""
    taken = kept[:]
    del kept[: len(taken)]
    return taken


def _in_blocks(items: Sequence[T], pieces: InterpreterPauses) -> Iterator[T]:
    """Each of them; the caller pauses between some."""
    for first in range(0, len(items), BLOCK):
        pieces.pause()
        yield from items[first : first + BLOCK]


def _oldest(age: Any) -> int | None:
    """Of the rows that have one, if it is by row."""
    rows = age if isinstance(age, list) else [age]
    return max((age_ns for age_ns in rows if age_ns is not None), default=None)


def _first(device: Values, host: Values) -> Values:
    """The device's own measure where there is one."""
    return np.where(device > 0, device, host)


def _totals(columns: Values) -> NDArray[np.float64]:
    """Sum of each row [rows, n]; faster than nansum, which copies."""
    found: NDArray[np.float64] = np.add.reduce(columns, axis=1, where=columns == columns)
    return found
