"""A robot with a client of GR00T's wire, in an environment of its own.

``groot_robot.py PORT GENERATION REQUESTS [TOKEN]`` asks with observations as GR00T's examples make
them, checks that each answer is of its observation, and prints what it got as JSON. ``n1.5`` asks
with the client that strands-robots publishes, ``n1.6`` with one written here from the wire's facts.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from importlib.metadata import version
from typing import Any

import msgpack
import numpy as np
import zmq

with warnings.catch_warnings():  # its robots want packages that its client does not
    warnings.simplefilter("ignore")
    from strands_robots.policies.groot.client import GR00TClient, _decode, _encode

Observation = dict[str, Any]
HEIGHT, WIDTH = 224, 224
TASK = "annotation.human.task_description"


class NewerClient:
    """Asks as N1.6 and later do: nested observations, answers in two parts, a token."""

    def __init__(self, port: int, token: str | None) -> None:
        self.token = token
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.REQ)
        self.socket.connect(f"tcp://127.0.0.1:{port}")

    def call(self, endpoint: str, data: Any = None) -> Any:
        request = {"endpoint": endpoint}
        request |= {} if data is None else {"data": data}
        request |= {} if self.token is None else {"api_token": self.token}
        self.socket.send(msgpack.packb(request, default=_encode))
        response = msgpack.unpackb(self.socket.recv(), object_hook=_decode)
        if isinstance(response, dict) and "error" in response:
            raise RuntimeError(f"Server error: {response['error']}")
        return response

    def get_action(self, observation: Observation) -> Any:
        return self.call("get_action", {"observation": observation, "options": None})


def values(number: int) -> np.ndarray[Any, Any]:
    return (np.arange(6) / 8 + number / 512).astype(np.float32)


def older(number: int) -> Observation:
    state = values(number).astype(np.float64)
    return {
        "video.webcam": np.full((1, HEIGHT, WIDTH, 3), number % 256, np.uint8),
        "state.single_arm": state[np.newaxis, :5],
        "state.gripper": state[np.newaxis, 5:],
        TASK: ["do something"],
    }


def newer(number: int) -> Observation:
    state = values(number)[np.newaxis, np.newaxis]
    return {
        "video": {"webcam": np.full((1, 1, HEIGHT, WIDTH, 3), number % 256, np.uint8)},
        "state": {"single_arm": state[..., :5], "gripper": state[..., 5:]},
        "language": {TASK: [["do something"]]},
    }


def main(port: str, generation: str, requests: str, token: str | None = None) -> None:
    is_newer = generation == "n1.6"
    client = NewerClient(int(port), token) if is_newer else GR00TClient("127.0.0.1", int(port))
    make = newer if is_newer else older
    took_ms = []
    for number in range(int(requests)):
        began = time.perf_counter()
        answer = client.get_action(make(number))
        took_ms.append(1e3 * (time.perf_counter() - began))
        if is_newer:
            (actions, info), prefix = answer, ""
            assert info["infer_ms"] > 0
        else:
            actions, prefix = answer, "action."
        wanted = values(number)
        for key, part in (("single_arm", wanted[:5]), ("gripper", wanted[5:])):
            found = actions[prefix + key]
            assert found.shape == ((1,) if is_newer else ()) + (16, len(part)), found.shape
            assert found.dtype == np.float32
            assert (found == part).all(), (number, found, part)
    found = {
        "version": version("strands-robots"),
        "p50_ms": sorted(took_ms)[len(took_ms) // 2],
        "error": failure(client),
    }
    if is_newer:
        found |= {name: client.call(name) for name in ("ping", "get_modality_config")}
        found["reset"] = client.call("reset", {"options": None})
    else:
        found["ping"] = client.ping()
    print(json.dumps(found))


def failure(client: Any) -> str:
    try:
        client.get_action({"a": 1})
    except RuntimeError as error:
        return str(error)
    return "none"


if __name__ == "__main__":
    main(*sys.argv[1:])
