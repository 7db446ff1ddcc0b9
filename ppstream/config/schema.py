"""PipelineConfig: everything that shapes a run, in one frozen struct.

Each field has its meaning and the bounds of its value; ``rules.py`` has the rules between values,
``load.py`` reads TOML and the command line. A value that encodes a design choice of the user's
robot or policy has no default.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from ppstream.config.field_types import Count as Count
from ppstream.config.field_types import (
    Device,
    Devices,
    FilePath,
    Index,
    Interpolation,
    Module,
    Name,
    PacingRule,
    Positive,
    Target,
    Text,
)
from ppstream.config.field_types import NonNegative as NonNegative

CHANNELS: Final = 3  # of a frame: red, green, blue
MAX_DIM: Final = 1 << 20  # values of a sample: a frame of 480 x 640 has 921600
RING_MARGIN: Final = 2.0  # a stream may run at twice its nominal rate before a ring is too short
RING_SPARE_SAMPLES: Final = 16  # of very slow streams: a few samples whatever the arithmetic says


class RecordConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Samples, windows' headers, action chunks and faults of a run, as MCAP."""

    file: FilePath | None = None  # .mcap, or a named pipe that a viewer reads; none: no recording
    queue_mb: Positive = 64.0  # waiting for the disk; what comes on top is dropped and counted
    robot: Name | None = None  # whose samples are replayed of a recording with several robots


class ViewConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A WebSocket for Foxglove, served on loopback by a process beside rank 0."""

    port: Annotated[int, Meta(ge=0, le=65535)] | None = None  # 8765 is the viewers' default
    # 0: any free port, told when the run begins; none: no live view
    queue_mb: Positive = 8.0  # waiting for that process; what comes on top is dropped and counted


class RecordedAs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Location of a stream's samples in a PX4 ULog, a ROS bag or an MCAP file made by others."""

    topic: Text  # of a ULog: sensor_combined, or sensor_combined[1] for its second instance
    fields: Annotated[tuple[Text, ...], Meta(min_length=1)]  # pose.position.x, gyro_rad[0], or q:
    # all values of an array, in order
    stamp: Text | None = None  # of each message; none: header.stamp, else when it was logged


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


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of the configuration: frozen, and no unknown key passes."""


class ImageConfig(_Part, frozen=True):
    """A stream of frames, ``[height, width, 3]`` uint8, and what a policy reads of them."""

    height: Annotated[int, Meta(ge=1, le=8192)]
    width: Annotated[int, Meta(ge=1, le=8192)]
    frames: Annotated[int, Meta(ge=1, le=64)] = 1  # the newest so many, oldest first
    resize: tuple[Count, ...] | None = None  # to height, width: bilinear, not antialiased
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)  # of pixels scaled to 0..1, by channel
    std: tuple[Positive, ...] = (1.0, 1.0, 1.0)
    dtype: Literal["bfloat16", "float32"] = "bfloat16"  # that a policy reads

    @property
    def size(self) -> tuple[int, int]:
        """Height and width that a policy reads."""
        height, width = self.resize or (self.height, self.width)
        return height, width


class StreamConfig(_Part, frozen=True, kw_only=True):
    """One sensor's stream of samples; with ``image`` a camera's frames."""

    name: Name
    dim: Count = 0  # values per sample; left out of a camera
    rate_hz: Positive | None = None  # nominal; sizes the ring and the synthetic source
    max_request_hz: Positive | None = None  # instead: comes on request, and so often at most
    interpolation: Interpolation = "linear"
    dtype: Literal["float32", "float64", "uint8"] = "float32"  # uint8 of a camera alone
    group: Name = "state"  # streams of one group become one tensor, concatenated in file order
    max_age_ms: Positive = 200.0  # held longer than this beyond its newest sample: invalid
    # A hole wider than max_gap_ms is not bridged: invalid. previous and nearest bridge from the
    # target to the sample they pick, also beyond the newest.
    max_gap_ms: Positive = 200.0
    reference: bool = False  # its newest stamp ends the window; at most one, else the fastest
    jitter_ms: NonNegative = 0.0  # of the synthetic source
    image: ImageConfig | None = None  # <name>.frames, .valid and .age_s; group does not apply
    recorded: RecordedAs | None = None  # where a recording made by others has it

    def __post_init__(self) -> None:
        if self.image is not None and self.dim == 0:
            pixels = self.image.height * self.image.width
            msgspec.structs.force_setattr(self, "dim", pixels * CHANNELS)
            msgspec.structs.force_setattr(self, "dtype", "uint8")

    @property
    def most_hz(self) -> float:
        """Samples a second that are to be expected: nominally, or of requests at most."""
        return self.rate_hz or self.max_request_hz or 0.0

    @property
    def is_on_request(self) -> bool:
        """True when samples come with a robot's requests: late, slow or silent is none of them."""
        return self.max_request_hz is not None


