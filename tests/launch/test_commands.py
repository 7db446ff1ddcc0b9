"""``ppstream COMMAND``: what each word calls, and what a wrong one is told."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from ppstream.launch.commands import COMMANDS, main
from ppstream.launch.launcher import RankLauncher

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_help_under_its_own_name(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main([name, "--help"])
    assert left.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: ppstream {name} ")


def test_a_name_with_a_hyphen_calls_the_same() -> None:
    scripts = dict(PROJECT["scripts"])
    assert scripts.pop("ppstream") == "ppstream.launch.commands:main"
    assert scripts.pop("ppstream-serve") == "ppstream.serve:main"
    assert len(scripts) == 4
    for script, target in scripts.items():
        assert COMMANDS[script.removeprefix("ppstream-")].target == target


def test_without_a_command_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    listed = capsys.readouterr().out
    assert [line.split()[0] for line in listed.splitlines() if line.startswith("  ")] == [*COMMANDS]


def test_an_unknown_command_gets_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rum"]) == 2
    assert "there is no command 'rum' (did you mean 'run'?)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [("run", 0, "ppstream: exit 0 DRAINED SIGINT before the run was ready\n"), ("check", 130, "")],
)
def test_ctrl_c_before_a_command_has_begun_is_no_traceback(
    name: str,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(_args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ppstream.config.load.load", interrupted)
    assert main([name, "run.toml"]) == code
    assert capsys.readouterr().err == said


def test_a_reader_that_has_seen_enough_gets_no_traceback() -> None:
    command = [sys.executable, "-m", "ppstream.launch.commands", "explain", "--all"]
    read_fd, write_fd = os.pipe()
    fcntl.fcntl(write_fd, fcntl.F_SETPIPE_SZ, 4096)  # far less than is printed
    piped = subprocess.Popen(command, stdout=write_fd, stderr=subprocess.PIPE)
    os.close(write_fd)
    os.read(read_fd, 10)
    os.close(read_fd)
    _, errors = piped.communicate(timeout=60)
    assert errors == b""
    assert piped.returncode == 141


def test_a_configuration_with_mistakes_is_refused_without_torch() -> None:
    words = ["check", "demo", "--set", "streams.0.rate_hs=3", "--set", "pipeline.d_in=0"]
    code = (
        "import sys; from ppstream.launch.commands import main\n"
        f"code = main({words!r}); assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 11, done.stderr
    assert "streams[0].rate_hs: unknown key (did you mean 'rate_hz'?)" in done.stderr
    assert "pipeline.d_in: got 0" in done.stderr


@pytest.mark.parametrize("count", ["-1", "0", "two"])
@pytest.mark.parametrize("command", ["run", "check"])
def test_no_run_has_less_than_one_rank(
    command: str, count: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main([command, "bench", f"--nproc={count}"])
    assert left.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith(f"argument --nproc: got '{count}', want a whole number, at least 1")


@pytest.mark.parametrize(("dt_ms", "is_told"), [("0.001", True), ("5", False)])
def test_run_tells_what_check_warns_of(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, dt_ms: str, is_told: bool
) -> None:
    monkeypatch.setattr(RankLauncher, "run", lambda _self, _arguments: 0)
    assert main(["run", "bench", "--set", f"window.dt_ms={dt_ms}"]) == 0
    assert ("ppstream: warning: window.dt_ms: got 0.001" in capsys.readouterr().err) == is_told


def test_check_prints_what_a_run_would_place_where(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "bench"]) == 0
    assert "rank 1           stage B" in capsys.readouterr().out
    assert main(["check", "bench", "--nproc", "1"]) == 0
    assert "rank 1 " not in capsys.readouterr().out
