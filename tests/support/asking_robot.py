"""A robot in a process of its own: ``asking_robot.py ENDPOINT RATE_HZ``.

Prints ``ready``; then asks as often as each line of standard input says, once a period and one at a
time, and prints how many chunks came. Ends with its standard input.
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress

import numpy as np
from bench.peers_work import NAMES, STATE_DIM

from ppstream.core.clock import NS_PER_S, now_ns
from ppstream.robot.client import RobotClient

READY_LIMIT_S = 60.0
ANSWER_LIMIT_S = 1.0


def main(endpoint: str, rate_hz: str) -> None:
    streams = [("state", STATE_DIM)]
    with RobotClient(endpoint, robot="asking", streams=streams, actions=NAMES) as client:
        client.connect(READY_LIMIT_S)
        if not client.wait_ready(READY_LIMIT_S):
            raise SystemExit("the run did not become ready")
        print("ready", flush=True)
        for line in sys.stdin:
            print(ask(client, int(line), round(NS_PER_S / float(rate_hz))), flush=True)


def ask(client: RobotClient, times: int, period_ns: int) -> int:
    """Chunks that came, of ``times`` observations at absolute deadlines."""
    state = {"state": np.linspace(-0.5, 0.5, STATE_DIM, dtype=np.float32)}
    due_ns = now_ns()
    answered = 0
    for number in range(times):
        due_ns += period_ns
        time.sleep(max(0, due_ns - now_ns()) / NS_PER_S)
        state["state"][0] = number / times  # values that never change are a fault of the sensor
        with suppress(TimeoutError):
            client.ask(state, ANSWER_LIMIT_S)
            answered += 1
    return answered


if __name__ == "__main__":
    main(*sys.argv[1:])
