"""What may be watched of a run while it goes on: metrics and profiles. Part of ``schema.py``."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class MetricsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Prometheus metrics and health of each rank, on loopback alone."""

    port: Annotated[int, Meta(ge=0, le=65535)] | None = None  # of rank 0; rank r has port + r
    # 0: any free port, told in the log's event "metrics"; none: nothing listens


class ProfileConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """torch.profiler on a running rank: SIGUSR2 starts it, or ``after``."""

    after: Annotated[int, Meta(ge=0)] | None = None  # envelopes behind ready; none: SIGUSR2 alone
    wait: Annotated[int, Meta(ge=0)] = 5  # envelopes that are left alone,
    warmup: Annotated[int, Meta(ge=0)] = 5  # then traced and thrown away,
    active: Annotated[int, Meta(ge=1, le=10_000)] = 20  # then kept,
    repeat: Annotated[int, Meta(ge=1, le=100)] = 1  # so many times: one trace each
    shapes: bool = False  # of operators' inputs; costs time
    memory: bool = False  # allocations; costs time
    stacks: bool = False  # Python's; costs much time
