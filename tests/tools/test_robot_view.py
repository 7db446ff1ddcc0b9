from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mcap")
pytest.importorskip("PIL")

import robot_view
from PIL import Image, ImageColor
from robot_rig import MS, make_chunk

from ppstream.config import load
from ppstream.core.errors import ExitCode
from ppstream.recording.items import Emitted, Item, LoggedLine, RowWindow, SamplesItem
from ppstream.recording.mcap_writer import RecordFile

S = 1000 * MS
ROBOT_NS = 7 * S  # the robot's clock is so far ahead of rank 0's


def record_fall(path: Path) -> Path:
    """1 s in which the pole falls after 0.5 s; every other window is answered too late."""
    items: list[Item] = []
    for number in range(20):
        at_ns = number * 50 * MS
        stamps = np.arange(50, dtype=np.int64) * MS + at_ns + ROBOT_NS
        states = np.tile(np.array([0.2, 0.1 if number < 10 else 0.7], np.float32), (50, 1))
        came_ns = at_ns + 49 * MS
        arrays = (number * 50, number * 50 + 50, stamps.tobytes(), states.tobytes())
        items.append(SamplesItem("row0", "encoder", *arrays, came_ns))
        end_ns = int(stamps[-1])
        header = ("row0", came_ns, 1, number, "ready", (1, 0))
        items.append(RowWindow(*header, end_ns, end_ns + S, {"encoder": number * 50 + 50}))
        if number % 2 == 0:
            chunk = make_chunk(number, end_ns=end_ns, epoch=1)
            items.append(Emitted("row0", came_ns + 60 * MS, chunk, ""))
        else:
            fields = {"kind": "event", "name": "drop", "epoch": 1, "seq": number}
            items.append(LoggedLine(came_ns + 120 * MS, {**fields, "reason": "expired"}))
    file = RecordFile(path, load.read("demo"), "run")
    file.write(items)
    file.close()
    return path


def test_ages_are_counted_on_the_robot_s_clock_up_to_decoding(tmp_path: Path) -> None:
    view = robot_view.read_view(record_fall(tmp_path / "run.mcap"), "two")
    assert sorted(view.ages_ms) == [60.0] * 10 + [120.0] * 10
    assert set(view.ages_ms[view.usable]) == {60.0}
    assert set(view.ages_ms[~view.usable]) == {120.0}
    assert view.fell_s == 0.5
    assert view.at_s[-1] == pytest.approx(0.999)


def test_runs_are_drawn_beside_one_another_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(record_fall(tmp_path / "run.mcap"))
    gif = tmp_path / "robot.gif"
    assert robot_view.main([path, path, "--label", "two", "--gif", str(gif)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "two: fell after 0.5 s; actions p50 90, p99 120 ms old, 50% too late"
    assert said[1].startswith("run: fell")
    with Image.open(gif) as image:
        assert image.size == (1280, 380)
        assert 10 < image.n_frames <= 19  # equal ones are one that lasts longer
        shown = []
        for frame in (2, image.n_frames - 2):
            image.seek(frame)
            shown.append(np.asarray(image.convert("RGB")))
    differs = (shown[0] != shown[1]).any(axis=2)
    assert differs[60:190, :640].any()  # the pole
    assert differs[220:, 640:].any()  # and the ages


@pytest.mark.parametrize("position", [9.0, -9.0])
def test_a_pole_that_has_fallen_lies_whole_in_its_frame(tmp_path: Path, position: float) -> None:
    view = robot_view.read_view(record_fall(tmp_path / "run.mcap"), "two")
    angles = np.linspace(0, 4.0, len(view.at_s))  # down, and round under the rail
    states = np.column_stack([np.full_like(angles, position), np.copysign(angles, position)])
    fallen = view._replace(states=states)
    assert fallen.state(0.9) == (position, pytest.approx(np.copysign(np.pi / 2, position)))
    drawn = np.asarray(robot_view.draw([view, fallen, view], 0.9, 1.0))
    wood = (drawn == ImageColor.getrgb(robot_view.WOOD)).all(axis=2)
    rows, columns = np.nonzero(wood[:, 427:853])
    assert columns.max() - columns.min() > 55  # from the cart's side to its end
    assert rows.max() < robot_view.RAIL_Y


def test_without_a_recording_it_says_what_to_give(capsys: pytest.CaptureFixture[str]) -> None:
    assert robot_view.main([]) == ExitCode.CONFIG
    assert "no recording named, want FILE or --run 2 4" in capsys.readouterr().err


@pytest.mark.parametrize("depth", [2, 4])
def test_without_a_clock_a_deeper_queue_makes_actions_older(tmp_path: Path, depth: int) -> None:
    pytest.importorskip("mujoco")
    from robot_view_lockstep import record_lockstep

    path = record_lockstep(tmp_path / "run.mcap", depth, seconds=0.3)
    view = robot_view.read_view(path, "made")
    assert view.ages_ms[depth:] == pytest.approx(depth * 25 + 2, abs=1)  # stamps have an error
    assert view.usable[-1] == (depth == 2)
    assert view.fell_s is None
