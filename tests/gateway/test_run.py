"""``[[gateway]]`` in a run's own TOML: rank 0 starts the gateway, and it ends with the run."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import grpc
import numpy as np
import pytest
import zmq
from documents import BOOKS, FENCE
from lerobot_rig import refused, robot_at, rows_of
from ranks import Ranks
from robot_rig import wait_until
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from ppstream.analysis.judge import judge
from ppstream.analysis.log_reader import read_run
from ppstream.control.peer_process import children, command
from ppstream.core.errors import ExitCode
from ppstream.observe.top import Events
from ppstream.report.html.page import render_page
from ppstream.report.text import render
from ppstream.wire import groot
from ppstream.wire.openpi import decode, encode

pytestmark = pytest.mark.multirank

DROID = Path(__file__).parents[1] / "support" / "droid.toml"
SO101 = DROID.with_name("so101.toml")
MOTORS = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")
REQUESTS = 50
GROOT = (
    "gateway.0.wire=groot",
    "gateway.0.metadata={}",
    "gateway.0.map={joints='state.arm', gripper='state.grip', wrist='video.wrist'}",
    "gateway.0.action_keys={arm=[0, 7], grip=[7, 8]}",
)
TWO_WIRES = (
    '{wire="openpi", listen="127.0.0.1:0", timeout_ms=5000, processes=2, map='
    '{joints="observation/joint_position", gripper="observation/gripper_position", '
    'wrist="observation/wrist_image_left"}}',
    '{wire="groot", listen="127.0.0.1:0", timeout_ms=5000, action_keys={arm=[0, 7], grip=[7, 8]}, '
    'map={joints="state.arm", gripper="state.grip", wrist="video.wrist"}}',
)
REMEDY = re.compile(
    r"the gateway ended with exit status 0: "
    r"its robots hold until you start one: ppstream gateway (.*)"
)
TAG = re.compile(r"<[^>]*>")
#: Replies to a client, in this order, and what the log counts them as.
TOLD = {
    "answered": "answered",
    "no actions came": "timeout",
    "may not be executed": "not_executable",
    "the run is": "not_ready",
}
ROBOTS = 4
#: Nobody is left behind for want of a CPU.
SHARED = ("gateway.0.processes=2",)
IN_ROWS = (f"batch.rows={ROBOTS}", "pipeline.pacing=rows", "pipeline.gather_ms=2000")


def observation(number: int) -> dict[str, object]:
    return {
        "observation/joint_position": np.arange(7) / 8 + number / 64,
        "observation/gripper_position": np.array([number / 64]),
        "observation/wrist_image_left": np.full((8, 6, 3), number, np.uint8),
        "prompt": "nobody follows it here",
    }


def test_each_answer_is_of_its_very_observation_and_the_gateway_ends_with_the_run(
    tmp_path: Path,
) -> None:
    with Ranks(tmp_path, config=DROID, world_size=1) as ranks:
        address = ranks.gateway_address("openpi")
        with connect(address, compression=None, proxy=None) as robot:
            assert decode(bytes(robot.recv()))["reset_pose"] == [0, -1.5]
            for number in range(REQUESTS):
                given = observation(number)
                robot.send(encode(given))
                actions = decode(bytes(robot.recv()))["actions"]
                assert actions.shape == (10, 8)
                values = [given["observation/joint_position"], [number / 64]]
                assert (actions == np.concatenate(values).astype("f4")).all()
            ranks.processes[0].send_signal(signal.SIGTERM)
            with pytest.raises(ConnectionClosed):
                robot.recv(20)
        assert ranks.wait() == [ExitCode.DRAINED]


def test_a_robot_of_lerobot_gets_actions_of_its_own_observations(tmp_path: Path) -> None:
    with Ranks(tmp_path, config=SO101, world_size=1) as ranks:
        address = ranks.gateway_address("lerobot")
        with robot_at(address) as robot:
            state = {"dtype": "float32", "shape": (6,), "names": [f"{m}.pos" for m in MOTORS]}
            front = {"dtype": "image", "shape": (8, 6, 3), "names": ["height", "width", "channels"]}
            features = {"observation.state": state, "observation.images.front": front}
            robot.start(lerobot_features=features, actions_per_chunk=10)
            for number in range(REQUESTS):
                given = {f"{motor}.pos": number / 64 + k / 8 for k, motor in enumerate(MOTORS)}
                frames = {"front": np.full((8, 6, 3), number, np.uint8), "task": "nobody follows"}
                actions = robot.ask(observation=given | frames, timestep=number)
                assert [one.timestep for one in actions] == list(range(number, number + 10))
                assert (rows_of(actions) == np.array([*given.values()], "f4")).all()
            ranks.processes[0].send_signal(signal.SIGTERM)
            assert ranks.wait() == [ExitCode.DRAINED]
            with pytest.raises(grpc.RpcError) as caught:
                robot.send()
            assert refused(caught.value)[0] == "UNAVAILABLE"


RECIPES = {"openpi": DROID, "groot": DROID, "lerobot": SO101}


@pytest.mark.parametrize("wire", RECIPES)
def test_the_recipe_of_the_run_book_serves_a_client_of_its_wire(wire: str, tmp_path: Path) -> None:
    """The page's text as it stands, below the streams of the robot that it maps."""
    page = (BOOKS / f"connect-{wire}.md").read_text()
    (recipe,) = (block for block in FENCE.findall(page) if "[[gateway]]" in block)
    run, _, _ = RECIPES[wire].read_text().partition("[[gateway]]")
    assert recipe.startswith("[[gateway]]\n")
    file = tmp_path / "run.toml"
    file.write_text(run + recipe)
    settings = (
        "policy.target=told_echo:build",
        "policy.instructions=true",
        "gateway.0.listen=127.0.0.1:0",  # the page's may be taken
        "gateway.0.timeout_ms=30000",
    )
    with Ranks(tmp_path, *settings, config=file, world_size=1) as ranks:
        actions = ASKING[wire](ranks.gateway_address(wire))
        ranks.processes[0].send_signal(signal.SIGTERM)
        assert ranks.wait() == [ExitCode.DRAINED]
    assert actions.tolist() == (np.arange(actions.shape[1]) / 8 + np.zeros(actions.shape)).tolist()


