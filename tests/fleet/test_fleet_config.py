"""A fleet's TOML: everything that is wrong is said before anything starts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fleet_robot import ROBOTS, RUN

from ppstream import FleetDirectory
from ppstream.core.errors import ConfigError
from ppstream.fleet.fleet_config import endpoint_of, read
from ppstream.launch import commands
from ppstream.wire.keys import allow, make_pair

PAGE = Path(__file__).parents[2] / "runbooks" / "fleet.md"
PLAIN = 'name = "arms"\nrun = "arm.toml"\npipelines = 2\n'


def written(folder: Path, text: str, run: str = "") -> Path:
    (folder / "arm.toml").write_text(f"{RUN}\n{run}")
    (folder / "fleet.toml").write_text(text)
    return folder / "fleet.toml"


def test_a_plain_fleet_has_its_rows_and_names(tmp_path: Path) -> None:
    plan = read(written(tmp_path, PLAIN))
    assert plan.fleet.pipeline_names() == ("arms-0", "arms-1")
    assert (plan.rows, plan.gpus, plan.server_key, plan.token) == (ROBOTS, 0.0, None, None)
    assert plan.run_file == str(tmp_path / "arm.toml")


def test_it_reserves_the_gpus_that_the_placement_names(tmp_path: Path) -> None:
    placed = ["placement.rank0=cuda:0", "placement.policy=cuda:1", "simulate.kind=gpu"]
    assert read(written(tmp_path, f"{PLAIN}set = {placed}\n")).gpus == 2
    assert read(written(tmp_path, f"{PLAIN}set = {placed}\ngpus = 1\n")).gpus == 1


def test_others_reach_a_pipeline_with_keys_alone(tmp_path: Path) -> None:
    network = PLAIN + 'endpoint = "tcp://{node}:{port}"\n'
    with pytest.raises(ConfigError, match=r"service\.(secret_key|endpoint)"):
        read(written(tmp_path, network))
    key = make_pair("server", tmp_path)
    allow(tmp_path / "robots.txt", "arm", make_pair("arm", tmp_path))
    keys = f'[service]\nsecret_key = "{tmp_path}/server.secret"\n'
    keys += f'allowed_keys = "{tmp_path}/robots.txt"\n'
    assert read(written(tmp_path, network, keys)).server_key == key.decode()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (PLAIN + 'endpoint = "unix:///tmp/one"\n', "want {pipeline} or {port} in it"),
        (PLAIN + 'endpoint = "nonsense-{pipeline}"\n', "want 'unix://PATH'"),
        (PLAIN + "pipeline = 3\n", "pipeline: unknown key (did you mean 'pipelines'?)"),
        (PLAIN.replace("2", "0"), "pipelines: got 0, want a whole number, at least 1"),
        (PLAIN.replace("arm.toml", "nobody.toml"), "nobody.toml"),
        (PLAIN + 'set = ["batch.rows=0"]\n', "batch.rows"),
        (PLAIN + '[directory]\ntoken_file = "nowhere"\n', "nowhere: cannot be read"),
        (PLAIN + '[directory]\nlisten = "127.0.0.1:99999"\n', "got '127.0.0.1:99999', want HOST"),
        (PLAIN + '[directory]\nlisten = "foo"\n', "directory.listen: got 'foo', want HOST:PORT"),
        (PLAIN + '[directory]\nlisten = "0.0.0.0:5871"\n', "want directory.token_file"),
        ("name =", "fleet.toml: not TOML"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read(written(tmp_path, text))
    assert said in str(refused.value)


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    text = 'name = "a b"\nrun = "arm.toml"\npipelines = 0\nrestarts = -2\n'
    with pytest.raises(ConfigError) as refused:
        read(written(tmp_path, text))
    assert [line.split(":")[0] for line in refused.value.problems] == [
        "name",
        "pipelines",
        "restarts",
    ]
    text = PLAIN + 'endpoint = "nonsense"\nset = ["batch.rows=0", "log.keep=0"]\n'
    with pytest.raises(ConfigError) as refused:
        read(written(tmp_path, text + '[directory]\nlisten = "foo"\ntoken_file = "nowhere"\n'))
    assert [line.split(" ")[0] for line in refused.value.problems] == [
        "directory.listen:",
        "endpoint:",
        "endpoint:",
        f"{tmp_path}/nowhere:",
        "batch.rows:",
        "log.keep:",
    ]


def test_the_run_s_rules_are_said_beside_an_endpoint_that_is_none(tmp_path: Path) -> None:
    text = PLAIN + 'endpoint = "nonsense-{port}"\nset = ["pipeline.pacing=tick"]\n'
    with pytest.raises(ConfigError) as refused:
        read(written(tmp_path, text))
    assert [line.split(" ")[0] for line in refused.value.problems] == [
        "endpoint:",
        "pipeline.tick_hz:",
    ]


def test_no_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read(tmp_path / "fleet.toml")


def test_each_pipeline_has_an_address_of_its_own() -> None:
    assert endpoint_of("tcp://{node}:{port}", "a", "10.0.0.7", 99) == "tcp://10.0.0.7:99"
    for template in ("tcp://{node}:{port}", "tcp://[{node}]:{port}"):
        for node in ("fd00::2", "[fd00::2]"):
            assert endpoint_of(template, "a", node, 99) == "tcp://[fd00::2]:99"
    assert endpoint_of("unix:///r/{uid}/{pipeline}", "a", "", 0) == "unix:///r/{uid}/a"


def test_the_page_s_fleet_is_one_of_a_run_that_init_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = dict(re.findall(r"```(toml|python)\n(.*?)```", PAGE.read_text(), re.S))
    assert commands.main(["init", "my-arm"]) == 0
    key = make_pair("server", tmp_path)
    allow(tmp_path / "allowed", "arm-7", make_pair("arm-7", tmp_path))
    (tmp_path / "directory.token").write_text("secret\n")
    (tmp_path / "fleet.toml").write_text(shown["toml"].replace("/srv/arms", str(tmp_path)))
    plan = read(tmp_path / "fleet.toml")
    assert (plan.server_key, plan.token) == (key.decode(), "secret")
    asks, _, _ = shown["python"].partition("client = ")  # which needs a fleet
    names: dict[str, object] = {}
    exec(compile(asks, PAGE.name, "exec"), names)
    assert isinstance(names["directory"], FleetDirectory)
