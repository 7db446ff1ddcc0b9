"""GatewaySession: one foreign robot as a robot of the run, request by request.

``answer`` is awaited on the server's event loop. What else waits, a server calls from a thread, one
at a time; ``pop`` never waits, and may be called beside. It knows observations and answers, not how
they travel.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, NamedTuple

from ppstream.analysis.records import RequestError
from ppstream.config.gateway_rules import rank0_endpoint
from ppstream.config.schema import GatewayConfig, PipelineConfig
from ppstream.core.clock import NS_PER_MS, NS_PER_S, now_ns
from ppstream.core.errors import (
    ConfigError,
    PeerLostError,
    PpstreamError,
    ProtocolError,
    RateError,
    SpecError,
)
from ppstream.gateway.key_map import Array, KeyMap
from ppstream.robot.async_client import ask_on_loop
from ppstream.robot.client import RobotClient
from ppstream.robot.sample_rates import SampleRates
from ppstream.robot.session import run_text
from ppstream.wire.keys import ClientKeys, client_keys
from ppstream.wire.robot_messages import ActionChunk, Conditioned

CONNECT_LIMIT_S: Final = 2.0  # for a session: a row that is being given back is free by then
MIN_WAIT_S: Final = 1e-3
OVERDUE_S: Final = 0.5  # behind ``timeout_ms``: every request is answered by then, come what may
REFUSALS: Final = {"superseded": "their steps are all in the past"}  # of a timeline, in its words
AT_ONCE_BYTES: Final = 4_000_000  # of a message: a larger one is decoded beside the event loop


class NoAnswerError(PpstreamError):
    """An observation has no answer now; asking again may help. The message says why.

    Attributes:
        reason: the same for the log of requests.
    """

    def __init__(self, message: str, reason: RequestError) -> None:
        super().__init__(message)
        self.reason = reason


def reason_of(error: Exception) -> RequestError:
    """Returns the reason that the log of requests has for an error of a session."""
    if isinstance(error, NoAnswerError):
        return error.reason
    if isinstance(error, SpecError | ProtocolError):
        return "bad_request"
    return "refused" if isinstance(error, PpstreamError) else "gateway_failed"


class Reply(NamedTuple):
    """Actions for an observation, float32 ``[horizon, dim]``, and what is known of them.

    ``wait_ms`` and ``policy_ms`` need ``actions.provenance``. ``chunk`` is for ``handed_over``.
    """

    actions: Array
    age_ms: float  # window end to now
    lease_ms: float  # from now; the actions are worth nothing afterwards
    epoch: int  # of the instruction that the policy follows; 0: none
    wait_ms: float | None
    policy_ms: float | None
    chunk: ActionChunk

    def timing(self, infer_ns: int) -> dict[str, float]:
        """Times for a robot's program, in ms: ``infer_ns`` is from receipt to now."""
        found = {
            "infer_ms": infer_ns / NS_PER_MS,
            "age_ms": self.age_ms,
            "lease_ms": self.lease_ms,
            "epoch": self.epoch,
        }
        if self.policy_ms is not None and self.wait_ms is not None:
            found |= {"wait_ms": self.wait_ms, "policy_ms": self.policy_ms}
        return found


class _Followed(NamedTuple):
    """A prompt that the policy follows, and its word for it."""

    prompt: str
    answer: Conditioned


def gateway_keys(gateway: GatewayConfig) -> ClientKeys | None:
    """Keys with which a gateway shows itself to rank 0; None: it needs none.

    Raises:
        ConfigError: a file holds no key, or the secret can be read by others.
    """
    if gateway.secret_key is None or gateway.server_key is None:
        return None
    return client_keys(gateway.secret_key, gateway.server_key)


