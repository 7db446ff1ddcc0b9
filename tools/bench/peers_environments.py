"""Virtual environments of the peers that want packages of their own, made on demand by pip.

They lie in ``$PPSTREAM_CLIENTS`` or ``~/.cache/ppstream/clients``, each in a folder named after its
package and version, and stay there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

CONSTRAINTS: Final = Path(__file__).resolve().parents[2] / "constraints.txt"
MAKE_LIMIT_S: Final = 600.0
#: numpy is our robot's, typing_extensions what openpi-client imports and does not name.
ADDED: Final = ("numpy", "typing_extensions")
#: Of a package whose own dependencies fill a disk: what the part of it that is used imports.
INSTEAD: Final = {
    "strands-robots": ("msgpack", "numpy", "pyzmq"),
    "lerobot": (
        *("draccus==0.10.0", "deepdiff", "einops", "grpcio", "huggingface-hub<1"),
        *("packaging", "pillow", "protobuf", "pyserial", "safetensors", "termcolor"),
    ),
    "torchvision": ("pillow",),
    "datasets": (
        *("dill<0.4.1", "filelock", "fsspec[http]<=2025.9.0", "httpx", "huggingface-hub<1"),
        *("jsonlines", "multiprocess<0.70.17", "packaging", "pandas", "pyyaml", "requests"),
        *("tqdm", "xxhash"),
    ),
    "diffusers": ("filelock", "importlib-metadata", "regex"),
    "ray": (
        *("click", "filelock", "jsonschema", "msgpack", "packaging", "protobuf"),
        *("pyyaml", "requests"),
    ),
}
#: Of a package that wants torch, which is large: what this interpreter has installed is seen, too.
SHARING: Final = frozenset({"lerobot", "datasets", "ray"})
#: Of a package that another one reads with: whose environment is seen, too.
BESIDE: Final = {"datasets": "lerobot"}
COMPLETE: Final = "complete"  # a file: an environment without it was not finished


class Unavailable(Exception):
    """An environment cannot be had; the message says why."""


def python_with(package: str, folder: Path | None = None) -> Path:
    """The interpreter of an environment that has ``package`` as ``constraints.txt`` pins it.

    Its dependencies are those that pip picks for it, whatever this project's are, or ``INSTEAD``.
    An interpreter that has it already is its own environment.

    Args:
        package: name on the package index.
        folder: of all environments; None: as above.

    Raises:
        Unavailable: it is not there, and cannot be made.
    """
    pinned = pin_of(package)
    if _is_here(pinned):
        return Path(sys.executable)
    place = (folder or clients_folder()) / pinned.replace("==", "-")
    python = place / "bin" / "python"
    if not (place / COMPLETE).exists():
        shutil.rmtree(place, ignore_errors=True)
        _run(sys.executable, "-m", "venv", str(place))
        _share(package, place)
        install = (str(python), "-m", "pip", "install", "--quiet")
        if package in INSTEAD:
            _run(*install, "--no-deps", pinned)
            _run(*install, *INSTEAD[package])
        else:
            _run(*install, pinned, *ADDED)
        (place / COMPLETE).touch()
    _share(package, place)  # another checkout may have made it
    return python


def _is_here(pinned: str) -> bool:
    """This interpreter has the package, as it is pinned."""
    name, _, wanted = pinned.partition("==")
    try:
        return version(name) == wanted
    except PackageNotFoundError:
        return False


def _share(package: str, place: Path) -> None:
    """Have ``package`` see what this interpreter has installed, where it wants that."""
    if package in SHARING:
        (theirs,) = place.glob("lib/python*/site-packages")
        seen = [sysconfig.get_path("purelib")]
        if other := BESIDE.get(package):
            place = python_with(other, place.parent).parent.parent
            seen += map(str, place.glob("lib/python*/site-packages"))
        (theirs / "shared.pth").write_text("".join(f"{folder}\n" for folder in seen))


def clients_folder() -> Path:
    """Returns ``$PPSTREAM_CLIENTS``, or its default."""
    given = os.environ.get("PPSTREAM_CLIENTS")
    return Path(given) if given else Path.home() / ".cache" / "ppstream" / "clients"


def pin_of(package: str) -> str:
    """The line ``package==version`` of ``constraints.txt``."""
    pins = CONSTRAINTS.read_text().splitlines()
    return next(line for line in pins if line.startswith(f"{package}=="))


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=MAKE_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{Path(command[0]).name}: {error}") from None
    if done.returncode:
        found = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]
        raise Unavailable(f"{' '.join(command[1:3])}: {found[-1]}")
