from __future__ import annotations

import asyncio
import math
import threading
from pathlib import Path
from typing import Any

import pytest
from robot_rig import make_client, make_config, serving, wait_until

from ppstream.config.schema import PipelineConfig
from ppstream.core.clock import NS_PER_S, now_ns
from ppstream.core.errors import PeerLostError, PpstreamError, ReceiverEndedError, SpecError
from ppstream.robot.async_client import AsyncRobotClient
from ppstream.robot.client import RobotClient
from ppstream.robot.feedback import Feedback

pytestmark = pytest.mark.usefixtures("either_socket")
GIVEN = {"joints": [0, 0, 0]}


def patient(endpoint: str | None = None) -> PipelineConfig:
    """A configuration whose chunks are not too late on a busy machine."""
    return make_config(endpoint, dt_ns=NS_PER_S, lease_ns=60 * NS_PER_S)


def test_what_waits_is_awaited_and_chunks_are_iterated() -> None:
    async def live(endpoint: str) -> list[int]:
        async with AsyncRobotClient(make_client(endpoint)) as robot:
            await robot.wait_ready()
            seen = []
            robot.push("joints", now_ns(), [0, 0, 0])
            async for chunk in robot.chunks():
                seen.append(chunk.seq)
                if len(seen) == 5:
                    return seen
                robot.push("joints", now_ns(), [0, 0, 0])
        raise AssertionError("the chunks ended")

    with serving(patient(), answers=True) as server:
        assert asyncio.run(asyncio.wait_for(live(server.sessions.endpoint), 30)) == [0, 1, 2, 3, 4]


def test_waiting_for_ready_can_be_cancelled_and_others_run_meanwhile() -> None:
    async def live(endpoint: str) -> int:
        turns = 0
        async with AsyncRobotClient(make_client(endpoint)) as robot:
            waiting = asyncio.create_task(robot.wait_ready())
            for _ in range(10):
                await asyncio.sleep(0)
                turns += 1
            assert not waiting.done()
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        return turns

    with serving(phase="bring-up") as server:
        assert asyncio.run(asyncio.wait_for(live(server.sessions.endpoint), 30)) == 10


def test_what_waits_and_iterates_ends_when_the_client_itself_is_closed() -> None:
    async def live(endpoint: str) -> list[Any]:
        robot = AsyncRobotClient(make_client(endpoint))
        await robot.connect()
        waiting = asyncio.create_task(robot.wait_ready())
        await asyncio.sleep(0)
        await asyncio.to_thread(robot.client.close)
        with pytest.raises(PpstreamError, match="this client was closed"):
            await waiting
        return [chunk async for chunk in robot.chunks()]

    with serving(phase="bring-up") as server:
        assert asyncio.run(asyncio.wait_for(live(server.sessions.endpoint), 20)) == []


def test_chunks_that_nobody_fetched_are_counted_and_the_newest_is_given() -> None:
    seen: list[Any] = []

    async def live(endpoint: str) -> tuple[int, int]:
        client = make_client(endpoint, on_chunk=seen.append)
        async with AsyncRobotClient(client) as robot:
            for number in range(3):
                robot.push("joints", now_ns(), [0, 0, 0])
                await asyncio.to_thread(wait_until, lambda: len(seen) > number)  # noqa: B023
            await asyncio.to_thread(wait_until, lambda: robot.overtaken == 2)
            async for chunk in robot.chunks():
                return chunk.seq, robot.overtaken
        raise AssertionError

    with serving(patient(), answers=True) as server:
        assert asyncio.run(asyncio.wait_for(live(server.sessions.endpoint), 30)) == (2, 2)


def test_a_task_that_is_cancelled_as_a_chunk_arrives_ends(tmp_path: Path) -> None:
    async def live(endpoint: str) -> None:
        async with AsyncRobotClient(make_client(endpoint)) as robot:
            await robot.wait_ready()

            async def watch() -> None:
                async for _ in robot.chunks():
                    pass

            watching = asyncio.create_task(watch())
            await asyncio.sleep(0.01)
            await robot.ask(GIVEN, 20.0)
            watching.cancel()
            await asyncio.wait([watching], timeout=20)
            assert watching.cancelled()

    with serving(patient(f"unix://{tmp_path}/robots"), answers=True) as server:
        asyncio.run(asyncio.wait_for(live(server.sessions.endpoint), 60))


