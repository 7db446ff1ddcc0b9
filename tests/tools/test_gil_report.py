from pathlib import Path
from typing import Any

import gil_report
import pytest

GOLDEN = Path(__file__).parents[1] / "golden"
CONVOY = GOLDEN / "pyspy-convoy.raw"  # a loop beside a thread of pure Python, switch interval 5 ms
HEALTHY = GOLDEN / "pyspy-healthy.raw"  # the same beside a thread that hashes without the lock


def test_recorded_convoy_is_named_with_both_threads(capsys: Any) -> None:
    assert gil_report.main([str(CONVOY)]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("GIL CONVOY: loop spends 54% of the time waiting for the GIL at loop")
    assert "while decoder runs decode" in first


def test_two_busy_threads_that_share_no_lock_are_no_convoy(capsys: Any) -> None:
    assert gil_report.main([str(HEALTHY)]) == 0
    assert capsys.readouterr().out.startswith("no GIL convoy")


def test_states_of_a_thread_make_up_its_samples() -> None:
    threads = {thread.name: thread for thread in gil_report.threads_of(CONVOY)}
    assert set(threads) == {"MainThread", "decoder", "loop"}  # one each, named or not yet
    assert threads["decoder"].runs > 0.8 * threads["decoder"].samples
    assert threads["loop"].wants > threads["loop"].runs
    assert all(t.runs + t.wants <= t.samples for t in threads.values())


@pytest.mark.parametrize("name", gil_report.BACKGROUND)
def test_background_threads_of_a_rank_are_never_called_a_convoy(name: str, tmp_path: Path) -> None:
    sources = (GOLDEN.parent.parent / "ppstream").rglob("*.py")
    assert any(f'name="{name}"' in source.read_text() for source in sources)
    text = CONVOY.read_text().replace(": loop", f": {name}")
    (tmp_path / "raw").write_text(text)
    found = list(gil_report.lines(gil_report.threads_of(tmp_path / "raw")))
    assert found[0].startswith("no GIL convoy")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no samples"),
        ("loop (a.py:1);wait (b.py:2) 7\n", "not py-spy's --format raw"),
        ("thread (1): loop;loop (a.py:1) 7\n", "record with --native"),
    ],
)
def test_recordings_that_cannot_tell_are_refused(
    tmp_path: Path, capsys: Any, text: str, said: str
) -> None:
    (tmp_path / "raw").write_text(text)
    assert gil_report.main([str(tmp_path / "raw")]) == 3
    assert said in capsys.readouterr().err
