"""Run the tests of the twins against the compiled core with AddressSanitizer and UBSan.

The core is compiled anew, warnings are errors, into a folder of its own. Ends with 0 and the reason
where there is no compiler or no libasan.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from build_core import SANITIZE, STRICT, compile_core

ROOT: Final = Path(__file__).resolve().parents[2]
TESTS: Final = [
    *sorted((ROOT / "tests" / "native").glob("test_*_twins.py")),
    ROOT / "tests" / "core" / "test_waiter.py",
    ROOT / "tests" / "links" / "test_doorbell.py",
]
LIMIT_S: Final = 400

#: Puts it in place of the package's own, before anything imports that. The sanitizers write to the
#: descriptor of stderr, which pytest leaves alone this way.
RUN: Final = """
import importlib.util, sys
import pytest
spec = importlib.util.spec_from_file_location("ppstream.native.core", sys.argv[1])
sys.modules[spec.name] = importlib.util.module_from_spec(spec)
options = ["-q", "-p", "no:cacheprovider", "--capture=sys", "--timeout=0"]
sys.exit(pytest.main([*options, *sys.argv[2:]]))
"""


def main() -> int:
    """Returns the exit status of the tests."""
    compiler = os.environ.get("CC", "cc")
    if shutil.which(compiler) is None:
        return skip(f"no compiler {compiler}")
    command = [compiler, "-print-file-name=libasan.so"]
    library = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(library).is_absolute():
        return skip(f"{compiler} has no libasan.so")
    with tempfile.TemporaryDirectory(prefix="ppstream-core-") as name:
        core = Path(name, "core.abi3.so")
        problem = compile_core(ROOT, core, *STRICT, *SANITIZE)
        if problem is not None:
            print(f"check_core: {problem}")
            return 1
        sanitized = {
            "LD_PRELOAD": library,
            "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter frees little at its end
            "PYTHONMALLOC": "malloc",  # the interpreter's own pools would hide an overrun
            "PPSTREAM_NATIVE": "1",
        }
        command = [sys.executable, "-c", RUN, core, *TESTS]
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=os.environ | sanitized, timeout=LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired:
            print(f"check_core: no end within {LIMIT_S} s; the stack of what stood is above")
            return 1
        return done.returncode


def skip(why: str) -> int:
    """Says why nothing was checked."""
    print(f"check_core: skipped: {why}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
