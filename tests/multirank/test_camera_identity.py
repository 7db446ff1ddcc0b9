"""A run with cameras is recorded with its frames, and replayed: across real processes."""

import json
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from ranks import Ranks
from recorded_runs import played
from recording_files import picture
from robot_rig import wait_until

pytest.importorskip("mcap")
pytest.importorskip("PIL")

from mcap.reader import make_reader

from ppstream.config.load import locate
from ppstream.core.clock import now_ns
from ppstream.recording.load import load_recording
from ppstream.robot.client import RobotClient

pytestmark = pytest.mark.multirank

CONFIG = locate("two_cameras")
SIDE, JOINTS, CAMERAS = 96, 6, ("top", "wrist")
CHUNKS = 60
LEAST_DB = 35  # of JPEG, as record-and-replay.md says
SCHEDULED = ("pipeline.windows=scheduled", "service.duration_s=none")


class Filmed(NamedTuple):
    """A recording, the frames that the robot sent, and by window the chunk that it was sent."""

    path: Path
    sent: dict[str, dict[int, np.ndarray]]  # by camera and stamp
    windows: list[dict]
    actions: list[dict]


@contextmanager
def filming(endpoint: str) -> Iterator[dict[str, dict[int, np.ndarray]]]:
    """A robot that sends joints and frames until the end; gives what it has sent."""
    sent: dict[str, dict[int, np.ndarray]] = {name: {} for name in CAMERAS}
    ended = threading.Event()
    frames = [(name, (SIDE, SIDE, 3), "uint8") for name in CAMERAS]
    actions = [f"joint_{number + 1}" for number in range(JOINTS)]
    client = RobotClient(
        endpoint, robot="arm", streams=[("joints", JOINTS), *frames], actions=actions
    )

    def live() -> None:
        rng, step = np.random.default_rng(2), 0
        while not ended.wait(0.01):
            client.push("joints", now_ns(), rng.normal(0, 0.3, JOINTS))
            if step % 3 == 0:
                for name in CAMERAS:
                    stamp_ns, frame = now_ns(), picture(SIDE, SIDE, step)
                    if client.push(name, stamp_ns, frame):
                        sent[name][stamp_ns] = frame
            step += 1

    with client:
        client.connect(40)
        wait_until(lambda: client.ready, seconds=60)
        thread = threading.Thread(target=live)
        thread.start()
        try:
            wait_until(lambda: client.statistics().timeline.received >= CHUNKS, seconds=60)
            yield sent
        finally:
            ended.set()
            thread.join(10)


def messages(path: Path, topic: str) -> list[dict]:
    with path.open("rb") as file:
        return [json.loads(m.data) for _, _, m in make_reader(file).iter_messages(topics=[topic])]


def film(folder: Path, form: str) -> Filmed:
    """Two ranks of ``two_cameras``, recorded while a robot is served."""
    path, endpoint = folder / "run.mcap", f"unix://{folder}/robots"
    recorded = f"record.file={path}", f"record.frames={form}", f"service.endpoint={endpoint}"
    with Ranks(folder, *recorded, config=CONFIG) as ranks:
        ranks.wait_for_event("phase", phase="ready")
        with filming(endpoint) as sent:
            pass
        ranks.processes[0].send_signal(signal.SIGTERM)
        assert ranks.wait() == [0, 0], ranks.output()
        (told,) = [line for line in ranks.lines(0) if line.get("name") == "recorder"]
        assert (told["dropped"], told["waiting"], told["failure"]) == (0, 0, "")
    return Filmed(path, sent, messages(path, "/arm/windows"), messages(path, "/arm/actions"))


def replayed(root: Path, recording: Path, ranks: int) -> dict[str, np.ndarray]:
    return played(root, recording, *SCHEDULED, ranks=ranks, config=CONFIG, limit_s=80)[0]


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Filmed:
    return film(tmp_path_factory.mktemp("raw"), "raw")


def test_raw_frames_give_the_robot_s_chunks_again_bit_for_bit_on_one_rank_and_two(
    raw: Filmed, tmp_path: Path
) -> None:
    one, two = (replayed(tmp_path / f"{ranks}", raw.path, ranks) for ranks in (1, 2))
    for name in one:
        assert one[name].tobytes() == two[name].tobytes(), name
    assert len(one["actions"]) == len(raw.windows)
    place = {window["seq"]: number for number, window in enumerate(raw.windows)}
    assert len(raw.actions) >= CHUNKS
    for chunk in raw.actions:
        said = np.array(chunk["actions"], np.float32)
        assert said.tobytes() == one["actions"][place[chunk["seq"]]].tobytes(), chunk["seq"]


def test_raw_frames_are_those_that_the_robot_sent(raw: Filmed) -> None:
    tracks = load_recording(raw.path).tracks
    for name in CAMERAS:
        track = tracks[name]
        assert len(track.stamps_ns) >= 10
        assert set(track.stamps_ns.tolist()) <= set(raw.sent[name])
        for number, stamp_ns in enumerate(track.stamps_ns.tolist()):
            sent = raw.sent[name][stamp_ns]
            assert track.values[number : number + 1].tobytes() == sent.tobytes()


def test_jpeg_frames_give_near_chunks_the_same_on_one_rank_and_two(tmp_path: Path) -> None:
    filmed = film(tmp_path, "jpeg")
    for name, track in load_recording(filmed.path).tracks.items():
        for number, stamp_ns in enumerate(track.stamps_ns.tolist() if name in CAMERAS else ()):
            sent = filmed.sent[name][stamp_ns].astype(float)
            found = track.values[number : number + 1].reshape(sent.shape)
            assert 10 * np.log10(255**2 / np.mean((found - sent) ** 2)) > LEAST_DB
    one, two = (replayed(tmp_path / f"{ranks}", filmed.path, ranks) for ranks in (1, 2))
    assert one["actions"].tobytes() == two["actions"].tobytes()
    place = {window["seq"]: number for number, window in enumerate(filmed.windows)}
    said = np.array([chunk["actions"] for chunk in filmed.actions], np.float32)
    again = one["actions"][[place[chunk["seq"]] for chunk in filmed.actions]]
    again = again.reshape(said.shape)
    assert np.abs(again - said).max() < 1e-3  # of actions within 0.05 of the joints
    assert again.tobytes() != said.tobytes()  # they do depend on the frames
