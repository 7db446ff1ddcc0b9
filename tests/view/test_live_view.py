"""The live view of a real run, and viewers that do not read."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from base64 import b64decode
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BytesIO
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mcap.records import Message
from ranks import Ranks
from recording_files import with_camera
from robot_rig import MS, make_config
from viewer import Viewer, address_in, viewing
from websockets.sync.client import ClientConnection, connect

from ppstream.analysis.log_reader import read_run
from ppstream.control.peer_process import children, command
from ppstream.core.errors import ExitCode
from ppstream.observe.run_folder import EventLog
from ppstream.recording.items import FrameItem, Item, LoggedLine, SamplesItem
from ppstream.recording.mcap_writer import RecordFile
from ppstream.view.live_view import LiveView, backlog, decode_event, records
from ppstream.wire.openpi import decode, encode

DROID = Path(__file__).parents[1] / "support" / "droid.toml"
MESSAGES = 100
PERIOD_S = 0.02  # of a robot
#: By channel as many as a viewer waits for; of events and resets there are few.
WANTED = {
    **dict.fromkeys(("/arm/samples/joints", "/arm/samples/gripper", "/arm/windows"), MESSAGES),
    **dict.fromkeys(("/arm/actions", "/envelopes", "/reports"), MESSAGES),
    "/arm/cameras/wrist": 3,  # five a second
    "/state": 1,
}


def ask(robot: ClientConnection, number: int) -> None:
    """The robot's answer is of this very observation."""
    joints = np.arange(7) / 8 + number % 256 / 64
    robot.send(
        encode(
            {
                "observation/joint_position": joints,
                "observation/gripper_position": np.array([number % 256 / 64]),
                "observation/wrist_image_left": np.full((8, 6, 3), number % 256, np.uint8),
                "prompt": "nobody follows it here",
            }
        )
    )
    actions = decode(bytes(robot.recv(20)))["actions"]
    assert (actions == np.append(joints, number % 256 / 64).astype("f4")).all(), number


def ask_some(robot: ClientConnection, numbers: Iterator[int]) -> None:
    """At a robot's rate: as fast as it is answered, a small queue would drop in any case."""
    for number in islice(numbers, 20):
        ask(robot, number)
        time.sleep(PERIOD_S)


@contextmanager
def robot_of(ranks: Ranks) -> Iterator[ClientConnection]:
    address = ranks.gateway_address("openpi") + "/robots/arm"
    with connect(address, compression=None, proxy=None) as robot:
        robot.recv()
        yield robot


@contextmanager
def asking(ranks: Ranks) -> Iterator[None]:
    """A robot that asks again and again, and gets each answer."""
    ended, failures = threading.Event(), []

    def live() -> None:
        try:
            with robot_of(ranks) as robot:
                number = 0
                while not ended.is_set():
                    ask(robot, number)
                    number += 1
        except BaseException as error:
            failures.append(error)
            raise

    thread = threading.Thread(target=live)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(30)
    assert not failures


def is_complete(found: dict[str, list[Any]]) -> bool:
    return all(len(found.get(topic, [])) >= n for topic, n in WANTED.items())


@pytest.mark.multirank
def test_a_viewer_decodes_a_hundred_messages_of_each_channel(tmp_path: Path) -> None:
    with Ranks(tmp_path, "view.port=0", config=DROID, world_size=2) as ranks:
        with viewing(address_in(ranks.output)) as viewer:
            assert viewer.subprotocol == "foxglove.sdk.v1"
            ranks.wait_for_event("phase", phase="ready")
            with asking(ranks):
                while not is_complete(viewer.found):
                    viewer.read()
            with viewing(address_in(ranks.output)) as late:
                while not late.found.get("/state"):
                    late.read()
        ranks.processes[0].send_signal(signal.SIGTERM)
        assert ranks.wait() == [ExitCode.DRAINED] * 2
        verdict = next(line for line in ranks.lines(0) if line.get("name") == "verdict")
        counts = [line for line in ranks.lines(0) if line.get("name") == "recorder"]
    found = viewer.found
    for topic, messages in found.items():
        fields = viewer.schemas[topic]["properties"]
        assert all(message.keys() == fields.keys() for message in messages), topic
        assert viewer.times[topic] == sorted(viewer.times[topic])
    assert found.keys() - WANTED.keys() <= {"/events", "/arm/resets"}
    for state in (found["/state"][-1], late.found["/state"][-1]):
        assert (state["phase"], state["verdict"]) == ("ready", verdict["verdict"])
        assert (state["epoch"], state["reasons"]) == (1, verdict["reasons"])
    ages = [one["age_ns"] for one in found["/envelopes"] if not one["dropped"]]
    assert min(ages) > 0
    assert all(one["input_age_ns"].keys() >= {"joints"} for one in found["/envelopes"])
    chunk = found["/arm/actions"][-1]
    assert chunk["actions"][:7] == (np.arange(7) / 8 + chunk["actions"][7]).tolist()
    assert viewer.names["/arm/cameras/wrist"] == "foxglove.RawImage"
    frame = found["/arm/cameras/wrist"][-1]
    assert (frame["height"], frame["width"], frame["step"]) == (8, 6, 18)
    pixels = b64decode(frame["data"])
    assert len(pixels) == 8 * 18
    assert len(set(pixels)) == 1
    assert (counts[-1]["to"], counts[-1]["waiting"], counts[-1]["failure"]) == ("live view", 0, "")
    assert counts[-1]["written"] > 5 * MESSAGES


