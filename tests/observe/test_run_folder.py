import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tracemalloc
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from ppstream.core.errors import ConfigError, ExitCode
from ppstream.observe.run_folder import LAUNCHER_RUN, EventLog, Run, launcher_identity


def begin(root: Path, keep: int = 20) -> Run:
    run = Run.create(root, keep)
    run.begin(config={"name": "x"}, config_sha256="0", versions={"ppstream": "0"})
    return run


@pytest.mark.parametrize("used", [True, False])
def test_run_json_tells_whether_the_compiled_core_was_used(tmp_path, monkeypatch, used):
    monkeypatch.setattr("ppstream.native.is_used", used)
    assert json.loads((begin(tmp_path).directory / "run.json").read_text())["native"] is used


def test_latest_points_at_the_newest_run(tmp_path):
    begin(tmp_path)
    newest = begin(tmp_path)
    assert (tmp_path / "latest").resolve() == newest.directory


def end(run: Run) -> None:
    """Close what holds the folder, as the end of its process does."""
    for held in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the descriptor that lists them
            if held.readlink() == run.directory:
                os.close(int(held.name))


def over(root: Path, keep: int = 20, *, year: int | None = None, **fields) -> Run:
    """A run whose ranks have ended; ``year`` by the clock of its host, if that stood wrong."""
    run = begin(root, keep)
    run.describe(**fields)
    end(run)
    if year is None:
        return run
    named = Run(run.directory.rename(root / f"{year}0101T000000-{run.run_id[-6:]}"))
    (root / "latest").unlink()
    (root / "latest").symlink_to(named.run_id)
    return named


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir() if not path.is_symlink()}


def test_on_another_host_the_oldest_runs_are_deleted_too(tmp_path):
    own = over(tmp_path)
    (tmp_path / "notes").mkdir()
    joined = []
    for number in range(6):
        run = Run.joined(tmp_path / f"2026010{9 - number}T000000-00000{number}", keep=3)
        os.utime(run.directory, (number, number))  # rank 0's clock goes back, this one on
        joined += [run]
        Run.joined(run.directory, keep=1)  # another rank of this host: it is there already
        if number != 1:  # which goes on
            end(run)
    kept = {run.run_id for run in (joined[1], *joined[3:])}
    assert names(tmp_path) == {own.run_id, "notes"} | kept


def test_only_the_newest_runs_are_kept(tmp_path):
    runs = [over(tmp_path, keep=3) for _ in range(6)]
    assert len(names(tmp_path)) == 4  # three old ones and the one just begun
    assert runs[-1].directory.name in names(tmp_path)


def test_a_folder_without_the_name_of_a_run_is_never_deleted(tmp_path):
    over(tmp_path).directory.rename(tmp_path / "baseline")
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "run.json").write_text('{"experiment": "mine"}')
    for _ in range(3):
        over(tmp_path, keep=1)
    assert {"baseline", "training"} <= names(tmp_path)
    assert len(names(tmp_path)) == 4


def test_a_clock_that_stood_wrong_makes_no_run_older_or_newer(tmp_path):
    years = (2099, None, 2000, None, None, 1970)
    runs = [over(tmp_path, keep=3, year=year) for year in years]
    assert names(tmp_path) == {run.directory.name for run in runs[-4:]}
    begin(tmp_path)
    assert runs[-1].directory.name in names(tmp_path)


def test_latest_is_kept_beside_runs_whose_order_nobody_counted(tmp_path):
    """Runs of an older version: their names are all there is, but for the link."""
    for year in (2097, 2098, 2000):
        (over(tmp_path, year=year).directory / "run.json").write_text("{}")
    latest = (tmp_path / "latest").readlink().name
    assert latest.startswith("2000")
    begin(tmp_path, keep=2)
    assert latest in names(tmp_path)
    assert not any(name.startswith("2097") for name in names(tmp_path))


