"""What a start says of its waits, by a clock that is passed in."""

from __future__ import annotations

import threading
from io import StringIO

from robot_rig import wait_until

from ppstream.core.clock import NS_PER_S
from ppstream.launch.progress import CLEAR, NO_WRAP, WRAP, Progress, Wait

BUILD = "the build of my_policy:build"


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def told(stream: StringIO, waits: list[Wait | None]) -> str:
    """What it writes of these waits, one a second."""
    seconds = iter(waits)
    progress = Progress(lambda _now: next(seconds), "rank 1", stream)
    for second in range(len(waits)):
        progress.tick(second * NS_PER_S)
    return stream.getvalue()


def test_a_short_wait_is_worth_no_word() -> None:
    assert told(Terminal(), [Wait(BUILD), Wait(BUILD), Wait("the link"), Wait("the link")]) == ""


def test_a_terminal_has_one_line_that_is_written_again_and_cleared() -> None:
    lines = told(Terminal(), [*[Wait("bring-up", f"{k} of 9 envelopes") for k in range(5)], None])
    begin = f"{CLEAR}{NO_WRAP}ppstream: rank 1: bring-up: "
    assert lines == "".join(f"{begin}{k} of 9 envelopes{WRAP}" for k in (2, 3, 4)) + CLEAR


def test_a_pipe_gets_whole_lines_and_few() -> None:
    lines = told(StringIO(), [Wait(BUILD)] * 25)
    begin = f"ppstream: rank 1: {BUILD}: for"
    assert lines.splitlines() == [f"{begin} 2 s", f"{begin} 12 s", f"{begin} 22 s"]


def test_each_wait_is_timed_by_itself() -> None:
    lines = told(StringIO(), [Wait("a")] * 4 + [Wait("b")] * 4)
    assert lines.splitlines() == [
        "ppstream: rank 1: a: for 2 s",
        "ppstream: rank 1: b: for 2 s",
    ]


class Closed(Terminal):
    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")


def test_a_terminal_that_was_closed_disturbs_nobody() -> None:
    assert told(Closed(), [Wait(BUILD)] * 5) == ""


def test_its_thread_ends_when_the_start_is_over() -> None:
    asked = threading.Event()

    def wait(_now: int) -> Wait | None:
        asked.set()
        raise StopIteration

    before = threading.active_count()
    with Progress(wait, "rank 0", StringIO()):
        assert asked.wait(30)
        wait_until(lambda: threading.active_count() == before)
