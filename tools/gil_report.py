"""Finds which threads wait for Python's lock: names a GIL convoy in a recording of py-spy.

    py-spy record --native --idle --threads --format raw --rate 200 --duration 10 -o FILE --pid PID
    python tools/gil_report.py FILE

A thread that wants the GIL sleeps in ``take_gil``, which is ``pthread_cond_timedwait`` where the
interpreter has no symbols of its own; Python's locks and sockets wait elsewhere. So native frames
tell the three states apart: runs, waits for the GIL, waits for something else.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

GIL_WAIT: Final = re.compile(r"\btake_gil\b|\bpthread_cond_(timed|clock)wait\b")
BLOCKED: Final = re.compile(
    r"\b(select|poll|ppoll|epoll_wait|(clock_)?nanosleep|sem_\w*wait|do_futex_wait|futex\w*|recv\w*|"
    r"accept\w*|read|connect|waitpid|pthread_cond_wait|wait4)\b[^;]*\(lib|acquire_lock"
)
NATIVE: Final = re.compile(r"^(0x[0-9a-f]+|.*\((lib|.*\.so|.*\.c:))")
CONVOY_WAIT_MIN: Final = 0.10  # of a thread's time spent on waiting for the GIL
CONVOY_HOLD_MIN: Final = 0.30  # of the time that another thread runs
#: Threads of a rank that nobody waits for; all others may be on the critical path.
BACKGROUND: Final = ("timestamps", "heartbeat", "health", "lookout", "memory", "watchdog")
BAD_INPUT: Final = 3


class Thread(NamedTuple):
    """One thread's samples; the three states make up all of them."""

    name: str
    samples: int
    runs: int
    wants: int
    wants_at: Counter[str]  # Python frame that was to go on
    runs_at: Counter[str]


def threads_of(path: Path) -> list[Thread]:
    """All threads of a recording, the most sampled first.

    Raises:
        ValueError: the file is no raw recording of py-spy with threads and native frames.
    """
    states: dict[str, Counter[str]] = defaultdict(Counter)
    places: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    names: dict[str, str] = {}
    native = False
    for line in path.read_text(errors="replace").splitlines():
        stack, _, count = line.rpartition(" ")
        frames = stack.split(";")
        if not count.isdigit() or not frames[0].startswith("thread"):
            raise ValueError(f"{path}: not py-spy's --format raw with --threads: {line[:60]!r}")
        native = native or any(map(NATIVE.match, frames[1:]))
        thread, _, name = frames[0].partition(": ")
        names[thread] = name or names.get(thread, thread)  # it is sampled before it has its name
        state = _state(frames)
        states[thread][state] += int(count)
        places[thread, state][_python_frame(frames)] += int(count)
    if not states:
        raise ValueError(f"{path}: no samples")
    if not native:
        raise ValueError(f"{path}: no native frames: record with --native, else no wait has a name")
    found = [
        Thread(names[t], c.total(), c["runs"], c["wants"], places[t, "wants"], places[t, "runs"])
        for t, c in states.items()
    ]
    return sorted(found, key=lambda thread: -thread.samples)


def _state(frames: Sequence[str]) -> str:
    tail = ";".join(frames[-4:])  # below the waiting call there are some unnamed frames
    if GIL_WAIT.search(tail):
        return "wants"
    return "blocked" if BLOCKED.search(tail) else "runs"


def _python_frame(frames: Sequence[str]) -> str:
    return next((f for f in reversed(frames[1:]) if re.search(r"\.py:\d+\)$", f)), "?")


def lines(threads: Sequence[Thread]) -> Iterator[str]:
    """The verdict first, then every thread."""
    ticks = threads[0].samples
    holders = sorted(threads, key=lambda t: -t.runs)
    named = False
    for thread in threads:
        others = [t for t in holders if t is not thread and t.runs >= CONVOY_HOLD_MIN * ticks]
        if thread.wants >= CONVOY_WAIT_MIN * ticks and others and not is_background(thread):
            named = True
            (at, _), (by, _) = (
                thread.wants_at.most_common(1)[0],
                others[0].runs_at.most_common(1)[0],
            )
            share = f"{thread.wants / ticks:.0%} of the time"
            yield (
                f"GIL CONVOY: {thread.name} spends {share} waiting for the GIL at {at}, "
                f"while {others[0].name} runs {by}"
            )
    if not named:
        yield "no GIL convoy: no thread waits for the lock while another one keeps it"
    yield ""
    yield f"{'thread':32} {'runs':>7} {'wants GIL':>10} {'waits':>7}"
    for thread in threads:
        rest = thread.samples - thread.runs - thread.wants
        shares = (thread.runs / ticks, thread.wants / ticks, rest / ticks)
        yield f"{thread.name:32} {shares[0]:7.0%} {shares[1]:10.0%} {shares[2]:7.0%}"


def is_background(thread: Thread) -> bool:
    return thread.name.startswith(BACKGROUND)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("recording", type=Path, help="py-spy's --format raw")
    options = parser.parse_args(argv)
    try:
        threads = threads_of(options.recording)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return BAD_INPUT
    for line in lines(threads):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