def test_a_start_behind_the_first_leaves_its_run_as_old_as_it_is(tmp_path):
    again, other = over(tmp_path), over(tmp_path)
    again.begin(config={"name": "x"}, config_sha256="0", versions={"ppstream": "0"})
    over(tmp_path, keep=1)
    assert again.directory.name not in names(tmp_path)
    assert other.directory.name in names(tmp_path)


HOLD = """
import sys, time
from pathlib import Path
from ppstream.observe.run_folder import LAUNCHER_RUN, EventLog, Run, launcher_identity
Run.joined(Path(sys.argv[1]), 20)
print("holds", flush=True)
time.sleep(60)
"""


def test_a_run_that_goes_on_is_not_deleted_and_one_that_was_killed_is(tmp_path):
    """Two pipelines with one folder: twenty restarts of one leave the other's log alone."""
    first = over(tmp_path)
    command = [sys.executable, "-c", HOLD, str(first.directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout.readline() == "holds\n"
        for _ in range(4):
            over(tmp_path, keep=1)
        assert first.directory.name in names(tmp_path)
        assert (first.directory / "run.json").exists()
        rank.kill()
    over(tmp_path, keep=1)
    assert first.directory.name not in names(tmp_path)


def test_a_run_that_its_launcher_may_be_starting_anew_is_not_deleted(tmp_path):
    between = over(tmp_path, launcher_restarts=3)  # this process's parent lives
    ended = over(tmp_path, launcher_restarts=3, launcher_start=1)
    over(tmp_path, keep=1)
    over(tmp_path, keep=1)
    assert between.directory.name in names(tmp_path)
    assert ended.directory.name not in names(tmp_path)


def test_where_there_are_no_locks_runs_are_deleted_as_ever(tmp_path, monkeypatch):
    def refuse(fd, operation):
        raise OSError(errno.ENOTSUP, "no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    for _ in range(4):
        over(tmp_path, keep=1)
    assert len(names(tmp_path)) == 2


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


def test_a_start_that_no_launcher_counts_has_a_number_of_its_own(tmp_path):
    run = begin(tmp_path)
    assert run.next_generation() == 1  # the first one has begun, whatever it left
    run.log_path(0, 1).touch()
    assert run.next_generation() == 2
    run.log_path(1, 11).touch()
    run.stacks_path(0, 20).touch()
    assert run.next_generation() == 12
    run.record_exit(1, ExitCode.PEER_LOST, "gone", generation=12)
    assert run.next_generation() == 13


def test_two_launches_of_one_process_are_two_runs(tmp_path, monkeypatch):
    for name in ("first", "second"):
        monkeypatch.setenv(LAUNCHER_RUN, name)
        assert Run.of_launcher(tmp_path) is None
        begun = begin(tmp_path)
        assert Run.of_launcher(tmp_path).directory == begun.directory
        begun.directory.rename(tmp_path / f"{name}-{begun.run_id}")  # in this order
    monkeypatch.setenv(LAUNCHER_RUN, "first")
    assert Run.of_launcher(tmp_path).run_id.startswith("first")


@pytest.mark.parametrize(
    "other",
    [
        {"launcher_pid": 1_000_000},
        {"launcher_start": 1},  # the number was given again, in a container always the same one
        {"boot_id": "another"},
        {"launcher_start": None},  # written by an older version: its launcher is unknown
    ],
)
def test_foreign_launcher_finds_nothing(tmp_path, other):
    mine = begin(tmp_path)
    assert Run.of_launcher(tmp_path).directory == mine.directory
    path = mine.directory / "run.json"
    manifest = json.loads(path.read_text()) | other
    path.write_text(json.dumps({k: v for k, v in manifest.items() if v is not None}))
    assert Run.of_launcher(tmp_path) is None


def test_a_launcher_is_named_by_when_it_began():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as later:
        names = [launcher_identity(pid) for pid in (os.getpid(), os.getpid(), later.pid)]
        assert names[0] == names[1]
        assert names[0]["launcher_start"] < names[2]["launcher_start"]
        assert len(names[0]["boot_id"]) == 36
        later.stdin.close()


def test_a_launcher_that_cannot_be_named_finds_nothing(tmp_path, monkeypatch):
    begin(tmp_path).describe(launcher_start=None)
    monkeypatch.setattr("ppstream.observe.run_folder.start_time", lambda pid: None)
    assert Run.of_launcher(tmp_path) is None


def test_a_launcher_finds_the_run_of_its_children(tmp_path):
    begin(tmp_path).describe(**launcher_identity(os.getpid()))
    assert Run.of_launcher(tmp_path, os.getpid()) is not None
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


@pytest.mark.parametrize("ranks", [(0, 1), (1, 0)])
def test_who_failed_first_does_not_depend_on_a_clock_that_is_set_back(tmp_path, monkeypatch, ranks):
    run, clock = begin(tmp_path), iter(("2026-11-27T20:00:00", "2000-01-01T00:00:00"))
    run.record_exit(ranks[1], ExitCode.PEER_LOST, "gone", generation=0)
    monkeypatch.setattr("ppstream.observe.run_folder.utc_now", lambda: next(clock))
    for rank in ranks:
        run.record_exit(rank, ExitCode.WATCHDOG, "stuck", generation=1)
    assert run.first_to_fail(1)[0] == ranks[0]


def test_folder_that_cannot_be_written_is_a_configuration_error(tmp_path):
    occupied = tmp_path / "file"
    occupied.write_text("")
    with pytest.raises(ConfigError, match=r"log\.root: cannot write"):
        Run.create(occupied, 3)


def test_a_folder_that_vanishes_is_named_and_leaves_no_half_file(tmp_path):
    run = begin(tmp_path)
    shutil.rmtree(run.directory)
    with pytest.raises(ConfigError, match=r"cannot write to .*run\.json: No such file"):
        run.describe(standalone={})
    with pytest.raises(OSError, match="No such file"):
        run.record_exit(0, ExitCode.DRAINED, "over")
    assert not run.directory.exists()


def test_a_full_disk_keeps_the_old_file_whole(tmp_path, monkeypatch):
    run = begin(tmp_path)

    def full(path, text):
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ConfigError, match="No space left on device; make room"):
        run.describe(standalone={})
    assert [path.name for path in run.directory.iterdir()] == ["run.json"]
    assert json.loads((run.directory / "run.json").read_text())["config"] == {"name": "x"}


@pytest.mark.parametrize("value", [1.5, float("inf"), "arm", "not UTF-8: \udc80"])
def test_run_json_is_indented_whatever_a_configuration_holds(tmp_path, value):
    run = begin(tmp_path)
    run.describe(config={"value": value})
    text = (run.directory / "run.json").read_text()
    assert json.loads(text)["config"] == {"value": value}
    assert '\n "config": {\n  "value": ' in text


def test_events_of_a_long_log_are_read_without_the_log_in_memory(tmp_path):
    """An owner that looks hours later, or as it stops the run, holds the events alone.

    A line that is not complete is read when it is.
    """
    path, line = tmp_path / "rank0.gen0.jsonl", b'{"kind":"envelope","seq":0}'.ljust(999) + b"\n"
    event = b'{"kind":"event","name":"phase","phase":"%s"}\n'
    cut = event % b"draining"
    path.write_bytes(event % b"ready" + line * 8000 + event % b"degraded" + cut[:20])
    log = EventLog(path)
    tracemalloc.start()
    try:
        phases = [found["phase"] for found in log.read()]
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert phases == ["ready", "degraded"]
    assert most < len(line) * 800  # a tenth of the log
    assert [*log.read()] == []
    with path.open("ab") as file:
        file.write(cut[20:])
    assert [found["phase"] for found in log.read()] == ["draining"]
