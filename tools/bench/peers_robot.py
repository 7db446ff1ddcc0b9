"""The robot of one peer: a process of its own, in the peer's environment, that asks and times.

``python -m bench.peers_robot PEER ADDRESS WORK CPUS`` answers each line of its standard input, an
order in JSON, with a line: first the versions that it runs with. A time is from before an
observation is given away to after its action is there.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections import Counter, deque
from importlib.metadata import version
from typing import Any, Final, TextIO

from bench.peers_work import ACTION_DIM, NAMES, STATE_DIM, Array, observation, policy

READY_LIMIT_S: Final = 60.0
ANSWER_LIMIT_S: Final = 1.0
#: Of a request: behind the limits of servers, since some clients wait for ever by themselves.
REQUEST_LIMIT_S: Final = 20.0
SETTLE_S: Final = 3.0
MS: Final = 1e-3  # s per ms
Observation = dict[str, Array]


class Ppstream:
    """``RobotClient.ask`` over a UNIX socket."""

    packages = ("pyzmq", "msgspec", "numpy")

    def __init__(self, address: str, work: str, cpus: list[int]) -> None:
        from ppstream.core.errors import PeerLostError
        from ppstream.robot.client import RobotClient

        self.unanswered = (TimeoutError, PeerLostError)
        if cpus:
            pin(os.getpid(), cpus[1])
        given = observation(work)
        streams: list[Any] = [
            (name, STATE_DIM) if name == "state" else (name, values.size, "uint8")
            for name, values in given.items()
        ]
        robot = f"bench-{os.getpid()}"
        self._client = RobotClient(address, robot=robot, streams=streams, actions=NAMES)
        self._client.connect(READY_LIMIT_S)
        until = time.monotonic() + READY_LIMIT_S
        while not self._client.wait_ready(0.1):
            if self._client.phase == "stopped" or time.monotonic() > until:
                raise SystemExit(f"not ready within {READY_LIMIT_S:g} s: {self._client.phase}")
        self._newest_ns = self._chunks = 0
        self._arrival = threading.Condition()
        self._posted: deque[int] = deque()

    def ask(self, given: Observation) -> Array:
        flat = {name: values.reshape(-1) for name, values in given.items()}
        answer = self._client.ask(flat, ANSWER_LIMIT_S)
        if answer.actions.shape[1] != ACTION_DIM:
            raise SystemExit(f"{answer.actions.shape} came")
        first: Array = answer.actions[0]
        return first

    def close(self) -> None:
        self._client.close()

    def post(self, given: Observation) -> None:
        self._client.on_chunk = self._arrived
        self._posted.append(time.monotonic_ns())
        self._client.push("state", self._posted[-1], given["state"])

    def collect(self) -> int:
        """An observation that a newer one overtook has no chunk of its own."""
        oldest_ns = self._posted.popleft()
        with self._arrival:
            while self._newest_ns < oldest_ns:
                if not self._arrival.wait(ANSWER_LIMIT_S):
                    raise SystemExit("no chunk came")
            chunks, self._chunks = self._chunks, 0
        return chunks

    def _arrived(self, chunk: Any) -> None:
        with self._arrival:
            self._newest_ns = max(self._newest_ns, chunk.window_end_ns)
            self._chunks += 1
            self._arrival.notify()


class ReqRep:
    """ZeroMQ's REQ; DEALER where several requests are under way."""

    unanswered = ()
    packages = ("pyzmq", "msgspec", "numpy")

    def __init__(self, address: str, work: str, cpus: list[int]) -> None:
        import msgspec
        import zmq

        pin(os.getpid(), cpus[1])
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(tuple[int, list[memoryview]]).decode
        context: Any = zmq.Context()
        self._request, self._dealer = context.socket(zmq.REQ), context.socket(zmq.DEALER)
        for socket in (self._request, self._dealer):
            socket.setsockopt(zmq.RCVTIMEO, round(ANSWER_LIMIT_S / MS))
            socket.connect(address)

    def ask(self, given: Observation) -> None:
        self._request.send(self._body(given))
        self._check(self._request.recv())

    def post(self, given: Observation) -> None:
        self._dealer.send_multipart([b"", self._body(given)])

    def collect(self) -> int:
        self._check(self._dealer.recv_multipart()[1])
        return 1

    def _body(self, given: Observation) -> bytes:
        arrays = [values.reshape(-1).data for values in given.values()]
        return self._encode((time.monotonic_ns(), arrays))

    def _check(self, body: bytes) -> None:
        import numpy as np

        actions = np.frombuffer(self._decode(body)[1][0], np.float32)
        if len(actions) != ACTION_DIM:
            raise SystemExit(f"{len(actions)} actions came")


