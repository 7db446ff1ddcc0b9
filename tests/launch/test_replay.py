from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from recording_files import picture, with_camera
from stream_cases import MS, Input, at_ms, config, ramp, stream

from ppstream.config.load import as_toml
from ppstream.config.schema import PipelineConfig, RecordConfig, ServiceConfig
from ppstream.core.clock import now_ns
from ppstream.core.errors import ExitCode
from ppstream.core.waiter import Waiter
from ppstream.launch import commands, replay
from ppstream.launch.replay import ReplayClock
from ppstream.recording.mcap_writer import open_recorder
from ppstream.sessions.server import Sessions
from ppstream.wire.robot_messages import ActionChunk, RobotState

TOOL = Path(__file__).parents[2] / "tools" / "replay.py"
DATA = os.environ.get("PPSTREAM_TEST_DATA")
LEASE = 100 * MS


class Server:
    """Sessions on a thread of their own, as rank 0 runs them; answers each window with zeros."""

    def __init__(self, settings: PipelineConfig, phase: str, pause_ns: int) -> None:
        self.case = Input(settings)
        self._pause_ns = pause_ns
        self.sessions = Sessions(settings, self.case.rows)
        self.sessions.set_phase(phase)
        self.windows: list[tuple[int, int]] = []  # of which episode, and where they ended
        self._waiter = Waiter()
        self._stopped = threading.Event()
        for fd in self.sessions.fds:
            self._waiter.register(fd)
        self.sessions.set_wake(self._waiter.wake)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._waiter.wake()
        self._thread.join(10)
        while self.sessions.drain(now_ns()):  # what was still in the socket
            pass
        self.sessions.close()
        self._waiter.close()

    def _run(self) -> None:
        out = self.case.slot()
        seq = 0
        while not self._stopped.is_set():
            self._waiter.wait(20 * MS)
            self._stopped.wait(self._pause_ns / 1e9)
            if not self.sessions.drain(now_ns()) or not self.case.rows[0].present:
                continue
            end_ns = self.case.cutter.cut(out, [None], LEASE).window_end_ns[0]
            self.sessions.emit(0, self._chunk(seq, end_ns))
            self.windows.append((self.case.rows[0].session_epoch, end_ns))
            seq += 1

    def _chunk(self, seq: int, end_ns: int) -> ActionChunk:
        row = self.case.rows[0]
        actions = memoryview(np.zeros((4, 1), np.float32).tobytes())
        return ActionChunk(
            session=row.session,
            session_epoch=row.session_epoch,
            epoch=0,
            seq=seq,
            window_end_ns=end_ns,
            start_ns=end_ns + 10 * MS,
            dt_ns=10 * MS,
            expires_ns=end_ns + LEASE,
            horizon=4,
            actions=actions,
        )


@contextmanager
def serving(settings: PipelineConfig, phase: str = "ready", pause_ns: int = 0) -> Iterator[Server]:
    server = Server(settings, phase, pause_ns)
    try:
        yield server
    finally:
        server.stop()


def listening(settings: PipelineConfig, folder: Path) -> PipelineConfig:
    service = ServiceConfig(endpoint=f"unix://{folder}/robots")
    return msgspec.structs.replace(settings, service=service)


#: As in 3.10, where pip installs tomli: the same code under another name.
OLD_PYTHON = """
import runpy, sys, tomllib
sys.modules.update(tomli=tomllib, tomllib=None)
sys.argv[:] = sys.argv[1:]
sys.version_info = (3, 10, 13, "final", 0)
import ppstream.config.load
sys.version_info = (3, 11, 0, "final", 0)  # others have chosen theirs
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_tool(
    settings: PipelineConfig,
    folder: Path,
    file: Path,
    *options: str,
    interpreter: tuple[str, ...] = (),
) -> Any:
    (folder / "run.toml").write_text(as_toml(settings))
    command = [sys.executable, *interpreter, str(TOOL), str(file)]
    command += ["--config", str(folder / "run.toml"), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Two streams over 400 ms of a clock that nobody else has."""
    fast, slow = (at_ms(*(1e9 + np.arange(0, 401, step))) for step in (1, 40))
    arrays = {
        "fast.stamps_ns": fast,
        "fast.values": ramp(fast, 3),
        "slow.stamps_ns": slow,
        "slow.values": ramp(slow, 1),
    }
    np.savez(tmp_path / "run.npz", allow_pickle=False, **arrays)
    return tmp_path / "run.npz"


