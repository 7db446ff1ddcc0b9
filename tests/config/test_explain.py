"""The configuration reference: every key has its meaning, and the page is what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ppstream.config.explain import explain, keys, main, markdown, overview
from ppstream.config.load import read
from ppstream.config.to_toml import as_toml

PAGE = Path(__file__).parents[2] / "runbooks" / "configuration.md"
WHEN = re.compile(r"\b(Set|Raise|Lower|Change|State) ")
KEYS = {key.path: key for key in keys()}


def test_every_key_has_a_meaning() -> None:
    assert [path for path, key in KEYS.items() if not key.meaning.endswith(".")] == []


def test_every_default_says_when_to_leave_it() -> None:
    values = [key for key in KEYS.values() if key.default is not None and key.table is None]
    assert len(values) > 90
    assert [key.path for key in values if not WHEN.search(key.meaning)] == []


def test_no_key_of_a_whole_configuration_is_missing() -> None:
    table, names = "", set()
    for line in as_toml(read("demo")).splitlines():
        if heading := re.fullmatch(r"\[+([a-z_.]+)\]+", line):
            table = f"{heading[1]}."
        elif key := re.match(r"([a-z0-9_]+) = ", line):
            names.add(f"{table}{key[1]}")
    assert len(names) > 80
    assert names - set(KEYS) == set()


def test_the_page_is_what_the_code_says() -> None:
    assert PAGE.read_text() == markdown()  # ppstream explain --markdown > runbooks/configuration.md


def test_a_table_is_explained_with_all_below_it() -> None:
    text = explain("streams.image")
    assert text.startswith('streams.image: a table, or "none"\n')
    assert "streams.image.resize: a list, each a whole number, at least 1" in text
    assert "streams.name" not in text
    assert explain("liveness.watchdog_s").startswith(
        "liveness.watchdog_s: a number, above 0, s; default 5.0\n    Standstill "
    )
    assert explain("actions.lease_ms").startswith(
        "actions.lease_ms: a number, above 0, ms; must be stated\n"
    )


def test_the_overview_has_a_line_for_each_table() -> None:
    assert sum(line.startswith("streams ") for line in overview().splitlines()) == 1


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("pipeline.d_inn", "(did you mean 'pipeline.d_in'?)"),
        ("d_inn", "(did you mean 'pipeline.d_in'?)"),
        ("liveness.watchdog", "(did you mean 'liveness.watchdog_s'?)"),
        ("zzz", "no key 'zzz'\n"),
    ],
)
def test_a_key_that_is_not_there_gets_a_hint(
    path: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([path]) == 11
    assert hint in capsys.readouterr().err