@pytest.mark.multirank
def test_a_frozen_view_loses_messages_and_the_run_nothing(tmp_path: Path) -> None:
    few = ("view.port=0", "view.queue_mb=0.02")
    with Ranks(tmp_path, *few, config=DROID, world_size=1) as ranks, robot_of(ranks) as robot:
        rank0 = ranks.processes[0]
        (view,) = (pid for pid in children(rank0.pid) if "ppstream.view" in command(pid))

        log = EventLog(ranks.directory / "rank0.gen0.jsonl")
        told: list[dict[str, Any]] = []

        def is_dropping() -> bool:
            told.extend(line for line in log.read() if line["name"] == "recorder")
            return len(told) % 2 == 1

        numbers = count()
        os.kill(view, signal.SIGSTOP)
        while not is_dropping():
            ask_some(robot, numbers)
        os.kill(view, signal.SIGCONT)
        while is_dropping():
            ask_some(robot, numbers)
        with viewing(address_in(ranks.output)) as viewer:
            while not viewer.found.get("/arm/actions"):
                ask(robot, next(numbers))
                with suppress(TimeoutError):  # it has not subscribed yet
                    for _ in range(20):
                        viewer.read(0.1)
        os.kill(view, signal.SIGSTOP)
        while not is_dropping():
            ask_some(robot, numbers)
        rank0.send_signal(signal.SIGTERM)
        assert ranks.wait() == [ExitCode.DRAINED]
        is_dropping()
        *before, last = told
    dropped = [line["dropped"] for line in (*before, last)]
    assert len(before) >= 3
    assert dropped == sorted(dropped)
    assert 0 < dropped[0] < dropped[-1]
    assert not any(line["failure"] for line in before)
    assert last["failure"] == "the writer did not finish within 2 s"
    run = read_run(ranks.directory)
    assert run.ledgers
    assert all(ledger.imbalance == 0 for ledger in run.ledgers)
    assert not Path(f"/proc/{view}").exists()


@pytest.mark.multirank
def test_a_view_that_was_killed_is_told_once_and_the_run_goes_on(tmp_path: Path) -> None:
    with Ranks(tmp_path, "view.port=0", config=DROID, world_size=1) as ranks:
        with robot_of(ranks) as robot:
            rank0 = ranks.processes[0]
            (view,) = (pid for pid in children(rank0.pid) if "ppstream.view" in command(pid))
            os.kill(view, signal.SIGKILL)
            number = 0
            while "the view ended with signal 9 SIGKILL" not in ranks.output():
                ask(robot, number)
                number += 1
            ask(robot, number)
        rank0.send_signal(signal.SIGTERM)
        assert ranks.wait() == [ExitCode.DRAINED]
        assert "live view stopped, the run goes on: Broken pipe" in ranks.output()


@pytest.mark.multirank
def test_a_taken_port_ends_the_run_with_one_clear_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with Ranks(tmp_path, f"view.port={port}", config=DROID, world_size=1) as ranks:
            assert ranks.wait() == [ExitCode.CONFIG]
            assert f"view.port: 127.0.0.1:{port}: " in ranks.output()
            assert "warming" not in ranks.output()


# ---- the process by itself ------------------------------------------------------------------