@pytest.fixture
def settings(tmp_path: Path) -> PipelineConfig:
    slow = stream("slow", dim=1, rate_hz=25, dtype="float64")
    return listening(config(stream("fast", dim=3), slow), tmp_path)


@pytest.mark.parametrize(
    ("options", "shortest_s", "longest_s"),
    [((), 0.4, 3.0), (("--speed", "4"), 0.1, 2.0), (("--speed", "max", "--batch-ms", "0"), 0, 2.0)],
)
def test_every_sample_arrives_with_its_recorded_stamp(
    settings: PipelineConfig,
    recorded: Path,
    options: tuple[str, ...],
    shortest_s: float,
    longest_s: float,
) -> None:
    with serving(settings) as server:
        done = run_tool(settings, recorded.parent, recorded, *options)
    assert done.returncode == 0, done.stderr
    assert "412 recorded, 412 sent" in done.stdout
    assert done.stderr.startswith(f"replay: reads {recorded}\n")
    took_s = float(done.stdout.split(" in ")[1].split(" s")[0])
    assert shortest_s <= took_s <= longest_s
    fast, slow = server.case.rows[0].rings.values()
    assert (fast.ledger.received, slow.ledger.received) == (401, 11)
    assert set(fast.ledger.dropped) | set(slow.ledger.dropped) <= {"passed_over", "closed"}
    assert int(server.case.banks["fast"].stamps_ns[0, 400]) == 1_000_000_400 * MS
    sent = ramp(at_ms(*(1e9 + np.arange(0, 401, 40))), 1)
    assert server.case.banks["slow"].values[0, :11].tolist() == sent.tolist()
    server.case.check()


def test_it_needs_no_newer_python_than_a_robot_s_side(
    settings: PipelineConfig, recorded: Path
) -> None:
    with serving(settings):
        done = run_tool(settings, recorded.parent, recorded, interpreter=("-c", OLD_PYTHON))
    assert "412 recorded, 412 sent" in done.stdout, done.stderr


def test_action_chunks_come_back_and_are_aged_in_the_recording_s_clock(
    settings: PipelineConfig, recorded: Path
) -> None:
    actions = msgspec.structs.replace(settings.actions, lease_ms=5000.0)  # on a busy machine, too
    settings = msgspec.structs.replace(settings, actions=actions)
    with serving(settings):
        done = run_tool(settings, recorded.parent, recorded)
    chunks = done.stdout.splitlines()[-1]
    taken = int(chunks.split(" received, ")[1].split(" ")[0])
    assert taken >= 10
    assert 0 < float(chunks.split("p50 ")[1].split(",")[0]) < 100


def test_what_it_waits_for_at_its_end_is_no_time_without_a_new_chunk(
    settings: PipelineConfig, recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "LAST_CHUNK_S", 10.0)
    (recorded.parent / "run.toml").write_text(as_toml(settings))
    with serving(settings) as server:
        code = replay.main([str(recorded), "--config", str(recorded.parent / "run.toml")])
    assert code == 0
    states = [one for one in server.sessions.reports if isinstance(one, RobotState)]
    assert 0 < states[-1].chunk_gap_ns < 5_000 * MS


def test_it_holds_until_the_run_is_ready(settings: PipelineConfig, recorded: Path) -> None:
    with serving(settings, phase="warming") as server:
        done = run_tool(settings, recorded.parent, recorded, "--wait-s", "0.5")
    assert done.returncode == ExitCode.PEER_LOST
    assert "phase is 'warming' after 0.5 s, not ready" in done.stderr
    assert server.case.rows[0].rings["fast"].ledger.received == 0


def test_a_recording_that_lacks_a_stream_is_refused_with_its_names(
    settings: PipelineConfig, recorded: Path
) -> None:
    wrong = msgspec.structs.replace(settings, streams=(stream("gripper"),))
    done = run_tool(wrong, recorded.parent, recorded)
    assert done.returncode == ExitCode.CONFIG
    assert "'gripper' is not recorded, want one of fast, slow" in done.stderr


