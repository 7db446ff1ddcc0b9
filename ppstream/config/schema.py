"""PipelineConfig: everything that shapes a run, in one frozen struct.

Each key's docstring has its meaning and, where it has a default, when to set it; its type has the
bounds of its value. ``rules.py`` has the rules between values, ``load.py`` reads TOML and the
command line. A value that encodes a design choice of the user's robot or policy has no default.
"""

from __future__ import annotations

import math
import sys
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from ppstream.config.field_types import Count as Count
from ppstream.config.field_types import (
    FilePath,
    Interpolation,
    Name,
    Positive,
    RateLimit,
    Table,
    Target,
    Text,
)
from ppstream.config.field_types import NonNegative as NonNegative
from ppstream.config.run_tables import BringupConfig as BringupConfig
from ppstream.config.run_tables import DemoConfig as DemoConfig
from ppstream.config.run_tables import GatewayConfig as GatewayConfig
from ppstream.config.run_tables import LinkConfig as LinkConfig
from ppstream.config.run_tables import LivenessConfig as LivenessConfig
from ppstream.config.run_tables import LogConfig as LogConfig
from ppstream.config.run_tables import MetricsConfig as MetricsConfig
from ppstream.config.run_tables import PipelineShape as PipelineShape
from ppstream.config.run_tables import PlacementConfig as PlacementConfig
from ppstream.config.run_tables import ProfileConfig as ProfileConfig
from ppstream.config.run_tables import RecordConfig as RecordConfig
from ppstream.config.run_tables import ServiceConfig as ServiceConfig
from ppstream.config.run_tables import SimulateConfig as SimulateConfig
from ppstream.config.run_tables import ViewConfig as ViewConfig

ROWS_MAX: Final = 1024
CHANNELS: Final = 3  # of a frame: red, green, blue
RING_MARGIN: Final = 2.0  # a stream may run at twice its nominal rate before a ring is too short
RATE_MARGIN: Final = 4.0  # times its declared rate a robot may send, each sample by itself
RING_SPARE_REQUESTS: Final = 8  # of cameras: more than a robot has under way
RING_SPARE_SAMPLES: Final = 16  # of very slow streams: a few samples whatever the arithmetic says


class ImageConfig(Table, frozen=True):
    """A stream of frames, ``[height, width, 3]`` uint8, and what a policy reads of them."""

    height: Annotated[int, Meta(ge=1, le=8192)]
    """Rows of a frame as the robot sends it, [height, width, 3] uint8 RGB."""
    width: Annotated[int, Meta(ge=1, le=8192)]
    """Columns of a frame as the robot sends it."""
    frames: Annotated[int, Meta(ge=1, le=64)] = 1
    """Newest frames that a policy reads, oldest first. Raise it for policies that see motion."""
    resize: tuple[Annotated[int, Meta(ge=1, le=8192)], ...] | None = None
    """Height and width that a policy reads, bilinear and not antialiased; none keeps the frame's.
    Set it to the network's input."""
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    """Mean of each channel, of pixels scaled to 0..1. Set it to the network's normalisation."""
    std: tuple[Positive, ...] = (1.0, 1.0, 1.0)
    """Standard deviation of each channel, of pixels scaled to 0..1. Set it to the network's
    normalisation."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of <name>.frames that a policy reads; unless stated float32 where all ranks are on CPUs.
    Set what the policy reads."""

    @property
    def size(self) -> tuple[int, int]:
        """Height and width that a policy reads."""
        height, width = self.resize or (self.height, self.width)
        return height, width

    @property
    def is_plain(self) -> bool:
        """True when a policy reads 0..1, not normalised."""
        return set(self.mean) == {0.0} and set(self.std) == {1.0}


class RecordedAs(Table, frozen=True, kw_only=True):
    """Location of a stream's samples in a PX4 ULog, a ROS bag or an MCAP file made by others."""

    topic: Text
    """Topic with the samples; of a ULog sensor_combined, or sensor_combined[1] for its second
    instance."""
    fields: tuple[Text, ...] = ()
    """Values in order: pose.position.x, gyro_rad[0], or an array's name for all of it. State them;
    a camera has none, since a message is a frame."""
    stamp: Text | None = None
    """Field with each message's time; none takes header.stamp, else when it was logged. Set it
    where another field has the sensor's clock."""


