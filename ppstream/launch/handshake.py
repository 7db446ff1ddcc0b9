"""Handshake of the two ranks: hello, comparison, welcome, the policy's tensors; goodbye.

Both sides of the conversation stand here, in the order it is held. It uses the launcher's store and
the control sockets alone; no tensor moves before it is over. Facts are compared by key class:
``equal`` must agree on all ranks; ``informational`` ones of the policy rank are kept in run.json.
Settings that only rank 0 reads (sensors' service, bring-up, decode, recording, logs) are not
compared.
"""

from __future__ import annotations

import os
import platform
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import msgspec
import torch

from ppstream.config.schema import PipelineConfig
from ppstream.config.to_toml import as_tables
from ppstream.control.generation import tell_busy, tell_generation
from ppstream.control.heartbeat import HeartbeatThread
from ppstream.control.launcher_store import LauncherStore
from ppstream.control.peer import Peer
from ppstream.control.peer_process import HeldProcess
from ppstream.control.rendezvous import Listener, connect
from ppstream.core.clock import NS_PER_MS, NS_PER_S, now_ns
from ppstream.core.errors import (
    ConfigError,
    HandshakeError,
    PeerLostError,
    PpstreamError,
    ProtocolError,
)
from ppstream.core.specs import TensorSpec
from ppstream.core.user_code import how_it_ends
from ppstream.core.version import VERSION
from ppstream.launch.course import Course
from ppstream.links.protocol import Neighbours
from ppstream.links.slots import BACK, Position
from ppstream.observe.run_folder import Run, boot_id
from ppstream.policy.compatibility import other_parts, places_of
from ppstream.policy.fingerprint import file_digest
from ppstream.policy.parts import PartSpecs, Place, blind_reads
from ppstream.wire.fields import WIRE_MAJOR, WIRE_MINOR
from ppstream.wire.rank_messages import (
    Goodbye,
    RankHeart,
    RankHello,
    RankRefused,
    RankWelcome,
    Ready,
)

TOKEN_KEY: Final = "run/token"  # known to the launcher's ranks alone
HOP_KEY: Final = "hop"  # where a policy rank is reached by the next one
WORDS_NS: Final = NS_PER_S  # rank 0 receives within this why a rank was lost
SPARE_NS: Final = 2 * NS_PER_S  # the rank that builds notices first: it knows more
RANK0_ONLY: Final = frozenset(
    {"service", "bringup", "decode", "log", "demo", "simulate", "gateway", "record", "view"}
)
NVIDIA_VERSION: Final = "/proc/driver/nvidia/version"
FIRST_RANK: Final = 1  # of the policy
LINES_MAX: Final = 20  # differences that are told
SAME_WEIGHTS: Final = (
    "the policy has other weights on each rank, where all need the same: load them from one file, "
    "or draw them from one seed"
)
SHARED_WEIGHTS: Final = (
    "parts on different ranks share a module, and each rank built another one: load its weights "
    "from one file, or draw them from one seed"
)
NO_WEIGHTS: Final[Mapping[str, str]] = {}
TELL_NS: Final = NS_PER_S // 5
TEST_HOOK_PREFIX: Final = "PPSTREAM_TEST_"

_nccl: Final[Any] = torch.cuda.nccl  # torch does not annotate its methods


def configuration_facts(config: PipelineConfig) -> dict[str, dict[str, Any]]:
    """This rank's resolved facts, by key class."""
    equal = {
        f"config.{path}": value
        for path, value in _flatten(as_tables(config))
        if path.partition(".")[0] not in RANK0_ONLY
    }
    equal["config.policy.weights"] = file_digest(config.policy.weights)
    equal["protocol"] = WIRE_MAJOR
    equal["ppstream"] = VERSION
    equal["test_hooks"] = sorted(
        f"{key}={value}" for key, value in os.environ.items() if key.startswith(TEST_HOOK_PREFIX)
    )
    mesh = _mesh_facts()
    return {
        "equal": equal,
        "mesh": mesh,
        "informational": {
            "protocol_minor": WIRE_MINOR,
            "host": platform.node(),
            "boot_id": boot_id(),
            "pid": os.getpid(),
            "python": mesh["python"],
            "torch": mesh["torch"],
        },
    }


def _mesh_facts() -> dict[str, Any]:
    """Facts that ranks must share which compute one policy together, though others need not."""
    driver = Path(NVIDIA_VERSION)
    return {
        "torch": version("torch"),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, _nccl.version())) if torch.version.cuda else None,
        "driver": driver.read_text().partition("\n")[0] if driver.exists() else None,
        "cpu": torch.backends.cpu.get_cpu_capability(),  # kernels differ, and so do last bits
        "python": platform.python_version(),
    }


