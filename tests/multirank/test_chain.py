"""A policy in parts over real ranks: the twin's actions bit for bit, none outlives another."""

from __future__ import annotations

import json
import os
import signal
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from policy_in_parts import CALL
from ranks import Ranks
from recorded_runs import played
from recording_files import made_recording
from robot_rig import wait_until

from ppstream.analysis.judge import judge
from ppstream.analysis.log_reader import read_run
from ppstream.core.clock import now_ns
from ppstream.report import attribution
from ppstream.robot.client import RobotClient
from ppstream.wire.robot_messages import ActionChunk

pytestmark = pytest.mark.multirank

PARTS = (
    "policy.target=policy_in_parts:build",
    "pipeline.windows=scheduled",
    "service.duration_s=none",
)
SHAPE = "steps=8, dim=5, horizon=4, action_dim=2"
GONE_S = 2.5


def placed(*where: int) -> tuple[str, ...]:
    devices = ", ".join(['"cpu"'] * max(where))
    return f"placement.policy=[{devices}]", f"placement.parts={list(where)}"


def actions_of(
    root: Path, recording: Path, *settings: str, ranks: int, fails: str = ""
) -> tuple[dict[str, np.ndarray], list[str | None]]:
    """Actions by name, and why each envelope of the recording gave none."""
    options = f'policy.options={{{SHAPE}, fails="{fails}"}}'
    return played(root, recording, *PARTS, options, *settings, ranks=ranks)


@pytest.fixture(scope="module")
def twin(tmp_path_factory):
    folder = tmp_path_factory.mktemp("twin")
    recording = made_recording(folder / "recording.npz")
    found = {
        fails: actions_of(folder / f"inline{fails}", recording, ranks=1, fails=fails)
        for fails in ("", "first", "last")
    }
    return recording, found


@pytest.mark.parametrize(
    ("where", "settings", "fails"),
    [
        ((0, 1, 2), ("link.kind=host",), ""),
        ((0, 1, 2), ("link.kind=gloo", "pipeline.threads=split"), "first"),
        ((1, 2, 3), ("link.kind=host", "pipeline.threads=split"), "first"),
        ((1, 2, 3), ("link.kind=gloo",), "last"),
        ((0, 0, 1), (), "last"),
        ((1, 1, 2), (), ""),
    ],
    ids=str,
)
def test_parts_give_the_twin_s_actions_wherever_they_run(where, settings, fails, twin, tmp_path):
    recording, expected = twin
    actions, drops = actions_of(
        tmp_path / "ranks", recording, *placed(*where), *settings, ranks=max(where) + 1, fails=fails
    )
    assert drops == expected[fails][1]
    assert ("policy_error" in drops) == bool(fails)
    assert actions.keys() == expected[fails][0].keys()
    for name, array in actions.items():
        assert array.tobytes() == expected[fails][0][name].tobytes(), name
    assert len(actions["actions"]) > 20


def auto(ranks: int, parts_ms: str = "") -> tuple[str, ...]:
    """Settings of a cut that the run chooses; of parts that sleep where their times are given."""
    devices = ", ".join(['"cpu"'] * (ranks - 1))
    settings = f"placement.policy=[{devices}]", "placement.parts=auto"
    if not parts_ms:
        return settings
    options = f"policy.options={{parts_ms=[{parts_ms}], horizon=4, action_dim=2}}"
    return *settings, options, "simulate.a_ms=0", "simulate.c_ms=0"


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_cut_that_the_run_chooses_gives_the_twin_s_actions(ranks, twin, tmp_path):
    recording, expected = twin
    actions, _ = actions_of(tmp_path / "ranks", recording, *auto(3), ranks=ranks)
    assert actions["actions"].tobytes() == expected[""][0]["actions"].tobytes()


@pytest.mark.parametrize(
    ("settings", "ranks", "text"),
    [
        ((PARTS[0], f'policy.options={{{SHAPE}, fails="load"}}'), 3, "part 'middle' of policy_in"),
        (
            (PARTS[0], f'policy.options={{{SHAPE}, fails="load"}}', *placed(0, 1, 2)),
            3,
            "part 'middle' of policy_in",
        ),
        (auto(4, "1, 1"), 4, "got 'auto' for 2 parts (part_1, part_2) on 3 policy ranks"),
    ],
    ids=["a part cannot be loaded", "a part cannot be loaded at its place", "too few parts"],
)
def test_a_policy_that_cannot_be_loaded_or_timed_ends_all_ranks_with_one_text(
    settings, ranks, text, tmp_path
):
    with Ranks(tmp_path, *auto(ranks), *settings, world_size=ranks) as run:
        assert run.wait(20) == [11] * ranks, run.output()
        for rank in range(ranks):
            assert text in run.exits()[str(rank)]["reason"]


def timing(run: Ranks) -> None:
    wait_until(lambda: "times each part" in run.errors[0].read_text(), seconds=30)


