"""``ppstream init NAME``: writes a run that works, with a policy, a robot and a test to change.

The Python files are copies of ``ppstream_stages.new_arm``; the TOML is written here, and the other
files read from it what an arm consists of.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final, NamedTuple

from ppstream.analysis.verdict import ACCEPTABLE
from ppstream.config.load import SHIPPED_PACKAGE
from ppstream.config.to_toml import toml_value
from ppstream.core.errors import ConfigError

TEMPLATES: Final = f"{SHIPPED_PACKAGE}.new_arm"
JOINTS_NAME: Final = "joints"
NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,40}")
WANTED_NAME: Final = "a letter, then up to 40 letters, digits, '-' or '_'"
JOINTS_MAX: Final = 256
NO_CAMERA: Final = "none"  # an answer
SIZE: Final = re.compile(r"(\d{1,4})x(\d{1,4})")
STEPS: Final = 16  # of the window, and of a chunk
STEP_MS: Final = 20.0  # of a chunk
LEASE_MS: Final = 300.0
GAP_MS: Final = 200.0  # max_gap_ms and max_age_ms, unless they are stated
GAPS: Final = 2  # samples may be so many periods apart
LIMIT_RAD: Final = 3.2
LEFT: Final = 130  # exit code of who left a question unanswered, as after Ctrl-C


class Arm(NamedTuple):
    """An arm as it is described to ``init``."""

    name: str
    joints: int
    rate_hz: float
    cameras: tuple[str, ...]
    height: int
    width: int
    frame_hz: float

    @property
    def module(self) -> str:
        """Begin of the names of its Python files."""
        return self.name.replace("-", "_")


def files_of(arm: Arm) -> dict[str, str]:
    """The files' texts by name: TOML, policy, robot, test."""
    spec = find_spec(TEMPLATES)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError([f"{TEMPLATES} is not installed: pip install ppstream"])
    folder = Path(next(iter(spec.submodule_search_locations)))
    copies = {"policy.py": "policy", "robot.py": "robot", "arm_test.py": "test"}
    texts = {f"{arm.module}_{as_}.py": (folder / file).read_text() for file, as_ in copies.items()}
    return {f"{arm.name}.toml": toml_of(arm, f"{arm.module}_policy:build"), **texts}


def toml_of(arm: Arm, target: str) -> str:
    """The TOML of a run for ``arm`` with the policy ``target``."""
    joints = [f"joint_{k + 1}" for k in range(arm.joints)]
    sizes = ", ".join(f"{name} = [{arm.height}, {arm.width}]" for name in arm.cameras)
    cameras = "".join(
        f'\n[[streams]]\nname = "{name}"          # RGB, uint8 [height, width, 3]\n'
        f"rate_hz = {arm.frame_hz:g}\n{_apart(arm.frame_hz)}"
        f"[streams.image]\nheight = {arm.height}\nwidth = {arm.width}\n"
        for name in arm.cameras
    )
    dt_ms = 1000 / arm.rate_hz
    # a chunk covers two samples, and is valid until the second one's could be here
    step_ms, lease_ms = max(STEP_MS, 2 * dt_ms / STEPS), max(LEASE_MS, 2 * dt_ms)
    return f"""\
# {arm.joints} joints, {len(arm.cameras)} cameras. ppstream explain KEY says what a key means.
name = "{arm.name}"

[[streams]]
name = "{JOINTS_NAME}"
dim = {arm.joints}
rate_hz = {arm.rate_hz:g}
reference = true        # its newest stamp ends the window
{_apart(arm.rate_hz)}{cameras}
[window]
steps = {STEPS}
dt_ms = {dt_ms:g}

[actions]
names = [{", ".join(f'"{name}"' for name in joints)}]
horizon = {STEPS}
dt_ms = {step_ms:g}
low = [{", ".join([f"{-LIMIT_RAD:g}"] * arm.joints)}]
high = [{", ".join([f"{LIMIT_RAD:g}"] * arm.joints)}]
lease_ms = {lease_ms:<12g} # no older action is executed

[policy]
target = "{target}"
# weights = "weights.safetensors"

[policy.options]
steps = {STEPS}
joints = {arm.joints}
horizon = {STEPS}
cameras = {{ {sizes} }}

[service]
endpoint = "unix:///tmp/ppstream-{{uid}}/robots"   # tcp://ADDRESS:PORT for robots on other hosts

[bringup]
# Ranks overlap A + C (here under a millisecond) with the policy. Take this away once both of yours
# are of similar length: next to a far longer one there is nothing to hide.
accept = {toml_value(ACCEPTABLE)}

[metrics]
port = 0                # a free one, on this host alone: for ppstream top
"""


