"""Files and overrides become one checked configuration; everything wrong is named at once."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import pytest

from ppstream.config.load import add_arguments, arguments_of, load, locate, read
from ppstream.config.schema import PipelineConfig
from ppstream.config.to_toml import as_toml
from ppstream.core.errors import ConfigError
from ppstream.wire.fields import encoder
from ppstream.wire.robot_messages import Hello, from_robot

PLAIN = """
name = "arm"

[[streams]]
name = "joints"
dim = 7
rate_hz = 1000

[[streams]]
name = "imu"
dim = 6
rate_hz = 200.0
interpolation = "previous"

[window]
steps = 32
dt_ms = 4.0

[actions]
names = ["x", "y"]
horizon = 16
dt_ms = 10.0
low = [-1.0, -2.0]
high = [1.0, 2.0]
lease_ms = 200.0

[policy]
target = "ppstream_stages.simulated:build"

[policy.options]
b_ms = 8.0
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "arm.toml"
    path.write_text(PLAIN)
    return path


def problems_of(file: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(str(file), overrides)
    return caught.value.problems


def test_file_becomes_a_frozen_configuration_with_defaults(file: Path) -> None:
    config = read(str(file))
    assert [stream.name for stream in config.streams] == ["joints", "imu"]
    assert config.streams[0].rate_hz == 1000.0
    assert config.pipeline.d_in == 2
    assert config.policy.options == {"b_ms": 8.0}
    with pytest.raises(AttributeError):
        config.name = "other"  # type: ignore[misc]


def test_command_line_beats_file_beats_default(file: Path) -> None:
    file.write_text(PLAIN + "\n[pipeline]\nd_in = 3\n")
    assert read(str(file)).pipeline.d_in == 3
    assert read(str(file), ["pipeline.d_in=4"]).pipeline.d_in == 4
    assert read(str(file), ["pipeline.d_in=4", "pipeline.d_in=1"]).pipeline.d_in == 1
    assert read(str(file), ["pipeline.d_in=4"]).pipeline.d_out == 2


@pytest.mark.parametrize(
    ("override", "value_of", "expected"),
    [
        ("pipeline.pacing=saturated", lambda c: c.pipeline.pacing, "saturated"),
        ('pipeline.pacing="free"', lambda c: c.pipeline.pacing, "free"),
        ("service.endpoint=none", lambda c: c.service.endpoint, None),
        ("placement.parts=none", lambda c: c.placement.parts, ()),
        ("service.duration_s=2", lambda c: c.service.duration_s, 2.0),
        ("link.trusted_network=true", lambda c: c.link.trusted_network, True),
        ("policy.options.deep.er=[1, 2]", lambda c: c.policy.options["deep"]["er"], [1, 2]),
        ("streams.imu.rate_hz=400", lambda c: c.streams[1].rate_hz, 400.0),
        ("streams[1].dim=3", lambda c: c.streams[1].dim, 3),
        ("streams.0.jitter_ms=0.5", lambda c: c.streams[0].jitter_ms, 0.5),
        ("actions.high[1]=5.5", lambda c: c.actions.high, (1.0, 5.5)),
        ("actions.velocity=[2.0, inf]", lambda c: c.actions.velocity, (2.0, math.inf)),
        (
            "actions.robots.a.acceleration=[inf, 9]",
            lambda c: c.actions.robots["a"].acceleration,
            (math.inf, 9.0),
        ),
        ("policy.options.text=a = b\nc", lambda c: c.policy.options["text"], "a = b\nc"),
        ("policy.options.two=1\nd_in = 2", lambda c: c.policy.options["two"], "1\nd_in = 2"),
    ],
)
def test_override_reaches_every_kind_of_value(
    file: Path, override: str, value_of: object, expected: object
) -> None:
    assert callable(value_of)
    assert value_of(read(str(file), [override])) == expected


def test_every_problem_is_reported_at_once_with_its_remedy(file: Path) -> None:
    text = PLAIN.replace("dim = 7", "dim = 0").replace('"previous"', '"previus"')
    text = text.replace("rate_hz = 1000", 'rate_hz = "fast"').replace("horizon = 16\n", "")
    file.write_text(text + "\n[pipeline]\ndin = 3\nd_out = 65\n[log]\nkeep = true\n")
    assert problems_of(file) == [
        "streams[0].dim: got 0, want a whole number, at least 1",
        "streams[0].rate_hz: got 'fast', want a number, above 0, or \"none\"",
        "streams[1].interpolation: got 'previus', want one of linear, previous, nearest, slerp, "
        "angle, cubic (did you mean 'previous'?)",
        "actions.horizon: missing, want a whole number, at least 1, at most 65536",
        "pipeline.d_out: got 65, want a whole number, at least 1, at most 64",
        "pipeline.din: unknown key (did you mean 'd_in'?)",
        "log.keep: got True, want a whole number, at least 1",
    ]


def test_rules_of_tables_without_a_mistake_are_judged_beside_one(file: Path) -> None:
    """A rule that asks for a wrong table says nothing more: what it would say may be wrong, too."""
    assert problems_of(
        file,
        "streams.imu.dim=0",  # no rule of streams, nor of gateways, which ask for them
        "window.groups.state.dtype=int8",
        "actions.lease_ms=5.0",
        "actions.velocity=[1.0]",
        "liveness.start_s=1e300",
        "pipeline.pacing=tick",
        "service.endpoint=nonsense",
        "batch.size=1",  # no rule of batch.sizes
        "batch.sizes=[]",
        "log.root=" + __file__,
    ) == [
        "streams[1].dim: got 0, want a whole number, at least 1",
        "batch.size: unknown key (did you mean 'sizes'?)",
        "liveness.start_s: got 1e+300, want 1e-09 (1 ns) to 3.1536e+07 (a year)",
        "actions.velocity: got 1 limit, want 2: one for each name (inf: no limit), or none at all",
        "actions.lease_ms: got 5, want more than actions.dt_ms = 10",
        "service.endpoint: got 'nonsense', want 'unix://PATH' or 'tcp://ADDRESS:PORT'",
        f"log.root: got {__file__!r}, which is a file; want a folder",
    ]


def test_devices_that_follow_from_others_are_judged_beside_a_mistake(file: Path) -> None:
    settings = ("placement.replicas=2", "placement.mesh=2", "placement.policy=cuda:0")
    assert problems_of(file, "name=a b", "pipeline.d_in=0", *settings) == [
        "name: got 'a b', want 1 to 64 letters, digits, '_', '-' or '/'",
        "pipeline.d_in: got 0, want a whole number, at least 1, at most 64",
        "placement.mesh: got 2 with cuda:0, cuda:0 in placement.policy, want 4 CUDA devices: one "
        "for each policy rank, those of leaders first",
    ]


@pytest.mark.parametrize("override", ["pipline.tick_hz=5", "nonsense", "pipeline.x.y.z=1"])
def test_a_setting_whose_table_is_not_known_leaves_the_rules_for_later(
    file: Path, override: str
) -> None:
    (found,) = problems_of(file, override, "pipeline.pacing=tick")
    assert "tick_hz: missing" not in found


def test_tables_and_lists_of_the_wrong_kind_are_named(file: Path) -> None:
    file.write_text('name = "x y"\nstreams = 3\nwindow = [1]\nactions = "none"\nextra = 1\n')
    found = problems_of(file)
    assert found[0] == "name: got 'x y', want 1 to 64 letters, digits, '_', '-' or '/'"
    assert found[1] == "streams: got 3, want a list, each a table"
    assert found[2] == "window: got [1], want a table"
    assert found[3] == "actions: got 'none', want a table"
    assert found[4] == "policy: missing, want a table"
    assert found[5].startswith("extra: unknown key (known: name, streams, window")


@pytest.mark.parametrize("robot", ["openpi-1-127.0.0.1-58672", "Arm 2 (ä)", "a" * 64, "row0"])
def test_a_recorded_robot_is_chosen_by_any_name_that_the_wire_takes(file: Path, robot: str) -> None:
    assert read(str(file), [f"record.robot={robot}"]).record.robot == robot
    said = Hello(1, 2, robot, (), ())
    assert from_robot.decode(encoder.encode(said)) == said


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("policy.target=acme.stages", "got 'acme.stages', want 'package.module:attr'"),
        ("decode.target=acme/x:build", "got 'acme/x:build', want 'package.module:attr'"),
        ("demo.robot=a b", "got 'a b', want 'package.module'"),
        (f"record.robot={'a' * 65}", "want 1 to 64 characters"),
        ("liveness.handshake_s=0.5", "liveness.handshake_s: got 0.5, want a number, at least 1"),
        (
            "streams.imu.image={height=8, width=8, resize=[8193, 9]}",
            "image.resize[0]: got 8193, want a whole number, at least 1, at most 8192",
        ),
        ("pipeline.pacing=often", "got 'often', want one of sample, sample:<stream>, rows, tick,"),
        ("pipeline.pacing=free:imu", "got 'free:imu', want one of sample"),
        ("streams.imu.name=", "got '', want 1 to 64 letters"),
        ('streams.imu.name="a\\n"', "want 1 to 64 letters"),
        ("log.root=", "got '', want text, not empty"),
        ("log.root=~nobody-here/logs", "log.root: got '~nobody-here/logs', want a path: that"),
        ("policy.weights=~nobody-here/w.safetensors", "want a path: that user's home is not known"),
        (r'log.root="a\u0000b"', "want text without a NUL character"),
        (r'service.endpoint="unix:///tmp/\u0000/r"', "want text without a NUL character"),
        ("streams.\u00b2.dim=3", "there is no '\u00b2' to change"),
    ],
)
def test_text_of_the_wrong_form_is_told_the_right_one(file: Path, override: str, said: str) -> None:
    (found,) = problems_of(file, override)
    assert said in found


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("log.ring", 262144),
        ("actions.horizon", 65536),
        ("window.steps", 65536),
        *((f"bringup.{name}", 1000000) for name in ("envelopes", "standalone", "warmup_max")),
    ],
)
def test_a_number_that_a_start_must_get_through_has_a_largest_value(
    file: Path, name: str, most: int
) -> None:
    read(str(file), [f"{name}={most}"])
    (found,) = problems_of(file, f"{name}={most + 1}")
    assert found.startswith(f"{name}: got {most + 1}, want a whole number, at least ")
    assert found.endswith(f"at most {most}")


