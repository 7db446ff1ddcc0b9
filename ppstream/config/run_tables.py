"""Tables of how a run goes: pipeline, placement, gate, service, limits, logs, gateways.

``schema.py`` has what a robot and a policy state, and the whole. A key's docstring says what it
means and, where it has a default, when to set it; ``explain.py`` prints both.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from ppstream.config.field_types import (
    Count,
    Device,
    Devices,
    FilePath,
    Index,
    Module,
    NonNegative,
    PacingRule,
    Positive,
    RobotName,
    Table,
    Text,
)

REPLICAS_MAX: Final = 16
D_IN_MAX: Final = 64
ENVELOPES_MAX: Final = 1_000_000  # before ready: more is a mistyped number, and never ends
LOG_RING_MAX: Final = 1 << 18  # records are made before the first envelope


class PipelineShape(Table, frozen=True):
    """Shape of the pipeline of two ranks."""

    pacing: PacingRule = "sample"
    """Moment at which stage A begins, once it has a credit: a new sample of the reference stream
    (sample) or of another one (sample:<stream>), a new sample of every robot (rows), a clock
    (tick), a new sample of any stream (free), at once (saturated). Set rows for robots that wait
    for answers."""
    tick_hz: Positive | None = None
    """Rate of pacing tick. Set it with that pacing."""
    gather_ms: Positive | None = None
    """Longest wait for other robots' samples, of pacing rows. Set it with that pacing."""
    windows: Literal["live", "scheduled"] = "live"
    """End of a window: live at the newest sample, or scheduled at its due time. Set scheduled for
    recordings."""
    threads: Literal["auto", "serial", "split"] = "auto"
    """Threads of rank 0: serial on one, split for receiving and decoding on another; auto splits
    for long front parts. Set split when C is long."""
    d_in: Annotated[int, Meta(ge=1, le=D_IN_MAX)] = 2
    """Envelopes that wait for the policy; unless stated the number of ranks, a mesh counted as one.
    Lower it for younger actions, raise it for uneven stages."""
    d_out: Annotated[int, Meta(ge=1, le=64)] = 2
    """Results that wait for rank 0. Raise it when C is uneven."""
    credit: Literal["before_window", "after_window"] = "before_window"
    """Moment at which an envelope takes its credit: before the window for freshness, after it for
    throughput. Set after_window for long stages A."""
    spin_ms: Annotated[float, Meta(ge=0, le=100)] = 0.0
    """Time for which a rank that waits looks again and again before it sleeps, and keeps its CPU
    awake. Raise it to the distance of envelopes where each rank has a CPU to itself."""


class PlacementConfig(Table, frozen=True):
    """Which rank computes on which device."""

    rank0: Device = "cpu"
    """Device of stages A and C, and of the policy's front parts. Set cuda:0 for windows cut on a
    GPU."""
    policy: Devices = ("cpu",)
    """Device of each policy rank; one is a list of one, and cpu stands for a whole mesh. Set a list
    to cut the policy over several."""
    parts: tuple[Annotated[int, Meta(ge=0)], ...] | Literal["auto"] = ()
    """Place of each part, 0 being rank 0; auto times them at the start and takes the best cut. Set
    it for policies of several parts."""
    replicas: Annotated[int, Meta(ge=1, le=REPLICAS_MAX)] = 1
    """Equal policy ranks of one place that take envelopes in turn. Raise it when a stateless policy
    takes several times as long as stages A and C."""
    replicas_min: Count | None = None
    """Replicas that are enough to go on serving when others are lost; none ends the run at the
    first loss. Set it where fewer actions are better than none."""

    @property
    def places(self) -> int:
        """Places of policy ranks: replicas are one, and so is a mesh."""
        return 1 if self.replicas > 1 or self.mesh > 1 else len(self.policy)

    def place_of(self, rank: int) -> int:
        """The place whose parts a rank runs."""
        return min(rank, self.places)

    @property
    def fewest(self) -> int:
        """Replicas without which the run ends."""
        return self.replicas if self.replicas_min is None else self.replicas_min

    mesh: Annotated[int, Meta(ge=1, le=16)] = 1
    """Ranks that compute the policy together, each with a shard of its weights; 1 is none. Set it
    for a policy that does not fit one rank; on GPUs list a device for each. With replicas each of
    them is so many ranks."""

    @property
    def leaders(self) -> int:
        """Policy ranks that envelopes pass; others are further members of their meshes."""
        return self.replicas if self.mesh > 1 else len(self.policy)

    @property
    def ranks(self) -> int:
        """Ranks of a pipelined run, rank 0 among them."""
        return 1 + self.leaders * self.mesh

    def leader_of(self, rank: int) -> int:
        """The policy rank that leads the mesh of a policy rank: itself, but of other members."""
        leaders = self.leaders
        is_leader = rank <= leaders or self.mesh == 1
        return rank if is_leader else 1 + (rank - leaders - 1) // (self.mesh - 1)

    def mesh_of(self, leader: int) -> tuple[int, ...]:
        """The ranks of a mesh, its leader first."""
        first = 1 + self.leaders + (leader - 1) * (self.mesh - 1)
        return leader, *range(first, first + self.mesh - 1)

    def device_of(self, rank: int) -> str:
        """The device of a policy rank; that of its leader where no others are listed."""
        is_listed = len(self.policy) == self.leaders * self.mesh
        return self.policy[(rank if is_listed else self.leader_of(rank)) - 1]

    @property
    def cut(self) -> tuple[int, ...]:
        """Place of each part; empty where none are stated, or not known yet."""
        return () if isinstance(self.parts, str) else self.parts


