import json
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from ppstream.errors import ConfigError, ExitCode
from ppstream.runs import Run


def begin(root: Path, keep: int = 20) -> Run:
    run = Run.create(root, keep)
    run.begin(config={"name": "x"}, config_sha256="0", versions={"ppstream": "0"})
    return run


def test_latest_points_at_the_newest_run(tmp_path):
    begin(tmp_path)
    newest = begin(tmp_path)
    assert (tmp_path / "latest").resolve() == newest.directory


def test_only_the_newest_runs_are_kept(tmp_path):
    runs = [begin(tmp_path, keep=3) for _ in range(6)]
    left = {path.name for path in tmp_path.iterdir() if not path.is_symlink()}
    assert len(left) == 4  # three old ones and the one just begun
    assert runs[-1].directory.name in left


def test_later_generation_finds_the_run_of_its_launcher_and_its_final_code(tmp_path):
    run = begin(tmp_path)
    found = Run.of_launcher(tmp_path)
    assert found is not None
    assert found.directory == run.directory
    assert found.final_code() is None
    run.record_exit(0, ExitCode.PEER_LOST, "gone")
    assert found.final_code() is None  # restarting may help
    run.record_exit(1, ExitCode.GATE_FAIL, "no overlap")
    assert found.final_code() is ExitCode.GATE_FAIL


def test_foreign_launcher_finds_nothing(tmp_path):
    begin(tmp_path).describe(launcher_pid=os.getpid() + 1_000_000)
    assert Run.of_launcher(tmp_path) is None


def _record(directory: Path, rank: int) -> None:
    Run(directory).record_exit(rank, ExitCode.DRAINED, "done")


def test_ranks_that_end_at_the_same_moment_all_stand_in_exit_json(tmp_path):
    run = begin(tmp_path)
    with ProcessPoolExecutor(4) as pool:
        list(pool.map(_record, [run.directory] * 16, range(16)))
    ends = json.loads((run.directory / "exit.json").read_text())
    assert sorted(ends, key=int) == [str(rank) for rank in range(16)]
    assert ends["3"]["name"] == "DRAINED"


def test_folder_that_cannot_be_written_is_a_configuration_error(tmp_path):
    occupied = tmp_path / "file"
    occupied.write_text("")
    with pytest.raises(ConfigError, match=r"log\.root: cannot write"):
        Run.create(occupied, 3)
