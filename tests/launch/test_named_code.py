"""Names of code in a configuration: what their files tell, and what is left to a rank."""

import os
import zipfile
from pathlib import Path

import pytest

from ppstream.config import load
from ppstream.launch.named_code import code_problems, is_module

TAKES = (
    "def named(options, device): ...",
    "def named(options, device, mesh=None): ...",
    "def named(options, *more): ...",
    "def named(options, device, *, quick=False, **more): ...",
    "class named: ...",
    "from elsewhere import build as named",
    "from elsewhere import *",
    "globals()['na' + 'med'] = print",
    "def __getattr__(name): ...",
    "def wrapped(build): ...\n@wrapped\ndef named(options): ...",
    "try:\n    import fast as named\nexcept ImportError:\n    def named(options, device): ...",
)
REFUSED = (
    ("def other(options, device): ...", "has no 'named' (want the name of build(options, device)"),
    ("def nameb(options, device): ...", "has no 'named' (did you mean nameb?)"),
    ("\ndef named(options): ...", ":2 is named(options), want build(options, device)"),
    ("def named(a, b, c): ...", ":1 is named(a, b, c), want build(options, device)"),
    ("def named(a, b, *, c): ...", ":1 is named(a, b, *, c), want build(options, device)"),
    ("x = 1\ndef named(options, device)", ":2 is no Python: expected ':'"),
    ("\0", "is no Python: source code string cannot contain null bytes"),
)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def problems(*settings: str) -> list[str]:
    return code_problems(load.read("bench", settings))


@pytest.mark.parametrize("text", TAKES)
def test_code_that_a_rank_may_be_able_to_call_is_left_to_it(text: str, here: Path) -> None:
    (here / "a_policy.py").write_text(text)
    assert problems("policy.target=a_policy:named") == []


@pytest.mark.parametrize(("text", "told"), REFUSED)
def test_code_that_no_rank_could_call_is_told_with_file_and_line(
    text: str, told: str, here: Path
) -> None:
    (here / "a_policy.py").write_text(text)
    (found,) = problems("policy.target=a_policy:named")
    assert found.startswith("policy.target: got 'a_policy:named', but ")
    assert f"{here / 'a_policy.py'}" in found or "a_policy.py" in found
    assert told in found


def test_the_policy_and_the_decoder_are_told_together_and_none_is_run(here: Path) -> None:
    (here / "a_decoder.py").write_text("open('was_run', 'w')\ndef build(options): ...")
    wrong = "policy.target=nobody_here.at_all:build", "decode.target=a_decoder:build"
    missing, taken = problems(*wrong)
    assert missing == (
        "policy.target: got 'nobody_here.at_all:build', but there is no module "
        "'nobody_here.at_all'; install it, or mend the name"
    )
    assert taken.startswith("decode.target: got 'a_decoder:build', but ")
    assert taken.endswith(":2 is build(options), want build(options, actions)")
    assert os.listdir(here) == ["a_decoder.py"]


def test_a_package_that_makes_modules_while_it_is_imported_is_left_to_a_rank(here: Path) -> None:
    (here / "lazy").mkdir()
    (here / "lazy" / "__init__.py").write_text("import sys\nsys.modules['lazy.made'] = sys")
    assert problems("policy.target=lazy.made:build") == []
    assert not is_module("lazy.made")
    (here / "lazy" / "__init__.py").write_text("")
    assert len(problems("policy.target=lazy.made:build")) == 1


def test_a_module_in_a_zip_file_is_left_to_a_rank(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(here / "packed.zip", "w") as packed:
        packed.writestr("from_a_zip.py", "def build(options, device): ...")
    monkeypatch.syspath_prepend(here / "packed.zip")
    assert problems("policy.target=from_a_zip:build") == []


def test_a_module_of_this_folder_comes_before_one_that_is_installed(here: Path) -> None:
    (here / "numpy").mkdir()  # without __init__.py the installed one is taken
    assert problems("policy.target=numpy:empty") == []
    (here / "numpy" / "__init__.py").write_text("def build(options, device): ...")
    assert problems("policy.target=numpy:build") == []
    assert len(problems("policy.target=numpy:empty")) == 1