class StreamConfig(Table, frozen=True, kw_only=True):
    """One sensor's stream of samples; with ``image`` a camera's frames."""

    name: Name
    """Name of the stream, as robots send it."""
    dim: Count = 0
    """Values of a sample. State it; a camera takes it from its image."""
    rate_hz: Positive | None = None
    """Nominal rate; sizes the ring and the synthetic source. State it, or max_request_hz."""
    max_request_hz: Positive | None = None
    """Most samples a second of a stream that comes with a robot's requests. Set it instead of
    rate_hz for robots that ask in lock-step: RobotClient.ask, a gateway's clients."""
    interpolation: Interpolation = "linear"
    """Value between two samples: linear, previous, nearest, slerp (quaternions), angle (wraps at
    pi), cubic (smooth, without overshoot). Set previous for switched values, cubic for slow sensors
    of smooth motion."""
    dtype: Literal["float32", "float64", "uint8"] = "float32"
    """Type that robots send; uint8 of a camera alone. Set float64 where the driver has it."""
    group: Name = "state"
    """Tensor that the stream is a part of: streams of one group are concatenated in file order. Set
    it for policies with several inputs."""
    max_age_ms: Positive = 200.0
    """Oldest newest sample that still counts: held longer, a target is invalid. Raise it for slow
    sensors."""
    max_gap_ms: Positive = 200.0
    """Widest hole between two samples that is bridged; previous and nearest bridge from target to
    sample. Raise it for sensors that stall."""
    low: tuple[float, ...] = ()
    """Lowest value of each of the dim values. Set it for groups in 8 bits, which saturate there."""
    high: tuple[float, ...] = ()
    """Highest value of each of the dim values. Set it for groups in 8 bits, which saturate there.
    """
    reference: bool = False
    """Makes the stream's newest stamp the end of each window; at most one, else the fastest. Set it
    on the sensor that matters most."""
    jitter_ms: NonNegative = 0.0
    """Jitter of the synthetic source. Set it to try a policy on uneven stamps."""
    image: ImageConfig | None = None
    """Makes the stream a camera: a policy reads <name>.frames, .valid and .age_s. Set it for
    frames."""
    joints: tuple[Text, ...] = ()
    """Names of the joints whose positions a sample holds, as in the robot's URDF: recordings and
    the live view give them as foxglove.JointStates. Set it to see the robot move in a viewer."""
    recorded: RecordedAs | None = None
    """Place of the stream in a recording made by others. Set it to replay a ULog, ROS bag or MCAP.
    """

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
    def bracket_ms(self) -> float:
        """Longest time from a target back to a sample that shapes its value; of a hold none."""
        return self.max_gap_ms * (2 if self.interpolation == "cubic" else 1)

    @property
    def is_on_request(self) -> bool:
        """True when samples come with a robot's requests: late, slow or silent is none of them."""
        return self.max_request_hz is not None


class GroupConfig(Table, frozen=True):
    """Values of one group in a window: their type, and what scales those in 8 bits."""

    dtype: Literal["float32", "int8", "float8_e4m3fn"] = "float32"
    """Type of <group>.values; of 8 bits a value is the number times its column of <group>.scale.
    Set what the policy reads."""
    statistics: FilePath | None = None
    """JSON file like LeRobot's meta/stats.json, min and max by stream or group. Set it for 8 bits
    where streams state no low and high."""

    @property
    def is_scaled(self) -> bool:
        """True in 8 bits."""
        return self.dtype != "float32"


class WindowConfig(Table, frozen=True):
    """The aligned slice a policy sees: ``steps`` targets ``dt_ms`` apart, the last at the end."""

    steps: Annotated[int, Meta(ge=1, le=65536)]
    """Targets of a window; each tensor of a policy has so many rows."""
    dt_ms: Positive
    """Time between two targets, as in training."""
    groups: dict[str, GroupConfig] = msgspec.field(default_factory=dict)
    """Type of a group's values by the group's name; float32 where it is not named. Set it for
    policies that read 8 bits."""


