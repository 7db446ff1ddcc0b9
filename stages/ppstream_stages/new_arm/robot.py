"""The robot: a simulated arm with cameras. Put your driver in the place of ``FakeArm``.

``python THIS_FILE RUN.toml [SECONDS]``, in a process of its own, with or without torch.
"""

import sys
import threading
import traceback
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import toml

from ppstream import ControlLoop, PpstreamError, RobotClient

Array = np.ndarray[Any, Any]
say = partial(print, flush=True)
START_S = 600  # the ranks may load a checkpoint and compile it first


class FakeArm:
    """Joints that follow their targets, and cameras that see them as a moving stripe."""

    def __init__(self, joints: int) -> None:
        self.angles = np.zeros(joints, np.float32)

    def move_to(self, targets: Array) -> None:
        self.angles += 0.2 * (targets - self.angles)

    def brake(self) -> None:
        """Hold: a servo keeps its last target."""

    def frame(self, height: int, width: int) -> Array:
        """RGB, uint8 ``[height, width, 3]``."""
        image = np.zeros((height, width, 3), np.uint8)
        image[:, int(abs(self.angles[0]) * 100) % width] = 255
        return image


def film(
    client: RobotClient,
    loop: ControlLoop,
    arm: FakeArm,
    stream: dict[str, Any],
    end: threading.Event,
) -> None:
    """Push a camera's frames until ``end``, each with the time before it was taken.

    An error of its own stops the arm.
    """
    height, width = stream["image"]["height"], stream["image"]["width"]
    try:
        while not end.wait(1 / stream["rate_hz"]):
            stamp_ns = client.clock()
            client.push(stream["name"], stamp_ns, arm.frame(height, width))
    except Exception as error:  # noqa: BLE001 - a camera that is gone stops the arm
        traceback.print_exc()
        loop.stop(f"camera {stream['name']}: {error!r}")


def main(file: str, duration_s: float | None = None) -> None:
    """Move the arm until the time is over, Ctrl-C comes, or a fault lets it move no more."""
    run = toml.decode(Path(file).read_bytes())
    cameras = [stream for stream in run["streams"] if "image" in stream]
    sizes = {c["name"]: (c["image"]["height"], c["image"]["width"], 3) for c in cameras}

    def hold_or_end() -> None:
        arm.brake()
        if loop.fault is not None:
            loop.end()  # to move on, see what it was, and call loop.clear_fault() instead

    arm, rate_hz = FakeArm(run["streams"][0]["dim"]), run["streams"][0]["rate_hz"]
    client = RobotClient(
        run["service"]["endpoint"],
        robot=run["name"],
        streams=[("joints", len(arm.angles)), *((k, size, "uint8") for k, size in sizes.items())],
        actions=run["actions"]["names"],
        blend_ms=40,
    )
    loop = ControlLoop(
        rate_hz, lambda stamp_ns: {"joints": arm.angles}, arm.move_to, client, hold=hold_or_end
    )
    end = threading.Event()
    with suppress(KeyboardInterrupt), client:
        try:
            client.connect(START_S, say=say)
            is_ready = client.wait_ready(START_S, say=say)
        except PpstreamError as error:  # the run was refused, or wants another robot
            raise SystemExit(str(error)) from None
        if not is_ready:
            raise SystemExit(f"the run is {client.phase} after {START_S} s, not ready")
        for stream in cameras:
            threading.Thread(target=film, args=(client, loop, arm, stream, end)).start()
        try:
            loop.run(duration_s)
        finally:
            end.set()
    print(loop.statistics().line())
    if loop.fault is not None:
        raise SystemExit(f"the arm holds after the fault {loop.fault}; the run was {client.phase}")


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else None)
