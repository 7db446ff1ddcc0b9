"""Batches of as many rows as robots are there: graphs, a run, and a policy cut over two GPUs."""

from __future__ import annotations

import signal
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from counting_rows import CALLS_MAX, ROWS_MAX, Policy
from ranks import Ranks

from ppstream.config.schema import PolicyConfig
from ppstream.policy.graphed import prepared_policy
from ppstream.policy.unwritten import INTEGERS, Results
from ppstream.robot.client import RobotClient
from ppstream_stages import act

CUDA = torch.device("cuda", 0)
CONFIG = Path(__file__).parents[2] / "stages" / "ppstream_stages" / "bench_gpus.toml"
ROWS = 4
ROUNDS = 20
SETTINGS = (
    f"policy.options={{kernels=1000, rows={ROWS}}}",
    f"batch.rows={ROWS}",
    "pipeline.pacing=rows",
    "pipeline.gather_ms=2000",
    "simulate.a_ms=0",
    "simulate.c_ms=0",
    "bringup.envelopes=200",
    "bringup.standalone=5",
    "actions.lease_ms=5000",
    "service.duration_s=600",
    'bringup.accept=["NOTHING_TO_HIDE", "LOW_OVERLAP", "CONTENDED"]',
)
ALONE = ("placement.policy=cuda:0", "policy.target=counting_rows:build")
CUT_IN_TWO = (
    "placement.rank0=cuda:0",
    "placement.policy=cuda:1",
    "placement.parts=[0, 1]",
    "policy.target=counting_rows:build_parts",
)
GRAPHS = pytest.mark.parametrize("graph", ["true", "false"], ids=["graphs", "eager"])
READY_LIMIT_S, ANSWER_LIMIT_S = 150, 20.0
STREAMS = [("joints", 14), ("vision", 256)]

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
]