class WindowConfig(_Part, frozen=True):
    """The aligned slice a policy sees: ``steps`` targets ``dt_ms`` apart, the last at the end."""

    steps: Count
    dt_ms: Positive


class BatchConfig(_Part, frozen=True):
    """Fixed robot rows of one envelope."""

    rows: Annotated[int, Meta(ge=1, le=1024)] = 1


class RobotLimits(_Part, frozen=True):
    """Tighter limits of one robot; what is left empty is as for all."""

    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    velocity: tuple[Positive, ...] = ()
    acceleration: tuple[Positive, ...] = ()


class ActionConfig(_Part, frozen=True):
    """Meaning of a policy's ``actions [horizon, len(names)]``, and how long they may be used."""

    names: tuple[Name, ...]
    horizon: Count
    dt_ms: Positive
    low: tuple[float, ...]  # limits per action, in the units the robot executes
    high: tuple[float, ...]
    lease_ms: Positive  # an action chunk expires this long after its window's end
    max_age_ms: Positive | None = None  # robots execute no older action; none: the lease alone
    discrete: dict[str, tuple[float, ...]] = {}  # switched actions: the nearest of these values
    on_limit: Literal["clip", "drop"] = "clip"  # outside low to high: clip it, or drop the chunk
    velocity: tuple[Positive, ...] = ()  # units/s per action between steps; faster: dropped
    acceleration: tuple[Positive, ...] = ()  # units/s2 per action; more: the chunk is dropped
    robots: dict[str, RobotLimits] = {}  # of single robots, by the name they say in Hello
    prefix_steps: Annotated[int, Meta(ge=0, le=1024)] = 0  # of input executed_prefix; 0: none
    provenance: bool = False  # chunks tell the robot where their age comes from


class PolicyConfig(_Part, frozen=True):
    """Stage B: ``module:attr`` of a ``build(config, device)`` function, its weights and options."""

    target: Target
    weights: FilePath | None = None  # .safetensors, .onnx
    options: dict[str, Any] = {}  # handed to build() untouched
    instructions: bool = False  # robots may send texts: inputs instruction_id, conditioning_epoch
    graph: bool = True  # on a GPU: replayed from CUDA graphs that warm-up records
    compile: bool = False  # by torch.compile, while warming up


class DecodeConfig(_Part, frozen=True):
    """Stage C: ``module:attr`` of a ``build(options, actions)`` function; the default copies."""

    target: Target = "ppstream.pipeline.decode:build"
    options: dict[str, Any] = {}


class SimulateConfig(_Part, frozen=True):
    """Extra stage time on rank 0 for D sweeps and model checks; B simulates in its policy."""

    a_ms: NonNegative = 0.0
    c_ms: NonNegative = 0.0
    kind: Literal["sleep", "spin", "gpu"] = "sleep"  # gpu: constant work on rank 0's device
    law: Literal["constant", "uniform", "tail"] = "constant"
    seed: int = 0


class PlacementConfig(_Part, frozen=True):
    """Which rank computes on which device."""

    rank0: Device = "cpu"  # stages A and C, and the policy's front parts
    policy: Devices = ("cpu",)  # stage B: one policy rank for each
    # place of each part, place 0 being rank 0; "auto": the best ones by the parts' times at start
    parts: tuple[Annotated[int, Meta(ge=0)], ...] | Literal["auto"] = ()

    @property
    def cut(self) -> tuple[int, ...]:
        """Place of each part; empty where none are stated, or not known yet."""
        return () if isinstance(self.parts, str) else self.parts


