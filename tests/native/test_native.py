"""Which of the twins a process uses: each case in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from ppstream import native

ASK = """
import json, sys
from ppstream import native
from ppstream.ingest.sample_ledger import SampleLedger
print(json.dumps([native.is_used, native.why_not, SampleLedger.__mro__[1].__module__]))
"""
STALE = """
import sys, types
core = types.ModuleType("ppstream.native.core")
core.API, core.__file__ = -1, "core.abi3.so"
sys.modules["ppstream.native.core"] = core
"""


def ask(before: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name != native.SWITCH}
    return subprocess.run(
        [sys.executable, "-c", before + ASK],
        env=clean | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_core_is_used_where_it_is_compiled() -> None:
    assert json.loads(ask().stdout) == [True, None, "ppstream.native.core"]


def test_it_can_be_turned_off() -> None:
    assert json.loads(ask(PPSTREAM_NATIVE="0").stdout) == [
        False,
        "PPSTREAM_NATIVE is 0",
        "ppstream.native",
    ]


def test_a_core_of_another_version_is_refused_and_python_does_it() -> None:
    assert native.is_used
    used, why, _ = json.loads(ask(STALE).stdout)
    assert (used, why) == (False, f"core.abi3.so has API -1, want {native.API}: install again")


def test_whoever_demands_the_core_gets_an_error_where_there_is_none() -> None:
    done = ask(STALE, PPSTREAM_NATIVE="1")
    assert done.returncode == 1
    assert "PPSTREAM_NATIVE is 1, but there is no compiled core: core.abi3.so" in done.stderr


def test_the_source_and_the_package_have_one_number() -> None:
    source = Path(native.__file__).with_name("core.c").read_text()
    assert f"#define API {native.API} " in source