def difference(
    mine: Mapping[str, Any], theirs: Mapping[str, Any], my_rank: int, their_rank: int
) -> list[str]:
    """One line for each key on which two ranks disagree; empty when they agree."""
    lines = []
    for key in sorted(mine.keys() | theirs.keys()):
        here, there = mine.get(key, "(absent)"), theirs.get(key, "(absent)")
        if here != there:
            lines.append(f"{key}: rank {my_rank} has {here!r}, rank {their_rank} has {there!r}")
    return lines


def refuse(lines: Sequence[str]) -> None:
    """Raise HandshakeError with these differences, if there are any; of very many the first."""
    if len(lines) > LINES_MAX:
        lines = [*lines[:LINES_MAX], f"and {len(lines) - LINES_MAX} more"]
    if lines:
        raise HandshakeError("\n".join(lines))


def compare_facts(mine: Mapping[str, Any], theirs: Mapping[str, Any], their_rank: int) -> None:
    """Raise HandshakeError with the per-rank difference unless the ``equal`` facts agree."""
    refuse(difference(mine["equal"], theirs.get("equal", {}), 0, their_rank))


def hash_weights(config: PipelineConfig, course: Course, store: LauncherStore | None) -> str | None:
    """As ``file_digest``: of gigabytes, before a rank waits for others.

    Those that wait for this one hear meanwhile through ``store``, the whole of it, that it lives.
    """
    told_ns = 0

    def tell() -> None:
        nonlocal told_ns
        if store is not None and now_ns() - told_ns > TELL_NS:
            tell_busy(store)
            told_ns = now_ns()

    with course.step("the hash of policy.weights"):
        return file_digest(config.policy.weights, tell)