class PipelineShape(_Part, frozen=True):
    """Shape of the pipeline of two ranks."""

    pacing: PacingRule = "sample"  # of the reference stream, else of the one named
    tick_hz: Positive | None = None  # needed by pacing = "tick"
    gather_ms: Positive | None = None  # needed by pacing = "rows": wait so long for other robots
    windows: Literal["live", "scheduled"] = "live"
    threads: Literal["auto", "serial", "split"] = "auto"  # auto: split for long front parts
    d_in: Annotated[int, Meta(ge=1, le=64)] = 2  # unless stated: the number of ranks
    d_out: Annotated[int, Meta(ge=1, le=64)] = 2
    credit: Literal["before_window", "after_window"] = "before_window"  # freshness | throughput
    #: On CPUs: while a rank waits, dry runs of the window and of a stateless policy so often.
    keep_warm_ms: Annotated[float, Meta(ge=0.1, le=100)] | None = None


class LinkConfig(_Part, frozen=True):
    """Transport of envelopes between the ranks; ``auto`` lets the placement choose."""

    kind: Literal["auto", "host", "gloo", "peer", "pinned", "nccl"] = "auto"
    trusted_network: bool = False  # must be true for gloo between hosts: it is not encrypted
    wait: Literal["kernel", "driver"] = "kernel"  # of peer; a GPU shared with others: "driver"


class BringupConfig(_Part, frozen=True):
    """The gate in front of *ready*."""

    source: Literal["synthetic", "recording"] = "synthetic"
    recording: FilePath | None = None  # any that tools/replay.py can read
    envelopes: Annotated[int, Meta(ge=100)] = 400
    overlap_min: Annotated[float, Meta(ge=0, le=1)] = 0.30  # by the stamps, and by times alone
    # Reasons of a refusal that count for nothing here: speed is yours to judge, safety is not.
    accept: tuple[Literal["NOTHING_TO_HIDE", "LOW_OVERLAP", "CONTENDED"], ...] = ()
    standalone: Count = 30  # envelopes each stage is timed alone, before and behind bring-up
    warmup_max: Count = 400  # give up waiting for a steady period after this many


class ServiceConfig(_Part, frozen=True):
    """Service: robots that connect, or a recording instead of them."""

    # unix://PATH for robots of this host, {uid}: its user; tcp://ADDRESS:PORT; none: no robots.
    endpoint: Text | None = "unix:///tmp/ppstream-{uid}/robots"
    recording: FilePath | None = None  # serve this recording as the only robot, then drain
    actions_file: FilePath | None = None  # .npz that collects the chunks of a recording's run
    duration_s: Positive | None = None  # drain by itself this long after ready
    # Both are needed, and made by ppstream-keys, where other hosts can reach the endpoint.
    secret_key: FilePath | None = None  # rank 0's own, a .secret file
    allowed_keys: FilePath | None = None  # public keys of the robots it serves
    # Of unix:// endpoints: users whose programs may connect; none: rank 0's own user.
    allowed_uids: tuple[Annotated[int, Meta(ge=0, lt=2**32)], ...] = ()
    clock_probe_s: Positive | None = None  # ask robots for their clock so often; for traces only


class LivenessConfig(_Part, frozen=True):
    """When the other side counts as gone. Heartbeat and limits are one pair."""

    heartbeat_ms: Positive = 200.0  # below a third of frozen_ms
    frozen_ms: Positive = 1500.0  # silent this long and no progress
    watchdog_s: Positive = 5.0  # a thread, or stage B, at a standstill; or 5 times the usual B
    start_s: Positive = 600.0  # the same before ready: a build, links, first calls, a compilation
    handshake_s: Positive = 15.0
    drain_s: Positive = 5.0
    policy_errors_max: Count = 5  # consecutive ones end the run with 26


class LogConfig(_Part, frozen=True):
    """Location of run logs."""

    root: FilePath = "logs"
    keep: Count = 20  # older runs are deleted
    ring: Annotated[int, Meta(ge=64)] = 8192  # envelopes buffered between loop and disk


class DemoConfig(_Part, frozen=True):
    """The embedded cart-pole, started as a child process by the default configuration only."""

    robot: Module  # module run with python -m
    extra_delay_ms: NonNegative = 0.0  # its samples leave, and so its actions come, this much later
    seed: int = 0


