from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipeline_in_process import NewestValues, PipelineInProcess, small_config
from robot_rig import wait_until

from ppstream.wire.rank_messages import Measure


def policy_lines(folder: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "rank1.gen0.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "stage1"]


def test_the_newest_envelope_is_accounted_for_in_a_pause(tmp_path: Path) -> None:
    with PipelineInProcess(small_config(), NewestValues(), tmp_path) as pipeline:
        pipeline.saturate()
        pipeline.rank0.run(3)
        wait_until(lambda: len(policy_lines(tmp_path)) == 3)
        assert [line["seq"] for line in policy_lines(tmp_path)] == [0, 1, 2]


def test_who_asks_for_what_was_measured_gets_the_newest_envelope_too(tmp_path: Path) -> None:
    with PipelineInProcess(small_config(), NewestValues(), tmp_path) as pipeline:
        pipeline.saturate()
        pipeline.rank0.run(3)
        pipeline.front.send(Measure(0))
        wait_until(lambda: len(policy_lines(tmp_path)) == 3)
        assert len(pipeline.policy_loop.measure(0)) == 3


def test_a_line_tells_of_its_own_envelope(tmp_path: Path) -> None:
    with PipelineInProcess(small_config(), NewestValues(), tmp_path) as pipeline:
        pipeline.saturate()
        pipeline.rank0.run(9)
        ours = pipeline.envelopes()
    pairs = [*zip(ours, policy_lines(tmp_path), strict=True)]
    for rank0, policy in pairs:
        assert (rank0["epoch"], rank0["seq"]) == (policy["epoch"], policy["seq"])
        assert rank0["tSend"] <= policy["tB0"] <= policy["tB1"] <= policy["tOut"] <= rank0["tRecv"]