def test_a_list_that_needs_an_entry_is_not_empty(file: Path) -> None:
    (found,) = problems_of(file, "placement.policy=[]")
    assert (
        found == "placement.policy: got [], want a list, each 'cpu' or 'cuda:<number>', not empty"
    )


@pytest.mark.parametrize(
    ("path", "want"),
    [
        ("profile.after", f'a whole number, at least 0, at most {2**63 - 1}, or "none"'),
        ("simulate.seed", f"a whole number from {-(2**63)} to {2**63 - 1}"),
        ("log.keep", f"a whole number, at least 1, at most {2**63 - 1}"),
        ("window.dt_ms", f"a number, above 0, at most {2**63 - 1}"),
        ("policy.options.seed", f"a whole number from {-(2**63)} to {2**63 - 1}"),
    ],
)
def test_a_whole_number_fits_64_bits_and_is_told_its_own_bounds(
    file: Path, path: str, want: str
) -> None:
    (found,) = problems_of(file, f"{path}={2**63}")
    assert found == f"{path}: got {2**63}, want {want}"


def test_a_whole_number_fits_64_bits_wherever_it_stands(file: Path) -> None:
    (found,) = problems_of(file, f"policy.options.heads=[{{seed = [1, {-(2**63) - 1}]}}]")
    assert found.startswith(f"policy.options.heads[0].seed[1]: got {-(2**63) - 1}, want a whole")
    most = read(str(file), [f"policy.options.seed={2**63 - 1}"])
    assert most.policy.options["seed"] == 2**63 - 1


