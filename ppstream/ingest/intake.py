"""Intake: the rings of all robot rows and the cutter that reads them, built together.

A run has two: bring-up's, filled from a synthetic or recorded source, and service's, filled by
robots. So a robot may connect early, and nothing made up ever reaches a window of its.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Final, NamedTuple

from ppstream.config.schema import CHANNELS
from ppstream.core.clock import NS_PER_MS
from ppstream.core.errors import ConfigError
from ppstream.core.host_memory import limit_bytes
from ppstream.ingest.ring import RingBank
from ppstream.ingest.rows import Need, RowInput
from ppstream.ingest.sample_ledger import Balance, SampleLedger, total
from ppstream.ingest.stamp_filter import ASKED_LIMIT_NS, FUTURE_LIMIT_NS
from ppstream.ingest.window import WindowCutter

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ppstream.config.schema import PipelineConfig, StreamConfig

INTAKES: Final = 2  # bring-up's rings and service's
VALUE_BYTES: Final = 4  # rings and windows keep float32 whatever a stream sends, but for frames
STAMP_BYTES: Final = 8
GIB: Final = 1 << 30
NOTHING_READ: Final[Mapping[str, bool]] = {}
BLIND: Final = "the policy reads this stream and cannot see that it is missing"


class Intake(NamedTuple):
    """Rings that one source fills and stage A reads; for the thread that owns the input."""

    rows: tuple[RowInput, ...]
    cutter: WindowCutter
    banks: Mapping[str, RingBank]  # the rings' memory, by stream


def build_intake(config: PipelineConfig, blind: Mapping[str, bool] = NOTHING_READ) -> Intake:
    """Empty rings for every stream and row, and their cutter.

    Args:
        config: of the run.
        blind: cameras and groups of which the policy reads samples and acts as if they were there.
            A robot has no window while a stream of these is missing at its end, or older than
            ``max_age_ms``, or a camera that sends by itself has fewer than ``image.frames``; of
            those that are False one frame is enough.

    Raises:
        ConfigError: as ``needs_of``; rings or window are larger than this host's memory.
    """
    if problems := list(_too_large(config)):
        raise ConfigError(problems)
    needs = needs_of(config, blind)
    banks = {
        stream.name: RingBank(stream, config.batch.rows, config.ring_samples(stream))
        for stream in config.streams
    }
    is_asked = all(stream.is_on_request for stream in config.streams)  # each sample is waited for
    stale_ns = None if is_asked else round(config.reach_ms * NS_PER_MS)
    future_ns = ASKED_LIMIT_NS if is_asked else FUTURE_LIMIT_NS
    rows = tuple(
        RowInput(banks, row, config.reference.name, stale_ns, needs, future_ns)
        for row in range(config.batch.rows)
    )
    return Intake(rows, WindowCutter(config, rows, banks), banks)


def rings_bytes(config: PipelineConfig) -> int:
    """Memory of a run's rings, those of bring-up and those of service."""
    return INTAKES * config.batch.rows * sum(_ring_bytes(config, one) for one in config.streams)


def _ring_bytes(config: PipelineConfig, stream: StreamConfig) -> int:
    """Of one row: a frame's values are a byte each."""
    sample = stream.dim * (VALUE_BYTES if stream.image is None else 1)
    return config.ring_samples(stream) * (sample + STAMP_BYTES)


def _window_bytes(config: PipelineConfig) -> int:
    plain = sum(stream.dim for stream in config.streams if stream.image is None)
    images = [stream.image for stream in config.streams if stream.image is not None]
    frames = sum(image.frames * CHANNELS * prod(image.size) for image in images)
    return config.batch.rows * VALUE_BYTES * (config.window.steps * plain + frames)


