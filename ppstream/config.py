"""PipelineConfig: everything that shapes a run, in one frozen struct.

This file says what may be set, what it means and the bounds of each value on its own;
``config_problems.py`` knows what values must agree on, ``config_file.py`` reads TOML and the
command line. A value that encodes a design choice of the user's robot or policy has no default.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

Interpolation = Literal["linear", "previous", "nearest", "slerp", "angle"]
Positive = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[float, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]
Text = Annotated[str, Meta(min_length=1)]
Name = Annotated[  # fits the wire and a log's key
    str,
    Meta(
        pattern=r"^[A-Za-z0-9_/-]{1,64}\Z",
        extra={"want": "1 to 64 letters, digits, '_', '-' or '/'"},
    ),
]
Target = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*\Z",
        extra={"want": "'package.module:attr'"},
    ),
]
Module = Annotated[
    str,
    Meta(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*\Z", extra={"want": "'package.module'"}),
]
PacingRule = Annotated[
    str,
    Meta(
        pattern=r"^(sample(:.+)?|tick|free|saturated)\Z",
        extra={"want": "one of sample, sample:<stream>, tick, free, saturated"},
    ),
]
FilePath = Annotated[str, Meta(min_length=1, extra={"path": True})]  # made absolute when read

RING_MARGIN: Final = 2.0  # a stream may run at twice its nominal rate before a ring is too short
RING_SPARE_SAMPLES: Final = 16  # of very slow streams: a few samples whatever the arithmetic says


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of the configuration: frozen, and no unknown key passes."""


class StreamConfig(_Part, frozen=True):
    """One sensor's stream of samples."""

    name: Name
    dim: Annotated[int, Meta(ge=1, le=65536)]  # values per sample
    rate_hz: Positive  # nominal; sizes the ring and the synthetic source
    interpolation: Interpolation = "linear"
    dtype: Literal["float32", "float64"] = "float32"
    group: Name = "state"  # streams of one group become one tensor, concatenated in file order
    max_age_ms: Positive = 200.0  # held longer than this beyond its newest sample: invalid
    max_gap_ms: Positive = 200.0  # not interpolated across a wider hole: invalid
    reference: bool = False  # its newest stamp ends the window; at most one, else the fastest
    jitter_ms: NonNegative = 0.0  # of the synthetic source


class WindowConfig(_Part, frozen=True):
    """The aligned slice a policy sees: ``steps`` targets ``dt_ms`` apart, the last at the end."""

    steps: Count
    dt_ms: Positive


class BatchConfig(_Part, frozen=True):
    """Fixed robot rows of one envelope."""

    rows: Annotated[int, Meta(ge=1, le=1024)] = 1


class ActionConfig(_Part, frozen=True):
    """What a policy's ``actions [horizon, len(names)]`` mean, and for how long they may be used."""

    names: tuple[Name, ...]
    horizon: Count
    dt_ms: Positive
    low: tuple[float, ...]  # limits per action, in the units the robot executes
    high: tuple[float, ...]
    lease_ms: Positive  # an action chunk expires this long after its window's end


class PolicyConfig(_Part, frozen=True):
    """Stage B: ``module:attr`` of a ``build(config, device)`` function, its weights and options."""

    target: Target
    weights: FilePath | None = None  # .safetensors
    options: dict[str, Any] = {}  # handed to build() untouched


class DecodeConfig(_Part, frozen=True):
    """Stage C: ``module:attr`` of a ``build(options, actions)`` function; the default copies."""

    target: Target = "ppstream.decode:build"
    options: dict[str, Any] = {}


class SimulateConfig(_Part, frozen=True):
    """Extra stage time on rank 0 for D sweeps and model checks; B simulates in its policy."""

    a_ms: NonNegative = 0.0
    c_ms: NonNegative = 0.0
    kind: Literal["sleep", "spin"] = "sleep"
    law: Literal["constant", "uniform", "tail"] = "constant"
    seed: int = 0


class PipelineShape(_Part, frozen=True):
    """How the two ranks run."""

    pacing: PacingRule = "sample"  # of the reference stream, else of the one named
    tick_hz: Positive | None = None  # needed by pacing = "tick"
    windows: Literal["live", "scheduled"] = "live"
    threads: Literal["serial", "split"] = "serial"
    d_in: Annotated[int, Meta(ge=1, le=64)] = 2
    d_out: Annotated[int, Meta(ge=1, le=64)] = 2