class LinkConfig(Table, frozen=True):
    """Transport of envelopes between the ranks; ``auto`` lets the placement choose."""

    kind: Literal["auto", "host", "gloo", "peer", "pinned", "nccl"] = "auto"
    """Transport of envelopes between ranks; auto lets the placement choose. Set it to compare
    transports."""
    trusted_network: bool = False
    """Allows gloo between hosts, which encrypts nothing. Set it on a network that nobody else uses.
    """
    wait: Literal["kernel", "driver"] = "kernel"
    """Who waits for an envelope on a GPU: a kernel, or the driver. Set driver on a GPU that others
    share."""
    stamps: Literal["auto", "events"] = "auto"
    """Takes the times of stages on a GPU: by kernels of the peer link where it can with auto, or by
    CUDA events. Set events to compare the two."""


class BringupConfig(Table, frozen=True):
    """The gate in front of *ready*."""

    source: Literal["synthetic", "recording"] = "synthetic"
    """Samples of bring-up: synthetic, or a recording. Set recording to prove overlap on real data.
    """
    recording: FilePath | None = None
    """Recording that bring-up plays, of any form that ppstream replay reads. Set it with that
    source."""
    envelopes: Annotated[int, Meta(ge=100, le=ENVELOPES_MAX)] = 400
    """Envelopes that the gate judges. Raise it for noisy machines."""
    overlap_min: Annotated[float, Meta(ge=0, le=1)] = 0.30
    """Lowest overlap score, by the stamps and by isolated stage times, that becomes ready. Raise it
    once the pipeline is tuned."""
    accept: tuple[Literal["NOTHING_TO_HIDE", "LOW_OVERLAP", "CONTENDED"], ...] = ()
    """Reasons of a refusal that do not count: speed is yours to judge, safety is not. Set them for
    a policy that is fast enough without overlap."""
    standalone: Annotated[int, Meta(ge=1, le=ENVELOPES_MAX)] = 30
    """Envelopes that each stage is timed alone, before and behind bring-up. Raise it for uneven
    stages."""
    warmup_max: Annotated[int, Meta(ge=1, le=ENVELOPES_MAX)] = 400
    """Envelopes after which waiting for a steady period ends. Raise it for policies that settle
    slowly."""


class ServiceConfig(Table, frozen=True):
    """Service: robots that connect, or a recording instead of them."""

    endpoint: Text | None = "unix:///tmp/ppstream-{uid}/robots"
    """Address for robots: unix://PATH on this host ({uid}: its user), tcp://ADDRESS:PORT, none for
    no robots. Set tcp for other hosts."""
    recording: FilePath | None = None
    """Recording that is served as the only robot; then the run drains. Set it to repeat actions
    offline."""
    actions_file: FilePath | None = None
    """File (.npz) that collects the chunks of a recording's run. Set it to compare runs."""
    duration_s: Positive | None = None
    """Time after ready at which the run drains by itself. Set it in tests."""
    secret_key: FilePath | None = None
    """Rank 0's own .secret file, made by ppstream keys. Set it where other hosts reach the
    endpoint."""
    allowed_keys: FilePath | None = None
    """File with public keys of the robots that are served, read at start: restart to lock one out.
    Set it where other hosts reach the endpoint."""
    allowed_uids: tuple[Annotated[int, Meta(ge=0, lt=2**32)], ...] = ()
    """Users whose programs may connect to unix://; empty allows rank 0's own. Set it for robots of
    another user."""
    clock_probe_s: Positive | None = None
    """Period at which robots are asked for their clock, for traces. Set it to see robots in
    Perfetto."""


