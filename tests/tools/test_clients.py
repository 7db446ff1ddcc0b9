"""The comparison with clients of openpi: what it counts as an answer, and how it judges."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from bench import clients, peers_robot
from bench.clients import OPENPI, ROWS, ClientsCell
from bench.peers_work import ACTION_DIM, Array, observation, policy
from bench.policies import build_on_gpu

from ppstream.config.load import read


class Robot:
    """Answers as a server of the peers' works would, or with an older observation's actions."""

    def __init__(self, *, is_late: bool) -> None:
        self._infer = policy("none")
        self._is_late = is_late
        self._before = np.zeros(ACTION_DIM, np.float32)
        self.asked = 0

    def ask(self, given: dict[str, Array]) -> Array:
        self.asked += 1
        actions, before = self._infer(given["state"]).copy(), self._before
        self._before = actions
        return before if self._is_late else actions


def test_each_answer_is_timed_and_is_of_its_own_observation() -> None:
    robot = Robot(is_late=False)
    taken_ns = peers_robot.closed(robot, observation("none"), seconds=0.01, mark=0.5)
    assert len(taken_ns) == robot.asked
    assert all(began <= there for began, there, _ in taken_ns)
    with pytest.raises(SystemExit, match="was answered with"):
        peers_robot.closed(Robot(is_late=True), observation("none"), seconds=0.01, mark=0.5)


def test_eight_clients_are_judged_against_one_of_the_same_round() -> None:
    rates = [(20.0, 150.0), (25.0, 100.0), (10.0, 80.0)]
    found = [
        ClientsCell(number, ROWS, count, rate, 10.0 * count, 99.0, 100, 0.0, 0.0)
        for number, both in enumerate(rates)
        for count, rate in zip((1, 8), both, strict=True)
    ]
    found += [
        ClientsCell(0, OPENPI, 8, 1e6, 1.0, 1.0, 1, 0.0, 0.0),
        ClientsCell(9, ROWS, 8, 1e6, 1.0, 1.0, 1, 0.0, 0.0),
    ]
    targets, claims = clients.judged(found)
    assert [target.reached for target in targets] == [20.0 / 150.0, 8.0]
    assert [target.met for target in targets] == [True, False]
    assert claims[0]["numbers"] == {"of": 20.0, "over": 150.0}
    assert clients.judged(found[6:]) == ([], [])


@pytest.mark.parametrize(
    ("work", "gpus", "ranks"),
    [("frames", 1, 2), ("tiny", 1, 3), ("vla", 1, 2), *(("vla", n, n) for n in (2, 3, 4))],
)
def test_each_work_has_a_configuration_of_as_many_ranks(
    tmp_path: Path, work: str, gpus: int, ranks: int
) -> None:
    config = read("bench", clients.settings(tmp_path, ROWS, work, gpus))
    assert clients.ranks_of(work, gpus) == ranks
    assert len(config.placement.policy) == ranks - 1
    assert config.batch.rows >= 4
    assert {*config.gateway[0].map} == {*observation(work)}
    cameras = [values for values in observation(work).values() if values.ndim == 3]
    sizes = [(s.image.height, s.image.width, 3) for s in config.streams if s.image is not None]
    assert [values.shape for values in cameras] == sizes


def test_the_miniature_of_a_cut_policy_answers_each_row_with_its_own_state() -> None:
    parts = build_on_gpu({"work": "tiny"}, torch.device("cpu"))
    for part in parts:
        part.load()
    given = {name: torch.from_numpy(values) for name, values in observation("tiny").items()}
    state = torch.stack([given.pop("state"), torch.zeros(14)])
    tensors = {f"{name}.frames": torch.rand(2, 1, 3, 56, 56) for name in given}
    tensors |= {"state.values": state[:, None], "state.valid": torch.ones(2, 1, 1) > 0}
    for part in parts:
        for spec in part.outputs:
            tensors[spec.name] = torch.zeros(2, *spec.shape, dtype=getattr(torch, spec.dtype))
        part({spec.name: tensors[spec.name] for spec in part.inputs}, tensors)
    assert torch.equal(tensors["actions"][:, 0], state[:, :ACTION_DIM])


def test_a_number_instead_of_a_work_is_a_pause_without_a_policy() -> None:
    state = np.arange(14, dtype=np.float32)
    begun = time.monotonic()
    assert np.array_equal(policy("2.5")(state), state[:ACTION_DIM])
    assert time.monotonic() - begun >= 2.5e-3
    with pytest.raises(SystemExit, match="no such work"):
        policy("2.5.1")


def test_a_request_without_an_answer_ends_its_robot_and_says_what_waits() -> None:
    code = (
        "import threading\n"
        "from bench.peers_robot import InTime\n"
        "class Robot:\n"
        "    unanswered = ()\n"
        "    def ask(self, given):\n"
        "        threading.Event().wait(60)\n"
        "InTime(Robot(), 0.2).ask({})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(Path(clients.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 1
    assert "no answer within 0.2 s" in done.stderr
    assert "in wait" in done.stderr
