"""Faults that a run survives: what makes them visible, and how soon the robot moves again."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Final

from drill.bad_scrapers import SCRAPERS
from drill.faults import (
    Recovering,
    Seen,
    cable,
    condition,
    degraded,
    dropped,
    event,
    held,
    input_age,
    order,
    reported_fault,
    robot,
)
from drill.scene import Scene

FULL_BYTES: Final = 100  # that the log may still grow
FULL_TICKS: Final = 100  # of the robot without one more byte
BEFORE: Final[
    dict[int, tuple[int, int]]
] = {}  # size of the log and ticks, when the disk was filled
NOISE: Final = bytes(range(256)) * 8
HOUR_S: Final = 3600.0
BUTTON_S: Final = 0.1  # from the order on a pipe to the first tick that holds; a tick is 10 ms


def pause_policy_rank(scene: Scene) -> None:
    scene.signal(1, signal.SIGSTOP)


def resume_policy_rank(scene: Scene) -> None:
    scene.signal(1, signal.SIGCONT)


def replace_robot(scene: Scene) -> None:
    assert scene.robot is not None
    scene.robot.kill()
    scene.robot.wait()
    scene.robot = scene.start_robot()


def pause_robot(scene: Scene) -> None:
    assert scene.robot is not None
    scene.robot.send_signal(signal.SIGSTOP)


def resume_robot(scene: Scene) -> None:
    assert scene.robot is not None
    scene.robot.send_signal(signal.SIGCONT)


def after(seconds: float, text: str) -> Callable[[Scene, int], Seen]:
    def look(scene: Scene, since_ns: int) -> Seen:
        now_ns = max((line["t"] for line in scene.lines() if "t" in line), default=0)
        return text if now_ns > since_ns + seconds * 1e9 else None

    return look


def moved_anew(scene: Scene, since_ns: int) -> Seen:
    return "a new session" if any(tick.moved for tick in scene.ticks(since_ns)) else None


def torn(scene: Scene, since_ns: int) -> Seen:
    """Seen once the log has not grown for half a second while envelopes went on."""
    size = scene.log_path(0).stat().st_size
    before = BEFORE.setdefault(since_ns, (size, len(scene.ticks())))
    is_full = size - before[0] <= FULL_BYTES and len(scene.ticks()) > before[1] + FULL_TICKS
    return "the log stopped growing, the robot went on" if is_full else None


def empty_disk(scene: Scene) -> None:
    """There is room again, and the log goes on."""
    before = scene.log_path(0).stat().st_size
    scene.limit_files(0, None)
    scene.wait("the log goes on", 3.0, lambda: scene.log_path(0).stat().st_size > before or None)


RECOVERING: Final = (
    Recovering(
        "cut-by-operator",
        "F10 BT10 BT11",
        "SIGUSR1 to rank 0: a new epoch",
        lambda scene: scene.signal(0, signal.SIGUSR1),
        event("first_action"),
        1.0,
    ),
    Recovering(
        "policy-raises-once", "F18 BT19", "one exception", order("raise", 1), event("fault"), 1.0
    ),
    Recovering(
        "policy-raises-oddly",
        "F18",
        "an exception that is no Exception, and whose text raises",
        order("raise-oddly", 1),
        event("fault", stage="B", rank=1, fault="exception"),
        1.0,
    ),
    Recovering(
        "policy-wrong-shape",
        "F18",
        "actions of another shape",
        order("shape", 1),
        event("fault"),
        1.0,
    ),
    Recovering(
        "policy-gives-nan", "F37 BT39", "NaN once", order("nan", 1), dropped("non_finite"), 3.0
    ),
    Recovering(
        "policy-rebinds-once",
        "F31",
        "out['actions'] = x, once",
        order("rebind", 1),
        event("fault", fault="unwritten"),
        1.0,
    ),
    Recovering(
        "policy-writes-nothing-once",
        "F31",
        "an early return: nothing is written",
        order("nothing", 1),
        event("fault", fault="unwritten"),
        1.0,
    ),
    Recovering(
        "policy-writes-half-once",
        "F31",
        "half of the steps are written",
        order("half", 1),
        event("fault", fault="unwritten"),
        1.0,
    ),
    Recovering(
        "policy-writes-later-once",
        "F31",
        "a thread writes some envelopes after the call has returned",
        order("later", 1),
        event("fault", fault="unwritten"),
        1.0,
    ),
    Recovering(
        "policy-outlier",
        "F38 BT24",
        "one result takes 0.8 s, the lease is 0.3 s",
        order("slow", 1),
        held(0.2),
        3.0,
        holds=True,
    ),
    Recovering(
        "policy-rank-pauses",
        "F21",
        "SIGSTOP to the policy rank for 1 s: below liveness.frozen_ms",
        pause_policy_rank,
        held(0.5),
        3.0,
        undo=resume_policy_rank,
        holds=True,
    ),
    Recovering(
        "cable-cut",
        "F28",
        "the robot's connection is closed",
        cable(is_cut=True),
        held(0.5),
        3.0,
        undo=cable(is_cut=False),
        moves_s=5.0,
        holds=True,
    ),
    Recovering(
        "cable-hangs",
        "F28",
        "connected, and nothing passes (half-open)",
        cable(is_hanging=True),
        held(1.0),
        4.0,
        undo=cable(is_hanging=False),
        moves_s=6.0,
        holds=True,
    ),
    Recovering(
        "cable-delays",
        "F38",
        "everything takes 0.4 s longer than the lease allows, each way",
        cable(delay_s=0.4),
        held(0.5),
        4.0,
        undo=cable(delay_s=0.0),
        moves_s=6.0,
        holds=True,
    ),
    Recovering(
        "cable-noise",
        "F39 BT41",
        "2 KiB of noise between the robot's frames",
        lambda scene: scene.cable.add_noise(NOISE),
        after(1.0, "rank 0 goes on"),
        4.0,
        moves_s=6.0,
    ),
    Recovering(
        "emergency-stop",
        "robot",
        "another thread of the robot calls loop.stop; chunks go on coming",
        robot("stop", 1),
        reported_fault("stop: drill", BUTTON_S),
        3.0,
        undo=robot("clear", 1),
        holds=True,
    ),
    Recovering(
        "callback-raises",
        "robot",
        "the robot's on_chunk raises: its receiving thread ends; another robot comes",
        robot("raise", 1),
        reported_fault("client: the receiving thread ended: RuntimeError", BUTTON_S),
        3.0,
        undo=replace_robot,
        moves_s=15.0,
        holds=True,
    ),
    Recovering(
        "robot-replaced",
        "F28",
        "SIGKILL to the robot; another one of its name comes",
        replace_robot,
        moved_anew,
        15.0,
    ),
    Recovering(
        "robot-pauses",
        "F27",
        "SIGSTOP to the robot for a second",
        pause_robot,
        after(1.0, "rank 0 goes on"),
        3.0,
        undo=resume_robot,
        moves_s=5.0,
    ),
    Recovering(
        "one-stream-silent",
        "F28 BT40",
        "no sample of the imu",
        robot("silent_imu", 1),
        input_age("imu", 300),
        2.0,
        undo=robot("silent_imu", 0),
    ),
    Recovering(
        "reference-silent",
        "F28 BT40",
        "no sample of the reference stream: no window, no action",
        robot("silent_joints", 1),
        held(0.5),
        3.0,
        undo=robot("silent_joints", 0),
        holds=True,
    ),
    Recovering(
        "rate-collapses",
        "F28 BT40",
        "5 Hz instead of 100 Hz",
        robot("every", 20),
        condition("joints", "slow", after_s=1.0),
        4.0,
        undo=robot("every", 1),
    ),
    Recovering(
        "values-stuck",
        "F28 BT40",
        "the imu repeats its last values for ever",
        robot("stuck_imu", 1),
        condition("imu", "unchanged", after_s=1.0),
        4.0,
        undo=robot("stuck_imu", 0),
    ),
    Recovering(
        "stream-silent-is-told",
        "F28 BT40",
        "no sample of the imu, and who looks at the log or the robot's phase sees it",
        robot("silent_imu", 1),
        degraded(after_s=2.5),
        4.0,
        undo=robot("silent_imu", 0),
    ),
    Recovering(
        "not-a-number-sensor",
        "F28",
        "NaN in every sample of the imu",
        robot("nan_imu", 1),
        dropped("non_finite"),
        3.0,
        undo=robot("nan_imu", 0),
    ),
    Recovering(
        "samples-twice-and-late",
        "F11 F12 BT22",
        "each sample twice, and an older one behind it",
        robot("twice", 1),
        dropped("duplicate"),
        3.0,
        undo=robot("twice", 0),
        moves_s=4.0,
    ),
    Recovering(
        "clock-jumps-forward",
        "F29 BT40",
        "the robot's clock is set an hour ahead",
        robot("clock_s", HOUR_S),
        dropped("future"),
        5.0,
        moves_s=5.0,
    ),
    Recovering(
        "clock-jumps-back",
        "F29 BT40",
        "and back again",
        robot("clock_s", 0.0),
        dropped("late"),
        5.0,
        moves_s=5.0,
    ),
    Recovering(
        "disk-full",
        "F44 BT45",
        "no byte more for the log of rank 0",
        lambda scene: scene.limit_files(0, FULL_BYTES),
        torn,
        5.0,
        undo=empty_disk,
    ),
    *SCRAPERS,
)