class GatewaySession:
    """One robot's session on rank 0, from ``open`` to ``close``.

    Args:
        robot: its name, for people, logs and ``actions.robots``.
        keys: as ``gateway_keys`` gives them.
        on_actions: called by the receiving thread when ``pop`` may have something new.
        in_thread: awaits a call in a thread of the server's.
    """

    def __init__(
        self,
        config: PipelineConfig,
        gateway: GatewayConfig,
        keys: ClientKeys | None,
        robot: str,
        on_actions: Callable[[], None] | None = None,
        in_thread: Callable[..., Awaitable[Any]] = asyncio.to_thread,
    ) -> None:
        endpoint = rank0_endpoint(config, gateway)
        if endpoint is None:
            raise ConfigError(["service.endpoint: got none, want one for the gateway"])
        self._gateway = gateway
        self._map = KeyMap(config, gateway)
        self._on_actions = on_actions
        self._in_thread = in_thread
        are_limited = config.streams if config.batch.rows > 1 else ()
        self._rates = SampleRates(
            {stream.name: config.samples_per_second(stream) for stream in are_limited}
        )
        self._newest: ActionChunk | None = None
        self._taken: ActionChunk | None = None
        self._since_ns = 0  # observations before are of another prompt or episode
        self._wanted: str | None = None  # prompt that the robot asked for last
        self._followed: _Followed | None = None  # None: none, or nobody knows which
        self._episode: str | None = None  # as the robot names it
        self._has_begun = False  # an observation of it was sent
        self.client = RobotClient(
            endpoint,
            robot=robot,
            streams=[(stream.name, stream.dim, stream.dtype) for stream in config.streams],
            actions=config.actions.names,
            on_chunk=self._keep,
            keys=keys,
        )
        self.client.counts_answers = False  # but replies

    def open(self) -> None:
        """Ask rank 0 for a row.

        Raises:
            PpstreamError: there is none in time, or never; the message is the refusal.
        """
        self.client.connect(CONNECT_LIMIT_S)

    async def answer(self, observation: Mapping[str, Any], received_ns: int) -> Reply:
        """Send one observation, stamped when it was received, and wait for its actions.

        No thread has a part in it but while the run is not ready, or has to follow another prompt.

        Raises:
            SpecError: it is not what the map says, or the prompt is too long.
            NoAnswerError: none came within ``timeout_ms``, or they may not be executed any more.
        """
        until_ns = received_ns + round(self._gateway.timeout_ms * NS_PER_MS)
        try:
            async with asyncio.timeout(_left_s(until_ns) + OVERDUE_S):
                return await self._answer(observation, received_ns, until_ns)
        except TimeoutError as error:  # no wait of its own ended
            reason = f"no actions came: the gateway did not get to it in time; {self._limit()}"
            raise NoAnswerError(reason, "timeout") from error

    async def _answer(
        self, observation: Mapping[str, Any], received_ns: int, until_ns: int
    ) -> Reply:
        samples, prompt = self._samples(observation, received_ns), self._prompt_of(observation)
        self._has_begun = True
        if not self.client.ready or self._is_new(prompt):
            await self._in_thread(self._prepare, prompt, received_ns, until_ns)
        in_force = self._in_force() if self._gateway.answer == "newest" else None
        if in_force is None:
            return self._reply(await self._asked(samples, received_ns, until_ns), prompt)
        for stream, values in samples.items():
            self.client.push(stream, received_ns, values)
        return self._reply(in_force, prompt)

    def observe(self, observation: Mapping[str, Any], received_ns: int) -> None:
        """Send one observation, stamped when it was received; ``take`` has its actions later.

        Raises:
            SpecError: as ``answer``.
            NoAnswerError: nobody takes it now, or the policy does not follow its prompt.
        """
        until_ns = received_ns + round(self._gateway.timeout_ms * NS_PER_MS)
        samples, prompt = self._samples(observation, received_ns), self._prompt_of(observation)
        self._prepare(prompt, received_ns, until_ns)
        taken = [self.client.push(name, received_ns, one) for name, one in samples.items()]
        if not all(taken):
            reason = f"nobody can take samples now; {self._run_text()}"
            raise NoAnswerError(reason, "not_ready")

    def pop(self) -> Reply | None:
        """The newest actions in force, each once; None: none are new."""
        newest = self._in_force()
        if newest is None or newest is self._taken:
            return None
        self._taken = newest
        try:
            return self._reply(newest, self._wanted)
        except NoAnswerError:
            return None  # a later observation will have some

    def reset(self) -> None:
        """Begin a new episode: what is owed to the old one is dropped."""
        self.client.reset()
        self._since_ns = now_ns()
        self._newest = self._episode = None
        self._has_begun = False

    def follow_episode(self, name: str) -> None:
        """Begin a new episode when the robot names another one than before, or for the first time.

        What it sent without a name may be of another one.
        """
        if self._has_begun and self._episode != name:
            self.reset()
        self._episode = name

    def handed_over(self, reply: Reply, at_ns: int) -> None:
        """Count the reply as executed: what its robot does with it, nobody here can see."""
        self.client.executed(reply.chunk, at_ns)

    def close(self) -> None:
        """Give the row back. Twice is fine."""
        self.client.close()

    def _keep(self, chunk: ActionChunk) -> None:
        self._newest = chunk
        if self._on_actions is not None:
            self._on_actions()

    def _samples(self, observation: Mapping[str, Any], received_ns: int) -> dict[str, Array]:
        """Raises NoAnswerError: rank 0 would refuse a sample, and nobody would learn why."""
        samples = self._map.samples(observation)
        try:
            self._rates.note(samples, received_ns)
        except RateError as error:
            raise NoAnswerError(str(error), "refused") from error
        return samples

    def _prompt_of(self, observation: Mapping[str, Any]) -> str | None:
        """The prompt that an observation is to be answered for; it may leave it as it is."""
        prompt = self._map.prompt(observation)
        return self._wanted if prompt is None else prompt

    def _is_new(self, prompt: str | None) -> bool:
        followed = self._followed
        if prompt is None or followed is None:
            return prompt is not None
        is_told = not self.client.connected or followed.answer.session == self.client.session
        return followed.prompt != prompt or not is_told

    def _prepare(self, prompt: str | None, received_ns: int, until_ns: int) -> None:
        """Wait until the run is ready, and the policy follows the prompt."""
        try:
            is_ready = self.client.wait_ready(_left_s(until_ns))
        except PeerLostError as error:
            raise NoAnswerError(str(error), "peer_lost") from error
        if not is_ready:
            reason = f"the run is {self.client.phase}; ask again once it is ready"
            raise NoAnswerError(reason, "not_ready")
        if prompt is not None and self._is_new(prompt):
            self._follow(prompt, received_ns, until_ns)

    def _follow(self, prompt: str, received_ns: int, until_ns: int) -> None:
        """Have the policy follow ``prompt``, and wait until it does.

        From the first word on nobody knows which prompt it follows, until it says so: it may take
        this one up after the robot was told that it does not.
        """
        before = self._wanted
        self._followed = None
        self._newest = None  # made for the prompt before, as all that comes for earlier windows
        self._since_ns = received_ns
        epoch = self.client.instruct(prompt)
        self._wanted = prompt
        answer = self.client.wait_conditioned(epoch, _left_s(until_ns))
        if answer is None or answer.conditioning_epoch != epoch:
            reason = f"the policy does not follow the new prompt yet; {self._limit()}"
            raise NoAnswerError(reason, "prompt")
        if answer.fault:
            self._wanted = before  # and told again, when asked for
            fault = answer.fault.rstrip().rpartition("\n")[2]  # rank 0's log has the traceback
            raise NoAnswerError(f"the policy cannot follow this prompt: {fault}", "prompt")
        self._followed = _Followed(prompt, answer)

    async def _asked(
        self, samples: Mapping[str, Array], received_ns: int, until_ns: int
    ) -> ActionChunk:
        try:
            limit_s = _left_s(until_ns)
            answer = await ask_on_loop(self.client, samples, limit_s, received_ns, self._in_thread)
        except TimeoutError as error:
            reason = f"no actions came for this observation; {self._run_text()}"
            raise NoAnswerError(f"{reason}; {self._limit()}", "timeout") from error
        except PeerLostError as error:
            raise NoAnswerError(str(error), "peer_lost") from error
        except RateError as error:  # of those that were sent, not received, within a second
            raise NoAnswerError(str(error), "refused") from error
        if answer.refusal is not None:
            age_ms = (now_ns() - answer.chunk.window_end_ns) / NS_PER_MS
            refusal = REFUSALS.get(answer.refusal, answer.refusal)
            raise NoAnswerError(
                f"the actions may not be executed: {refusal}, {age_ms:.0f} ms after the "
                "observation",
                "not_executable",
            )
        return answer.chunk

    def _in_force(self) -> ActionChunk | None:
        """The newest chunk, if it may be executed, and is of this prompt, episode and session."""
        newest = self._newest
        if newest is None or newest.window_end_ns < self._since_ns:
            return None
        if newest.session != self.client.session:
            return None  # of a run before this one
        return newest if now_ns() < newest.expires_ns else None

    def _reply(self, chunk: ActionChunk, prompt: str | None) -> Reply:
        followed = self._followed
        if prompt is not None and not self._is_made_for(prompt, chunk):
            self._followed = None  # a session of a run that may not know the prompt yet
            reason = "the run lost this robot, and has to be told its prompt anew; ask again"
            raise NoAnswerError(reason, "peer_lost")
        now = now_ns()
        if now >= chunk.expires_ns:
            raise NoAnswerError("the actions may not be executed: expired", "not_executable")
        parts = chunk.provenance
        return Reply(
            actions=self.client.timeline.actions_of(chunk).copy(),
            age_ms=(now - chunk.window_end_ns) / NS_PER_MS,
            lease_ms=(chunk.expires_ns - now) / NS_PER_MS,
            epoch=0 if followed is None else followed.answer.conditioning_epoch,
            wait_ms=None if parts is None else (parts.server_ns - parts.b_ns) / NS_PER_MS,
            policy_ms=None if parts is None else parts.b_ns / NS_PER_MS,
            chunk=chunk,
        )

    def _is_made_for(self, prompt: str, chunk: ActionChunk) -> bool:
        """True when the policy followed ``prompt`` before the window was cut, and does still."""
        if self._followed is None or self._followed.prompt != prompt:
            return False
        answer = self._followed.answer
        return answer == self.client.conditioned and answer.session == chunk.session

    def _run_text(self) -> str:
        told = self.client.statistics().phase_text
        return run_text(told, is_reached=self.client.connected)

    def _limit(self) -> str:
        return f"gateway.timeout_ms is {self._gateway.timeout_ms:g}"


def _left_s(until_ns: int) -> float:
    return max(MIN_WAIT_S, (until_ns - now_ns()) / NS_PER_S)