def _apart(rate_hz: float) -> str:
    """A stream's ``max_gap_ms`` and ``max_age_ms``, where its samples are too far apart for the
    defaults.
    """
    gap_ms = GAPS * 1000 / rate_hz
    return "" if gap_ms <= GAP_MS else f"max_gap_ms = {gap_ms:g}\nmax_age_ms = {gap_ms:g}\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the files, asking for what no option says; returns the exit code."""
    args = _parser().parse_args(argv)
    try:
        arm = _arm_of(args)
        texts = files_of(arm)
        folder = Path(args.folder)
        there = [name for name in texts if (folder / name).exists()]
        if there:
            raise ConfigError([f"{folder / name}: exists already" for name in there])
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, text in texts.items():
                (folder / name).write_text(text)
        except OSError as error:
            what = error.filename or folder
            raise ConfigError([f"--folder: {what}: {error.strerror}"]) from error
    except ConfigError as error:
        print(error, file=sys.stderr)
        return int(error.exit_code)
    except (EOFError, KeyboardInterrupt):  # of who was asked
        print("\nppstream init: nothing was written", file=sys.stderr)
        return LEFT
    print(_next_steps(arm, folder, texts))
    return 0


def _next_steps(arm: Arm, folder: Path, names: Iterable[str]) -> str:
    steps = {
        f"ppstream run {arm.name}.toml": "the ranks, until Ctrl-C",
        f"python {arm.module}_robot.py {arm.name}.toml": "the robot, in another terminal",
        "ppstream top": "what both do now, in a third terminal",
        "ppstream report logs/latest": "what was fast, and what was not",
    }
    width = max(map(len, steps))
    lines = [f"{command:<{width}}   # {text}" for command, text in steps.items()]
    where = [] if folder == Path() else [f"cd {shlex.quote(str(folder))}"]
    return "\n".join([f"wrote {', '.join(names)}", "", *where, *lines])


def _arm_of(args: argparse.Namespace) -> Arm:
    """Reads the options; what they leave out it asks at the terminal, or takes a default.

    Raises:
        ConfigError: holds every value that cannot be.
    """
    ask = input if sys.stdin.isatty() and sys.stdout.isatty() else None
    joints = _said(args.joints, "joints", "6", ask, _is_count)
    rate = _said(args.rate_hz, "samples of the joints a second", "100", ask, _positive)
    cameras = args.cameras
    if cameras is None:
        cameras = _said(None, "cameras (names, or none)", "top wrist", ask, _are_names).split()
    cameras = [] if cameras == [NO_CAMERA] else cameras
    found = []
    if not NAME.fullmatch(args.name):
        found.append(f"NAME: got {args.name!r}, want {WANTED_NAME}")
    if not _is_count(joints):
        found.append(f"--joints: got {joints!r}, want a whole number, 1 to {JOINTS_MAX}")
    for name in cameras:
        if name == JOINTS_NAME:
            found.append(f"--cameras: got {name!r}, want another name: the joints' stream has it")
        elif not _is_name(name):
            found.append(f"--cameras: got {name!r}, want {WANTED_NAME}")
    if len(set(cameras)) != len(cameras):
        found.append(f"--cameras: got {' '.join(cameras)}, want each name once")
    size = SIZE.fullmatch(args.camera_size)
    if size is None or not all(1 <= int(side) <= 8192 for side in size.groups()):
        found.append(f"--camera-size: got {args.camera_size!r}, want HEIGHTxWIDTH, as 96x96")
    if (rate_hz := _positive(rate)) is None:
        found.append(f"--rate-hz: got {rate!r}, want a number above 0")
    if (frame_hz := _positive(args.frame_hz)) is None:
        found.append(f"--frame-hz: got {args.frame_hz!r}, want a number above 0")
    if found or size is None or rate_hz is None or frame_hz is None:
        raise ConfigError(found)
    height, width = map(int, size.groups())
    return Arm(args.name, int(joints), rate_hz, tuple(cameras), height, width, frame_hz)


def _is_name(text: str) -> bool:
    return NAME.fullmatch(text) is not None and text != JOINTS_NAME


def _said(
    option: str | None,
    what: str,
    default: str,
    ask: Callable[[str], str] | None,
    fits: Callable[[str], object],
) -> str:
    """The option, or an answer that fits: another one is asked for again."""
    if option is not None or ask is None:
        return option or default
    answer = ""
    while not answer or not fits(answer):
        if answer:
            print(f"  {answer!r} cannot be")
        answer = ask(f"{what} [{default}]: ").strip() or default
    return answer


def _is_count(text: str) -> bool:
    return text.isdecimal() and 1 <= int(text) <= JOINTS_MAX


def _are_names(text: str) -> bool:
    return all(map(_is_name, text.split()))


def _positive(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value < 1e5 else None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ppstream init",
        description="Write a run with a simulated arm and a small policy: four files to change. "
        "On a terminal it asks for what no option says.",
    )
    parser.add_argument("name", metavar="NAME", help="of the run and its files, such as my-arm")
    parser.add_argument("--folder", default=".", help="where they go (default: here)")
    parser.add_argument("--joints", metavar="N", help="default: 6")
    parser.add_argument("--rate-hz", metavar="HZ", help="of the joints (default: 100)")
    parser.add_argument(
        "--cameras", nargs="*", metavar="NAME", help="names, or none (default: top wrist)"
    )
    parser.add_argument(
        "--camera-size", default="96x96", metavar="HxW", help="default: %(default)s"
    )
    parser.add_argument("--frame-hz", default="30", metavar="HZ", help="default: %(default)s")
    return parser


if __name__ == "__main__":
    sys.exit(main())