class BatchConfig(Table, frozen=True):
    """Fixed robot rows of one envelope."""

    rows: Annotated[int, Meta(ge=1, le=ROWS_MAX)] = 1
    """Robots of one envelope, a fixed row each. Raise it to serve several robots with one policy.
    """
    sizes: tuple[Count, ...] | Literal["powers", "all", "whole"] = "powers"
    """Rows that a policy with any_rows is called with, the fewest that hold all robots: powers is
    1, 2, 4 up to rows. Set whole for numbers that do not depend on how many robots are there."""


class RobotLimits(Table, frozen=True):
    """Tighter limits of one robot; what is left empty is as for all."""

    low: tuple[float, ...] = ()
    """Lowest value of each action of this robot; empty as for all. Set it for a robot with less
    room."""
    high: tuple[float, ...] = ()
    """Highest value of each action of this robot; empty as for all. Set it for a robot with less
    room."""
    velocity: tuple[RateLimit, ...] = ()
    """Largest change per second of each action of this robot; empty as for all. Set it for a slower
    robot."""
    acceleration: tuple[RateLimit, ...] = ()
    """Largest change of velocity per second of each action of this robot; empty as for all. Set it
    for a softer robot."""


class ActionConfig(Table, frozen=True):
    """Meaning of a policy's ``actions [horizon, len(names)]``, and how long they may be used."""

    names: tuple[Name, ...]
    """Names of a chunk's columns, as robots know them."""
    horizon: Annotated[int, Meta(ge=1, le=65536)]
    """Steps of a chunk."""
    dt_ms: Positive
    """Time between two steps of a chunk."""
    low: tuple[float, ...]
    """Lowest value of each action, in the units that the robot executes."""
    high: tuple[float, ...]
    """Highest value of each action, in the units that the robot executes."""
    lease_ms: Positive
    """Time after a window's end at which its chunk expires; without a newer one the robot holds.
    State more than a chunk's age and the time until the next one."""
    max_age_ms: Positive | None = None
    """Oldest action that robots execute; none leaves it to the lease. Set it below the lease for
    fast motions."""
    discrete: dict[str, tuple[float, ...]] = msgspec.field(default_factory=dict)
    """Values of switched actions: the nearest one is sent. Set it for grippers and modes."""
    on_limit: Literal["clip", "drop"] = "clip"
    """What happens to a chunk outside low to high: clip its values, or drop it. Set drop where a
    clipped motion is worse than none."""
    velocity: tuple[RateLimit, ...] = ()
    """Largest change per second of each action between steps; a faster chunk is dropped. Set it for
    real arms."""
    acceleration: tuple[RateLimit, ...] = ()
    """Largest change of velocity per second of each action; a harder chunk is dropped. Set it for
    real arms."""
    robots: dict[str, RobotLimits] = msgspec.field(default_factory=dict)
    """Tighter limits by a robot's name. Set it when robots of one run differ."""
    prefix_steps: Annotated[int, Meta(ge=0, le=1024)] = 0
    """Steps of input executed_prefix, the actions under way; 0 gives none. Set it for policies that
    continue a chunk (RTC)."""
    provenance: bool = False
    """Tells robots where the age of each chunk comes from. Set it to look for latency at the robot.
    """


class PolicyConfig(Table, frozen=True):
    """Stage B: ``module:attr`` of a ``build(config, device)`` function, its weights and options."""

    target: Target
    """Function build(config, device) that makes the policy, as package.module:attr."""
    weights: FilePath | None = None
    """File with weights, .safetensors or .onnx, handed to build. Set it for trained policies."""
    options: dict[str, Any] = msgspec.field(default_factory=dict)
    """Values handed to build untouched. Set what the policy's page names."""
    instructions: bool = False
    """Lets robots send texts: inputs instruction_id and conditioning_epoch. Set it for policies
    that follow language."""
    graph: bool = True
    """Replays the policy from CUDA graphs that warm-up records. Set false for policies that cannot
    be captured."""
    compile: bool = False
    """Compiles the policy with torch.compile while warming. Set it where it is faster; the start
    takes longer."""
    graph_breaks_max: Annotated[int, Meta(ge=0, le=1000)] = 0
    """Graph breaks of a compiled policy, in all its parts on a rank, with which it becomes ready.
    Raise it for a policy that is fast enough in several graphs."""


