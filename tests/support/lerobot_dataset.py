"""LeRobot's own reader on a data set, in an environment of its own.

``lerobot_dataset.py ROOT STEPS [KEY...]``: items of ``LeRobotDataset(root=ROOT)``, with STEPS of
``delta_timestamps`` of each key, as an ``.npz`` on stdout's last line's path. torchvision, which
images alone need, is stood in for where it is not installed, as what training alone needs.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from stand_ins import stand_in_for, stand_in_for_operators

ABSENT = {"accelerate", "av", "cv2", "gymnasium", "imageio", "torchcodec"}
if find_spec("torchvision") is None:
    ABSENT.add("torchvision")
else:
    operators = stand_in_for_operators()
stand_in_for(ABSENT)

from lerobot.datasets.lerobot_dataset import LeRobotDataset  # noqa: E402
from lerobot.datasets.utils import dataset_to_policy_features  # noqa: E402


def main(root: str, steps: str, out: str, *keys: str) -> None:
    plain = LeRobotDataset("nobody/local", root=root)
    offsets = [(index - int(steps) + 1) / plain.fps for index in range(int(steps))]
    deltas = dict.fromkeys(keys, offsets) if keys else None
    dataset = LeRobotDataset("nobody/local", root=root, delta_timestamps=deltas)
    items = [dataset[index] for index in range(len(dataset))]
    arrays = {k: np.stack([one[k].numpy() for one in items]) for k in items[0] if k != "task"}
    np.savez(out, **arrays)
    stats = dataset.meta.stats
    print(
        json.dumps(
            {
                "version": version("lerobot"),
                "episodes": dataset.num_episodes,
                "frames": dataset.num_frames,
                "fps": dataset.fps,
                "tasks": [one["task"] for one in items],
                "stats": {k: {n: v.tolist() for n, v in one.items()} for k, one in stats.items()},
                "policy": sorted(dataset_to_policy_features(dataset.features)),
                "root": str(Path(root).resolve()),
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