def test_iterating_ends_with_the_client_and_raises_what_ended_its_thread() -> None:
    def fail(chunk: Any) -> None:
        raise KeyError("user code")

    async def end(endpoint: str) -> list[Any]:
        robot = AsyncRobotClient(make_client(endpoint))
        await robot.connect()
        asyncio.get_running_loop().call_later(0.05, lambda: asyncio.ensure_future(robot.close()))
        return [chunk async for chunk in robot.chunks()]

    async def fall(endpoint: str) -> None:
        async with AsyncRobotClient(make_client(endpoint, on_chunk=fail)) as robot:
            robot.push("joints", now_ns(), [0, 0, 0])
            async for _ in robot.chunks():
                pass

    with serving(patient(), answers=True) as server:
        endpoint = server.sessions.endpoint
        assert asyncio.run(asyncio.wait_for(end(endpoint), 30)) == []
        with pytest.raises(PpstreamError, match="user code"):
            asyncio.run(asyncio.wait_for(fall(endpoint), 30))


def test_an_event_loop_that_has_ended_does_not_end_the_receiving_thread() -> None:
    with (
        serving(patient(), answers=True) as server,
        make_client(server.sessions.endpoint) as client,
    ):
        robot = AsyncRobotClient(client)
        asyncio.run(robot.connect())
        client.push("joints", now_ns(), [0, 0, 0])
        wait_until(lambda: client.timeline.statistics().received)
        wait_until(lambda: client.push("imu", now_ns(), [0, 0]))  # its thread lives
        wait_until(lambda: server.rows[0].rings["imu"].count)
        assert client.failure is None


def test_without_a_server_connecting_fails_and_nothing_is_left(tmp_path: Path) -> None:
    async def live() -> None:
        robot = AsyncRobotClient(make_client(f"unix://{tmp_path}/nobody"))
        with pytest.raises(PeerLostError):
            await robot.connect(0.05)
        await robot.close()
        await robot.close()

    asyncio.run(live())


def test_an_observation_is_awaited_and_others_run_meanwhile() -> None:
    async def live(endpoint: str) -> list[tuple[int, int]]:
        ends = []
        async with AsyncRobotClient(make_client(endpoint)) as robot:
            await robot.wait_ready()
            for _ in range(5):
                stamp_ns = now_ns()
                answer = await robot.ask({"joints": [0, 0, 0]}, math.inf, stamp_ns)
                ends.append((stamp_ns, answer.chunk.window_end_ns))
        return ends

    async def wait_in_vain(endpoint: str) -> int:
        turns = 0
        async with AsyncRobotClient(make_client(endpoint)) as robot:
            await robot.wait_ready()
            asking = asyncio.create_task(robot.ask({"joints": [0, 0, 0]}, 0.3))
            while not asking.done():
                await asyncio.sleep(0.01)
                turns += 1
            with pytest.raises(TimeoutError, match=r"came within 0\.3 s"):
                await asking
        return turns

    with serving(patient(), answers=True) as server:
        endpoint = server.sessions.endpoint
        for stamp_ns, end_ns in asyncio.run(asyncio.wait_for(live(endpoint), 30)):
            assert end_ns == stamp_ns
        server.order(lambda: setattr(server, "answers", False))
        assert asyncio.run(asyncio.wait_for(wait_in_vain(endpoint), 30)) > 3


def test_observations_asked_at_once_are_answered_one_after_the_other() -> None:
    async def live(endpoint: str) -> list[int]:
        async with AsyncRobotClient(make_client(endpoint)) as robot:
            await robot.wait_ready()
            answers = await asyncio.gather(*(robot.ask(GIVEN, 20.0) for _ in range(4)))
        return [answer.chunk.seq for answer in answers]

    with serving(patient(), answers=True) as server:
        seen = asyncio.run(asyncio.wait_for(live(server.sessions.endpoint), 60))
        assert sorted(seen) == [0, 1, 2, 3]


def test_behind_a_cancelled_ask_chunks_come_as_before(tmp_path: Path) -> None:
    async def live(endpoint: str, server: Any) -> None:
        async with AsyncRobotClient(make_client(endpoint)) as robot:
            await robot.wait_ready()
            asking = asyncio.create_task(robot.ask(GIVEN, 20.0))
            await asyncio.sleep(0)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            await asyncio.to_thread(server.order, lambda: setattr(server, "answers", True))
            timeline = robot.client.timeline
            await asyncio.to_thread(wait_until, lambda: timeline.statistics().received == 1)
            assert (await robot.ask(GIVEN, 20.0)).chunk.seq == 1

    with serving(make_config(f"unix://{tmp_path}/robots")) as server:
        asyncio.run(asyncio.wait_for(live(server.sessions.endpoint, server), 60))