class LivenessConfig(Table, frozen=True):
    """When the other side counts as gone. Heartbeat and limits are one pair."""

    heartbeat_ms: Positive = 200.0
    """Period of heartbeats between ranks, below a third of frozen_ms. Change it with frozen_ms."""
    frozen_ms: Positive = 1500.0
    """Silence without progress after which the other rank counts as gone. Raise it on machines that
    stall."""
    watchdog_s: Positive = 5.0
    """Standstill of a thread, or of stage B (or 5 times its usual time), that ends the run. Raise
    it for slow policies."""
    start_s: Positive = 600.0
    """The same limit before ready: a build, links, first calls, a compilation. Raise it for large
    checkpoints."""
    handshake_s: Annotated[float, Meta(ge=1)] = 15.0
    """Time for ranks to find each other, without that of hashing weights. Raise it when ranks start
    far apart."""
    drain_s: Positive = 5.0
    """Time for what is in flight when a run stops. Raise it above the latency of slow policies."""
    policy_errors_max: Count = 5
    """Failed results in a row that end the run with 26. Raise it for policies that may miss now and
    then."""


class LogConfig(Table, frozen=True):
    """Location of run logs."""

    root: FilePath = "logs"
    """Folder of run logs. Set it to a disk with room."""
    keep: Count = 20
    """Runs that are kept; older ones are deleted. Raise it to compare more, lower it for long runs:
    an hour of 50 chunks/s takes some 270 MB."""
    ring: Annotated[int, Meta(ge=64, le=LOG_RING_MAX)] = 8192
    """Envelopes buffered between the loop and the disk. Raise it for slow disks."""


class MetricsConfig(Table, frozen=True, kw_only=True):
    """Prometheus metrics and health of each rank, on loopback alone."""

    port: Annotated[int, Meta(ge=0, le=65535)] | None = None
    """Loopback port of rank 0 for /metrics, /healthz and /readyz; rank r has port + r, 0 takes free
    ones, none listens nowhere. Set it to scrape a run."""


class RecordConfig(Table, frozen=True, kw_only=True):
    """Samples, windows' headers, action chunks and faults of a run, as MCAP."""

    file: FilePath | None = None
    """MCAP file or named pipe that gets the recording; none records nothing. Set it to keep what a
    robot sent and got."""
    frames: Literal["none", "jpeg", "raw"] = "none"
    """Form of cameras' frames in it: none leaves them out, jpeg loses little, raw loses nothing and
    takes 4/3 of a frame's bytes. Set it to replay a run with cameras."""
    part_mb: Positive = 1000.0
    """Size at which a file is completed and the recording goes on in a next one, run.part002.mcap
    behind run.mcap. Lower it to move or delete parts of a long run sooner."""
    queue_mb: Positive = 64.0
    """Memory for messages that wait for the disk; what comes on top is dropped and counted, frames
    first. Raise it for slow disks and many cameras."""
    robot: RobotName | None = None
    """Robot whose samples are replayed. Set it for a recording of several robots."""


class ViewConfig(Table, frozen=True, kw_only=True):
    """A WebSocket for Foxglove, served on loopback by a process beside rank 0."""

    port: Annotated[int, Meta(ge=0, le=65535)] | None = None
    """Loopback port of a WebSocket for Foxglove, 0 for any free one; none serves no view. Set it to
    watch a run live; viewers expect 8765."""
    queue_mb: Positive = 8.0
    """Memory for messages that wait for the view's process; what comes on top is dropped and
    counted. Raise it for cameras."""