def ask_openpi(address: str) -> np.ndarray[Any, Any]:
    with connect(address, compression=None, proxy=None) as robot:
        robot.recv(20)
        given = observation(0) | {"observation/gripper_position": 7 / 8}
        robot.send(encode(given | {"prompt": "pick up the cup"}))
        return np.asarray(decode(bytes(robot.recv(60)))["actions"])


def ask_groot(address: str) -> np.ndarray[Any, Any]:
    with zmq.Context() as context, context.socket(zmq.REQ) as robot:
        robot.set(zmq.RCVTIMEO, 60_000)
        robot.connect(address)
        data = {"state.single_arm": np.arange(7)[None] / 8, "state.gripper": np.full((1, 1), 7 / 8)}
        data["video.wrist"] = np.zeros((1, 8, 6, 3), np.uint8)
        task = {"annotation.human.task_description": ["pick up the cup"]}
        robot.send(groot.encode({"endpoint": "get_action", "data": data | task}))
        found = groot.decode(robot.recv())
        return np.concatenate([found["action.single_arm"], found["action.gripper"]], axis=1)


def ask_lerobot(address: str) -> np.ndarray[Any, Any]:
    with robot_at(address) as robot:
        state = {"dtype": "float32", "shape": (6,), "names": [f"{m}.pos" for m in MOTORS]}
        front = {"dtype": "image", "shape": (8, 6, 3), "names": ["height", "width", "channels"]}
        features = {"observation.state": state, "observation.images.front": front}
        robot.start(lerobot_features=features, actions_per_chunk=10)
        given = {f"{motor}.pos": k / 8 for k, motor in enumerate(MOTORS)}
        given |= {"front": np.zeros((8, 6, 3), np.uint8), "task": "pick up the cup"}
        return rows_of(robot.ask(observation=given, timestep=0))


ASKING = {"openpi": ask_openpi, "groot": ask_groot, "lerobot": ask_lerobot}


def ask(address: str, robot: int) -> None:
    """Each of this robot's answers is of the observation before it."""
    with connect(address, compression=None, proxy=None) as connection:
        connection.recv()
        for number in range(robot, robot + ROBOTS * REQUESTS, ROBOTS):
            connection.send(encode(observation(number % 256)))
            actions = decode(bytes(connection.recv()))["actions"]
            wanted = np.append(np.arange(7) / 8 + number % 256 / 64, number % 256 / 64)
            assert (actions == wanted.astype("f4")).all(), (robot, number)