class Openpi:
    """The client that openpi publishes; a request waits for the reply to the one before."""

    unanswered = ()
    packages = ("openpi-client", "websockets", "numpy")
    timing: dict[str, float]  # as the newest answer tells it, in ms

    def __init__(self, address: str, work: str, cpus: list[int]) -> None:
        from openpi_client.websocket_client_policy import WebsocketClientPolicy

        if cpus:
            pin(os.getpid(), cpus[1])
        host, port = address.rsplit(":", 1)
        self._client = WebsocketClientPolicy(host, int(port))

    def ask(self, given: Observation) -> Array:
        answer = self._client.infer(given)
        actions: Array = answer["actions"]
        if actions.shape[1:] != (ACTION_DIM,):
            raise SystemExit(f"{actions.shape} came")
        self.timing = answer.get("server_timing", {})
        return actions[0]


class Ray:
    """A compiled graph of two actors: one hands on, or both sleep as long as ``address`` says."""

    unanswered = ()
    packages = ("ray", "numpy")

    def __init__(self, address: str, work: str, cpus: list[int]) -> None:
        import ray
        from ray.dag import InputNode

        class Stage:
            def __init__(self, work: str, sleep_s: float, cpu: int) -> None:
                self._infer = policy(work) if work else None
                self._sleep_s = sleep_s
                pin(os.getpid(), cpu)

            def run(self, given: Any) -> Any:
                if self._sleep_s:
                    time.sleep(self._sleep_s)
                return given if self._infer is None else self._infer(given["state"])

        quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "error"}
        ray.init("local", num_cpus=len(cpus), **quiet)  # of its own, whatever else runs here
        remote = ray.remote(Stage)
        sleep_s = float(address or 0) * MS
        stages = [
            remote.remote(work, sleep_s, cpu) for work, cpu in (("", cpus[0]), (work, cpus[-1]))
        ]
        with InputNode() as given:
            graph = stages[1].run.bind(stages[0].run.bind(given))
        self._graph, self._get = graph.experimental_compile(), ray.get
        self._posted: deque[Any] = deque()
        self._check(self._graph.execute(observation(work)), READY_LIMIT_S)  # its actors start
        time.sleep(SETTLE_S)  # its agents and idle workers still start
        pin(os.getpid(), cpus[1])

    def ask(self, given: Observation) -> None:
        self._check(self._graph.execute(given))

    def post(self, given: Observation) -> None:
        self._posted.append(self._graph.execute(given))

    def collect(self) -> int:
        self._check(self._posted.popleft())
        return 1

    def _check(self, reply: Any, limit_s: float = ANSWER_LIMIT_S) -> None:
        actions = self._get(reply, timeout=limit_s)
        if len(actions) != ACTION_DIM:
            raise SystemExit(f"{len(actions)} actions came")


class InTime:
    """A robot of which a request without an answer ends this process, and says what waits."""

    def __init__(self, robot: Any, limit_s: float = REQUEST_LIMIT_S) -> None:
        self._robot, self._limit_s = robot, limit_s
        self.unanswered = robot.unanswered
        signal.signal(signal.SIGALRM, self._end)

    def ask(self, given: Observation) -> Any:
        signal.setitimer(signal.ITIMER_REAL, self._limit_s)
        return self._robot.ask(given)

    @property
    def timing(self) -> dict[str, float]:
        return getattr(self._robot, "timing", {})

    def post(self, given: Observation) -> None:
        self._robot.post(given)

    def collect(self) -> Any:
        signal.setitimer(signal.ITIMER_REAL, self._limit_s)
        return self._robot.collect()

    def _end(self, _signal: int, _frame: object) -> None:
        faulthandler.dump_traceback(all_threads=True)
        raise SystemExit(f"no answer within {self._limit_s:g} s")


