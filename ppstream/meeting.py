"""How the two ranks meet: hello, comparison, welcome, and what the policy's tensors look like.

Both sides of the conversation stand here, in the order it is held. Nothing but the launcher's store
and the control socket is used; no tensor moves before it is over.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from ppstream import handshake
from ppstream.clock import NS_PER_MS, NS_PER_S
from ppstream.config import PipelineConfig
from ppstream.control import Peer
from ppstream.ends import PeerLeftError
from ppstream.errors import ConfigError, HandshakeError, PpstreamError, ProtocolError
from ppstream.heartbeat import Heartbeat
from ppstream.links import LauncherStore
from ppstream.messages import (
    WIRE_MAJOR,
    Control,
    Goodbye,
    RankHello,
    RankRefused,
    RankWelcome,
    Ready,
)
from ppstream.preflight import policy_problems
from ppstream.rendezvous import Listener, connect
from ppstream.runs import Run, boot_id
from ppstream.specs import TensorSpec

TOKEN_KEY: Final = "run/token"  # known to the launcher's ranks alone
BUILD_LIMIT_NS: Final = 600 * NS_PER_S  # to load weights; the heart beats meanwhile


def ranks_on_this_host(world_size: int) -> int:
    """How many ranks of the run the launcher started here; all, unless it says otherwise."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size)))


def receive(peer: Peer, timeout_ns: int) -> Control:
    """The next frame; raises PeerLeftError when the other rank says that it leaves."""
    frame = peer.receive(timeout_ns)
    if isinstance(frame, Goodbye):
        raise PeerLeftError(frame)
    return frame


def last_words(peer: Peer) -> PeerLeftError | None:
    """Why the other rank left, if it said so before its end was noticed in another way."""
    with suppress(PpstreamError):
        peer.pump()
    left = [frame for frame in peer.inbox if isinstance(frame, Goodbye)]
    return PeerLeftError(left[0]) if left else None


# ---- rank 0 -----------------------------------------------------------------------------------


def listen(store: LauncherStore, host: str | None) -> Listener:
    """Publish where policy ranks reach this rank, and the token that they must show."""
    store.set(TOKEN_KEY, secrets.token_hex(16))
    return Listener(store, host=host)


def admit(config: PipelineConfig, store: LauncherStore, listener: Listener, run: Run) -> Peer:
    """Accept the policy rank and compare what both resolved.

    Raises:
        HandshakeError: the ranks disagree; the message is the difference, line by line.
        PeerLostError: nobody came within ``liveness.handshake_s``.
    """
    limit_s = config.liveness.handshake_s
    peer = listener.accept(limit_s)
    hello = receive(peer, round(limit_s * NS_PER_S))
    if not isinstance(hello, RankHello) or hello.token != store.get(TOKEN_KEY, limit_s):
        raise ProtocolError("a stranger connected to the control socket: it does not know the run")
    try:
        if hello.generation != store.generation:
            raise HandshakeError(
                f"generation: rank 0 has {store.generation}, rank {hello.rank} {hello.generation}"
            )
        handshake.compare(handshake.facts(config), hello.facts, hello.rank)
    except HandshakeError as error:
        peer.send(RankRefused(tuple(str(error).splitlines())))
        raise
    run.describe(policy_rank=hello.facts.get("informational", {}))
    peer.send(RankWelcome(run.run_id, str(run.directory)))
    return peer


def agree_on_tensors(
    config: PipelineConfig, peer: Peer, offered: tuple[TensorSpec, ...]
) -> tuple[TensorSpec, ...]:
    """Wait until the policy is built; its outputs, once all its tensors are known to fit.

    Raises:
        ConfigError: the policy does not fit the configuration, with every reason.
        PeerLeftError: the policy could not be built.
    """
    ready = receive(peer, BUILD_LIMIT_NS)
    if not isinstance(ready, Ready):
        raise ProtocolError(f"expected Ready from the policy rank, got {type(ready).__name__}")
    specs = msgspec.convert(ready.facts, dict[str, tuple[TensorSpec, ...]])
    if problems := policy_problems(config, offered, specs["inputs"], specs["outputs"]):
        raise ConfigError(problems)
    return specs["outputs"]


def accepted(inputs: tuple[TensorSpec, ...]) -> Ready:
    """What rank 0 answers: the tensors of every envelope, in slot order."""
    return Ready({"inputs": msgspec.to_builtins(inputs)})


# ---- the policy rank ----------------------------------------------------------------------------


def introduce(config: PipelineConfig, store: LauncherStore) -> tuple[Peer, Run]:
    """Connect to rank 0, say who this is, and learn where the run's logs go.

    Raises:
        HandshakeError: rank 0 refused; the message is the difference.
        PeerLostError: rank 0 is not there.
    """
    limit_s = config.liveness.handshake_s
    peer = connect(store, limit_s)
    facts = handshake.facts(config)
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
    answer = receive(peer, round(limit_s * NS_PER_S))
    if isinstance(answer, RankRefused):
        raise HandshakeError("\n".join(answer.difference))
    if not isinstance(answer, RankWelcome):
        raise ProtocolError(f"expected Welcome from rank 0, got {type(answer).__name__}")
    return peer, Run.joined(Path(answer.run_dir))


def offer_tensors(
    peer: Peer, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]
) -> None:
    """Tell rank 0 that the policy is built, and its tensors."""
    specs = {"inputs": inputs, "outputs": outputs}
    peer.send(Ready(msgspec.to_builtins(specs)))


def offered(peer: Peer) -> tuple[TensorSpec, ...]:
    """Rank 0's answer: the tensors of every envelope, in slot order."""
    answer = receive(peer, BUILD_LIMIT_NS)
    if not isinstance(answer, Ready):
        raise ProtocolError(f"expected Ready from rank 0, got {type(answer).__name__}")
    return msgspec.convert(answer.facts["inputs"], tuple[TensorSpec, ...])


def start_heartbeat(
    config: PipelineConfig,
    peer: Peer,
    progress: Callable[[], int],
    on_lost: Callable[[], None],
) -> Heartbeat:
    """A heart that beats from the handshake to the end."""
    beat = Heartbeat(peer, round(config.liveness.heartbeat_ms * NS_PER_MS), progress, on_lost)
    beat.start()
    return beat
