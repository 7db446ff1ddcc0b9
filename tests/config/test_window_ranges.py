from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from stream_cases import config, stream

from ppstream.config.load import read
from ppstream.config.rules import problems
from ppstream.config.schema import GroupConfig, PipelineConfig, StreamConfig
from ppstream.config.window_ranges import ranges_of
from ppstream.core.errors import ConfigError

WITH_RANGE = {"low": (-1.0, -2.0), "high": (1.0, 0.5)}


def eight_bits(*streams: StreamConfig, **group: str) -> PipelineConfig:
    made = config(*streams)
    groups = {"state": GroupConfig(**{"dtype": "int8", **group})}
    return msgspec.structs.replace(made, window=msgspec.structs.replace(made.window, groups=groups))


def statistics(tmp_path: Path, **features: object) -> str:
    file = tmp_path / "stats.json"
    file.write_text(json.dumps({key.replace("__", "."): one for key, one in features.items()}))
    return str(file)


def test_a_streams_own_limits_are_its_range() -> None:
    case = eight_bits(stream("a", **WITH_RANGE), stream("b", dim=1, low=(0.0,), high=(9.0,)))
    assert problems(case) == []
    assert ranges_of(case, "state") == ([-1, -2, 0], [1, 0.5, 9])


def test_statistics_are_found_by_stream_or_group_and_limits_come_first(tmp_path: Path) -> None:
    streams = (stream("a"), stream("b", dim=1))
    b_alone = {"min": [-3], "max": [3], "mean": [0.1]}
    file = statistics(tmp_path, a={"min": [-1, 0], "max": [1, 2]}, observation__b=b_alone)
    assert ranges_of(eight_bits(*streams, statistics=file), "state") == ([-1, 0, -3], [1, 2, 3])
    file = statistics(tmp_path, observation__state={"min": [1, 2, 3], "max": [4, 5, 6]})
    assert ranges_of(eight_bits(*streams, statistics=file), "state") == ([1, 2, 3], [4, 5, 6])
    limited = (stream("a", **WITH_RANGE), streams[1])
    assert ranges_of(eight_bits(*limited, statistics=file), "state") == ([-1, -2, 3], [1, 0.5, 6])


def test_a_column_that_never_moved_still_has_a_range(tmp_path: Path) -> None:
    file = statistics(tmp_path, a={"min": [0, -3], "max": [0, -3]})
    case = eight_bits(stream("a"), statistics=file)
    assert problems(case) == []
    assert ranges_of(case, "state") == ([-1, -3], [1, 0])


def test_a_range_that_is_missing_is_one_problem_of_each_stream_with_its_remedy() -> None:
    case = eight_bits(stream("a"), stream("b", **WITH_RANGE), stream("c", dim=7))
    assert problems(case) == [
        f"streams[{index}].low: missing, want low and high of the {dim} values of '{name}', or "
        "window.groups.state.statistics: window.groups.state.dtype = 'int8' needs the range of "
        "each value"
        for index, dim, name in ((0, 2, "a"), (2, 7, "c"))
    ]
    with pytest.raises(ValueError, match="missing, want low and high"):
        ranges_of(case, "state")


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"low": (0.0,), "high": (1.0,)}, "streams[0].low: got 1 limit, want 2: one per value"),
        ({"low": (0.0, 0.0)}, "got 2 limits beside 0 of high, want both"),
        ({"low": (0.0, 1.0), "high": (1.0, 1.0)}, "got 1 to 1 of 'a', want low below high"),
        (
            {"low": (0.0, 0.0), "high": (1.0, 1e-38)},
            "got 0 to 1e-38 of 'a', want one of them 1e-30 or more away from 0",
        ),
        (
            {"low": (0.0, 0.0), "high": (1.0, 1e39)},
            "got 0 to 1e+39 of 'a', want both from -1e+38 to 1e+38",
        ),
    ],
)
def test_limits_that_are_no_range_are_refused(limits: dict[str, object], said: str) -> None:
    assert any(said in line for line in problems(eight_bits(stream("a", **limits))))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read: No such file"),
        ("[1]", "is no JSON table of features"),
        ('{"b": {}}', "has neither 'a' nor 'observation.state'"),
        ('{"a": {"min": [0, 0]}}', "'a', has 2 numbers of min and 0 of max, want 2 each"),
        ('{"a": {"min": 0, "max": 1}}', "'a', holds no lists of numbers"),
        ('{"a": {"min": [2, 0], "max": [1, 1]}}', "got 2 to 1 of 'a', want low below high"),
    ],
)
def test_statistics_that_say_nothing_are_one_problem(
    tmp_path: Path, text: str | None, said: str
) -> None:
    file = tmp_path / "stats.json"
    if text is not None:
        file.write_text(text)
    (line,) = problems(eight_bits(stream("a"), statistics=str(file)))
    assert said in line


def test_a_group_that_no_stream_is_in_is_refused() -> None:
    case = eight_bits(stream("a", group="arm"))
    assert problems(case) == ["window.groups.state: got 'state', want a group of the streams: arm"]


PLAIN = """
name = "case"
[[streams]]
name = "a"
dim = 1
rate_hz = 100
interpolation = "cubic"
[window]
steps = 4
dt_ms = 10
[window.groups.state]
dtype = "float8_e4m3fn"
statistics = "stats.json"
[actions]
names = ["x"]
horizon = 4
dt_ms = 10
low = [-1]
high = [1]
lease_ms = 100
[policy]
target = "nobody:build"
"""


def test_a_file_names_statistics_beside_itself(tmp_path: Path) -> None:
    statistics(tmp_path, a={"min": [-1], "max": [1]})
    file = tmp_path / "run.toml"
    file.write_text(PLAIN)
    made = read(str(file))
    assert made.group_settings("state").statistics == str(tmp_path / "stats.json")
    assert made.group_settings("other") == GroupConfig()
    assert made.streams[0].bracket_ms == 2 * made.streams[0].max_gap_ms


def test_a_misspelt_type_of_a_group_is_said_at_its_place(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(PLAIN.replace("float8_e4m3fn", "float8"))
    with pytest.raises(ConfigError, match=r"window\.groups\.state\.dtype: got 'float8', want one"):
        read(str(file))