def test_an_ask_ends_when_its_client_is_closed_or_a_callback_raises() -> None:
    def fail(chunk: Any) -> None:
        raise KeyError("user code")

    async def close(endpoint: str) -> None:
        robot = AsyncRobotClient(make_client(endpoint))
        await robot.connect()
        await robot.wait_ready()
        asking = asyncio.create_task(robot.ask(GIVEN, 20.0))
        await asyncio.sleep(0)
        await robot.close()
        with pytest.raises(PpstreamError, match=r"closed during ask\(\)|cannot receive samples"):
            await asking

    async def fall(endpoint: str) -> None:
        async with AsyncRobotClient(make_client(endpoint, on_chunk=fail)) as robot:
            await robot.wait_ready()
            with pytest.raises(ReceiverEndedError, match="user code"):
                await robot.ask(GIVEN, 20.0)

    with serving() as server:
        asyncio.run(asyncio.wait_for(close(server.sessions.endpoint), 60))
    with serving(patient(), answers=True) as server:
        asyncio.run(asyncio.wait_for(fall(server.sessions.endpoint), 60))


def test_behind_an_observation_that_was_never_sent_the_client_goes_on(tmp_path: Path) -> None:
    endpoint = f"unix://{tmp_path}/robots"

    async def live(client: RobotClient) -> None:
        robot = AsyncRobotClient(client)
        with pytest.raises(PeerLostError):
            await robot.connect(0)
        with pytest.raises(PeerLostError, match="rank 0 cannot receive samples now"):
            await robot.ask(GIVEN, 20.0)
        with serving(patient(endpoint), answers=True):
            await robot.connect(20.0)
            await robot.wait_ready()
            with pytest.raises(SpecError, match="joints"):
                await robot.ask({"joints": [0]}, 20.0)
            assert (await robot.ask(GIVEN, 20.0)).refusal is None

    with make_client(endpoint) as client:
        asyncio.run(asyncio.wait_for(live(client), 60))


def test_a_callback_may_close_the_client_that_reads_on_the_event_loop(tmp_path: Path) -> None:
    async def live(endpoint: str) -> None:
        client = make_client(endpoint, on_chunk=lambda _: client.close())
        async with AsyncRobotClient(client) as robot:
            await robot.wait_ready()
            assert (await robot.ask(GIVEN, 20.0)).refusal is None

    with serving(patient(f"unix://{tmp_path}/robots"), answers=True) as server:
        asyncio.run(asyncio.wait_for(live(server.sessions.endpoint), 60))


def test_an_ask_ends_when_what_is_due_meanwhile_raises(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    collect, here = Feedback.collect, threading.get_ident()

    def fail(feedback: Feedback) -> None:
        if threading.get_ident() == here:
            raise KeyError("user code")
        collect(feedback)

    async def fall(endpoint: str) -> None:
        client = make_client(endpoint)
        robot = AsyncRobotClient(client)
        await robot.connect()
        await robot.wait_ready()
        monkeypatch.setattr(Feedback, "collect", fail)
        with pytest.raises(ReceiverEndedError, match="user code"):
            await robot.ask(GIVEN, 20.0)
        assert client.failure is not None
        monkeypatch.undo()
        await robot.close()

    with serving(make_config(f"unix://{tmp_path}/robots")) as server:
        asyncio.run(asyncio.wait_for(fall(server.sessions.endpoint), 60))


def test_on_this_host_the_event_loops_own_thread_reads_the_answer(tmp_path: Path) -> None:
    readers: list[int] = []

    async def live(endpoint: str) -> None:
        client = make_client(endpoint, on_chunk=lambda _: readers.append(threading.get_ident()))
        async with AsyncRobotClient(client) as robot:
            await robot.wait_ready()
            while len(readers) < 5:  # a chunk that comes too late is no call
                await robot.ask(GIVEN, 20.0)

    with serving(patient(f"unix://{tmp_path}/robots"), answers=True) as server:
        asyncio.run(asyncio.wait_for(live(server.sessions.endpoint), 60))
    assert set(readers) == {threading.get_ident()}
