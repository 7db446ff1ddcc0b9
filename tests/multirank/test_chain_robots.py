"""Robots of a chain with a part on each rank: what one asks for reaches every part, once."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import pytest
from policy_in_parts import CALL
from ranks import Ranks, placed
from robot_rig import wait_until

from ppstream.core.clock import now_ns
from ppstream.robot.client import RobotClient
from ppstream.wire.robot_messages import ActionChunk

pytestmark = pytest.mark.multirank


class Robot:
    """Pushes samples until it is closed; keeps what each chunk's trail says."""

    def __init__(self, endpoint: str, number: int) -> None:
        self.told: list[Told] = []
        streams, names = (("joints", 3), ("imu", 2)), ("a", "b")
        self.client = RobotClient(
            endpoint, robot=f"robot{number}", streams=streams, actions=names, on_chunk=self._keep
        )
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._push, daemon=True)
        self.client.connect(10)
        self._thread.start()

    def close(self) -> None:
        self._end.set()
        self._thread.join(10)
        self.client.close()

    def reset(self) -> int:
        """Returns the new episode."""
        self.client.reset()
        return max(chunk.episode for chunk in self.told) + 1

    def told_since(self, begun: int, count: int = 10) -> list[Told]:
        """Waits for so many chunks behind the first ``begun``."""
        wait_until(lambda: len(self.told) >= begun + count)
        return self.told[begun:]

    def _keep(self, chunk: ActionChunk) -> None:
        trail = np.frombuffer(chunk.actions, np.float32).reshape(4, 2)
        calls = tuple(round(float(value) / CALL) for value in trail[:, 0])
        name = (chunk.session_epoch, chunk.epoch, chunk.seq)
        self.told.append(Told(*name, calls, tuple(trail[:, 1].tolist())))

    def _push(self) -> None:
        while not self._end.wait(0.005):
            self.client.push("joints", now_ns(), [0.0] * 3)
            self.client.push("imu", now_ns(), [0.0] * 2)


class Told(NamedTuple):
    """A chunk: whose it is, and of each part its calls since the reset and if it knows the text."""

    episode: int
    epoch: int
    seq: int
    calls: tuple[int, ...]
    knows: tuple[float, ...]


class Live(NamedTuple):
    """A chain of four ranks with a part on each, and two robots that it serves."""

    run: Ranks
    robots: tuple[Robot, Robot]

    def begin(self) -> None:
        """New episodes: what another test has left is forgotten."""
        for robot in self.robots:
            episode = robot.reset()
            wait_until(lambda r=robot, e=episode: any(chunk.episode == e for chunk in r.told[-9:]))

    def events(self, name: str) -> list[dict[str, Any]]:
        return [line for line in self.run.lines(0) if line.get("name") == name]


@pytest.fixture(scope="module", params=["host", "gloo"])
def live(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("live")
    endpoint = f"unix://{folder}/robots"
    settings = (
        "policy.target=policy_in_parts:build_telling",
        "policy.options={}",
        "policy.instructions=true",
        *placed(0, 1, 2, 3),
        f"link.kind={request.param}",
        f"service.endpoint={endpoint}",
        "service.duration_s=none",
        "batch.rows=2",
    )
    with Ranks(folder, *settings, world_size=4) as run:
        run.wait_for_event("phase", phase="ready")
        with ExitStack() as stack:
            robots = Robot(endpoint, 0), Robot(endpoint, 1)
            for robot in robots:
                stack.callback(robot.close)
                robot.told_since(0)
            yield Live(run, robots)
        run.processes[0].terminate()
        assert run.wait(60) == [0] * 4, run.output()


def test_a_reset_of_one_row_reaches_every_part_of_a_chain(live):
    live.begin()
    one, other = live.robots
    begun = len(other.told)
    other.told_since(begun)
    before = one.told[-1]
    episode = one.reset()
    wait_until(lambda: one.told[-1].episode == episode)
    told = [chunk for chunk in one.told_since(len(one.told)) if chunk.episode == episode]
    assert told[0].calls[0] < before.calls[0] + told[0].seq - before.seq
    for robots in (told, other.told_since(begun, 20)):  # of the other's nothing is forgotten
        first = robots[0]
        for chunk in robots:
            assert chunk.calls == (first.calls[0] + chunk.seq - first.seq,) * 4


def test_a_text_reaches_every_part_of_a_chain(live):
    live.begin()
    one, other = live.robots
    epoch = one.client.instruct(f"pick {len(one.told)}")
    wait_until(lambda: (found := one.client.conditioned) and found.conditioning_epoch == epoch)
    assert not one.client.conditioned.fault
    for robot in (one, other):
        for chunk in robot.told_since(len(robot.told)):
            assert chunk.knows == (1.0,) * 4


def test_a_cut_emits_nothing_of_the_older_epoch_and_resets_every_part(live):
    live.begin()
    stale = 0
    for _ in range(50):
        cuts = len(live.events("epoch_cut"))
        os.kill(live.run.processes[0].pid, signal.SIGUSR1)
        wait_until(lambda n=cuts: len(live.events("first_action")) > n)
        lines = live.run.envelopes("ready")
        stale = sum(line.get("drop") == "stale" for line in lines)
        if stale:
            break
    assert stale
    for cut in live.events("epoch_cut"):
        older = [line for line in lines if line["epoch"] < cut["epoch"]]
        assert all(line["tEmit"] <= cut["t"] for line in older if line.get("drop") is None)
    newest = live.events("epoch_cut")[-1]["epoch"]
    for robot in live.robots:
        told = [chunk for chunk in robot.told_since(len(robot.told)) if chunk.epoch == newest]
        assert all(chunk.calls == (chunk.seq + 1,) * 4 for chunk in told)


@pytest.mark.parametrize("place", range(4))
def test_a_part_that_raises_once_costs_one_envelope(place, live):
    live.begin()
    robot = live.robots[0]
    faults = len(live.events("fault"))

    def failed() -> list[tuple[int, int]]:
        lines = live.run.envelopes("ready")
        return [(e["epoch"], e["seq"]) for e in lines if e.get("drop") == "policy_error"]

    before = failed()
    robot.client.instruct(f"raise part_{place}")
    wait_until(lambda: len(live.events("fault")) > faults)
    (later, *_) = robot.told_since(len(robot.told))
    name = later.epoch, later.seq
    wait_until(lambda: name in [(e["epoch"], e["seq"]) for e in live.run.envelopes("ready")])
    assert len(failed()) == len(before) + 1
    (fault,) = live.events("fault")[faults:]
    assert (fault["rank"], fault["stage"]) == (place, "B")
    assert fault["what"] == f"ValueError: part_{place} was told to raise"
