"""The comparison with clients of openpi: what it counts as an answer, and how it judges."""

from __future__ import annotations

import numpy as np
import pytest
from bench import clients, peers_robot
from bench.clients import OPENPI, ROWS, ClientsCell
from bench.peers_work import ACTION_DIM, Array, observation, policy


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
    assert all(began <= there for began, there in taken_ns)
    with pytest.raises(SystemExit, match="was answered with"):
        peers_robot.closed(Robot(is_late=True), observation("none"), seconds=0.01, mark=0.5)


def test_eight_clients_are_judged_against_one_of_the_same_round() -> None:
    rates = [(20.0, 150.0), (25.0, 100.0), (10.0, 80.0)]
    found = [
        ClientsCell(number, ROWS, count, rate, 10.0 * count, 99.0, 100, 0.0)
        for number, both in enumerate(rates)
        for count, rate in zip((1, 8), both, strict=True)
    ]
    found += [
        ClientsCell(0, OPENPI, 8, 1e6, 1.0, 1.0, 1, 0.0),
        ClientsCell(9, ROWS, 8, 1e6, 1.0, 1.0, 1, 0.0),
    ]
    targets, claims = clients.judged(found)
    assert [target.reached for target in targets] == [20.0 / 150.0, 8.0]
    assert [target.met for target in targets] == [True, False]
    assert claims[0]["numbers"] == {"of": 20.0, "over": 150.0}
    assert clients.judged(found[6:]) == ([], [])
