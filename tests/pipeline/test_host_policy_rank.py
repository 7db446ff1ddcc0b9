from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pipeline_in_process import NewestValues, PipelineInProcess, small_config
from robot_rig import wait_until

from ppstream.core.clock import NS_PER_S, now_ns
from ppstream.pipeline import host_policy_rank
from ppstream.pipeline.host_policy_rank import MESH_SPARE_NS
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


def test_an_envelope_that_had_to_wait_makes_no_silence_of_a_heart_that_beats(
    tmp_path: Path,
) -> None:
    """It was rung for before the policy, or a prompt that it takes up, stood for a while."""
    beat_ns = now_ns() + 3600 * NS_PER_S
    found: list[int] = []

    def act(call: int) -> None:
        peer = pipeline.policy_loop.peer
        if call == 0:
            peer.last_heard_ns = beat_ns
        found.append(peer.last_heard_ns)

    with PipelineInProcess(small_config(), NewestValues(act), tmp_path) as pipeline:
        pipeline.saturate()
        pipeline.rank0.run(3)
    assert found == [beat_ns] * 3


def test_who_has_waited_for_its_mesh_is_spared_until_its_envelope_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collective that another rank's end breaks is left some time before it has raised."""
    limits_ns: list[list[int]] = []

    def act(_: int) -> None:
        found = []
        for waits in (False, True, False):
            monkeypatch.setattr(
                host_policy_rank, "waits_for_collective", lambda _, is_in=waits: is_in
            )
            found.append(pipeline.policy_loop.standstill_ns)
        limits_ns.append(found)

    with PipelineInProcess(
        small_config("placement.mesh=2"), NewestValues(act), tmp_path
    ) as pipeline:
        pipeline.saturate()
        pipeline.rank0.run(3)
    usual_ns = limits_ns[0][0]
    assert limits_ns == [[usual_ns, usual_ns + MESH_SPARE_NS, usual_ns + MESH_SPARE_NS]] * 3