class GatewayConfig(_Part, frozen=True):
    """Robots that speak another wire, served by ``ppstream-gateway`` as robots of this run."""

    wire: Literal["openpi", "groot", "lerobot"]
    # By stream its path in a robot's observation, or a list of them, each of one number, or
    # { key, layout = "hwc" | "chw" | "auto", optional }; by prompt, which is no stream, the
    # instruction's.
    map: dict[str, Any]
    listen: Text | None = None  # ADDRESS:PORT, none: loopback, the wire's own port; port 0: any
    # free one, told in the log
    answer: Literal["exact", "newest"] = "exact"  # chunk of this observation | the newest, at once
    timeout_ms: Positive = 1000.0  # for an answer; then the robot is told why there is none
    silence_s: Positive = 40.0  # a robot that answers no ping, or of GR00T asks nothing, is gone
    message_mb: Positive = 64.0  # largest message taken
    metadata: dict[str, Any] = {}  # told to each robot that connects
    # Of GR00T: by key of its action, first and behind-last of actions.names; the form of
    # get_modality_config, which changed.
    action_keys: dict[str, tuple[Index, Index]] = {}
    generation: Literal["n1.5", "n1.6"] = "n1.6"
    # Other hosts can reach it: what the wire has of them is needed.
    api_key_file: FilePath | None = None  # the key alone, readable by its owner alone
    certfile: FilePath | None = None  # TLS, PEM
    keyfile: FilePath | None = None
    # Where rank 0 is, if not at service.endpoint; keys, if rank 0 has some.
    endpoint: Text | None = None
    secret_key: FilePath | None = None  # the gateway's own, a .secret file
    server_key: FilePath | None = None  # rank 0's, a .public file


class PipelineConfig(_Part, frozen=True):
    """A whole run."""

    name: Name
    streams: tuple[StreamConfig, ...]
    window: WindowConfig
    actions: ActionConfig
    policy: PolicyConfig
    pipeline: PipelineShape = PipelineShape()
    placement: PlacementConfig = PlacementConfig()
    batch: BatchConfig = BatchConfig()
    decode: DecodeConfig = DecodeConfig()
    simulate: SimulateConfig = SimulateConfig()
    link: LinkConfig = LinkConfig()
    bringup: BringupConfig = BringupConfig()
    service: ServiceConfig = ServiceConfig()
    liveness: LivenessConfig = LivenessConfig()
    log: LogConfig = LogConfig()
    metrics: MetricsConfig = MetricsConfig()
    record: RecordConfig = RecordConfig()
    view: ViewConfig = ViewConfig()
    profile: ProfileConfig = ProfileConfig()
    mode: Literal["throughput", "attribution"] = "throughput"  # attribution times blocks alone
    demo: DemoConfig | None = None
    gateway: tuple[GatewayConfig, ...] = ()  # started and ended by rank 0

    @property
    def reference(self) -> StreamConfig:
        """The stream whose newest stamp ends the window: the marked one, else the fastest."""
        marked = [stream for stream in self.streams if stream.reference]
        return marked[0] if marked else max(self.streams, key=lambda stream: stream.most_hz)

    @property
    def groups(self) -> dict[str, tuple[StreamConfig, ...]]:
        """Streams by group, in file order; cameras are in none."""
        plain = [stream for stream in self.streams if stream.image is None]
        names = dict.fromkeys(stream.group for stream in plain)
        return {name: tuple(s for s in plain if s.group == name) for name in names}

    @property
    def cameras(self) -> tuple[StreamConfig, ...]:
        """Streams of frames, in file order."""
        return tuple(stream for stream in self.streams if stream.image is not None)

    @property
    def window_span_ms(self) -> float:
        """From a window's first target to its end."""
        return (self.window.steps - 1) * self.window.dt_ms

    @property
    def reach_ms(self) -> float:
        """No window uses a sample that is older than this."""
        return self.window_span_ms + max(s.max_gap_ms + s.max_age_ms for s in self.streams)

    @property
    def threads(self) -> Literal["serial", "split"]:
        """As rank 0 runs; serial, too, where ``auto`` is not decided."""
        return "split" if self.pipeline.threads == "split" else "serial"

    def ring_samples(self, stream: StreamConfig) -> int:
        """Samples a ring of ``stream`` must hold so that no window misses one it needs.

        A window reaches back over its span and one bracket of at most ``max_gap_ms``; the stream
        may be ahead of the reference stream by what still counts as fresh, ``max_age_ms``.
        Of a camera the newest frames alone are used.
        """
        if stream.image is not None:
            ahead = math.ceil(RING_MARGIN * stream.most_hz * stream.max_age_ms / 1000)
            return RING_SPARE_SAMPLES + stream.image.frames + ahead
        reach_ms = self.window_span_ms + stream.max_gap_ms + stream.max_age_ms
        return RING_SPARE_SAMPLES + math.ceil(RING_MARGIN * stream.most_hz * reach_ms / 1000)
