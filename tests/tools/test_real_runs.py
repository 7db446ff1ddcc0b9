from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from real_runs import RankPair, ending_cleanly


@pytest.mark.multirank
def test_ranks_that_do_not_end_are_named_with_their_output_and_none_outlives_the_block(
    tmp_path: Path,
) -> None:
    ranks = RankPair(tmp_path, "bench", ["service.endpoint=none", "service.duration_s=600"])

    def waits_too_short() -> None:
        with ranks:
            assert all(process.poll() is None for process in ranks.processes)
            ranks.wait(0.1)

    with pytest.raises(SystemExit, match=r"no end within 0.1 s"):
        waits_too_short()
    assert all(process.poll() is not None for process in ranks.processes)


def test_sigterm_leaves_with_blocks_as_ctrl_c_does() -> None:
    left = []

    def terminated() -> None:
        with ending_cleanly():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                signal.pause()
            finally:
                left.append(True)

    with pytest.raises(SystemExit) as ended:
        terminated()
    assert left
    assert ended.value.code == 130
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
