from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from robot_rig import DT_NS, MS, make_config, make_rows

from ppstream.core.clock import now_ns
from ppstream.ingest.executed_prefix import PrefixWriter, commitment, prefix_specs
from ppstream.ingest.intake import build_intake
from ppstream.ingest.rows import Commitment
from ppstream.links.slots import SlotLayout
from ppstream.sessions.session import Session
from ppstream.wire.robot_messages import Hello, Prefix

STEPS = 3


def asking_config(**changes: Any) -> Any:
    config = make_config(rows=2)
    actions = msgspec.structs.replace(config.actions, prefix_steps=STEPS, **changes)
    return msgspec.structs.replace(config, actions=actions)


class Rig:
    """Two rows, the first with a robot in it, and the tensors of an envelope."""

    def __init__(self, **changes: Any) -> None:
        config = asking_config(**changes)
        self.rows = make_rows(config)
        self.rows[0].open(7)
        stamps, joints = np.array([1], np.int64), np.zeros((1, 3), np.float32)
        self.rows[0].rings["joints"].append(stamps, joints, now_ns())
        specs = prefix_specs(config.actions)
        layout = SlotLayout((), specs, rows=2)
        self.out = layout.views(torch.full((layout.slot_bytes,), 255, dtype=torch.uint8))
        self.writer = PrefixWriter(config.actions, self.rows)

    def write(self, end_ns: int) -> tuple[np.ndarray[Any, Any], list[int]]:
        self.writer.write(self.out, [end_ns, 0])
        return self.out["executed_prefix"].numpy(), self.out["delay_steps"].tolist()

    def commit(self, *, start_ns: int = DT_NS, delay_ns: int = 25 * MS, n: int = 4) -> None:
        """Step i of the robot's own plan is ``[i, 10 i]``."""
        actions = np.arange(n, dtype=np.float32)[:, None] * np.array([1, 10], np.float32)
        self.rows[0].commitment = Commitment(start_ns, DT_NS, 200 * MS, delay_ns, actions)


def test_the_prefix_is_what_is_executed_when_each_step_of_the_next_chunk_falls_due() -> None:
    rig = Rig()
    rig.commit()
    prefix, _ = rig.write(DT_NS)  # its step 0 is due at 2 dt: the plan's step 1
    np.testing.assert_array_equal(prefix[0], [[1, 10], [2, 20], [3, 30]])


def test_between_the_robots_points_it_is_linear_and_behind_the_last_it_is_held() -> None:
    rig = Rig()
    rig.commit()
    prefix, _ = rig.write(DT_NS + DT_NS // 2)
    np.testing.assert_allclose(prefix[0], [[1.5, 15], [2.5, 25], [3, 30]])


def test_a_discrete_action_keeps_the_value_of_its_newest_point() -> None:
    rig = Rig(discrete={"dy": (-1.0, 1.0)})
    rig.commit()
    prefix, _ = rig.write(DT_NS + DT_NS // 2)
    np.testing.assert_allclose(prefix[0], [[1.5, 10], [2.5, 20], [3, 30]])


@pytest.mark.parametrize(
    ("delay_ms", "steps"), [(0, 0), (10, 0), (10.1, 1), (20, 1), (25, 2), (40, 3), (900, STEPS)]
)
def test_delay_steps_are_those_that_are_over_when_the_chunk_comes(
    delay_ms: float, steps: int
) -> None:
    rig = Rig()
    rig.commit(delay_ns=round(delay_ms * MS))
    assert rig.write(DT_NS)[1] == [steps, 0]


def test_a_row_of_which_nothing_is_known_is_all_zero() -> None:
    rig = Rig()
    prefix, delays = rig.write(DT_NS)
    assert not prefix.any()
    assert delays == [0, 0]


def test_what_a_robot_said_is_forgotten_with_its_episode_its_session_and_its_lease() -> None:
    rig = Rig()
    rig.commit()
    assert rig.write(190 * MS)[0].any()
    assert not rig.write(190 * MS + 1)[0].any()
    rig.rows[0].new_episode()
    assert rig.rows[0].commitment is None
    rig.commit()
    rig.rows[0].close()
    assert rig.rows[0].commitment is None


def test_only_finite_whole_actions_are_a_commitment() -> None:
    good = np.ones((2, 2), np.float32)
    bad = np.float32([[1, np.nan]])
    assert said(good) is not None
    assert said(bad) is None
    assert said(good.ravel()[:3]) is None
    assert said(good[:0]) is None


def said(actions: np.ndarray[Any, Any]) -> Commitment | None:
    raw = np.ascontiguousarray(actions).tobytes()
    return commitment(Prefix(7, 0, 0, DT_NS, 200 * MS, 0, memoryview(raw)), 2)


def test_what_a_robot_said_of_an_earlier_episode_or_before_it_is_served_is_ignored() -> None:
    row = make_rows(make_config())[0]
    hello = Hello(1, 1, "arm", (), ("dx", "dy"))
    session = Session(7, b"", 0, row, hello, [], heard_ns=0, frames_left=1, changes_left=0)
    actions = memoryview(np.ones((2, 2), np.float32).tobytes())
    session.commit(Prefix(7, 0, 0, DT_NS, 200 * MS, 0, actions))
    assert row.commitment is None
    session.serve()
    session.begin_episode()
    session.commit(Prefix(7, 0, 0, DT_NS, 200 * MS, 0, actions))
    assert row.commitment is None
    session.commit(Prefix(7, 1, 0, DT_NS, 200 * MS, 0, actions))
    assert row.commitment is not None


def test_an_envelope_of_a_run_that_asks_carries_prefix_and_delay() -> None:
    config = asking_config()
    intake = build_intake(config)
    row = intake.rows[0]
    row.open(7)
    stamps, joints = np.array([DT_NS], np.int64), np.zeros((1, 3), np.float32)
    row.rings["joints"].append(stamps, joints, now_ns())
    actions = np.arange(8, dtype=np.float32).reshape(4, 2)
    row.commitment = Commitment(DT_NS, DT_NS, 200 * MS, 25 * MS, actions)
    layout = SlotLayout((), intake.cutter.inputs, rows=2)
    out = layout.views(torch.zeros(layout.slot_bytes, dtype=torch.uint8))
    intake.cutter.cut(out, [None, None], 200 * MS)
    assert out["executed_prefix"][0].tolist() == actions[1:4].tolist()
    assert out["delay_steps"].tolist() == [2, 0]


def test_a_run_that_does_not_ask_has_no_such_tensors() -> None:
    assert prefix_specs(make_config().actions) == ()
    names = [spec.name for spec in prefix_specs(asking_config().actions)]
    assert names == ["executed_prefix", "delay_steps"]