def test_robots_in_rows_get_answers_of_their_own_and_the_report_says_that_they_ask_in_step(
    tmp_path: Path,
) -> None:
    with Ranks(tmp_path, *IN_ROWS, config=DROID, world_size=2) as ranks:
        address = ranks.gateway_address("openpi")
        with ThreadPoolExecutor(ROBOTS) as threads:
            for asked in [threads.submit(ask, address, robot) for robot in range(ROBOTS)]:
                asked.result(100)
        ranks.processes[0].send_signal(signal.SIGTERM)
        assert ranks.wait() == [ExitCode.DRAINED] * 2
    told = {line["condition"] for line in ranks.lines(0) if line.get("name") == "sensor"}
    assert told <= {"ok", "unchanged"}
    report = judge(read_run(ranks.directory))
    assert report.service is not None
    requests = report.service.requests
    assert requests is not None
    assert (requests.windows, requests.ahead) == (ROBOTS * REQUESTS, 0)
    assert requests.envelopes < 2 * REQUESTS  # most are of several robots
    text = " ".join(render(report).split())
    assert "robots ask in lock-step: 200 of 200 windows in service began with" in text
    assert re.search(r"joints on request 0.0% of targets invalid", text)


def test_the_report_counts_requests_as_their_clients_did(tmp_path: Path) -> None:
    found = Counter[str]()
    with Ranks(tmp_path, "gateway.0.timeout_ms=400", config=DROID, world_size=1) as ranks:
        address = ranks.gateway_address("openpi") + "/robots/arm"
        with connect(address, compression=None, proxy=None) as robot:
            robot.recv()
            rank0 = ranks.processes[0]

            def ask(given: dict[str, object]) -> None:
                robot.send(encode(given))
                reply = robot.recv(20)
                text = reply if isinstance(reply, str) else "answered"
                found[next(reason for said, reason in TOLD.items() if said in text)] += 1

            for number in range(REQUESTS):
                ask(observation(number))
            rank0.send_signal(signal.SIGSTOP)
            ask(observation(0))
            rank0.send_signal(signal.SIGCONT)
            ask(observation(1))
            robot.send(encode({"a": 1}))
            assert "missing" in str(robot.recv(20))
        rank0.send_signal(signal.SIGTERM)
        assert ranks.wait() == [ExitCode.DRAINED]
    run = read_run(ranks.directory)
    (row,) = run.requests
    assert (row.wire, row.robot, row.requests) == ("openpi", "arm", REQUESTS + 3)
    assert row.answered == found.pop("answered") >= REQUESTS / 2
    assert found["timeout"] >= 1
    assert row.errors == {**found, "bad_request": 1}
    assert (row.unanswered, row.imbalance) == (0, 0)
    assert "Requests\n  wire" in render(judge(run))
    (told,) = judge(run).as_dict()["requests"]
    assert 0 < told["p50_ms"] <= told["max_ms"] < 5000


def test_requests_that_a_killed_gateway_had_in_work_are_unanswered(tmp_path: Path) -> None:
    with Ranks(tmp_path, "gateway.0.timeout_ms=60000", config=DROID, world_size=1) as ranks:
        address = ranks.gateway_address("openpi") + "/robots/arm"
        with connect(address, compression=None, proxy=None) as robot:
            robot.recv()
            ranks.processes[0].send_signal(signal.SIGSTOP)
            robot.send(encode(observation(0)))
            log = ranks.directory / "gateway.gen0.jsonl"
            wait_until(lambda: '"unanswered":1' in log.read_text())
            gateway = gateway_of(ranks)
            os.kill(gateway, signal.SIGKILL)
        ranks.processes[0].send_signal(signal.SIGCONT)
        ranks.processes[0].send_signal(signal.SIGTERM)
        assert ranks.wait() == [ExitCode.DRAINED]
    (row,) = read_run(ranks.directory).requests
    assert (row.requests, row.answered, row.unanswered, row.imbalance) == (1, 0, 1, 0)
    assert "1 unanswered" in render(judge(read_run(ranks.directory)))