def test_a_stop_while_parts_are_timed_ends_all_ranks_as_asked(tmp_path):
    with Ranks(tmp_path, *auto(3, "600, 600"), world_size=3) as run:
        timing(run)
        for process in run.processes:
            process.terminate()
        assert run.wait(5) == [0] * 3, run.output()  # the parts would take 14 s


def test_no_rank_outlives_the_one_that_times_the_parts(tmp_path):
    with Ranks(tmp_path, *auto(3, "600, 600"), world_size=3) as run:
        timing(run)
        run.processes[1].kill()
        ends = run.processes[0], run.processes[2]
        wait_until(lambda: all(process.poll() is not None for process in ends), seconds=GONE_S)
        assert {process.poll() for process in ends} <= {20, -signal.SIGKILL}, run.output()


@pytest.mark.parametrize(
    ("asked", "front_ms", "runs"),
    [("auto", 4, "split"), ("auto", 0, "serial"), ("serial", 4, "serial")],
)
def test_long_front_parts_split_rank_0_s_threads_unless_the_user_decides(
    asked, front_ms, runs, tmp_path
):
    parts = f"policy.options={{parts_ms=[{front_ms}, 1], horizon=4, action_dim=2}}"
    settings = (*placed(0, 1), parts, f"pipeline.threads={asked}")
    with Ranks(tmp_path, *settings) as run:
        assert run.wait() == [0, 0], run.output()
        about = json.loads((run.directory / "run.json").read_text())
        assert about["topology"]["threads"] == runs
        assert (f"threads {runs}: front parts take" in run.output()) == (asked == "auto")
        report = judge(read_run(run.directory))
        assert report.window.topology.threads == runs


CHAIN = (
    *placed(1, 2, 3),
    PARTS[0],
    f"policy.options={{{SHAPE}}}",
    "service.duration_s=none",
    "log.keep=1",
)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
@pytest.mark.parametrize("rank", range(4))
def test_no_rank_outlives_another_of_the_chain(rank, how, tmp_path):
    with Ranks(tmp_path, *CHAIN, world_size=4) as run:
        run.wait_for_event("phase", phase="ready")
        ends = [other for other in run.processes if other is not run.processes[rank]]
        os.kill(run.processes[rank].pid, how)
        limit_s = GONE_S + (0 if how == signal.SIGKILL else 2.0)  # silence has a limit of its own
        wait_until(lambda: all(other.poll() is not None for other in ends), seconds=limit_s)
        codes = {process.poll() for process in ends}
        assert codes <= {20, -signal.SIGKILL}, (codes, run.output())
        assert 20 in codes


#: A rank that is made to leave may not get to write why, on a busy machine.
@pytest.mark.flaky(reruns=2, only_rerun=["KeyError"])
def test_a_rank_stopped_while_warming_is_the_only_one_that_is_killed(tmp_path):
    parts = "policy.options={parts_ms=[1, 400, 1], horizon=4, action_dim=2}"
    settings = (*placed(0, 1, 2), parts, "liveness.frozen_ms=1000")
    with Ranks(tmp_path, *settings, world_size=3) as run:
        run.wait_for_event("phase", phase="warming")
        run.processes[2].send_signal(signal.SIGSTOP)
        assert run.wait(10) == [20, 20, -signal.SIGKILL], run.output()
        assert "rank 2 was stopped before it served" in run.exits()["0"]["reason"]
        assert "left with 20 PEER_LOST: " in run.exits()["1"]["reason"]


def test_a_chain_drains_when_it_is_asked_to(tmp_path):
    with Ranks(tmp_path, *CHAIN, world_size=4) as run:
        run.wait_for_event("phase", phase="ready")
        run.processes[0].terminate()
        assert run.wait(10) == [0] * 4, run.output()
        lines = [len([x for x in run.lines(k) if x["kind"] == "stage1"]) for k in (1, 2, 3)]
        assert lines[0] == lines[1] == lines[2] > 100


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
        assert run.wait(10) == [0] * 4, run.output()


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


@pytest.mark.parametrize("threads", ["serial", "split"])
def test_attribution_gives_each_place_the_parts_that_run_there(threads, tmp_path):
    settings = (*placed(0, 1, 2), PARTS[0], f"policy.options={{{SHAPE}}}")
    asked = ("mode=attribution", f"pipeline.threads={threads}", "bringup.envelopes=100")
    with Ranks(tmp_path, *settings, *asked, world_size=3) as run:
        assert run.wait() == [0] * 3, run.output()
        rows = [line[:20].rstrip() for line in attribution.report(run.directory).splitlines()]
    unnamed = "  (in no block)"
    found = rows[rows.index("A") :]
    expected = ["A", "  first", unnamed, "B of place 1", "  middle", unnamed]
    assert found == [*expected, "B of place 2", "  last", unnamed, "C"]
