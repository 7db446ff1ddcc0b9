"""A full disk under a data set: one error with the numbers, and the same command goes on."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from camera_files import CameraFile, arm, camera, two_cameras, write_cameras
from forked_process import run_forked
from recording_files import S, picture
from resample_runs import LIMIT_S, make, settings, write_config, write_recording
from stream_cases import MS, config

from ppstream.core.errors import ExitCode
from ppstream.data import Windows
from ppstream.data.disk_space import DataSetWriteError, writing

pytest.importorskip("pyarrow")

FORMS = ("lerobot-v3", "safetensors")
SIZE_MB = 8
COUNT = 4
PAGE = 4096


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own."""
    if shutil.which("mount") is None or os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    folder = tmp_path / "disk"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={SIZE_MB}m", "tmpfs", str(folder)]
    mounted = subprocess.run(words, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path, but: int) -> Path:
    """Takes all of the disk but some bytes, in a file."""
    ballast = disk / "ballast"
    free = os.statvfs(disk).f_bavail * PAGE - but
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free)
    return ballast


@pytest.fixture
def recordings(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "in"
    folder.mkdir()
    return [write_recording(folder / f"{n}.npz", n, seconds=20) for n in range(COUNT)]


def files_of(out: Path) -> dict[str, bytes]:
    found = (f for f in out.rglob("*") if f.is_file() and ".resample" not in f.parts)
    return {str(file.relative_to(out)): file.read_bytes() for file in found}


def told(text: str) -> str:
    """The error, which is one line; the others tell of the job's progress."""
    assert all(line.startswith("resample: ") for line in text.splitlines()), text
    (line,) = [line for line in text.splitlines() if "disk is full" in line]
    return line


@pytest.mark.parametrize(
    ("form", "jobs"), [("lerobot-v3", "1"), ("safetensors", "1"), ("safetensors", "2")]
)
def test_a_disk_that_is_full_before_the_last_part(
    form: str,
    jobs: str,
    disk: Path,
    recordings: list[Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = write_config(tmp_path, settings())
    words = (*recordings, "--format", form, "--on-error", "skip")
    assert make(run, tmp_path / "expected", *words) == 0
    assert make(run, tmp_path / "first", *words, "--shard", f"0/{COUNT}") == 0
    (part,) = (tmp_path / "first" / ".resample").glob("000000.[ps]*")
    out = disk / "out"
    ballast = fill(disk, part.stat().st_size * 5 // 2)
    capsys.readouterr()
    code = make(run, out, *words, "--jobs", jobs)
    assert code == ExitCode.CONFIG, "no input is at fault, so none is skipped"
    said = told(capsys.readouterr().err)
    assert said.startswith(f"resample: {out}: the disk is full: ")
    assert "inputs are written, and stay; free space, and the same command goes on" in said
    ends = [json.loads(file.read_text()) for file in (out / ".resample").glob("0*.json")]
    kept = [end for end in ends if not end["error"]]  # a part without one may be another worker's
    assert 0 < len(kept) < COUNT
    ballast.unlink()
    assert make(run, out, *words) == 0
    again = capsys.readouterr().err.splitlines()
    assert len(again) == COUNT - len(kept), "what was written is not done again"
    assert files_of(out) == files_of(tmp_path / "expected")


def test_a_disk_that_is_full_while_parts_are_merged(
    disk: Path, recordings: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_config(tmp_path, settings())
    assert make(run, tmp_path / "expected", *recordings) == 0
    out = disk / "out"
    assert make(run, out, *recordings, "--shard", "0/2") == 0
    assert make(run, tmp_path / "other", *recordings, "--shard", "1/2") == 0
    for file in (tmp_path / "other" / ".resample").glob("00000[13].*"):
        shutil.copy2(file, out / ".resample")
    ballast = fill(disk, 50_000)
    capsys.readouterr()
    assert make(run, out, *recordings) == ExitCode.CONFIG
    said = told(capsys.readouterr().err)
    assert f"{out}: the disk is full: 4" in said, "what the merge had written is given back"
    assert f"all {COUNT} inputs are written" in said
    assert "merging them needs about" in said
    assert [one.name for one in out.iterdir()] == [".resample"], "no half data set"
    ballast.unlink()
    assert make(run, out, *recordings) == 0
    assert capsys.readouterr().err == ""
    assert files_of(out) == files_of(tmp_path / "expected")


BOTH_FORMS = """
import sys
from ppstream.data import cli

for form in ("lerobot-v3", "safetensors"):
    print(cli.main([*sys.argv[1:], "--out", form, "--format", form]))
"""


def test_a_full_disk_under_frames_ends_no_process(disk: Path, tmp_path: Path) -> None:
    size, path = (240, 320), tmp_path / "run.mcap"
    with CameraFile(path) as file:
        for number in range(60):
            stamp_ns = S + 20 * MS * number
            file.arm(stamp_ns, number, 1)
            file.image("/top", stamp_ns, picture(*size, number), size=size)
    run = write_config(tmp_path, config(arm(), camera("top", "/top", size), steps=2, dt_ms=20))
    fill(disk, 3_500_000)
    both = tmp_path / "both.py"
    both.write_text(BOTH_FORMS)
    command = [str(both), "--config", str(run), "--jobs", "1", str(path)]
    done = run_forked(command, LIMIT_S, disk)
    assert done.stdout.split() == [str(int(ExitCode.CONFIG))] * 2, done.stderr
    ends = [line for line in done.stderr.splitlines() if "no column" not in line]
    for form, said in zip(FORMS, ends, strict=True):
        assert said.startswith(f"resample: {form}: the disk is full: 3.3 MiB free")
        assert not [*(disk / form / ".resample").glob("0*.[ps]*")]


def test_a_full_disk_under_a_cache_is_one_error(disk: Path, tmp_path: Path) -> None:
    write_cameras(tmp_path / "run.mcap")
    ballast = fill(disk, 20_000)
    with pytest.raises(DataSetWriteError, match=r"the disk is full: .*columns of .*run\.mcap"):
        Windows(tmp_path / "run.mcap", two_cameras(), 4, cache=disk / "cache")
    assert not [*(disk / "cache").iterdir()]
    ballast.unlink()
    assert len(Windows(tmp_path / "run.mcap", two_cameras(), 4, cache=disk / "cache"))


def test_a_disk_that_is_full_at_the_start_is_one_error(
    disk: Path, recordings: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_config(tmp_path, settings())
    fill(disk, 0)
    assert make(run, disk / "out", *recordings) == ExitCode.CONFIG
    said = capsys.readouterr().err
    assert f"{disk / 'out'}: cannot be written: No space left on device" in said
    assert "Traceback" not in said


def test_other_errors_are_told_with_their_reason(tmp_path: Path) -> None:
    def fail() -> None:
        (tmp_path / "file" / "below").write_text("")

    (tmp_path / "file").touch()
    with (
        pytest.raises(DataSetWriteError, match=r"cannot be written: Not a directory; 3 are there"),
        writing(tmp_path, lambda: "3 are there"),
    ):
        fail()
