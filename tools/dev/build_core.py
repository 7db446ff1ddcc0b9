"""Compile ``ppstream/native/*.c``: as a hook of the build, or in place, run by itself.

The build goes on without a compiler, and says so in one line: the Python twins do the same. With
``--strict`` a warning and a failure are errors.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any, Final

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE: Final = Path("ppstream", "native")
SOURCES: Final = (NATIVE / "core.c", NATIVE / "wait.c")
LIBRARY: Final = NATIVE / "core.abi3.so"
FLAGS: Final = ("-shared", "-fPIC", "-O2", "-ffp-contract=off")  # a fused multiply rounds once less
STRICT: Final = ("-std=gnu11", "-Wall", "-Wextra", "-Werror")
SANITIZE: Final = ("-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
LIMIT_S: Final = 120


class CustomBuildHook(BuildHookInterface[Any]):
    """Adds the library to a wheel, whose tag then names the stable ABI and the platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """``version`` is that of the wheel's kind: standard, or editable, which builds in place."""
        if os.environ.get("PPSTREAM_NATIVE") == "0":  # a wheel for any machine and Python 3.10
            return
        problem = compile_core(Path(self.root), Path(self.root, LIBRARY))
        if problem is not None:
            self.app.display_warning(f"ppstream runs without its compiled core: {problem}")
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"cp311-abi3-{platform}"
        build_data["artifacts"].append(LIBRARY.as_posix())


def compile_core(root: Path, library: Path, *more: str) -> str | None:
    """Make ``library`` from the source under ``root``; returns why there is none, or None."""
    problem = _compile(root, library, *more)
    if problem is not None:
        library.unlink(missing_ok=True)  # an older one does not outlive a failure
    return problem


def _compile(root: Path, library: Path, *more: str) -> str | None:
    if sys.implementation.name != "cpython" or sys.version_info < (3, 11):
        return "it needs CPython 3.11 or newer"
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "free-threaded Python has no stable ABI"
    unfinished = library.with_suffix(".tmp")
    include = f"-I{sysconfig.get_path('include')}"
    compiler = shlex.split(os.environ.get("CC", "cc"))
    sources = [root / source for source in SOURCES]
    command = [*compiler, *FLAGS, *more, include, *sources, "-o", unfinished]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if "error" in line]
        return (errors or [f"{compiler[0]} ended with {done.returncode}"])[0]
    unfinished.replace(library)
    return None


def main() -> int:
    """Compile it where it is asked to be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--strict", action="store_true", help="warnings and failures are errors")
    root = Path(__file__).resolve().parents[2]
    is_strict = parser.parse_args().strict
    problem = compile_core(root, root / LIBRARY, *(STRICT if is_strict else ()))
    print(f"build_core: {LIBRARY if problem is None else problem}")
    return int(is_strict and problem is not None)


if __name__ == "__main__":
    sys.exit(main())
