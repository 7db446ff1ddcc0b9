import importlib.util
import subprocess
import sys

import pytest
from golden_runs import simulate

from ppstream import serve
from ppstream.config import load
from ppstream.core.errors import MEANINGS, ExitCode
from ppstream.launch import requirements
from ppstream.launch.placement import ranks_wanted
from ppstream.observe.run_folder import Run

OLD_PYTHON = """
import sys, tomllib
sys.modules.update(tomli=tomllib, tomllib=None)  # as in 3.10, where pip installs tomli
sys.version_info = (3, 10, 13, "final", 0)
from ppstream import serve
from ppstream.launch import commands
sys.exit(commands.main(["run"]) if "run" in sys.argv else serve.main([]))
"""


@pytest.mark.parametrize("command", [(), ("run",)])
def test_an_old_python_is_told_at_once_which_one_it_needs(command):
    start = [sys.executable, "-c", OLD_PYTHON, *command]
    ended = subprocess.run(start, capture_output=True, text=True)
    assert ended.returncode == 11, ended.stderr
    assert "this is Python 3.10, rank 0 and policy ranks need 3.11 or newer" in ended.stderr


@pytest.mark.parametrize(
    ("environment", "last"),
    [
        ({}, "ppstream: exit 11 CONFIG 1 problem, listed above"),
        (
            {"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "4"},
            "ppstream: rank 2: exit 11 CONFIG 1 problem, listed",
        ),
        ({"RANK": "2", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}, ""),
    ],
)
def test_one_rank_of_each_host_says_what_is_wrong_there(environment, last, monkeypatch, capfd):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert serve.main(["--set", "policy.weights=/nowhere/w.safetensors"]) == 11
    said = capfd.readouterr().err
    assert ("policy.weights: got '/nowhere/w.safetensors'" in said) == bool(last)
    assert "".join(said.splitlines()[-1:]).startswith(last)


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"RANK": "x"}, "RANK: got 'x', want a whole number; start ranks with"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE: got '', want a whole number"),
        ({"LOCAL_WORLD_SIZE": "-1"}, "LOCAL_WORLD_SIZE: got '-1', want a whole number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK: got 2 with WORLD_SIZE = 2, want less; start"),
    ],
)
def test_numbers_of_ranks_that_cannot_be_are_told_at_once(environment, told, monkeypatch, capfd):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert serve.main(["--config", "bench"]) == 11
    assert capfd.readouterr().err.startswith(told)


FILMED = ("--set", "record.file=run.mcap", "--set", "record.frames=jpeg")


@pytest.mark.parametrize(
    ("missing", "extra", "arguments"),
    [
        ("mujoco", "demo", ("--config", "demo")),
        ("foxglove", "view", ("--config", "bench", "--set", "view.port=0")),
        ("mcap", "view", ("--config", "bench", "--set", "view.port=0")),
        ("mcap", "record", ("--config", "bench", "--set", "record.file=run.mcap")),
        ("PIL", "record", ("--config", "two_cameras", *FILMED)),
    ],
)
def test_a_missing_extra_is_a_configuration_error_before_any_rank(
    missing, extra, arguments, monkeypatch, capsys
):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        requirements, "find_spec", lambda name: (name != missing and found(name)) or None
    )
    assert serve.main(arguments) == 11
    assert f"pip install 'ppstream[{extra}]'" in capsys.readouterr().err
    assert requirements.missing_packages(load.read("bench")) == []
    kept = load.read("two_cameras", ("record.file=run.mcap", "record.frames=raw"))
    assert (requirements.missing_packages(kept) == []) == (missing != "mcap")


def test_a_demo_robot_that_is_no_module_is_refused_and_one_of_this_folder_taken(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "arms").mkdir()
    (tmp_path / "arms" / "left.py").touch()

    def missing(robot):
        return requirements.missing_packages(load.read("demo", (f"demo.robot={robot}",)))

    robots = "nobody_here.robot", "ppstream_stages.none", "arms.right", "arms.left.none", "__main__"
    for robot in robots:
        text = f"demo.robot: got {robot!r}, which is no module here; install it"
        assert missing(robot) == [text]
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)  # as of a script
    assert missing("__main__") == [text]
    assert missing("arms.left") == missing("ppstream_stages.cartpole.robot") == []


@pytest.mark.parametrize(
    ("name", "settings", "count"),
    [
        ("bench", (), 2),
        ("bench", ("placement.policy=cuda:0",), 2),
        ("two_gpus", (), 2),
        ("two_gpus", ("placement.policy=cuda:0",), 1),  # both on one GPU: nothing would overlap
    ],
)
def test_the_placement_says_how_many_ranks_a_run_wants(name, settings, count):
    assert ranks_wanted(load.read(name, settings)) == count


def test_help_has_every_exit_code_and_its_meaning(capsys):
    with pytest.raises(SystemExit):
        serve.main(["--help"])
    text = capsys.readouterr().out
    for code in ExitCode:
        assert f"{int(code):3d}  {code.name}" in text
        assert MEANINGS[code] in text


@pytest.mark.parametrize("is_long", [False, True])
def test_the_end_of_a_run_reads_no_log_that_takes_longer_than_launchers_wait(
    tmp_path, monkeypatch, capsys, is_long
):
    run = Run(simulate(n=200).write(tmp_path / "a-run"))
    if is_long:
        monkeypatch.setattr(serve, "REPORT_BYTES_MAX", 10_000)
        for path in run.directory.glob("rank*.jsonl"):  # whoever reads it raises
            path.write_text("no log\n" + path.read_text())
    serve.print_report(run)
    said = capsys.readouterr().out
    assert ("primary" in said) == (not is_long)
    assert (f"ppstream report {run.directory}" in said) == is_long
    page = run.directory / "report.html"
    assert page.exists() == (f"the same with pictures: {page}" in said) == (not is_long)


def test_a_full_disk_costs_the_page_and_not_the_report(tmp_path, capsys):
    run = Run(simulate(n=200).write(tmp_path / "a-run"))
    (run.directory / "report.html").symlink_to("/dev/full")
    serve.print_report(run)
    said = capsys.readouterr()
    assert "primary" in said.out
    assert "cannot write" in said.err
    assert "with pictures" not in said.out
