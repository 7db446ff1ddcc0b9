"""A policy in parts over real ranks: the twin's actions bit for bit, none outlives another."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from ranks import Ranks
from recording_files import made_recording
from robot_rig import wait_until

from ppstream.analysis.judge import judge
from ppstream.analysis.log_reader import read_run

pytestmark = pytest.mark.multirank

PARTS = (
    "policy.target=policy_in_parts:build",
    "pipeline.windows=scheduled",
    "service.duration_s=none",
)
SHAPE = "steps=8, dim=5, horizon=4, action_dim=2"
GONE_S = 2.5


def placed(*where: int) -> tuple[str, ...]:
    devices = ", ".join(['"cpu"'] * max(where))
    return f"placement.policy=[{devices}]", f"placement.parts={list(where)}"


def actions_of(
    root: Path, recording: Path, *settings: str, ranks: int, fails: str = ""
) -> tuple[dict[str, np.ndarray], list[str | None]]:
    """Actions by name, and why each envelope of the recording gave none."""
    out = root / "actions.npz"
    options = f'policy.options={{{SHAPE}, fails="{fails}"}}'
    files = (f"service.recording={recording}", f"service.actions_file={out}")
    with Ranks(root, *PARTS, options, *files, *settings, world_size=ranks) as run:
        assert run.wait() == [0] * ranks, run.output()
        drops = [line.get("drop") for line in run.envelopes("ready")]
    with np.load(out) as arrays:
        return dict(arrays), drops


@pytest.fixture(scope="module")
def twin(tmp_path_factory):
    folder = tmp_path_factory.mktemp("twin")
    recording = made_recording(folder / "recording.npz")
    found = {
        fails: actions_of(folder / f"inline{fails}", recording, ranks=1, fails=fails)
        for fails in ("", "first", "last")
    }
    return recording, found


@pytest.mark.parametrize(
    ("where", "settings", "fails"),
    [
        ((0, 1, 2), ("link.kind=host",), ""),
        ((0, 1, 2), ("link.kind=gloo", "pipeline.threads=split"), "first"),
        ((1, 2, 3), ("link.kind=host", "pipeline.threads=split"), "first"),
        ((1, 2, 3), ("link.kind=gloo",), "last"),
        ((0, 0, 1), (), "last"),
        ((1, 1, 2), (), ""),
    ],
    ids=str,
)
def test_parts_give_the_twin_s_actions_wherever_they_run(where, settings, fails, twin, tmp_path):
    recording, expected = twin
    actions, drops = actions_of(
        tmp_path / "ranks", recording, *placed(*where), *settings, ranks=max(where) + 1, fails=fails
    )
    assert drops == expected[fails][1]
    assert ("policy_error" in drops) == bool(fails)
    assert actions.keys() == expected[fails][0].keys()
    for name, array in actions.items():
        assert array.tobytes() == expected[fails][0][name].tobytes(), name
    assert len(actions["actions"]) > 20


@pytest.mark.parametrize(
    ("asked", "front_ms", "runs"),
    [("auto", 4, "split"), ("auto", 0, "serial"), ("serial", 4, "serial")],
)
def test_long_front_parts_split_rank_0_s_threads_unless_the_user_decides(
    asked, front_ms, runs, tmp_path
):
    parts = f"policy.options={{parts_ms=[{front_ms}, 1], horizon=4, action_dim=2}}"
    settings = (*placed(0, 1), parts, f"pipeline.threads={asked}")
    with Ranks(tmp_path, *settings) as run:
        assert run.wait() == [0, 0], run.output()
        about = json.loads((run.directory / "run.json").read_text())
        assert about["topology"]["threads"] == runs
        assert (f"threads {runs}: front parts take" in run.output()) == (asked == "auto")
        report = judge(read_run(run.directory))
        assert report.window.topology.threads == runs


CHAIN = (
    *placed(1, 2, 3),
    PARTS[0],
    f"policy.options={{{SHAPE}}}",
    "service.duration_s=none",
    "log.keep=1",
)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
@pytest.mark.parametrize("rank", range(4))
def test_no_rank_outlives_another_of_the_chain(rank, how, tmp_path):
    with Ranks(tmp_path, *CHAIN, world_size=4) as run:
        run.wait_for_event("phase", phase="ready")
        ends = [other for other in run.processes if other is not run.processes[rank]]
        os.kill(run.processes[rank].pid, how)
        limit_s = GONE_S + (0 if how == signal.SIGKILL else 2.0)  # silence has a limit of its own
        wait_until(lambda: all(other.poll() is not None for other in ends), seconds=limit_s)
        codes = {process.poll() for process in ends}
        assert codes <= {20, -signal.SIGKILL}, (codes, run.output())
        assert 20 in codes


def test_a_chain_drains_when_it_is_asked_to(tmp_path):
    with Ranks(tmp_path, *CHAIN, world_size=4) as run:
        run.wait_for_event("phase", phase="ready")
        run.processes[0].terminate()
        assert run.wait(10) == [0] * 4, run.output()
        lines = [len([x for x in run.lines(k) if x["kind"] == "stage1"]) for k in (1, 2, 3)]
        assert lines[0] == lines[1] == lines[2] > 100
