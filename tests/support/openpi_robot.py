"""A robot with the client that openpi publishes, in an environment of its own.

``openpi_robot.py URI ROBOT REQUESTS [API_KEY]`` asks with observations as openpi's examples make
them, checks that each answer is of its observation, and prints what it got as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import numpy as np
from openpi_client import action_chunk_broker, msgpack_numpy
from openpi_client.websocket_client_policy import WebsocketClientPolicy

Observation = dict[str, Any]
SIZE = 224  # of a picture's sides


def droid(number: int) -> Observation:
    picture = np.full((SIZE, SIZE, 3), number % 256, np.uint8)
    return {
        "observation/exterior_image_1_left": picture,
        "observation/wrist_image_left": picture,
        "observation/joint_position": np.arange(7) / 8 + number / 512,
        "observation/gripper_position": np.array([number / 512]),
        "prompt": "do something",
    }


def aloha(number: int) -> Observation:
    picture = np.full((3, SIZE, SIZE), number % 256, np.uint8)
    cameras = ("cam_high", "cam_low", "cam_left_wrist", "cam_right_wrist")
    return {
        "state": np.arange(14) / 16 + number / 512,
        "images": dict.fromkeys(cameras[: 4 - number % 2], picture),  # one may be missing
        "prompt": "do something",
    }


def libero(number: int) -> Observation:
    picture = np.full((SIZE, SIZE, 3), number % 256, np.uint8)
    return {
        "observation/state": np.arange(8) / 16 + number / 512,
        "observation/image": picture,
        "observation/wrist_image": picture,
        "prompt": "do something",
    }


#: An observation by its number, keys that are echoed, and the shape of the actions.
ROBOTS: dict[str, tuple[Callable[[int], Observation], tuple[str, ...], tuple[int, int]]] = {
    "droid": (droid, ("observation/joint_position", "observation/gripper_position"), (10, 8)),
    "aloha": (aloha, ("state",), (50, 14)),
    "libero": (libero, ("observation/state",), (10, 7)),
}


def main(uri: str, robot: str, requests: str, api_key: str | None = None) -> None:
    make, echoed, shape = ROBOTS[robot]
    client = WebsocketClientPolicy(uri, api_key=api_key)
    took_ms = []
    for number in range(int(requests)):
        given = make(number)
        began = time.perf_counter()
        reply = client.infer(given)
        took_ms.append(1e3 * (time.perf_counter() - began))
        wanted = np.concatenate([given[key] for key in echoed]).astype(np.float32)[: shape[1]]
        assert reply["actions"].shape == shape, reply["actions"].shape
        assert (reply["actions"] == wanted).all(), (number, reply["actions"][0], wanted)
        assert reply["server_timing"]["infer_ms"] > 0
    broker = action_chunk_broker.ActionChunkBroker(client, action_horizon=5)
    steps = [broker.infer(make(0))["actions"].shape for _ in range(7)]
    found = {
        "version": version("openpi-client"),
        "numpy": np.__version__,
        "metadata": client.get_server_metadata(),
        "p50_ms": sorted(took_ms)[len(took_ms) // 2],
        "steps": steps,
        "errors": [failure(client, {"a": 1}), failure(client, make(0))],
    }
    print(json.dumps(found))


def failure(client: WebsocketClientPolicy, given: Observation) -> str:
    try:
        client.infer(given)
    except Exception as error:  # noqa: BLE001 - whatever a robot's program would see
        return f"{type(error).__name__}: {error}"
    return "none"


def repack(file: str) -> None:
    """Reads messages, a hex line each, and prints them as this client packs them."""
    packer = msgpack_numpy.Packer()
    with open(file) as lines:
        for line in lines:
            print(packer.pack(msgpack_numpy.unpackb(bytes.fromhex(line))).hex())


if __name__ == "__main__":
    repack(sys.argv[2]) if sys.argv[1] == "repack" else main(*sys.argv[1:])