@pytest.mark.parametrize("number", ["inf", "nan", "-inf"])
def test_no_number_is_infinite_or_undefined(file: Path, number: str) -> None:
    (found,) = problems_of(file, f"window.dt_ms={number}")
    assert found == f"window.dt_ms: got {float(number)!r}, want a number, above 0, finite"


@pytest.mark.parametrize("number", ["nan", "-inf", "0.0"])
def test_a_rate_limit_may_be_infinite_and_nothing_else(file: Path, number: str) -> None:
    (found,) = problems_of(file, f"actions.velocity=[1.0, {number}]")
    wanted = "want a number, above 0, or inf: no limit"
    assert found == f"actions.velocity[1]: got {float(number)!r}, {wanted}"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("pipeline.d_in", "--set pipeline.d_in: want PATH=VALUE"),
        ("=3", "--set =3: want PATH=VALUE"),
        ("name.deeper=3", "--set name.deeper: there is no 'name' to change"),
        ("streams.gyro.dim=3", "there is no 'gyro' to change (there are: joints, imu)"),
        ("streams[7].dim=3", "there is no '7' to change"),
        ("actions.low[2]=1.0", "there is no '2' to change"),
        ("actions.low.first=1.0", "there is no 'first' to change"),
        ("pipline.d_in=3", "pipline: unknown key (did you mean 'pipeline'?)"),
    ],
)
def test_override_of_something_that_is_not_there_is_refused(
    file: Path, override: str, said: str
) -> None:
    (found,) = problems_of(file, override)
    assert said in found


def test_broken_overrides_and_file_problems_come_together(file: Path) -> None:
    file.write_text(PLAIN.replace("steps = 32", "steps = 0"))
    assert len(problems_of(file, "nonsense", "pipeline.d_in=0")) == 3