def test_a_file_that_is_no_recording_is_refused_without_numpy_s_advice_to_unpickle(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (toml := tmp_path / "run.toml").write_text("name = 'arm'")
    assert commands.main(["replay", str(toml), "--config", "bench"]) == ExitCode.CONFIG
    said = capsys.readouterr().err
    assert f"{toml}: is no recording by its name, want .mcap, .npz" in said
    toml.rename(named := tmp_path / "a.npz")
    assert commands.main(["replay", str(named), "--config", "bench"]) == ExitCode.CONFIG
    assert "pickle" not in (said := capsys.readouterr().err)
    assert f"{named}: begins as no .npz or .npy does" in said


def test_at_max_a_slow_server_slows_the_replay_and_loses_nothing(tmp_path: Path) -> None:
    stamps = at_ms(*range(6000))
    arrays = {"joints.stamps_ns": stamps, "joints.values": ramp(stamps, 128)}
    np.savez(tmp_path / "run.npz", allow_pickle=False, **arrays)
    settings = listening(config(stream(dim=128)), tmp_path)
    with serving(settings, pause_ns=20 * MS) as server:
        done = run_tool(
            settings, tmp_path, tmp_path / "run.npz", "--speed", "max", "--batch-ms", "0"
        )
        refused = int(done.stdout.split("/s, ")[1].split(" not accepted")[0])
    assert "6000 recorded, 6000 sent" in done.stdout
    assert refused > 0
    assert server.case.rows[0].rings["joints"].ledger.received == 6000


def test_it_needs_no_torch() -> None:
    code = f"import runpy, sys; runpy.run_path({str(TOOL)!r}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_the_replay_clock_is_the_recording_s_at_its_speed() -> None:
    clock = ReplayClock(5_000 * MS, 1000.0)
    assert clock() == 5_000 * MS
    clock.start()
    clock.wait_until(15_000 * MS)  # 10 ms of ours
    assert clock() >= 15_000 * MS


def test_at_max_the_replay_clock_is_what_was_sent() -> None:
    clock = ReplayClock(5_000 * MS, None)
    clock.start()
    clock.wait_until(9_000 * MS)
    clock.wait_until(8_000 * MS)
    assert clock() == 9_000 * MS


def test_a_recorded_run_is_streamed_as_it_had_come(
    settings: PipelineConfig, tmp_path: Path
) -> None:
    pytest.importorskip("mcap")
    file = tmp_path / "run.mcap"
    recorder = open_recorder(
        msgspec.structs.replace(settings, record=RecordConfig(file=str(file))), "run"
    )
    assert recorder is not None
    for number in range(100):  # a clock of the robot's own, and a slow stream that is 30 ms late
        stamps, came_ns = at_ms(5e8 + 4 * number), (1000 + 4 * number) * MS
        recorder.samples("arm", "fast", stamps, ramp(stamps, 3), came_ns)
        if number % 10 == 9:
            stamps = stamps - 30 * MS
            recorder.samples("arm", "slow", stamps, ramp(stamps, 1).astype(np.float64), came_ns)
    recorder.close()
    with serving(settings) as server:
        done = run_tool(settings, tmp_path, file)
    assert done.returncode == 0, done.stderr
    assert "110 recorded, 110 sent" in done.stdout
    fast, slow = server.case.rows[0].rings.values()
    assert (fast.ledger.received, slow.ledger.received) == (100, 10)
    assert int(server.case.banks["fast"].stamps_ns[0, 99]) == 500_000_396 * MS
    slow = server.case.banks["slow"]
    assert int(slow.stamps_ns[0, 9]) == 500_000_366 * MS
    stamps = slow.stamps_ns[0, :10].numpy()
    assert slow.values[0, :10].tolist() == ramp(stamps, 1).tolist()


def record_both(recorder: Any, stamps: Any, came_ns: int) -> None:
    recorder.samples("arm", "fast", stamps, ramp(stamps, 3), came_ns)
    recorder.samples("arm", "slow", stamps, ramp(stamps, 1).astype(np.float64), came_ns)


@pytest.mark.parametrize(
    "begins_ms",
    [(5e8, 5e8 + 700, 5e8 + 1400), (5e8, 3e8, 4e8)],
    ids=["the clock goes on", "it begins anew"],
)
@pytest.mark.parametrize("options", [(), ("--speed", "max", "--batch-ms", "0")])
def test_each_recorded_episode_is_one_again(
    options: tuple[str, ...],
    begins_ms: tuple[float, ...],
    settings: PipelineConfig,
    tmp_path: Path,
) -> None:
    """As of a simulator, whose clock may begin anew with each: ages are of the episode's clock."""
    pytest.importorskip("mcap")
    file = tmp_path / "run.mcap"
    actions = msgspec.structs.replace(settings.actions, lease_ms=5000.0)  # on a busy machine, too
    settings = msgspec.structs.replace(
        settings, actions=actions, record=RecordConfig(file=str(file))
    )
    recorder = open_recorder(settings, "run")
    assert recorder is not None
    for episode, begin_ms in enumerate(begins_ms):
        for number in range(100):
            stamps, came_ns = at_ms(begin_ms + 4 * number), (1000 + 700 * episode + 4 * number) * MS
            record_both(recorder, stamps, came_ns)
        if episode < 2:
            recorder.cleared("arm", "new_episode")
    recorder.close()
    with serving(settings) as server:
        done = run_tool(settings, tmp_path, file, *options)
    assert done.returncode == 0, done.stderr
    assert "600 recorded, 600 sent" in done.stdout
    assert {epoch for epoch, _ in server.windows} == {0, 1, 2}
    begins_ns = at_ms(*begins_ms).tolist()
    for epoch, end_ns in server.windows:
        assert begins_ns[epoch] <= end_ns <= begins_ns[epoch] + 400 * MS
    if not options:  # as long as it was recorded, and old by the clock of the episode
        assert float(done.stdout.split(" in ")[1].split(" s")[0]) >= 1.79
        assert 0 < float(done.stdout.split(" max ")[1].split(" ms")[0]) < 1000


@pytest.mark.parametrize("options", [(), ("--speed", "max")])
def test_a_clock_that_jumped_in_an_episode_jumps_in_it_again(
    options: tuple[str, ...], settings: PipelineConfig, tmp_path: Path
) -> None:
    """A policy with state keeps its history, as it did in service."""
    pytest.importorskip("mcap")
    file = tmp_path / "run.mcap"
    settings = msgspec.structs.replace(settings, record=RecordConfig(file=str(file)))
    recorder = open_recorder(settings, "run")
    assert recorder is not None
    for number in range(300):
        stamps = at_ms(5e8 + 4 * number - (4e8 if number >= 100 else 0))
        record_both(recorder, stamps, (1000 + 4 * number) * MS)
        if number == 124:  # 50 samples after it: so long nobody can tell
            recorder.cleared("arm", "clock_jump")
    recorder.close()
    with serving(settings) as server:
        done = run_tool(settings, tmp_path, file, *options)
    assert done.returncode == 0, done.stderr
    assert "600 recorded, 600 sent" in done.stdout
    assert {epoch for epoch, _ in server.windows} == {0}
    assert server.windows[-1][1] == at_ms(1e8 + 4 * 299)[0]


@pytest.mark.parametrize("form", ["raw", "jpeg"])
def test_frames_of_a_recorded_run_are_streamed_too(form: str, tmp_path: Path) -> None:
    pytest.importorskip("mcap")
    file = tmp_path / "run.mcap"
    plain = config(stream("fast", dim=3))
    settings = listening(with_camera(plain, 48, 64, file=str(file), frames=form), tmp_path)
    recorder = open_recorder(settings, "run")
    assert recorder is not None
    pictures = [picture(48, 64, number) for number in range(6)]
    for number, frame in enumerate(pictures):
        stamps, came_ns = at_ms(5e8 + 33 * number), (1000 + 33 * number) * MS
        recorder.frames("arm", "wrist", stamps, frame.reshape(1, -1), came_ns)
        recorder.samples("arm", "fast", stamps, ramp(stamps, 3), came_ns)
    recorder.close()
    with serving(settings) as server:
        done = run_tool(settings, tmp_path, file, "--batch-ms", "100")
    assert done.returncode == 0, done.stderr
    assert "12 recorded, 12 sent" in done.stdout
    bank = server.case.banks["wrist"]
    assert bank.stamps_ns[0, :6].tolist() == at_ms(*(5e8 + 33 * np.arange(6))).tolist()
    for number, frame in enumerate(pictures):
        found = bank.values[0, number].numpy().reshape(frame.shape)
        error = np.mean((found.astype(float) - frame) ** 2)
        assert error == 0 if form == "raw" else 0 < error < 25  # 34 dB


@pytest.mark.skipif(DATA is None, reason="PPSTREAM_TEST_DATA names no folder of recordings")
def test_the_1_khz_arm_is_replayed_completely(tmp_path: Path) -> None:
    assert DATA is not None
    names = ("q", "dq", "tau", "tau_ext", "ee_pose")
    settings = listening(config(*(stream(name, dim=7) for name in names)), tmp_path)
    file = Path(DATA) / "franka_fr3_1khz.npy"
    with serving(settings) as server:
        done = run_tool(settings, tmp_path, file, "--speed", "max", "--batch-ms", "10")
    assert done.returncode == 0, done.stderr
    assert "47730 recorded, 47730 sent" in done.stdout
    for ring in server.case.rows[0].rings.values():
        assert ring.ledger.received == 9546
        assert "late" not in ring.ledger.dropped
        assert "future" not in ring.ledger.dropped
        assert "duplicate" not in ring.ledger.dropped
    server.case.check()