ROBOTS: Final = {"ppstream": Ppstream, "reply": ReqRep, "openpi": Openpi, "ray": Ray}


def pin(pid: int, cpu: int) -> None:
    """All threads of a process; those that they start inherit it."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(thread), {cpu})


def latencies(robot: Any, given: Observation, *, times: int, warm: int, rate_hz: float) -> Any:
    """In µs, of the answers to observations at absolute deadlines, the first ``warm`` left out."""
    taken_us: list[float] = []
    refusals: Counter[str] = Counter()
    due_ns = time.monotonic_ns()
    for number in range(warm + times):
        due_ns += round(1e9 / rate_hz)
        time.sleep(max(0, due_ns - time.monotonic_ns()) / 1e9)
        given["state"][0] = number / (warm + times)
        began_ns = time.monotonic_ns()
        try:
            robot.ask(given)
        except robot.unanswered as error:
            refusals[str(error)] += 1
        else:
            if number >= warm:
                taken_us.append((time.monotonic_ns() - began_ns) / 1e3)
    for why, times in refusals.most_common(3):
        print(f"{times} requests: {why}")
    return taken_us


def period(robot: Any, given: Observation, *, times: int, warm: int, in_flight: int) -> Any:
    """Mean µs an answer, with so many requests under way at once."""
    _ask(robot, given, warm, in_flight)
    began_ns = time.monotonic_ns()
    answers = _ask(robot, given, times, in_flight)
    return (time.monotonic_ns() - began_ns) / 1e3 / answers


def closed(robot: Any, given: Observation, *, seconds: float, mark: float) -> Any:
    """Asks again at each answer, which must echo; returns both instants of all, in ns.

    And what the server tells of its own time, in ms, where it does.

    ``mark`` tells this robot's observations from those of others.
    """
    given["state"][1] = mark
    taken_ns: list[tuple[int, int, dict[str, float]]] = []
    until_ns = time.monotonic_ns() + round(seconds * 1e9)
    while not taken_ns or taken_ns[-1][1] < until_ns:
        given["state"][0] = 1 / (2 + len(taken_ns))
        began_ns = time.monotonic_ns()
        actions = robot.ask(given)
        taken_ns.append((began_ns, time.monotonic_ns(), getattr(robot, "timing", {})))
        if (actions != given["state"][:ACTION_DIM]).any():
            raise SystemExit(f"{given['state']} was answered with {actions}")
    return taken_ns


def _ask(robot: Any, given: Observation, times: int, in_flight: int) -> int:
    """Returns how many answers came."""
    answers = 0
    for number in range(times + in_flight - 1):
        given["state"][0] = number / times  # values that never change are a fault of the sensor
        if in_flight == 1:
            robot.ask(given)
            answers += 1
            continue
        if number < times:
            robot.post(given)
        if number >= in_flight - 1:
            answers += robot.collect()
    return answers


MEASURES: Final = {"latencies": latencies, "period": period, "closed": closed}


def main(peer: str, address: str, work: str, cpus: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the peers print is no answer
    robot = ROBOTS[peer](address, work, [int(cpu) for cpu in cpus.split(",") if cpu])
    _answer(answers, {package: version(package) for package in robot.packages})
    given = observation(work)
    for line in sys.stdin:
        order = json.loads(line)
        found = MEASURES[order.pop("measure")]
        _answer(answers, found(InTime(robot), given, **order))
        signal.setitimer(signal.ITIMER_REAL, 0)
    getattr(robot, "close", lambda: None)()  # whose row is free at once


def _answer(to: TextIO, found: object) -> None:
    print(json.dumps(found), file=to, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