def _too_large(config: PipelineConfig) -> Iterator[str]:
    has = limit_bytes()
    rings, window = rings_bytes(config), _window_bytes(config)
    if rings > has:
        largest = max(config.streams, key=lambda stream: _ring_bytes(config, stream))
        yield (
            f"streams: got rings of {rings / GIB:.1f} GiB for batch.rows = {config.batch.rows}, "
            f"most of them for {largest.name!r}, want less than the {has / GIB:.1f} GiB that this "
            "host or container has: lower max_age_ms, max_gap_ms, a rate or the rows"
        )
    if window > has:
        yield (
            f"window: got {window / GIB:.1f} GiB for batch.rows = {config.batch.rows}, want less "
            f"than the {has / GIB:.1f} GiB that this host or container has: lower "
            "window.steps, image.resize or image.frames"
        )


def needs_of(config: PipelineConfig, blind: Mapping[str, bool]) -> dict[str, Need]:
    """Finds what ``build_intake`` asks of streams, by their names.

    Raises:
        ConfigError: these streams are optional, or come too seldom.
    """
    needs = {}
    for name, is_whole in blind.items():
        for stream in config.streams:
            image = stream.image
            if (stream.group if image is None else stream.name) != name:
                continue
            is_alone = image is None or not is_whole or stream.is_on_request  # asks for the next
            frames = 1 if image is None or is_alone else image.frames
            ends_windows = stream.name == config.reference.name and not _is_scheduled(config)
            if frames > 1 or not ends_windows:  # at its newest sample
                needs[stream.name] = Need(round(stream.max_age_ms * NS_PER_MS), frames)
    if problems := [*_optional(config, needs), *_seldom(config, needs)]:
        raise ConfigError(problems)
    return needs


def _optional(config: PipelineConfig, needs: Mapping[str, Need]) -> Iterator[str]:
    for index, gateway in enumerate(config.gateway):
        for name, entry in gateway.map.items():
            if name in needs and isinstance(entry, Mapping) and entry.get("optional"):
                yield (
                    f"gateway[{index}].map.{name}.optional: got true, want false: {BLIND}, so that "
                    "a robot without it gets no actions"
                )


def _seldom(config: PipelineConfig, needs: Mapping[str, Need]) -> Iterator[str]:
    often_hz = config.reference.most_hz  # windows end so often
    if _is_scheduled(config):
        often_hz = 1000 / config.window.dt_ms
    for index, stream in enumerate(config.streams):
        if stream.name in needs and stream.rate_hz is not None and stream.rate_hz < often_hz:
            period_ms = 1000 / stream.rate_hz
            if stream.max_age_ms < period_ms:
                yield (
                    f"streams[{index}].max_age_ms: got {stream.max_age_ms:g} for {stream.name!r}, "
                    f"want at least the {period_ms:g} ms between two samples at rate_hz = "
                    f"{stream.rate_hz:g}: {BLIND}, so that robots get no actions while its newest "
                    "sample is older"
                )


def _is_scheduled(config: PipelineConfig) -> bool:
    return config.pipeline.windows == "scheduled"


def stream_lines(intake: Intake) -> dict[str, dict[str, object]]:
    """Each stream over all rows, as the log has it; for the rings' own thread.

    Its balance; ``holes`` wider than ``max_gap_ms`` between two samples, and ``longest_hole_ns``;
    ``targets`` of windows and how many were ``invalid``: not of cameras, nor where a device cuts.
    """
    cutter, lines = intake.cutter, {}
    for name, ledger in _ledgers(intake.rows).items():
        holes = {"holes": ledger.holes, "longest_hole_ns": ledger.longest_hole_ns}
        line: dict[str, object] = {**ledger.as_dict(), **holes}
        if cutter.targets and name in cutter.invalid:
            line |= {"targets": cutter.targets, "invalid": cutter.invalid[name]}
        lines[name] = line
    return lines


def balances(rows: Iterable[RowInput]) -> dict[str, Balance]:
    """The ledger of each stream over all rows, in the log's form; for the rings' own thread."""
    return {name: ledger.as_dict() for name, ledger in _ledgers(rows).items()}


def _ledgers(rows: Iterable[RowInput]) -> dict[str, SampleLedger]:
    ledgers: dict[str, list[SampleLedger]] = {}
    for row in rows:
        for name, ring in row.rings.items():
            ledgers.setdefault(name, []).append(ring.ledger)
    return {name: total(parts) for name, parts in ledgers.items()}
