"""``ppstream resample``: recordings in, a data set out; progress, summary and exit code."""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from ppstream.config.load import add_arguments, load
from ppstream.core.errors import INTERRUPTED, ConfigError, PpstreamError, counted
from ppstream.recording.load import FORMS

if TYPE_CHECKING:
    from ppstream.data.job import InputRecord, JobEnd, Told

ACTION: Final = "action"  # the group that becomes LeRobot's column
SKIPPED: Final = 3  # exit code: the data set is there, without inputs that could not be read


class Shard(NamedTuple):
    """The share of one of several processes that make a data set together."""

    number: int
    of: int


def resample(arguments: argparse.Namespace) -> tuple[str, int]:
    """Make the data set; returns what to tell about it, and the exit code."""
    from ppstream.data.inputs import find_inputs, shard_of
    from ppstream.data.job import ResampleJob
    from ppstream.data.outputs import DataSettings

    config = load(arguments)
    inputs = find_inputs(arguments.inputs)
    settings = DataSettings(
        config, arguments.format, arguments.content, arguments.task, arguments.frames
    )
    job = ResampleJob(arguments.out, inputs, settings)
    is_first = arguments.shard.number == 0
    if is_first and arguments.format == "lerobot-v3" and ACTION not in config.groups:
        names = ", ".join(stream.name for group in config.groups.values() for stream in group)
        print(
            f"resample: the data set has no column {ACTION!r}, which training wants: of the "
            f'streams {names} none has group = "{ACTION}"; add what the robot was told as one',
            file=sys.stderr,
        )
    numbers = shard_of(inputs, *arguments.shard)
    jobs = arguments.jobs or min(os.cpu_count() or 1, len(numbers) or 1)
    with _progress(len(numbers)) as told:
        end = job.run(numbers, jobs, arguments.on_error, told)
    text = summary(end, arguments.out)
    return text, SKIPPED if any(record.error for record in end.records) else 0


def summary(end: JobEnd, out: Path) -> str:
    """A table of inputs by what became of them, and each that is not as it should be."""
    whole = [record for record in end.records if not record.error]
    skipped = [record for record in end.records if record.error]
    lines = [
        f"{'inputs':<22}{len(end.records) + end.missing:>10}",
        f"{'  in the data set':<22}{len(whole):>10}",
        f"{'  skipped':<22}{len(skipped):>10}",
        f"{'  left to other shards':<22}{end.missing:>10}",
        f"{'windows':<22}{sum(record.windows for record in whole):>10}",
    ]
    for group, (bad, total) in _invalid(whole).items():
        lines.append(f"{'  invalid in ' + group:<22}{bad / max(1, total):>10.2%} of targets")
    if short := sum(record.too_short for record in whole):
        lines.append(f"{'too short stretches':<22}{short:>10}")
    for topic, frames in _frames_written(whole).items():
        lines.append(f"{'frames':<22}{frames:>10} of {topic}")
    for topic, frames in _frames_left(whole).items():
        lines.append(f"{'frames left out':<22}{frames:>10} of {topic}: they stay in the recordings")
    lines += [f"skipped {record.name}: {record.error}" for record in skipped]
    lines += [f"note on {record.name}: {note}" for record in end.records for note in record.notes]
    lines.append(
        f"{out}: complete" if end.is_merged else f"{out}: waits for other shards, which merge it"
    )
    return "\n".join(lines)


def _invalid(records: Sequence[InputRecord]) -> dict[str, list[int]]:
    counts: dict[str, list[int]] = {}
    for record in records:
        for group, (bad, total) in (record.summary or {}).get("invalid", {}).items():
            one = counts.setdefault(group, [0, 0])
            one[0] += bad
            one[1] += total
    return counts


def _frames_written(records: Sequence[InputRecord]) -> Counter[str]:
    """By topic, as ``_frames_left``."""
    found: Counter[str] = Counter()
    for record in records:
        found.update((record.summary or {}).get("frames", {}))
    return found


def _frames_left(records: Sequence[InputRecord]) -> Counter[str]:
    """By topic, in the order in which they were found."""
    found: Counter[str] = Counter()
    for record in records:
        found.update(record.frames_left or {})
    return found


@contextmanager
def _progress(total: int) -> Iterator[Told]:
    """On a terminal a bar; in a pipe a line for each input."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

        columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task("resample", total=total)

            def advance(record: InputRecord, done: int) -> None:
                if record.error:
                    bar.console.print(_line(record), markup=False)
                bar.update(task, completed=done)

            yield advance
        return

    def tell(record: InputRecord, done: int) -> None:
        print(f"resample: {done}/{total} {_line(record)}", file=sys.stderr, flush=True)

    yield tell


def _line(record: InputRecord) -> str:
    return f"{record.name}: {record.error or counted(record.windows, 'window')}"


def _shard(text: str) -> Shard:
    number, slash, of = text.partition("/")
    if slash and number.isdigit() and of.isdigit() and 0 <= int(number) < int(of):
        return Shard(int(number), int(of))
    raise argparse.ArgumentTypeError(f"got {text!r}, want K/N with K of 0..N-1, as 0/4")


def _default_shard() -> Shard:
    """torchrun's, or the only one."""
    rank, world = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    try:
        return _shard(f"{rank}/{world}")
    except argparse.ArgumentTypeError as error:
        raise ConfigError([f"RANK/WORLD_SIZE: {error}"]) from error


def _jobs(text: str) -> int:
    if text.isdigit() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"got {text!r}, want a number above 0")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ppstream resample",
        description="Resample recordings to a data set, as a live run resamples its sensors.",
        epilog=f"Exit code {SKIPPED}: the data set is there, without inputs that were skipped.",
    )
    parser.add_argument(
        "inputs",
        metavar="IN",
        type=Path,
        nargs="+",
        help=f"recordings: {FORMS}; the folder of a LeRobotDataset v3; or a folder of such files",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the data set")
    parser.add_argument("--format", choices=("lerobot-v3", "safetensors"), default="lerobot-v3")
    parser.add_argument(
        "--content",
        choices=("windows", "episodes"),
        default="windows",
        help="windows as a run cuts them live, or whole episodes at one rate, where each frame "
        "knows the samples behind it, too (default: %(default)s)",
    )
    parser.add_argument(
        "--frames",
        choices=("write", "leave"),
        default="write",
        help="cameras' frames are a part of the data set, or stay in the recordings, and are named "
        "by their numbers (default: %(default)s)",
    )
    parser.add_argument("--task", default="", help="task of inputs that name none")
    parser.add_argument("--jobs", type=_jobs, help="processes (default: one for each CPU)")
    parser.add_argument(
        "--on-error",
        choices=("skip", "fail"),
        default="fail",
        help="an input that cannot be read is left out and named, or ends the job "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--shard",
        type=_shard,
        metavar="K/N",
        help="make every N-th input, from the K-th on (default: torchrun's RANK and WORLD_SIZE)",
    )
    add_arguments(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 3 with skipped inputs, or that of the error, told on stderr."""
    arguments = _parser().parse_args(argv)
    try:
        arguments.shard = arguments.shard or _default_shard()
        text, code = resample(arguments)
    except PpstreamError as error:
        print(f"resample: {error}", file=sys.stderr)
        return int(error.exit_code)
    except KeyboardInterrupt:
        print(
            "resample: interrupted; the same command goes on with what is missing", file=sys.stderr
        )
        return INTERRUPTED
    print(text)
    return code


if __name__ == "__main__":
    sys.exit(main())