@contextmanager
def view_of(path: Path) -> Iterator[str]:
    """``python -m ppstream.view`` on a named pipe; gives where viewers connect."""
    view = subprocess.Popen(
        [sys.executable, "-m", "ppstream.view", str(path), "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert view.stdout is not None
    try:
        yield view.stdout.readline().split()[-1]
        assert view.wait(20) == 0  # with the pipe's end
    finally:
        view.kill()
        view.wait()
        view.stdout.close()


def batch(number: int) -> SamplesItem:
    """A message of about 10 KB."""
    stamps = np.arange(200, dtype=np.int64) + 10**18
    values = np.zeros((200, 2))
    return SamplesItem(
        "arm", "imu", number, number + 200, stamps.tobytes(), values.tobytes(), number * 100 * MS
    )


def frame(number: int) -> FrameItem:
    """A message of about 37 KB."""
    pixels = bytes(96 * 96 * 3)
    return FrameItem("arm", "wrist", number, number, pixels, number * 100 * MS)


@pytest.mark.parametrize(
    ("item", "topic", "number", "rounds"),
    [
        (batch, "/arm/samples/imu", lambda body: body["first"], 20),
        (frame, "/arm/cameras/wrist", lambda body: body["timestamp"]["nsec"], 12),
    ],
)
def test_a_viewer_that_does_not_read_loses_messages_and_no_other_viewer(
    item: Callable[[int], Item],
    topic: str,
    number: Callable[[dict[str, Any]], int],
    rounds: int,
    tmp_path: Path,
) -> None:
    pipe, each = tmp_path / "live", 150
    os.mkfifo(pipe)
    config = with_camera(make_config(), 96, 96)
    opened: list[RecordFile] = []
    opening = threading.Thread(target=lambda: opened.append(RecordFile(pipe, config, "run", "raw")))
    opening.start()
    with view_of(pipe) as address:
        opening.join(20)
        (file,) = opened
        with viewing(address) as slow, viewing(address) as viewer:
            file.write([item(0)])  # opens the channel, whose first message nobody has asked for
            for one in (slow, viewer):
                wait_for_topic(one, topic)
                while not one.found[topic]:  # what it asks for is heard some time later
                    file.write([item(0)])
                    with suppress(TimeoutError):
                        one.read(0.1)
            file.write([LoggedLine(1, {"kind": "event", "name": "phase", "phase": "ready"})])
            for begun in range(1, rounds + 1):
                file.write([item(k) for k in range(begun * each, (begun + 1) * each)])
                while number(viewer.found[topic][-1]) < (begun + 1) * each - 1:
                    viewer.read()
            numbers = [number(one) for one in viewer.found[topic] if number(one)]
            assert numbers == [*range(each, (rounds + 1) * each)]
            late = slow.found[topic]
            while not late or number(late[-1]) != numbers[-1]:
                slow.read()
            assert 0 < len(late) < len(numbers)
            file.close()


@pytest.mark.parametrize(
    ("message_bytes", "messages"),
    [(1, 1024), (64 << 10, 1024), (224 * 224 * 4, 334), (720 * 1280 * 4, 18), (10 << 20, 16)],
)
def test_what_waits_for_a_viewer_is_bounded_by_its_bytes(message_bytes: int, messages: int) -> None:
    assert backlog(message_bytes) == messages


def wait_for_topic(viewer: Viewer, topic: str) -> None:
    while topic not in viewer.found:
        viewer.read()


def refusal(*arguments: str) -> tuple[int, str]:
    view = subprocess.run(
        [sys.executable, "-m", "ppstream.view", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    return view.returncode, view.stderr


def test_a_pipe_that_ends_inside_a_record_brings_all_before_it(tmp_path: Path) -> None:
    """Its run was killed; a record that came in part is none."""
    pipe = tmp_path / "live"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reading = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reading.start()
    file = RecordFile(pipe, make_config(), "run")
    small = np.zeros((1, 2)).tobytes()
    file.write([SamplesItem("arm", "imu", 0, 1, np.zeros(1, np.int64).tobytes(), small, MS)])
    file.write([LoggedLine(1, {"kind": "event", "name": "phase", "phase": "é"})])
    file.close()
    reading.join(20)
    (whole,) = read
    all_of_it = list(records(BytesIO(whole)))
    events = [one for one in all_of_it if isinstance(one, Message)][1:]
    assert decode_event(events[0].data).fields == {"phase": "é"}
    most = 0
    for end in range(len(whole)):
        view, found = LiveView(), []
        for record in records(BytesIO(whole[:end])):
            view.publish(record)
            found.append(record)
        assert found == all_of_it[: len(found)]
        assert len(found) >= most
        most = len(found)
    assert most == len(all_of_it)


def test_what_is_no_pipe_of_a_run_is_refused_with_one_line(tmp_path: Path) -> None:
    file = tmp_path / "run.mcap"
    file.write_bytes(b"")
    code, said = refusal(str(file))
    assert (code, "open it in the viewer" in said) == (ExitCode.CONFIG, True)
    code, said = refusal(str(tmp_path / "nothing"))
    assert (code, "No such file" in said) == (ExitCode.CONFIG, True)
