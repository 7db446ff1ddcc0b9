"""GatewaySession against rank 0's ingest, without a wire in front."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
from gateway_rig import (
    LONG_LIVED,
    LONG_NS,
    SHAPE,
    emit,
    gateway_config,
    observation,
    slow_config,
)
from robot_rig import MS, Server, serving, wait_until

from ppstream.config.schema import PipelineConfig
from ppstream.core.clock import NS_PER_S, now_ns
from ppstream.gateway.session import GatewaySession, NoAnswerError, Reply
from ppstream.wire.robot_messages import Provenance


def rarely(config: PipelineConfig) -> PipelineConfig:
    """The same with streams of 1 Hz: few observations a second are too many."""
    streams = (msgspec.structs.replace(stream, rate_hz=1.0) for stream in config.streams)
    return msgspec.structs.replace(config, streams=tuple(streams))


@contextmanager
def served(
    rows: int = 1, config: PipelineConfig | None = None, **changes: Any
) -> Iterator[tuple[Server, GatewaySession]]:
    """A policy that follows every prompt, and answers when it is told to."""
    config = config or slow_config(rows=rows, instructions=True)
    with serving(config, **LONG_LIVED) as rank0:

        def teach(number: int, text: str, done: Any) -> None:
            done(number, "")

        rank0.order(lambda: rank0.sessions.requests.attach(teach, lambda *_, **__: None))
        endpoint = rank0.sessions.endpoint
        gateway = gateway_config(config, endpoint, **changes)
        session = GatewaySession(config, gateway, None, "arm")
        try:
            session.open()
            yield rank0, session
        finally:
            session.close()


def answered(rank0: Server, session: GatewaySession, seq: int = 0, **chunk: Any) -> Reply:
    """The reply to an observation for which rank 0 emits one chunk, numbered ``seq``."""
    replies: list[Any] = []

    def ask() -> None:
        try:
            replies.append(asyncio.run(session.answer(observation(), now_ns())))
        except NoAnswerError as error:
            replies.append(error)

    asking = threading.Thread(target=ask)
    before_ns = rank0.rows[0].rings["joints"].newest_ns
    asking.start()
    wait_until(lambda: rank0.rows[0].rings["joints"].newest_ns > before_ns)
    emit(rank0, seq, **chunk)
    asking.join(20)
    if isinstance(replies[0], NoAnswerError):
        raise replies[0]
    reply: Reply = replies[0]
    return reply


def test_samples_are_stamped_when_their_observation_was_received() -> None:
    with served(timeout_ms=50.0) as (rank0, session):
        received_ns = now_ns() - 3 * MS
        with pytest.raises(NoAnswerError):
            asyncio.run(session.answer(observation(), received_ns))
        wait_until(lambda: rank0.rows[0].rings["joints"].newest_ns == received_ns)
        assert rank0.rows[0].rings["imu"].newest_ns == received_ns


def test_more_observations_than_rank_0_takes_in_a_second_are_refused_at_once_by_name() -> None:
    with served(rows=2) as (rank0, session):
        limit = slow_config(rows=2).samples_per_second(slow_config().streams[1])
        received_ns = now_ns() - limit
        for number in range(limit):
            stamp_ns = received_ns + number
            session.observe(observation(), stamp_ns)
            wait_until(lambda: rank0.rows[0].rings["imu"].newest_ns == stamp_ns)  # noqa: B023
        for ask in (session.observe, lambda *of: asyncio.run(session.answer(*of))):
            with pytest.raises(NoAnswerError, match=f"{limit} observations .* of imu; ask less"):
                ask(observation(), received_ns + limit)
        assert "rate" not in rank0.rows[0].rings["imu"].ledger.dropped
        for _ in range(3 * limit):  # which count towards no stream's limit
            with pytest.raises(NoAnswerError, match="of imu"):
                session.observe(observation(), received_ns + limit)
        session.observe(observation(), received_ns + NS_PER_S)
    with served(rows=1) as (rank0, session):  # which has no limit, and keeps nothing for one
        for number in range(limit + 1):
            stamp_ns = received_ns + number
            session.observe(observation(), stamp_ns)
            wait_until(lambda: rank0.rows[0].rings["imu"].newest_ns == stamp_ns)  # noqa: B023
        assert vars(session)["_rates"].per_s == {}


def test_observations_that_waited_and_leave_within_a_second_are_refused_at_once_too() -> None:
    config = rarely(slow_config(rows=2))
    with served(config=config, timeout_ms=1.0) as (rank0, session):
        limit = min(map(config.samples_per_second, config.streams))
        reasons: list[str] = []
        while "refused" not in reasons and len(reasons) < 20 * limit:
            received_ns = now_ns() - (20 * limit - len(reasons)) * NS_PER_S
            with pytest.raises(NoAnswerError) as caught:
                asyncio.run(session.answer(observation(), received_ns))
            reasons.append(caught.value.reason)
        assert {*reasons[:limit]} == {"timeout"}
        assert reasons[-1] == "refused"
        assert "rate" not in rank0.rows[0].rings["imu"].ledger.dropped


def test_actions_whose_steps_are_all_past_are_refused_by_name() -> None:
    with served() as (rank0, session):
        with pytest.raises(NoAnswerError, match="executed: their steps are all in the past, "):
            answered(rank0, session, start_ns=now_ns() - 1000 * MS, dt_ns=1)
        assert session.client.timeline.statistics().executed == 0
        assert answered(rank0, session, 1).actions.shape == SHAPE


@pytest.mark.parametrize("change", ["prompt", "episode", "nothing"])
def test_newest_gives_no_actions_of_an_earlier_prompt_or_episode(change: str) -> None:
    with served(answer="newest", timeout_ms=1000.0) as (rank0, session):
        first = answered(rank0, session)
        given = observation(prompt="pick" if change == "prompt" else None)
        if change == "episode":
            session.reset()
        if change == "nothing":
            again = asyncio.run(session.answer(given, now_ns()))
            assert again.chunk == first.chunk
            return
        with pytest.raises(NoAnswerError, match="no actions came"):
            asyncio.run(session.answer(given, now_ns()))


def test_newest_gives_no_actions_of_an_earlier_prompt_that_arrive_once_a_new_one_is_followed() -> (
    None
):
    """What was on its way when the policy turned to the new prompt was made for the old one."""
    with served(answer="newest", timeout_ms=1000.0) as (rank0, session):
        first = answered(rank0, session)
        pick = observation(prompt="pick")
        with pytest.raises(NoAnswerError, match="no actions came"):
            asyncio.run(session.answer(pick, now_ns()))
        late = {"end_ns": first.chunk.window_end_ns + 1, "expires_ns": first.chunk.expires_ns + 1}
        emit(rank0, 1, **late)
        wait_until(lambda: session.client.statistics().timeline.received == 2)
        with pytest.raises(NoAnswerError, match="no actions came"):
            asyncio.run(session.answer(pick, now_ns()))


def test_the_parts_of_an_age_come_with_provenance() -> None:
    parts = Provenance({}, 1 * MS, 2 * MS, 3 * MS, 4 * MS, 5 * MS, 6 * MS, 7 * MS)
    with served() as (rank0, session):
        reply = answered(rank0, session, provenance=parts)
        assert (reply.policy_ms, reply.wait_ms) == (5.0, 23.0)
        assert reply.lease_ms + reply.age_ms == pytest.approx(LONG_NS / MS)
        assert answered(rank0, session, 1).policy_ms is None


def test_an_observation_is_given_up_in_time_though_no_thread_gets_to_it() -> None:
    config, release = slow_config(), threading.Event()
    with (
        serving(config, phase="warming") as rank0,
        ThreadPoolExecutor(1) as threads,
    ):

        async def in_thread(call: Any, *args: Any) -> Any:
            return await asyncio.get_running_loop().run_in_executor(threads, call, *args)

        gateway = gateway_config(config, rank0.sessions.endpoint, timeout_ms=50.0)
        session = GatewaySession(config, gateway, None, "arm", in_thread=in_thread)
        session.open()
        threads.submit(release.wait, 60)
        errors: list[str] = []

        def ask() -> None:
            try:
                asyncio.run(session.answer(observation(), now_ns()))
            except NoAnswerError as error:
                errors.append(f"{error.reason}: {error}")

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        try:
            asking.join(30)
            assert errors == [
                "timeout: no actions came: the gateway did not get to it in time; "
                "gateway.timeout_ms is 50"
            ]
        finally:
            release.set()
            asking.join(30)
            session.close()
