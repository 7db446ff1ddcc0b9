"""Doubts about a configuration that may be meant: a warning each, and no reason to refuse it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from ppstream.config.rules import ROUNDED, chunk_rates

if TYPE_CHECKING:
    from ppstream.config.schema import PipelineConfig

SAME: Final = 0.1  # of the time between two samples: values so near are one


def warnings(config: PipelineConfig) -> Iterator[str]:
    """Lines about what may be meant, as a single action that robots hold until the next one."""
    actions = config.actions
    reach_ms = actions.horizon * actions.dt_ms
    for path, rate_hz in chunk_rates(config):
        if reach_ms < (period_ms := 1000 / rate_hz) * ROUNDED:
            yield (
                f"actions.dt_ms: got {actions.dt_ms:g} x horizon {actions.horizon} = {reach_ms:g} "
                f"ms a chunk, less than the {period_ms:g} ms between two ({path} = {rate_hz:g}): "
                "robots hold its last action meanwhile, and execute none of a chunk that is "
                f"{reach_ms + actions.dt_ms:g} ms old when it comes; raise dt_ms, which is in "
                "milliseconds, or horizon"
            )
    span_ms = config.window_span_ms
    fastest_hz = max((s.most_hz for s in config.streams if s.image is None), default=0)
    if fastest_hz and 0 < span_ms * fastest_hz / 1000 < SAME:
        yield (
            f"window.dt_ms: got {config.window.dt_ms:g}, so that {config.window.steps} steps span "
            f"{span_ms:g} ms, and samples are {1000 / fastest_hz:g} ms apart at least: all steps "
            "are nearly equal; raise dt_ms, which is in milliseconds"
        )
    for index, stream in enumerate(config.streams if config.gateway else ()):
        if stream.rate_hz is not None:
            yield (
                f"streams[{index}].rate_hz: got {stream.rate_hz:g} beside a gateway, whose clients "
                f"send as they need actions, so that {stream.name} is called slow or silent; want "
                "max_request_hz in its place"
            )
