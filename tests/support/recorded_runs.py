"""Runs that are brought up on a recording of an arm, and what the model says of their scores."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ranks import END_LIMIT_S, Ranks

from ppstream.analysis.judge import judge
from ppstream.analysis.log_reader import read_run
from ppstream.analysis.run_report import RunReport
from ppstream.core.clock import NS_PER_S
from ppstream.core.errors import ExitCode
from ppstream.recording.load import load_recording

CONFIG = Path(__file__).parents[2] / "stages" / "ppstream_stages" / "recorded_arm.toml"
DATA = os.environ.get("PPSTREAM_TEST_DATA")
STREAMS = ("q", "dq", "tau", "tau_ext", "ee_pose")
REFERENCE, RATE_HZ = "q", 957
SAMPLES = 10_000  # about ten seconds
LAPS_MAX = 50


def arm_recording(folder: Path) -> Path:
    """The arm's real recording where there is one, else one drawn with its shape and jitter."""
    if DATA is not None:
        return Path(DATA) / "franka_fr3_1khz.npy"
    rng = np.random.default_rng(5)
    stamps_ns = np.cumsum(rng.uniform(0.3e6, 1.8e6, SAMPLES)).astype(np.int64) + 10**15
    arrays = {}
    for name in STREAMS:
        arrays[f"{name}.stamps_ns"] = stamps_ns
        arrays[f"{name}.values"] = rng.normal(size=(SAMPLES, 7)).astype(np.float32)
    np.savez(folder / "arm.npz", **arrays)
    return folder / "arm.npz"


def played(
    root: Path,
    recording: Path,
    *settings: str,
    ranks: int = 2,
    limit_s: float = END_LIMIT_S,
    **options: Any,
) -> tuple[dict[str, np.ndarray[Any, Any]], list[str | None]]:
    """Serves a recording: its actions by name, and why each envelope gave none.

    ``options`` are those of ``Ranks``.
    """
    out = root / "actions.npz"
    files = (f"service.recording={recording}", f"service.actions_file={out}")
    with Ranks(root, *files, *settings, world_size=ranks, **options) as run:
        assert run.wait(limit_s) == [0] * ranks, run.output()
        drops = [line.get("drop") for line in run.envelopes("ready")]
    with np.load(out) as arrays:
        return dict(arrays), drops


class Depth(NamedTuple):
    """What bring-up did with this many envelopes in flight."""

    codes: list[int]
    report: RunReport
    output: str
    ends_ns: set[int]  # of its windows, by the robot's clock

    @property
    def hidden_ns(self) -> float:
        """Of the stages' time of an envelope: how much the others hide."""
        assert self.report.primary is not None, self.output
        return self.report.primary.sigma_ns / self.report.primary.n - self.report.primary.period_ns

    @property
    def expected_s(self) -> float:
        """The overlap that the model's period would be."""
        score, model = self.report.primary, self.report.model
        assert score is not None, self.output
        assert model is not None, self.output
        all_ns, longest_ns = score.sigma_ns / score.n, score.max_ns / score.n
        return (all_ns - model.period_ns) / (all_ns - longest_ns)


def brought_up(root: Path, recording: Path, depth: int, *settings: str) -> Depth:
    """Two ranks of the recorded arm with D_in = D_out = ``depth``, to their ends."""
    own = (
        f"bringup.recording={recording}",
        f"pipeline.d_in={depth}",
        f"pipeline.d_out={depth}",
        "service.endpoint=none",
        "service.duration_s=0.2",
    )
    with Ranks(root, *own, *settings, config=CONFIG, judged=True) as ranks:
        codes = ranks.wait(90)
        ends_ns = {line["window_end_ns"] for line in ranks.envelopes("bring-up")}
        return Depth(codes, judge(read_run(ranks.directory)), ranks.output(), ends_ns)


def assert_played(run: Depth, recording: Path) -> None:
    """Its windows end where the recording has samples, in whatever lap."""
    played = load_recording(recording)
    lap_ns = played.last_ns - played.first_ns + round(NS_PER_S / RATE_HZ)
    stamps_ns = played.tracks[REFERENCE].stamps_ns
    laps_ns = {int(stamp) + lap * lap_ns for lap in range(LAPS_MAX) for stamp in stamps_ns}
    assert len(run.ends_ns) > 50, run.output
    assert run.ends_ns <= laps_ns, run.output


def assert_as_the_model_says(one: Depth, two: Depth, gap_max: float) -> None:
    """D = 1 hides only stage C and the gate says so; D = 2 overlaps and passes.

    ``gap_max``: of the measured period to the model's, either way.
    """
    for run in (one, two):
        report = run.report
        assert all(audit.ok is not False for audit in report.audits.values()), run.output
        assert report.model is not None
        assert abs(report.model.gap) <= gap_max, run.output
        assert report.primary is not None
        assert report.primary.s is not None
        tolerance = gap_max * report.primary.period_ns / hideable_ns(report)
        assert abs(report.primary.s - run.expected_s) <= tolerance, run.output
    assert one.codes == [ExitCode.GATE_FAIL] * 2, one.output
    assert one.report.reasons[0] == "LOW_OVERLAP", one.output
    assert one.report.model is not None
    assert one.report.model.formula == "(A + x_in + B + x_out) / D_in"
    assert one.report.primary is not None
    slack_ns = gap_max * one.report.primary.period_ns
    assert one.hidden_ns <= one.report.primary.times.c + slack_ns  # nothing else is
    assert two.codes == [ExitCode.DRAINED] * 2, two.output
    assert two.report.verdict.name == "PASS", two.output
    assert two.hidden_ns > 2 * one.hidden_ns


def hideable_ns(report: RunReport) -> float:
    """Of an envelope: what ideal overlap would hide."""
    assert report.primary is not None
    return (report.primary.sigma_ns - report.primary.max_ns) / report.primary.n