def test_a_gateway_that_cannot_start_ends_the_run_before_it_is_ready(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("short")
    key.chmod(0o600)
    setting = f"gateway.0.api_key_file={key}"
    with Ranks(tmp_path, setting, config=DROID, world_size=1) as ranks:
        assert ranks.wait() == [ExitCode.CONFIG]
        assert "gateway[0].api_key_file" in ranks.output()
        assert "gateway: it ended with code 11 before the run was ready" in ranks.output()


def test_a_client_of_groot_is_answered_also_when_the_run_is_killed_amid_its_request(
    tmp_path: Path,
) -> None:
    with (
        Ranks(tmp_path, *GROOT, config=DROID, world_size=1) as ranks,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as robot,
    ):
        address = ranks.gateway_address("groot")
        robot.connect(address)
        robot.set(zmq.RCVTIMEO, 20_000)
        data = {"state.arm": np.ones((1, 7)), "state.grip": np.ones((1, 1))}
        data["video.wrist"] = np.zeros((1, 8, 6, 3), np.uint8)
        request = [b"", groot.encode({"endpoint": "get_action", "data": data})]

        def answer() -> Any:
            return groot.decode_reply(robot.recv_multipart()[-1])

        robot.send_multipart(request)
        assert answer()["action.arm"].shape == (10, 7)
        ranks.processes[0].send_signal(signal.SIGSTOP)
        robot.send_multipart(request)
        robot.send_multipart(request)
        assert "is not answered yet" in answer()["error"]  # so the one before is in work
        ranks.processes[0].send_signal(signal.SIGKILL)
        assert answer() == {"error": "the gateway ends"}


def test_a_gateway_that_dies_is_started_again_and_answers_the_robot_that_comes_back(
    tmp_path: Path,
) -> None:
    settings = "gateway.0.listen=127.0.0.1:0", f"batch.rows={ROBOTS}"
    with Ranks(tmp_path, *settings, *SHARED, config=DROID, world_size=1) as ranks:
        address = ranks.gateway_address("openpi").removeprefix("ws://")  # it stays the same
        gateway = gateway_of(ranks)
        for _ in range(2):
            ask(f"ws://{address}", 0)
            with connect(f"ws://{address}", compression=None, proxy=None) as robot:
                robot.recv(20)
                os.kill(gateway, signal.SIGKILL)
                with pytest.raises(ConnectionClosed):
                    robot.recv(20)
            wait_until(lambda old=gateway: old not in children(ranks.processes[0].pid))
            wait_until(lambda: listens(address))
            gateway = gateway_of(ranks)
        ask(f"ws://{address}", 0)
        ranks.processes[0].send_signal(signal.SIGTERM)
        assert ranks.wait() == [ExitCode.DRAINED]
        told = "the gateway ended with signal 9 SIGKILL: it is started again in"
        assert re.findall(rf"{told} (.*)", ranks.output()) == ["1 s (1 of 5)", "2 s (2 of 5)"]
    run = read_run(ranks.directory)
    assert [row.answered for row in run.requests] == [REQUESTS] * 3
    told = "the gateway ended with signal 9 SIGKILL 2 times: its robots held until the run had"
    assert told in " ".join(render(judge(run)).split())
    newest = Events(ranks.directory).read()
    assert "gateway: ended with signal 9 SIGKILL, again_in_s 2.00" in newest


def gateway_of(ranks: Ranks) -> int:
    """The newest process of the run's gateway."""
    beside = children(ranks.processes[0].pid)
    return max(pid for pid in beside if "ppstream.gateway" in command(pid))


def listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), 1).close()
    except OSError:
        return False
    return True


def test_a_gateway_that_was_asked_to_end_is_told_with_the_command_for_another_one(
    tmp_path: Path,
) -> None:
    with Ranks(tmp_path, config=DROID, world_size=1) as ranks:
        ranks.wait_for_event("phase", phase="ready")
        gateway = gateway_of(ranks)
        os.kill(gateway, signal.SIGTERM)
        wait_until(lambda: REMEDY.search(ranks.output()))
        remedy = REMEDY.search(ranks.output())
        assert remedy is not None
        command = [sys.executable, "-m", "ppstream.gateway", *shlex.split(remedy[1])]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as another:
            assert another.stdout is not None
            assert ask_openpi(another.stdout.readline().split()[1]).shape == (10, 8)
            another.terminate()
        ranks.processes[0].send_signal(signal.SIGTERM)
        assert ranks.wait() == [ExitCode.DRAINED]


