"""Build the wheel and use it as a stranger would: installed elsewhere, started from elsewhere.

Checks that it carries every file of the three packages and no other top-level name, that a robot's
side installs and imports without torch, and that with ``[serve,cuda]`` an arm of ``ppstream init``
runs at once on two ranks and drains. Needs pip and the network, or wherever pip is told to look.
The ranks pass the gate: where something else runs beside the installation, start them afterwards.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
CONSTRAINTS: Final = ROOT / "constraints.txt"
PACKAGES: Final = {
    "ppstream": ROOT / "ppstream",
    "ppstream_kernels": ROOT / "kernels" / "ppstream_kernels",
    "ppstream_stages": ROOT / "stages" / "ppstream_stages",
}
STEP_LIMIT_S: Final = 180
RUN_LIMIT_S: Final = 90
LAUNCHER_GRACE_S: Final = 40  # it gives its ranks 35

TWO_RANKS: Final = (
    *("run", "my-arm.toml"),
    *("--set", "service.duration_s=0.2", "--set", "service.endpoint=none"),
    *("--set", "bringup.envelopes=400"),
)
ROBOT_SIDE: Final = """
import sys
import ppstream.robot, ppstream.analysis.judge, ppstream.wire.robot_messages
import ppstream.report.html.page  # reads its style sheet and skeleton
assert "torch" not in sys.modules
assert "site-packages" in ppstream.__file__, ppstream.__file__
"""
SERVER_SIDE: Final = """
import cuda.core  # loads no driver before a device is asked for
import ppstream, ppstream_kernels, ppstream_stages
[getattr(ppstream, name) for name in ppstream.__all__]
assert "site-packages" in ppstream.__file__, ppstream.__file__
"""


def main() -> int:
    """Run every check in a temporary folder; the first that fails says what it ran."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--install", type=Path, help="all but the ranks, in this new folder")
    parser.add_argument("--ranks", type=Path, help="the ranks alone, of an earlier --install")
    args = parser.parse_args()
    if args.ranks:
        check_two_ranks(args.ranks.resolve())
    elif args.install:
        args.install.mkdir(parents=True)
        check_installation(args.install.resolve())
    else:
        with tempfile.TemporaryDirectory(prefix="ppstream-wheel-") as name:
            check_installation(Path(name))
            check_two_ranks(Path(name))
    return 0


def check_installation(folder: Path) -> None:
    """The wheel has what it must, and installs in ``folder`` for a robot and for a server."""
    wheel = build(folder)
    check_contents(wheel)
    check_robot_side(wheel, folder)
    print_progress("installing it with [serve,cuda]")
    python = environment(folder / "serve", f"{wheel}[serve,cuda]")
    run(python, "-c", SERVER_SIDE, cwd=folder / "serve")


def build(folder: Path) -> Path:
    """The path of a new wheel in ``folder``."""
    print_progress("building the wheel")
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", folder, ROOT, cwd=ROOT)
    (wheel,) = folder.glob("ppstream-*.whl")
    return wheel


def check_contents(wheel: Path) -> None:
    """Every file of the packages is in the wheel, and no other top-level name."""
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
    strangers = {name.split("/")[0] for name in inside} - PACKAGES.keys()
    if strangers:
        sys.exit(f"the wheel has other top-level names: {', '.join(sorted(strangers))}")
    wanted = {
        f"{package}/{file.relative_to(folder).as_posix()}"
        for package, folder in PACKAGES.items()
        for file in folder.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    if missing := wanted - inside:
        sys.exit(f"the wheel lacks: {', '.join(sorted(missing))}")
    print_progress(f"{wheel.name}: {len(inside)} files, {wheel.stat().st_size / 1e6:.1f} MB")


def check_robot_side(wheel: Path, folder: Path) -> None:
    """Without extras there is no torch, and the client, the score and the report work."""
    print_progress("installing it without extras, importing the robot's side")
    python = environment(folder / "robot", str(wheel))
    elsewhere = folder / "robot" / "elsewhere"
    elsewhere.mkdir()
    run(python, "-c", ROBOT_SIDE, cwd=elsewhere)
    for name in ("ppstream", "ppstream-report"):
        run(python.with_name(name), "--help", cwd=elsewhere, quiet=True)


def check_two_ranks(folder: Path) -> None:
    """Two ranks of the installed wheel come up with a new arm, pass the gate, serve and drain."""
    print_progress("running two ranks of a new arm")
    ppstream = folder / "serve" / "bin" / "ppstream"
    elsewhere = folder / "serve" / "elsewhere"
    elsewhere.mkdir()
    run(ppstream, "check", "ppstream_stages:bench.toml", cwd=elsewhere, quiet=True)
    run(ppstream, "init", "my-arm", cwd=elsewhere)
    run(ppstream, *TWO_RANKS, cwd=elsewhere, limit_s=RUN_LIMIT_S)
    run(ppstream, "report", "logs/latest", "--html", "page.html", cwd=elsewhere)
    print_progress("the wheel is complete")


def environment(folder: Path, requirement: str) -> Path:
    """The interpreter of a new virtual environment with ``requirement`` installed."""
    run(sys.executable, "-m", "venv", folder, cwd=folder.parent)
    python = folder / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", "-c", CONSTRAINTS, requirement, cwd=folder)
    return python


def run(
    *command: str | Path, cwd: Path, limit_s: float = STEP_LIMIT_S, quiet: bool = False
) -> None:
    """Run ``command`` in ``cwd``, or end with its exit status and what it was."""
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    text = " ".join(map(str, command))
    child = subprocess.Popen(
        command, cwd=cwd, env=clean, stdout=subprocess.DEVNULL if quiet else None
    )
    try:
        code = child.wait(limit_s)
    except subprocess.TimeoutExpired:
        child.terminate()  # the launcher then ends its ranks, the stuck ones after its own limit
        try:
            child.wait(LAUNCHER_GRACE_S)
        finally:
            child.kill()
        sys.exit(f"no end within {limit_s:g} s: {text}")
    if code:
        sys.exit(f"exit {code} from: {text}")


def print_progress(text: str) -> None:
    """One line of progress."""
    print(f"check_wheel: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