def _flatten(value: Any, path: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        parts = [(f"{path}.{key}" if path else str(key), item) for key, item in value.items()]
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        parts = [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    else:
        return [(path, value)]
    return [pair for key, item in parts for pair in _flatten(item, key)]


def ranks_on_this_host(world_size: int) -> int:
    """Counts the ranks that the launcher started here; all, unless it says otherwise."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size)))


def is_host_of_rank0() -> bool:
    """True where the launcher began to count here, and where nothing says otherwise."""
    return os.environ.get("RANK", "0") == os.environ.get("LOCAL_RANK", "0")


def wait_ready(config: PipelineConfig, peer: Peer, what: str) -> dict[str, Any]:
    """Waits for ``what`` of a rank that has ``liveness.start_s`` for it; returns its facts.

    Raises:
        PeerLeftError: it could not, and says why.
        PeerLostError, WatchdogError: it said nothing for longer.
        ProtocolError: it sent anything else.
    """
    ready = peer.receive(round(config.liveness.start_s * NS_PER_S) + SPARE_NS, what)
    if not isinstance(ready, Ready):
        raise ProtocolError(f"expected {what} from {peer.name}, got {type(ready).__name__}")
    return ready.facts


@contextmanager
def saying_goodbye(*peers: Peer) -> Iterator[None]:
    """Tell other ranks why this one ends; if one of them went first, what it said is the reason.

    A policy rank that lost its neighbour waits a moment for rank 0, which receives the reason.

    Raises:
        PeerLeftError: instead of a PeerLostError, when another rank had said why.
    """
    try:
        yield
    except PeerLostError as error:
        limit_ns = WORDS_NS if len(peers) == 1 else 0
        first = next(filter(None, (peer.last_words(limit_ns) for peer in peers)), error)
        if len(peers) > 1:
            _send_goodbyes(peers, first)
        raise first from None
    except BaseException as error:
        _send_goodbyes(peers, error)
        raise


def _send_goodbyes(peers: tuple[Peer, ...], error: BaseException) -> None:
    code, text = how_it_ends(error)
    for peer in peers:
        with suppress(PpstreamError):
            peer.send(Goodbye(int(code), text))


# ---- rank 0 -----------------------------------------------------------------------------------


def listen(store: LauncherStore, host: str | None) -> Listener:
    """Publish where policy ranks reach this rank, and the token that they must show."""
    store.set(TOKEN_KEY, secrets.token_hex(16))
    return Listener(store, host=host)


def invite(config: PipelineConfig, launcher: LauncherStore, generation: int, rank: int) -> None:
    """Tell a policy rank this start's number, which is its turn to connect.

    Args:
        config: of the run.
        launcher: the whole store.
        generation: the number.
        rank: the policy rank's.

    Raises:
        PeerLostError: it did not ask, or hashed weights and said nothing, for
            ``liveness.handshake_s``.
    """
    name, limit_s = _name_of(rank, launcher), config.liveness.handshake_s
    tell_generation(launcher, generation, rank, limit_s, name)


def _name_of(rank: int, store: LauncherStore) -> str:
    return "the policy rank" if store.world_size == 2 else f"policy rank {rank}"


def admit(
    config: PipelineConfig,
    store: LauncherStore,
    listener: Listener,
    run: Run,
    rank: int = 1,
    met: dict[int, Mapping[str, Any]] | None = None,
) -> Peer:
    """Accept a policy rank's two connections and compare what both ranks resolved; one by one.

    ``met`` has the facts of the ranks that came before, and gets this one's.

    Raises:
        HandshakeError: the ranks disagree, or those of a mesh do among themselves; the message is
            the difference, line by line.
        PeerLostError: nobody came within ``liveness.handshake_s``.
    """
    limit_s = config.liveness.handshake_s
    peer = listener.accept(limit_s, _name_of(rank, store))
    hello = peer.receive(round(limit_s * NS_PER_S))
    token = store.get(TOKEN_KEY, limit_s)
    if not isinstance(hello, RankHello) or (hello.token, hello.rank) != (token, rank):
        raise ProtocolError("a process without this run's token connected to the control socket")
    try:
        if hello.generation != store.generation:
            raise HandshakeError(
                f"generation: rank 0 has {store.generation}, rank {hello.rank} {hello.generation}"
            )
        compare_facts(configuration_facts(config), hello.facts, hello.rank)
        if met is not None:
            met[rank] = hello.facts
            leader = config.placement.leader_of(rank)
            if leader != rank:
                of_leader, of_member = (one.get("mesh", {}) for one in (met[leader], hello.facts))
                refuse(difference(of_leader, of_member, leader, rank))
    except HandshakeError as error:
        peer.send(RankRefused(tuple(str(error).splitlines())))
        raise
    run.describe_policy_rank(rank, hello.facts.get("informational", {}))
    peer.send(RankWelcome(run.run_id, str(run.directory)))
    peer.heart = listener.accept(limit_s)
    _expect_token(peer.heart, token, limit_s, "the control socket")
    return peer


def _expect_token(peer: Peer, token: str, limit_s: float, where: str) -> None:
    """Wait for the first frame of a further connection between ranks that know each other."""
    frame = peer.receive(round(limit_s * NS_PER_S))
    if not isinstance(frame, RankHeart) or frame.token != token:
        raise ProtocolError(f"a process without this run's token connected to {where}")


def agree_on_parts(
    config: PipelineConfig,
    peers: Sequence[Peer],
    window: tuple[TensorSpec, ...],
    shared: Mapping[str, str] = NO_WEIGHTS,
) -> tuple[tuple[Place, ...], int, dict[str, bool]]:
    """Waits until each rank has built its parts; returns the places, once all tensors fit.

    Behind them, how far ahead of envelopes all of it may be queued (``LinkShape.ahead``), which the
    policy ranks hear, too, and what parts read blindly. ``shared``: of parts of rank 0.

    Raises:
        ConfigError: the policy does not fit the configuration, with every reason.
        HandshakeError: ranks of a mesh, or replicas, have other weights, or parts of a chain other
            ones of a module that they share.
        PeerLeftError: the policy could not be built.
        WatchdogError: it was not built within ``liveness.start_s``.
    """
    built = [_built(config, peer) for peer in peers]
    for rank, other in enumerate(built[1:], 2):
        if other.parts != built[0].parts:
            raise ConfigError([other_parts(built[0].parts, other.parts, rank)])
        if lines := difference(_named(built[0]), _named(other), FIRST_RANK, rank):
            refuse([SAME_WEIGHTS, *lines])
    _compare_shared(shared, *(found.shared for found in built))
    places = places_of(config, built[0].parts, window)
    ahead = min(found.ahead for found in built)
    for peer in peers:
        peer.send(Ready({"ahead": ahead}))
    return places, ahead, blind_reads(built[0].parts)


def _compare_shared(*by_rank: Mapping[str, str]) -> None:
    """Raises HandshakeError: two ranks have other weights of the same name."""
    first: dict[str, tuple[int, str]] = {}
    lines = []
    for rank, weights in enumerate(by_rank):
        for name, text in weights.items():
            its_rank, its_text = first.setdefault(name, (rank, text))
            key = f"weights.{name}"
            lines += difference({key: its_text}, {key: text}, its_rank, rank)
    refuse([SHARED_WEIGHTS, *lines] if lines else [])


def _named(built: _Built) -> dict[str, str]:
    return {f"weights.{name}": text for name, text in built.weights.items()}


def _built(config: PipelineConfig, peer: Peer) -> _Built:
    return msgspec.convert(wait_ready(config, peer, "its parts"), _Built)


# ---- the policy rank ----------------------------------------------------------------------------


def introduce(config: PipelineConfig, store: LauncherStore) -> tuple[Peer, Run]:
    """Connect to rank 0, say who this is, and learn where the run's logs go.

    Raises:
        HandshakeError: rank 0 refused; the message is the difference.
        PeerLostError: rank 0 is not there.
    """
    limit_s = config.liveness.handshake_s
    peer = connect(store, limit_s)
    peer.heart = connect(store, limit_s, expects_fds=False)
    facts = configuration_facts(config)
    here = facts["informational"]["host"]
    token = store.get(TOKEN_KEY, limit_s)
    peer.send(
        RankHello(
            WIRE_MAJOR,
            token,
            store.generation,
            store.rank,
            here,
            boot_id(),
            os.getpid(),
            facts,
        )
    )
    with suppress(PeerLostError):  # of a rank that refused this one the answer is still to be read
        peer.heart.send(RankHeart(token))
    answer = peer.receive(round(limit_s * NS_PER_S))
    if isinstance(answer, RankRefused):
        raise HandshakeError("\n".join(answer.difference))
    if not isinstance(answer, RankWelcome):
        raise ProtocolError(f"expected Welcome from rank 0, got {type(answer).__name__}")
    return peer, Run.joined(Path(answer.run_dir), config.log.keep)


def connect_neighbours(
    config: PipelineConfig, store: LauncherStore, rank0: Peer, stack: ExitStack
) -> Neighbours:
    """The policy ranks on either side of this one, whose peers ``stack`` closes; else rank 0.

    A replica has rank 0 on both sides. The next rank has ``liveness.start_s`` to come: rank 0,
    which it meets first, is the one to miss it.

    Raises:
        PeerLostError: one of them did not come.
        ProtocolError: the process that connected is no rank of this run.
    """
    if config.placement.replicas > 1:
        return Neighbours.pair(BACK, rank0)
    limit_s, place = config.liveness.handshake_s, store.rank
    places = config.placement.places
    token = store.get(TOKEN_KEY, limit_s)
    before = behind = rank0
    listener = None
    if place < places:
        listener = Listener(store, host=rank0.local_host, key=f"{HOP_KEY}/{place}")
        stack.callback(listener.close)
    if place > 1:
        name = f"policy rank {place - 1}"
        before = connect(store, limit_s, key=f"{HOP_KEY}/{place - 1}", name=name)
        stack.callback(before.close)
        before.send(RankHeart(token))
    if listener is not None:
        behind = listener.accept(config.liveness.start_s, f"policy rank {place + 1}")
        stack.callback(behind.close)
        _expect_token(behind, token, limit_s, "a hop's socket")
        listener.close()
    return Neighbours(before, behind, Position(place, places))


class _Built(msgspec.Struct, frozen=True):
    """The policy rank's description of its policy in ``Ready.facts``."""

    parts: tuple[PartSpecs, ...]
    ahead: int = 0
    weights: dict[str, str] = msgspec.field(default_factory=dict)  # fingerprints, of equal ranks
    shared: dict[str, str] = msgspec.field(default_factory=dict)  # of weights of several parts


def offer_parts(
    peer: Peer,
    parts: tuple[PartSpecs, ...],
    ahead: int = 0,
    weights: Mapping[str, str] = NO_WEIGHTS,
    shared: Mapping[str, str] = NO_WEIGHTS,
) -> None:
    """Tells rank 0 that the policy is built, its parts, and how far ahead it may be queued.

    ``weights`` has their fingerprint, where other ranks must have the same; ``shared`` that of
    weights which parts of other ranks have, too.
    """
    built = _Built(parts, ahead, dict(weights), dict(shared))
    peer.send(Ready(msgspec.to_builtins(built)))


def wait_accepted(config: PipelineConfig, peer: Peer) -> int:
    """Waits for rank 0's answer: how far ahead of envelopes all policy ranks queue.

    Raises:
        PeerLeftError: it refuses the policy.
    """
    return int(wait_ready(config, peer, "its answer to the parts")["ahead"])


def start_heartbeat(
    config: PipelineConfig,
    peer: Peer,
    progress: Callable[[], int],
    on_lost: Callable[[], None],
    process: HeldProcess | None,
    stack: ExitStack,
) -> HeartbeatThread:
    """A heart that beats from the handshake to the end, which ``stack`` stops.

    It is stopped also when a signal comes while its thread starts: its socket closes behind it.
    """
    interval_ns = round(config.liveness.heartbeat_ms * NS_PER_MS)
    beat = HeartbeatThread(peer, interval_ns, progress, on_lost, process)
    stack.callback(beat.stop)
    beat.start()
    return beat