class DecodeConfig(Table, frozen=True):
    """Stage C: ``module:attr`` of a ``build(options, actions)`` function; the default copies."""

    target: Target = "ppstream.pipeline.decode:build"
    """Function build(options, actions) that makes stage C's decoder. Set it where a policy's output
    is no chunk yet."""
    options: dict[str, Any] = msgspec.field(default_factory=dict)
    """Values handed to the decoder untouched. Set what it documents."""


class PipelineConfig(Table, frozen=True):
    """A whole run."""

    name: Name
    """Name of the run, for folders and reports."""
    streams: tuple[StreamConfig, ...]
    """Sensors, a table each."""
    window: WindowConfig
    """Aligned slice that a policy sees."""
    actions: ActionConfig
    """Meaning and limits of what a policy answers."""
    policy: PolicyConfig
    """Stage B."""
    pipeline: PipelineShape = PipelineShape()
    """Shape of the pipeline."""
    placement: PlacementConfig = PlacementConfig()
    """Devices of the ranks."""
    batch: BatchConfig = BatchConfig()
    """Robots of one envelope."""
    decode: DecodeConfig = DecodeConfig()
    """Stage C's decoder."""
    simulate: SimulateConfig = SimulateConfig()
    """Extra stage times."""
    link: LinkConfig = LinkConfig()
    """Transport between ranks."""
    bringup: BringupConfig = BringupConfig()
    """Gate in front of ready."""
    service: ServiceConfig = ServiceConfig()
    """Robots that connect, or a recording instead."""
    liveness: LivenessConfig = LivenessConfig()
    """Limits after which a peer counts as gone."""
    log: LogConfig = LogConfig()
    """Run logs."""
    metrics: MetricsConfig = MetricsConfig()
    """Prometheus and health."""
    record: RecordConfig = RecordConfig()
    """Recording of a run."""
    view: ViewConfig = ViewConfig()
    """Live view of a run."""
    profile: ProfileConfig = ProfileConfig()
    """torch.profiler on a rank."""
    mode: Literal["throughput", "attribution"] = "throughput"
    """throughput serves; attribution times blocks of each stage alone, and ends. Set attribution to
    see where a stage spends its time."""
    demo: DemoConfig | None = None
    """Robot of the demo, started beside the ranks."""
    gateway: tuple[GatewayConfig, ...] = ()
    """Robots that speak another wire, a table each."""

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

    def group_settings(self, group: str) -> GroupConfig:
        """The group's own settings, or those of all."""
        return self.window.groups.get(group, GroupConfig())

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
        return self.window_span_ms + max(s.bracket_ms + s.max_age_ms for s in self.streams)

    @property
    def threads(self) -> Literal["serial", "split"]:
        """As rank 0 runs; serial, too, where ``auto`` is not decided."""
        return "split" if self.pipeline.threads == "split" else "serial"

    def ring_samples(self, stream: StreamConfig) -> int:
        """Samples a ring of ``stream`` must hold so that no window misses one it needs.

        A window reaches back over its span and one bracket of at most ``max_gap_ms`` (of cubics one
        more); the stream may be ahead of the reference stream by what still counts as fresh,
        ``max_age_ms``.
        Of a camera the newest frames alone are used. Where both it and the reference stream come
        with requests, it is ahead by those under way: a few, however often a robot may ask.
        """
        if stream.image is not None:
            if stream.is_on_request and self.reference.is_on_request:
                return RING_SPARE_REQUESTS + stream.image.frames
            ahead = math.ceil(RING_MARGIN * stream.most_hz * stream.max_age_ms / 1000)
            return RING_SPARE_SAMPLES + stream.image.frames + ahead
        reach_ms = self.window_span_ms + stream.bracket_ms + stream.max_age_ms
        return RING_SPARE_SAMPLES + math.ceil(RING_MARGIN * stream.most_hz * reach_ms / 1000)

    def samples_per_second(self, stream: StreamConfig) -> int:
        """Limit of a stream's samples that one robot may send; a frame beyond it is refused whole.

        A ring full comes on top: a robot may send at once what it has kept while it had no
        connection. A lone robot may send all it can: there is nobody to delay.
        """
        if self.batch.rows == 1:
            return sys.maxsize
        return self.ring_samples(stream) + math.ceil(RATE_MARGIN * stream.most_hz)