def test_relative_paths_follow_the_place_that_names_them(
    file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for folder in (file.parent, elsewhere):
        (folder / "w.safetensors").write_bytes(b"")
    file.write_text(PLAIN.replace("[policy]", '[policy]\nweights = "w.safetensors"'))
    monkeypatch.chdir(elsewhere)
    assert read(str(file)).policy.weights == str(file.parent / "w.safetensors")
    given = read(str(file), ["policy.weights=w.safetensors"]).policy.weights
    assert given == str(elsewhere / "w.safetensors")
    assert read(str(file)).log.root == "logs"


def test_file_that_is_not_toml_is_refused_with_its_line(file: Path) -> None:
    file.write_text('name = "arm"\nstreams = [\n')
    (found,) = problems_of(file)
    assert found.startswith(f"{file}: not TOML: ")
    file.write_bytes(b"name = '\xff'\n")
    (found,) = problems_of(file)
    assert "not TOML" in found


def test_configuration_inside_a_package_is_found_without_running_it(
    file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "acme_stages"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / "arm.toml").write_text(PLAIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert locate("acme_stages:arm.toml") == package / "arm.toml"
    assert "acme_stages" not in sys.modules
    (tmp_path / "acme_single.py").write_text("raise RuntimeError('imported')\n")
    assert locate("acme_single:arm.toml") == file
    with pytest.raises(ConfigError, match=r"has no leg\.toml \(it has: arm\.toml\)"):
        locate("acme_stages:leg.toml")
    for module in ("acme_legs", ".acme"):
        with pytest.raises(ConfigError, match=f"there is no module '{module}'"):
            locate(f"{module}:leg.toml")


def test_name_without_a_file_says_where_it_was_looked_for() -> None:
    with pytest.raises(ConfigError, match=r"there is no file 'nowhere/arm\.toml'"):
        locate("nowhere/arm.toml")
    with pytest.raises(ConfigError, match=r"ppstream_stages has no nowhere\.toml"):
        locate("nowhere")


def test_a_file_s_name_that_is_nearly_right_gets_the_right_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-arm.toml").touch()
    for name in ("my-arm.tml", "my_arm.toml", f"{tmp_path}/myarm.toml"):
        with pytest.raises(ConfigError, match=r"there is no file .* \(did you mean .*my-arm\.toml"):
            locate(name)


def test_arguments_default_to_the_embedded_demo(file: Path) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert parser.parse_args([]).config == "demo"
    args = parser.parse_args(["--config", str(file), "--set", "name=a", "--set", "pipeline.d_in=1"])
    config = load(args)
    assert (config.name, config.pipeline.d_in) == ("a", 1)


def test_a_file_may_stand_by_itself_or_behind_config(file: Path) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser, is_positional=True)
    assert parser.parse_args([]).config == "demo"
    setting = ["--set", "name=a"]
    for words in ([str(file)], ["--config", str(file)], [str(file), f"--config={file}"]):
        for line in ([*words, *setting], [*setting, *words]):
            args = parser.parse_args(line)
            assert load(args).name == "a"
            assert arguments_of(args) == ["--config", str(file), *setting]


@pytest.mark.parametrize("line", ["a.toml --config b.toml", "--config demo a.toml"])
def test_two_names_of_a_configuration_are_refused(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser, is_positional=True)
    with pytest.raises(SystemExit):
        parser.parse_args(line.split())
    assert "got two configurations" in capsys.readouterr().err


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["service.endpoint=none", "link.trusted_network=true", "actions.low[0]=-1e-7"],
        ['policy.options.a={b = [1, {c = "\\"\\u007f\\\\ é"}], "d e" = 2}'],
        ["actions.velocity=[inf, 2.5]", "actions.robots.a={acceleration = [1e9, inf]}"],
        ["bringup.accept=['NOTHING_TO_HIDE']", "demo.robot=some.module", "demo.seed=5"],
    ],
)
def test_effective_configuration_as_toml_reads_back_equal(
    file: Path, tmp_path: Path, overrides: list[str]
) -> None:
    config = read(str(file), overrides)
    again = tmp_path / "effective.toml"
    again.write_text(as_toml(config), encoding="utf-8")
    back = read(str(again))
    # The default of log.root is relative to the working directory; in a file, to that file.
    assert back.log.root == str(tmp_path / "logs")
    assert strip_log(back) == strip_log(config)


def strip_log(config: PipelineConfig) -> str:
    text = as_toml(config)
    return "\n".join(line for line in text.splitlines() if not line.startswith("root = "))


def test_modules_beside_the_file_become_importable(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So every command that loads a configuration finds its policy, not only the launcher's."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    for _ in range(2):
        load(parser.parse_args(["--config", str(file)]))
    assert sys.path.count(str(file.parent)) == 1
    assert sys.path[-1] == str(file.parent)