def test_several_processes_share_the_robots_of_a_wire_and_the_report_adds_them_up(
    tmp_path: Path,
) -> None:
    with Ranks(tmp_path, *IN_ROWS, *SHARED, config=DROID, world_size=1) as ranks:
        address = ranks.gateway_address("openpi")
        with ThreadPoolExecutor(ROBOTS) as threads:
            for asked in [threads.submit(ask, address, robot) for robot in range(ROBOTS)]:
                asked.result(100)
        with urlopen(f"http{address.removeprefix('ws')}/healthz", timeout=20) as health:
            assert health.read() == b"OK\n"
        ranks.processes[0].send_signal(signal.SIGTERM)
        assert ranks.wait() == [ExitCode.DRAINED]
    files = ranks.directory.glob("gateway.gen*.jsonl")
    robots = [
        {json.loads(line)["robot"] for line in file.read_text().splitlines()} for file in files
    ]
    assert sorted(map(len, robots)) == [0, 2, 2]  # its own process serves nobody
    rows = read_run(ranks.directory).requests
    assert sum(row.requests for row in rows) == sum(row.answered for row in rows)
    assert [row.answered for row in rows] == [REQUESTS] * ROBOTS


def test_a_process_that_dies_costs_its_own_robots_alone_and_another_takes_its_place(
    tmp_path: Path,
) -> None:
    with Ranks(tmp_path, f"batch.rows={ROBOTS}", *SHARED, config=DROID, world_size=1) as ranks:
        address = ranks.gateway_address("openpi")
        gateway = gateway_of(ranks)
        first, second = children(gateway)
        with (
            connect(address, compression=None, proxy=None) as one,
            connect(address, compression=None, proxy=None) as other,
        ):
            assert one.recv()
            assert other.recv()
            os.kill(first, signal.SIGKILL)
            lost = [robot for robot in (one, other) if is_cut_off(robot)]
            assert len(lost) == 1
            ask(address, 0)  # the process that is left, or the new one
            wait_until(lambda: len({*children(gateway)} - {first, second}) == 1)
            assert "gateway[0]: a process ended with code -9: its robots hold" in ranks.output()
            ask(address, 1)
        os.kill(gateway, signal.SIGKILL)  # the others end with it
        wait_until(lambda: not Path(f"/proc/{second}").exists())
        ranks.processes[0].send_signal(signal.SIGTERM)
        assert ranks.wait() == [ExitCode.DRAINED]


def is_cut_off(robot: ClientConnection) -> bool:
    """Its gateway is gone; else it answers."""
    try:
        robot.send(encode(observation(1)))
        return not robot.recv(60)
    except ConnectionClosed:
        return True


def test_the_report_has_a_row_for_each_robot_of_each_wire(tmp_path: Path) -> None:
    settings = (f"gateway=[{', '.join(TWO_WIRES)}]", "batch.rows=3")
    with (
        Ranks(tmp_path, *settings, config=DROID, world_size=1) as ranks,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as robot,
    ):
        robot.set(zmq.RCVTIMEO, 20_000)
        robot.connect(ranks.gateway_address("groot"))
        data = {"state.arm": np.ones((1, 7)), "state.grip": np.ones((1, 1))}
        data["video.wrist"] = np.zeros((1, 8, 6, 3), np.uint8)
        for given in (*[data] * 5, {}):
            data["state.arm"] -= 1 / 64  # values that never change are a fault of the sensor
            body = groot.encode({"endpoint": "get_action", "data": given})
            robot.send_multipart([b"", body])
            robot.recv_multipart()
        for name, times in (("arm1", 4), ("arm2", 3)):
            address = f"{ranks.gateway_address('openpi')}/robots/{name}"
            with connect(address, compression=None, proxy=None) as client:
                client.recv()
                for number in range(times):
                    client.send(encode(observation(number)))
                    client.recv(20)
                client.send(encode({"a": 1}))
                client.recv(20)
        ranks.processes[0].send_signal(signal.SIGTERM)
        assert ranks.wait() == [ExitCode.DRAINED]
    run = read_run(ranks.directory)
    report = judge(run)
    rows = {(row["wire"], row["robot"]): row for row in report.as_dict()["requests"]}
    (unnamed,) = (name for wire, name in rows if wire == "groot")
    assert unnamed.startswith("groot-1-127.0.0.1-")  # and the client's port
    wanted = {("openpi", "arm1"): 4, ("openpi", "arm2"): 3, ("groot", unnamed): 5}
    assert {key: row["answered"] for key, row in rows.items()} == wanted
    text = render(report)
    page = TAG.sub(" ", render_page([(run, report)]))
    for (wire, name), row in rows.items():
        answered = wanted[wire, name]
        assert (row["requests"], row["errors"]) == (answered + 1, {"bad_request": 1})
        assert 0 < row["p50_ms"] <= row["max_ms"]
        assert row["p99_ms"] is None  # too few to say
        shown = rf"{wire}\s+{name}\s+{answered + 1}\s+{answered}\s"
        assert re.search(shown, text)
        assert re.search(shown, page)
