"""Windows: each once, over ranks and epochs; the same bits by any workers; on after a kill."""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from camera_files import HEIGHT, WIDTH, two_cameras, write_cameras
from forked_process import ForkedProcess
from resample_runs import settings, write_config, write_recording
from robot_rig import wait_until
from torch import Tensor
from torch.utils.data import DataLoader
from training_process import BATCH, SEED, digests

from ppstream.core.errors import ConfigError
from ppstream.data import Windows
from ppstream.data.cutting import BatchCutter
from ppstream.data.episode import episodes_of
from ppstream.recording.load import load_recording

TRAINING = Path(__file__).parents[1] / "support" / "training_process.py"
COUNT = 4
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # few CPUs
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("recordings")
    return [write_recording(folder / f"{n}.npz", n) for n in range(COUNT)]


def windows(recordings: list[Path], batch_size: int = 16, **more: Any) -> Windows:
    return Windows(recordings, settings(), batch_size, **more)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def ends(batches: Iterator[dict[str, Tensor]]) -> list[int]:
    """The windows' ends, which name them: no two recordings share one."""
    return [end for batch in batches for end in batch["window_end_ns"].tolist()]


def test_unshuffled_they_are_a_replay_s_windows_in_order(recordings: list[Path]) -> None:
    found = list(windows(recordings, shuffle=False).batches())
    whole = {name: torch.cat([batch[name] for batch in found]) for name in found[0]}
    expected: list[dict[str, Tensor]] = []
    for path in recordings:
        recording = load_recording(path).select(settings().streams)
        for episode in episodes_of(path, recording, settings(), "replay").episodes:
            expected += BatchCutter(settings()).chunks(episode)
    assert same(whole, {name: torch.cat([one[name] for one in expected]) for name in whole})


def test_an_epoch_has_each_window_once_in_an_order_of_its_own(recordings: list[Path]) -> None:
    data = windows(recordings)
    in_order = ends(windows(recordings, shuffle=False).batches())
    epochs = [ends(data.batches()) for _ in range(3)]
    assert all(sorted(one) == in_order for one in epochs)
    assert len({tuple(one) for one in [*epochs, in_order]}) == 4
    assert ends(windows(recordings).batches()) == epochs[0]
    assert ends(windows(recordings, seed=1).batches()) != epochs[0]


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_share_no_window_and_have_all(recordings: list[Path], world_size: int) -> None:
    ranks = [windows(recordings, rank=r, world_size=world_size) for r in range(world_size)]
    found = [ends(one.batches()) for one in ranks]
    assert sorted(itertools.chain(*found)) == ends(windows(recordings, shuffle=False).batches())
    assert max(map(len, found)) - min(map(len, found)) <= 1


