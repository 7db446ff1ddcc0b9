from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

pytest.importorskip("mcap")

from robot_rig import file_size_limit, make_chunk, make_config

from ppstream.core.errors import ConfigError
from ppstream.launch import commands
from ppstream.pipeline.stage_c import Emitter
from ppstream.recording.action_file import ActionFile
from ppstream.recording.items import Emitted, RowWindow
from ppstream.recording.mcap_writer import RecordFile
from ppstream.recording.repeated_actions import compare_actions
from ppstream.wire.robot_messages import ActionChunk

CHUNKS = 5


def chunk(number: int, first: float = 0.25) -> ActionChunk:
    values = np.full((4, 2), number, np.float32)
    values[0, 0] = first
    return make_chunk(number, actions=memoryview(values.tobytes()), window_end_ns=number * 1000)


def window(robot: str, of: ActionChunk) -> RowWindow:
    episode = of.session, of.session_epoch
    return RowWindow(
        robot, 1, of.epoch, of.seq, "ready", episode, of.window_end_ns, of.expires_ns, {}
    )


def recorded(folder: Path, *robots: str) -> Path:
    file = RecordFile(folder / "run.mcap", make_config(), "run")
    for robot in robots:
        sent = [Emitted(robot, number, chunk(number), "") for number in range(1, CHUNKS + 1)]
        windows = [window(robot, one.chunk) for one in sent]
        file.write([*windows, *sent, Emitted(robot, 9, chunk(9), "expired")])
    file.close()
    return folder / "run.mcap"


def replayed(folder: Path, *chunks: ActionChunk) -> Path:
    file: Emitter = ActionFile(folder / "again.npz", 2)
    for one in chunks:
        file.emit(0, one)
    file.close()
    return folder / "again.npz"


def test_chunks_that_came_again_bit_for_bit_are_counted_and_so_are_others(tmp_path: Path) -> None:
    recording = recorded(tmp_path, "arm")
    whole = [chunk(number) for number in range(1, CHUNKS + 1)]
    found = compare_actions(recording, replayed(tmp_path, *whole))
    assert found.is_whole
    assert found.text == "5 of 5 chunks of arm are equal bit for bit"
    moved = chunk(2, np.nextafter(np.float32(0.25), np.float32(1)))
    found = compare_actions(recording, replayed(tmp_path, whole[0], moved, *whole[3:]))
    assert not found.is_whole
    assert (found.chunks, found.equal, found.missing) == (5, 3, 1)
    said, differ, missing = found.text.splitlines()
    assert said.endswith("bit for bit, 1 differ by up to 2.98e-08, 1 are not in the replay")
    assert "batch.rows" in differ
    assert "--nproc 1" in missing


def test_a_window_that_had_no_chunk_is_not_taken_for_another_that_ends_at_its_stamp(
    tmp_path: Path,
) -> None:
    """A simulator's clock begins anew with each episode, and its reset drops what is in flight."""
    cut = [chunk(number, number / 8) for number in range(6)]
    cut = [msgspec.structs.replace(one, window_end_ns=one.seq % 3 * 1000) for one in cut]
    file = RecordFile(tmp_path / "run.mcap", make_config(), "run")
    sent = [
        Emitted("arm", 9, one, "expired" if one.seq == 1 else "") for one in cut if one.seq != 2
    ]
    file.write([*sent, *(window("arm", one) for one in cut)])  # a GPU tells of windows later
    file.close()
    found = compare_actions(tmp_path / "run.mcap", replayed(tmp_path, *cut))
    assert found.text == "4 of 4 chunks of arm are equal bit for bit"
    found = compare_actions(tmp_path / "run.mcap", replayed(tmp_path, *cut[:4]))
    assert (found.equal, found.missing, found.largest) == (2, 2, 0)


def test_the_command_says_it_and_its_code_tells_programs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recording = recorded(tmp_path, "arm")
    whole = [chunk(number) for number in range(1, CHUNKS + 1)]
    command = ["replay", str(recording), "--compare", str(tmp_path / "again.npz")]
    replayed(tmp_path, *whole)
    assert commands.main(command) == 0
    assert capsys.readouterr().out == "5 of 5 chunks of arm are equal bit for bit\n"
    replayed(tmp_path)
    assert commands.main(command) == 1
    first, remedy = capsys.readouterr().out.splitlines()
    assert first == "0 of 5 chunks of arm are equal bit for bit, 5 are not in the replay"
    assert remedy.startswith("the replay holds no chunk at all: the run that wrote it ended")
    assert "--nproc" not in remedy


def test_one_of_several_robots_is_to_be_named(tmp_path: Path) -> None:
    recording, again = recorded(tmp_path, "left", "right"), replayed(tmp_path, chunk(1))
    with pytest.raises(ConfigError, match=r"record\.robot: missing, want one of left, right"):
        compare_actions(recording, again)
    assert compare_actions(recording, again, "right").equal == 1
    with pytest.raises(ConfigError, match="has no actions of middle; recorded: left, right"):
        compare_actions(recording, again, "middle")


def test_what_is_no_replay_is_refused(tmp_path: Path) -> None:
    recording = recorded(tmp_path, "arm")
    np.savez(tmp_path / "other.npz", values=np.zeros(3))
    replays = {
        tmp_path / "other.npz": "want the service.actions_file of a replay",
        tmp_path / "none.npz": "cannot be read as .npz or .npy: No such file",
        recording: "begins as no .npz or .npy does",
    }
    for wrong, says in replays.items():
        with pytest.raises(ConfigError, match=f"{wrong}: {says}"):
            compare_actions(recording, wrong)
    recordings = {"none.mcap": "No such file", "other.npz": "want the .mcap of a run"}
    for name, says in recordings.items():
        with pytest.raises(ConfigError, match=f"{tmp_path / name}: .*{says}"):
            compare_actions(tmp_path / name, recording)


def test_actions_that_find_no_room_are_one_line_and_leave_the_file_as_it_was(
    tmp_path: Path,
) -> None:
    before = replayed(tmp_path, chunk(1)).read_bytes()
    says = r"service.actions_file: cannot write to .*again.npz: File too large; its 2 chunks are"
    with file_size_limit(100), pytest.raises(ConfigError, match=says):
        replayed(tmp_path, chunk(1), chunk(2))
    assert [one.name for one in tmp_path.iterdir()] == ["again.npz"]
    assert (tmp_path / "again.npz").read_bytes() == before