class LinkConfig(_Part, frozen=True):
    """How envelopes travel between the ranks; ``auto`` lets the placement choose."""

    kind: Literal["auto", "host", "gloo"] = "auto"
    trusted_network: bool = False  # must be true for gloo between hosts: it is not encrypted


class BringupConfig(_Part, frozen=True):
    """The gate in front of *ready*."""

    source: Literal["synthetic", "recording"] = "synthetic"
    recording: FilePath | None = None  # .npz or .npy that tools/replay.py can read
    envelopes: Annotated[int, Meta(ge=100)] = 400
    overlap_min: Annotated[float, Meta(ge=0, le=1)] = 0.30
    accept: tuple[Literal["NOTHING_TO_HIDE"], ...] = ()
    standalone: Count = 30  # envelopes each stage is timed alone
    warmup_max: Count = 400  # give up waiting for a steady period after this many


class ServiceConfig(_Part, frozen=True):
    """What is served: robots that connect, or a recording instead of them."""

    endpoint: Text | None = "tcp://127.0.0.1:5870"  # tcp:// or ipc://; none: no robot can connect
    recording: FilePath | None = None  # serve this recording as the only robot, then drain
    actions_file: FilePath | None = None  # .npz that collects the chunks of a recording's run
    duration_s: Positive | None = None  # drain by itself this long after ready


class LivenessConfig(_Part, frozen=True):
    """When the other side counts as gone. Heartbeat and limits are one pair."""

    heartbeat_ms: Positive = 200.0  # below a third of frozen_ms
    frozen_ms: Positive = 2000.0  # silent this long and no progress
    handshake_s: Positive = 15.0
    drain_s: Positive = 5.0
    policy_errors_max: Count = 5  # consecutive ones end the run with 26


class LogConfig(_Part, frozen=True):
    """Where run logs go."""

    root: FilePath = "logs"
    keep: Count = 20  # older runs are deleted
    ring: Annotated[int, Meta(ge=64)] = 8192  # envelopes buffered between loop and disk


class DemoConfig(_Part, frozen=True):
    """The embedded cart-pole, started as a child process by the default configuration only."""

    robot: Module  # module run with python -m
    extra_delay_ms: NonNegative = 0.0  # its samples leave, and so its actions come, this much later
    seed: int = 0


class PipelineConfig(_Part, frozen=True):
    """A whole run."""

    name: Name
    streams: tuple[StreamConfig, ...]
    window: WindowConfig
    actions: ActionConfig
    policy: PolicyConfig
    pipeline: PipelineShape = PipelineShape()
    batch: BatchConfig = BatchConfig()
    decode: DecodeConfig = DecodeConfig()
    simulate: SimulateConfig = SimulateConfig()
    link: LinkConfig = LinkConfig()
    bringup: BringupConfig = BringupConfig()
    service: ServiceConfig = ServiceConfig()
    liveness: LivenessConfig = LivenessConfig()
    log: LogConfig = LogConfig()
    demo: DemoConfig | None = None

    @property
    def reference(self) -> StreamConfig:
        """The stream whose newest stamp ends the window: the marked one, else the fastest."""
        marked = [stream for stream in self.streams if stream.reference]
        return marked[0] if marked else max(self.streams, key=lambda stream: stream.rate_hz)

    @property
    def groups(self) -> dict[str, tuple[StreamConfig, ...]]:
        """Streams by group, in file order."""
        names = dict.fromkeys(stream.group for stream in self.streams)
        return {name: tuple(s for s in self.streams if s.group == name) for name in names}

    @property
    def window_span_ms(self) -> float:
        """From a window's first target to its end."""
        return (self.window.steps - 1) * self.window.dt_ms

    def ring_samples(self, stream: StreamConfig) -> int:
        """Samples a ring of ``stream`` must hold so that no window misses one it needs.

        A window reaches back over its span and one bracket of at most ``max_gap_ms``; the stream
        may be ahead of the reference stream by what still counts as fresh, ``max_age_ms``.
        """
        reach_ms = self.window_span_ms + stream.max_gap_ms + stream.max_age_ms
        return RING_SPARE_SAMPLES + math.ceil(RING_MARGIN * stream.rate_hz * reach_ms / 1000)