def test_with_drop_last_all_ranks_have_as_many_whole_batches(recordings: list[Path]) -> None:
    ranks = [windows(recordings, 12, drop_last=True, rank=r, world_size=3) for r in range(3)]
    sizes = [[len(b["window_end_ns"]) for b in one.batches()] for one in ranks]
    assert sizes[0] == sizes[1] == sizes[2] == [12] * (ranks[0].windows // 36)


def test_ranks_are_torchrun_s_unless_stated(
    recordings: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    stated = windows(recordings, rank=1, world_size=2)
    assert ends(windows(recordings).batches()) == ends(stated.batches())
    with pytest.raises(ConfigError, match="rank is 2 of 2"):
        windows(recordings, rank=2)


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_change_no_bit(recordings: list[Path], workers: int) -> None:
    alone = list(windows(recordings).batches())
    files = len(os.listdir("/proc/self/fd"))
    shared = list(windows(recordings).batches(workers=workers))
    assert len(os.listdir("/proc/self/fd")) < files + len(shared), "batches that are kept hold none"
    assert len(alone) == len(shared) == len(windows(recordings))
    assert all(map(same, alone, shared))


def test_a_cache_changes_no_bit_and_is_made_once(recordings: list[Path], tmp_path: Path) -> None:
    plain = list(windows(recordings).batches())
    assert all(map(same, plain, windows(recordings, cache=tmp_path / "c").batches()))
    files = {file: file.stat().st_mtime_ns for file in (tmp_path / "c").iterdir()}
    assert len(files) == COUNT
    assert all(map(same, plain, windows(recordings, cache=tmp_path / "c").batches()))
    assert files == {file: file.stat().st_mtime_ns for file in (tmp_path / "c").iterdir()}
    wide = Windows(recordings, settings(dt_ms=20), 16, cache=tmp_path / "c")
    assert ends(wide.batches()) != ends(iter(plain))


def test_ranks_whose_processes_have_one_number_make_a_cache_together(
    recordings: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace, others = os.replace, [1]

    def replaced(source: Path, target: Path) -> None:
        if others and others.pop():
            windows(recordings, cache=tmp_path)
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replaced)
        cached = windows(recordings, cache=tmp_path)
    assert all(map(same, windows(recordings).batches(), cached.batches()))
    assert len([*tmp_path.iterdir()]) == COUNT


def test_what_was_read_ahead_is_not_lost(recordings: list[Path]) -> None:
    expected = list(windows(recordings).batches())
    data = windows(recordings)
    running = data.batches(workers=2)
    for _ in range(3):
        next(running)
    state = data.state_dict()
    del running
    other = windows(recordings)
    other.load_state_dict(state)
    assert all(map(same, expected[3:], other.batches(workers=3)))
    assert other.state_dict()["epoch"] == 1


@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_workers_that_persist_go_on_where_the_state_is(
    recordings: list[Path], context: str
) -> None:
    forkserver.set_forkserver_preload(["torch"])
    options = {"batch_size": None, "num_workers": 2, "multiprocessing_context": context}
    data, alone = windows(recordings), windows(recordings)
    loader = DataLoader(data, persistent_workers=True, **options)
    for _ in range(3):
        assert ends(map(data.cut, loader)) == ends(alone.batches())
        assert data.state_dict() == alone.state_dict()
    for one, batches in ((data, map(data.cut, loader)), (alone, alone.batches())):
        assert len(ends(itertools.islice(batches, 3))) == 3 * 16
        assert (one.state_dict()["epoch"], one.state_dict()["batch"]) == (3, 3)
    assert ends(map(data.cut, loader)) == ends(alone.batches())  # the rest of the epoch
    for one in (data, alone):
        one.load_state_dict(one.state_dict() | {"epoch": 7, "batch": 1})
    assert ends(map(data.cut, loader)) == ends(alone.batches())
    again = DataLoader(data, persistent_workers=True, **options)
    for _ in range(2):
        assert ends(map(data.cut, again)) == ends(alone.batches())


def test_a_state_of_something_else_is_refused(recordings: list[Path]) -> None:
    state = windows(recordings[:2]).state_dict()
    with pytest.raises(ConfigError, match="windows of the state is"):
        windows(recordings).load_state_dict(state)
    state = windows(recordings).state_dict()
    for other in (windows(recordings[::-1]), windows(recordings, shuffle=False)):
        with pytest.raises(ConfigError, match="order of the state is"):
            other.load_state_dict(state)
    del state["order"]  # of a checkpoint that has none yet
    windows(recordings).load_state_dict(state)


def trained(folder: Path, recordings: list[Path], stop: int) -> list[str]:
    """What a process with four workers printed until it was killed, after ``stop`` batches."""
    words = [write_config(folder, settings()), folder / "cache", folder / "state.json", 4]
    command = [str(TRAINING), *map(str, (*words, stop, *recordings))]
    output, errors = folder / f"{stop}.output", folder / "errors"
    process = ForkedProcess(command, os.environ, output, errors=errors, own_session=True)
    try:
        wait_until(lambda: output.exists() and output.read_bytes().count(b"\n") == stop)
        process.kill()  # its four workers have read ahead
        assert process.wait(60) == -signal.SIGKILL
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # workers that had only just begun, too
        process.wait()
    return output.read_text().splitlines()


def test_killed_with_four_workers_the_next_process_goes_on_bit_for_bit(tmp_path: Path) -> None:
    recordings = [write_recording(tmp_path / f"{n}.npz", n, seconds=2.5) for n in range(3)]
    whole, kill_at = 1010, 1000  # 750 windows in batches of 2: in the third epoch
    expected = list(itertools.islice(digests(windows(recordings, BATCH, seed=SEED)), whole))
    assert len(set(expected)) > 900  # epochs may share a pair
    first = trained(tmp_path, recordings, kill_at)
    state = json.loads((tmp_path / "state.json").read_text())
    assert state["epoch"] * len(windows(recordings, BATCH)) + state["batch"] == kill_at
    assert first + trained(tmp_path, recordings, whole - kill_at) == expected


def test_indices_of_a_billion_windows_cost_no_memory() -> None:
    from ppstream.data.shuffle import ShuffledOrder

    order = ShuffledOrder(10**9, 5)
    found = order(np.arange(10**6))
    assert len(np.unique(found)) == 10**6
    assert 0 <= found.min() < 10**6
    assert 10**9 - 10**6 < found.max() < 10**9
    assert abs(found.mean() / 10**9 - 0.5) < 0.002


# ---- cameras -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def filmed(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("filmed")
    paths = [folder / "a.mcap", folder / "b.bag", folder / "c"]  # of ROS 2
    for number, path in enumerate(paths):
        write_cameras(path, number, damaged=(2, 3))
    return paths


def of_cameras(filmed: list[Path], **more: Any) -> Windows:
    return Windows(filmed, two_cameras(), 8, **more)


def test_batches_have_the_frames_of_the_windows(filmed: list[Path]) -> None:
    settings = two_cameras()
    expected: list[dict[str, Tensor]] = []
    for path in filmed:
        recording = load_recording(path, settings.streams).select(settings.streams)
        for episode in episodes_of(path, recording, settings, "replay").episodes:
            cutter = BatchCutter(settings, shown=("top", "wrist"))
            expected += cutter.chunks(episode)
    whole = {name: torch.cat([one[name] for one in expected]) for name in expected[0]}
    assert (whole["top.frames"].shape[1:], whole["top.frames"].dtype) == (
        (1, 3, 8, 9),
        torch.float32,
    )
    assert (whole["wrist.frames"].shape[1:], whole["wrist.frames"].dtype) == (
        (2, 3, HEIGHT, WIDTH),
        torch.bfloat16,
    )
    found = list(of_cameras(filmed, shuffle=False).batches())
    assert same(whole, {name: torch.cat([batch[name] for batch in found]) for name in found[0]})
    places = {end: place for place, end in enumerate(whole["window_end_ns"].tolist())}
    for batch in of_cameras(filmed).batches():
        wanted = [places[end] for end in batch["window_end_ns"].tolist()]
        assert same(batch, {name: tensor[wanted] for name, tensor in whole.items()})


@pytest.mark.parametrize(
    "loader", [{"workers": 2}, {"workers": 2, "multiprocessing_context": "forkserver"}]
)
@pytest.mark.parametrize("is_cached", [False, True])
def test_frames_are_the_same_by_any_workers_and_from_a_cache(
    filmed: list[Path], tmp_path: Path, is_cached: bool, loader: dict[str, Any]
) -> None:
    forkserver.set_forkserver_preload(["torch"])  # else each worker imports it
    forkserver.ensure_running()  # it inherits nothing of what was opened here
    alone = list(of_cameras(filmed).batches())
    cache = tmp_path / "columns" if is_cached else None
    assert all(map(same, alone, of_cameras(filmed, cache=cache).batches(**loader)))
    if cache is not None:
        times = {file: file.stat().st_mtime_ns for file in cache.iterdir()}
        assert len(times) == len(filmed)
        again = of_cameras(filmed, cache=cache)
        assert all(map(same, alone, again.batches()))
        assert times == {file: file.stat().st_mtime_ns for file in cache.iterdir()}


def test_frames_may_be_left_out_of_batches(filmed: list[Path], tmp_path: Path) -> None:
    of_cameras(filmed, cache=tmp_path)
    for cache in (None, tmp_path):
        batch = next(of_cameras(filmed, frames=False, cache=cache).batches())
        assert {name for name in batch if name.startswith("top.")} == {
            "top.frame_index",
            "top.valid",
            "top.age_s",
        }


def test_a_recording_that_changed_since_is_an_error_and_no_other_picture(
    filmed: list[Path], tmp_path: Path
) -> None:
    path = tmp_path / "a.mcap"
    path.write_bytes(filmed[0].read_bytes())
    data = of_cameras([path])
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(ConfigError, match=r"a\.mcap: cannot be read as MCAP: frame \d+ of /"):
        list(data.batches())