class ProfileConfig(Table, frozen=True, kw_only=True):
    """torch.profiler on a running rank: SIGUSR2 starts it, or ``after``."""

    after: Annotated[int, Meta(ge=0)] | None = None
    """Envelopes behind ready at which a profile begins by itself; none waits for SIGUSR2. Set it to
    profile without a signal."""
    wait: Annotated[int, Meta(ge=0)] = 5
    """Envelopes left alone before each profile. Raise it to skip what follows a start."""
    warmup: Annotated[int, Meta(ge=0)] = 5
    """Envelopes traced and thrown away. Raise it when the first kept ones are slow."""
    active: Annotated[int, Meta(ge=1, le=10_000)] = 20
    """Envelopes kept in a trace. Raise it for rare events; a trace grows by it."""
    repeat: Annotated[int, Meta(ge=1, le=100)] = 1
    """Traces in a row. Raise it to compare several."""
    shapes: bool = False
    """Records shapes of operators' inputs. Set it to find one call among many; costs time."""
    memory: bool = False
    """Records allocations. Set it to find what allocates in service; costs time."""
    stacks: bool = False
    """Records Python's stacks. Set it to find the line that calls; costs much time."""


class SimulateConfig(Table, frozen=True):
    """Extra stage time on rank 0 for D sweeps and model checks; B simulates in its policy."""

    a_ms: NonNegative = 0.0
    """Extra time of stage A. Set it for D sweeps and model checks."""
    c_ms: NonNegative = 0.0
    """Extra time of stage C. Set it for D sweeps and model checks."""
    kind: Literal["sleep", "spin", "gpu"] = "sleep"
    """Kind of extra time: sleep, spin a CPU, or constant work on rank 0's GPU. Set spin to load a
    CPU."""
    law: Literal["constant", "uniform", "tail"] = "constant"
    """Distribution of extra times: constant, uniform, or with a long tail. Set tail to see queues
    grow."""
    seed: int = 0
    """Seed of the distribution. Set it to repeat a run."""


class DemoConfig(Table, frozen=True):
    """The embedded cart-pole, started as a child process by the default configuration only."""

    robot: Module
    """Module of the demo's robot, run with python -m."""
    extra_delay_ms: NonNegative = 0.0
    """Delay added to the robot's samples, and so to its actions. Set it to see what age costs."""
    seed: int = 0
    """Seed of the robot's start. Set it to repeat a demo."""


class GatewayConfig(Table, frozen=True):
    """Robots that speak another wire, served by ``ppstream gateway`` as robots of this run."""

    wire: Literal["openpi", "groot", "lerobot"]
    """Protocol of the robots: openpi, groot or lerobot."""
    map: dict[str, Any]
    """By stream its path in a robot's observation, a list of paths of one number each, or { key,
    layout = hwc | chw | auto, optional }; by prompt the instruction's."""
    listen: Text | None = None
    """Address for those robots as ADDRESS:PORT, port 0 for any free one; none takes loopback and
    the wire's own port. Set it for other hosts."""
    answer: Literal["exact", "newest"] = "exact"
    """Chunk that answers: exact for this observation, newest for the last one, at once. Set newest
    for robots that must not wait."""
    timeout_ms: Positive = 1000.0
    """Wait for an answer; then the robot is told why there is none. Raise it for slow policies."""
    silence_s: Positive = 40.0
    """Silence after which a robot is gone: no ping answered, of GR00T nothing asked. Lower it to
    free rows sooner."""
    message_mb: Positive = 64.0
    """Largest message taken. Raise it for large frames."""
    processes: Annotated[int, Meta(ge=1, le=64)] | Literal["auto"] = "auto"
    """Processes that share the robots of wire openpi; auto takes one for each robot, 8 and half of
    the CPUs at most. Set 1 to leave CPUs to others."""
    metadata: dict[str, Any] = msgspec.field(default_factory=dict)
    """Values told to each robot that connects. Set what its client reads."""
    action_keys: dict[str, tuple[Index, Index]] = msgspec.field(default_factory=dict)
    """By key of a GR00T action its first and behind-last place in actions.names. Set it for GR00T.
    """
    generation: Literal["n1.5", "n1.6"] = "n1.6"
    """Generation of GR00T's get_modality_config. Set n1.5 for older clients."""
    api_key_file: FilePath | None = None
    """File with the key that openpi clients send, readable by its owner alone. Set it where other
    hosts connect."""
    certfile: FilePath | None = None
    """TLS certificate, PEM. Set it where other hosts connect."""
    keyfile: FilePath | None = None
    """TLS key, PEM, without a pass phrase. Set it where other hosts connect."""
    endpoint: Text | None = None
    """Address of rank 0, if not service.endpoint. Set it for a gateway on another host."""
    secret_key: FilePath | None = None
    """The gateway's own .secret file. Set it where rank 0 has keys."""
    server_key: FilePath | None = None
    """Rank 0's .public file. Set it where rank 0 has keys."""