def tensors(policy: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    window = {spec.name: torch.rand(ROWS, *spec.shape, device=CUDA) for spec in policy.inputs}
    window = {
        spec.name: (window[spec.name] + 0.5).to(getattr(torch, spec.dtype))
        for spec in policy.inputs
    }
    return window, {
        spec.name: torch.zeros(ROWS, *spec.shape, device=CUDA) for spec in policy.outputs
    }


def test_each_size_has_a_graph_of_its_own_that_leaves_the_fill_behind_its_rows() -> None:
    shape = {"steps": 2, "dim": 3, "streams": 1, "horizon": 4, "action_dim": 3, "width": 128}
    (policy,) = act.build(shape, CUDA)
    policy.load()
    graphed: Any = prepared_policy(policy, PolicyConfig(target="a:b"), CUDA)
    window, out = tensors(policy)
    for rows in (None, 1, 2):
        graphed.prepare(window, out, rows)
    graphed.seal()
    graphed(window, out, None)
    whole = out["actions"].clone()
    results = Results(INTEGERS)
    for rows in (1, 2, 1):
        graphed(window, out, rows)
        torch.cuda.synchronize()
        made = out["actions"].cpu()
        torch.testing.assert_close(made[:rows], whole[:rows].cpu(), rtol=0, atol=2e-2)
        assert made[rows:].isnan().all()  # no older actions
        slot = type("Slot", (), {"tensors": {"actions": made}})()
        assert results.unwritten(slot, [row < rows for row in range(ROWS)]) == ""
        assert "actions" in results.unwritten(slot, [row <= rows for row in range(ROWS)])
        results = Results(INTEGERS)
    assert graphed.statistics() == (3, 4, 0)


def test_a_row_s_memory_lasts_through_other_sizes() -> None:
    policy = Policy({"kernels": 2, "rows": ROWS}, CUDA)
    graphed: Any = prepared_policy(policy, PolicyConfig(target="a:b"), CUDA)
    window, out = tensors(policy)
    for rows in (None, 1, 2):
        graphed.prepare(window, out, rows)
    graphed.reset(torch.ones(ROWS, dtype=torch.bool, device=CUDA))
    for rows in (2, 1, None, 1):
        graphed(window, out, rows)
    assert policy.calls.tolist() == [4, 2, 1, 1]


class AskingRobot:
    """Asks again at each answer; keeps what it was told."""

    def __init__(self, endpoint: str, number: int) -> None:
        self.value = (number + 1) / 10
        self.told: list[np.ndarray[Any, Any]] = []
        names = [f"j{n}" for n in range(1, 8)]
        self.client = RobotClient(endpoint, robot=f"r{number}", streams=STREAMS, actions=names)

    def ask(self) -> None:
        for _ in range(ROUNDS):
            given = np.full(14, self.value, np.float32)
            samples = {"vision": np.zeros(256, np.float32), "joints": given}
            self.told.append(np.array(self.client.ask(samples, ANSWER_LIMIT_S).actions[0]))

    def rows_at(self, action: int) -> list[int]:
        """With how many rows the part was called that tells so by this action."""
        return [round(float(told[action]) * ROWS_MAX) for told in self.told]


def together(*robots: AskingRobot) -> None:
    threads = [threading.Thread(target=robot.ask) for robot in robots]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def come_and_go(
    tmp_path: Path, *settings: str
) -> tuple[AskingRobot, AskingRobot, list[list[dict[str, Any]]]]:
    """A robot that is there all the time, one that is there meanwhile, and both ranks' lines.

    Each is told its own value, and its own calls.
    """
    endpoint = f"unix://{tmp_path}/r"
    asked = (*SETTINGS, *settings, f"service.endpoint={endpoint}")
    with Ranks(tmp_path, *asked, config=CONFIG) as ranks:
        ranks.wait_for_event("phase", READY_LIMIT_S, phase="ready")
        first, second = AskingRobot(endpoint, 0), AskingRobot(endpoint, 1)
        with first.client as client:
            client.connect(ANSWER_LIMIT_S)
            assert client.wait_ready(ANSWER_LIMIT_S), ranks.output()
            first.ask()
            with second.client as other:
                other.connect(ANSWER_LIMIT_S)
                assert other.wait_ready(ANSWER_LIMIT_S)
                together(first, second)
            first.ask()
        for process in ranks.processes:
            process.send_signal(signal.SIGTERM)
        assert ranks.wait() == [0, 0], ranks.output()
        lines = [ranks.lines(rank) for rank in range(2)]
    for robot, rounds in ((first, 3 * ROUNDS), (second, ROUNDS)):
        assert len(robot.told) == rounds
        assert {round(float(told[0]), 5) for told in robot.told} == {round(robot.value, 5)}
        calls = [float(told[1]) * CALLS_MAX for told in robot.told]
        assert all(later > sooner for sooner, later in pairwise(calls))
    return first, second, lines


def assert_smallest(lines: list[dict[str, Any]]) -> None:
    """Stage B was called with the fewest rows that hold the robots that come and go."""
    stages = [line for line in lines if line["kind"] == "stage1"]
    served = [line["rows"] for line in stages if line["phase"] == "ready" and not line.get("drop")]
    assert {line["rows"] for line in stages if line["phase"] == "bring-up"} == {ROWS}
    assert set(served) == {1, 2}
    assert served[:5] == [1] * 5
    assert served[-5:] == [1] * 5


@GRAPHS
def test_robots_that_come_and_go_are_answered_by_the_smallest_batch(
    graph: str, tmp_path: Path
) -> None:
    *_, lines = come_and_go(tmp_path, *ALONE, f"policy.graph={graph}")
    assert_smallest(lines[1])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="a cut over two GPUs")
@GRAPHS
def test_a_part_on_rank_0_has_the_smallest_batch_as_those_behind_it(
    graph: str, tmp_path: Path
) -> None:
    first, second, lines = come_and_go(tmp_path, *CUT_IN_TWO, f"policy.graph={graph}")
    assert_smallest(lines[1])
    in_front, behind = first.rows_at(2), first.rows_at(3)
    assert in_front[:ROUNDS] == [1] * ROUNDS
    assert set(in_front) == {1, 2}
    assert in_front[-5:] == [1] * 5
    assert set(second.rows_at(2)) == {2}
    assert all(made >= read for made, read in zip(in_front, behind, strict=True))
    if graph == "true":
        (recorded,) = (line for line in lines[0] if line.get("name") == "policy_graphs")
        (ahead,) = (line for line in lines[1] if line.get("name") == "run_ahead")
        assert recorded["graphs"] == 3 * ahead["slots"]  # of each slot one for 1, 2 and 4 rows
        assert ahead["envelopes"] == 0
