"""A small live pipeline of sleeping stages: four threads, two socket pairs, complete log lines."""

from __future__ import annotations

import queue
import socket
import threading
import time
from statistics import fmean
from typing import Any

from golden_runs import Fields, GoldenRun, manifest

from ppstream.analysis.period_model import PipelineForm

FRAME = 16  # bytes: seq, padding
JOIN_S = 30.0


class _Counter:
    """A queue's length with its integral and maximum, under one lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._level = self._max = self._total_ns = 0
        self._since = time.monotonic_ns()

    def move(self, step: int, now: int) -> None:
        with self._lock:
            self._total_ns += self._level * (now - self._since)
            self._since = now
            self._level += step
            self._max = max(self._max, self._level)

    def sample(self, name: str, now: int) -> Fields:
        with self._lock:
            total = self._total_ns + self._level * (now - self._since)
            found = {name: self._level, f"{name}_max": self._max, f"{name}_ns_total": total}
            self._max = self._level
        return found


def run_live(*, a_ms: float, b_ms: float, c_ms: float, depth: int, n: int) -> GoldenRun:
    """Run ``n`` envelopes through split threads with D_in = D_out = ``depth``."""
    pipeline = _Live(a_ms / 1e3, b_ms / 1e3, c_ms / 1e3, depth, n)
    parts = (pipeline.stage_a, pipeline.stage_b, pipeline.receive, pipeline.stage_c)
    threads = [threading.Thread(target=part, daemon=True) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_S)
        assert not thread.is_alive(), "the live pipeline hangs"
    pipeline.close()
    form = PipelineForm("split", d_in=depth, d_out=depth)
    usual = {  # what a stage took here: nothing is shared, and a busy machine is no contention
        "A_ns": fmean(line["tA1"] - line["tA0"] for line in pipeline.lines),
        "B_ns": fmean(line["B_ns"] for line in pipeline.lines),
        "C_ns": fmean(line["tEmit"] - line["tDecode"] for line in pipeline.lines),
    }
    alone = {"standalone": {stage: round(ns) for stage, ns in usual.items()}}
    return GoldenRun(manifest(form) | alone, pipeline.lines, pipeline.policy_lines)


class _Live:
    def __init__(self, a_s: float, b_s: float, c_s: float, depth: int, n: int) -> None:
        self._times_s = (a_s, b_s, c_s)
        self.lines: list[Fields] = [_line("envelope", k) for k in range(n)]
        self.policy_lines: list[Fields] = [_line("stage1", k) for k in range(n)]
        self._credits = threading.Semaphore(depth)
        self._slots = threading.Semaphore(depth)
        self._results: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._outstanding, self._q_decode = _Counter(), _Counter()
        self._to_b, self._b_in = socket.socketpair()
        self._b_out, self._from_b = socket.socketpair()

    def close(self) -> None:
        for end in (self._to_b, self._b_in, self._b_out, self._from_b):
            end.close()

    def stage_a(self) -> None:
        for k, line in enumerate(self.lines):
            began = time.monotonic_ns()
            self._credits.acquire()
            line["tRx"] = line["tA0"] = time.monotonic_ns()
            line["w_credit_ns"] = line["tA0"] - began
            time.sleep(self._times_s[0])
            line["tA1"] = line["tSend"] = time.monotonic_ns()
            self._outstanding.move(1, line["tSend"])
            _send(self._to_b, k)
            line["busy_link_ns"] = time.monotonic_ns() - line["tSend"]

    def stage_b(self) -> None:
        done = None
        for k, line in enumerate(self.policy_lines):
            began = time.monotonic_ns()
            assert _receive(self._b_in) == k
            line["tB0"] = time.monotonic_ns()
            line["wait_input_ns"] = line["tB0"] - began
            line["wait_output_ns"] = 0
            line["idle_ns"] = None if done is None else line["tB0"] - done
            time.sleep(self._times_s[1])
            done = line["tB1"] = time.monotonic_ns()
            line["residence_ns"] = done - line["tB0"]
            _send(self._b_out, k)
            line["busy_link_ns"] = time.monotonic_ns() - done

    def receive(self) -> None:
        for line in self.lines:
            self._slots.acquire()
            k = _receive(self._from_b)
            now = line["tRecv"] = time.monotonic_ns()
            self._outstanding.move(-1, now)
            self._q_decode.move(1, now)
            self._credits.release()
            self._results.put(k)

    def stage_c(self) -> None:
        for line in self.lines:
            began = time.monotonic_ns()
            k = self._results.get()
            line["tDecode"] = time.monotonic_ns()
            line["w_result_ns"] = line["tDecode"] - began
            self._q_decode.move(-1, line["tDecode"])
            self._slots.release()
            time.sleep(self._times_s[2])
            now = line["tEmit"] = time.monotonic_ns()
            line |= self._outstanding.sample("outstanding", now)
            line |= self._q_decode.sample("q_decode", now)
            policy = self.policy_lines[k]
            line["B_ns"] = policy["tB1"] - policy["tB0"]
            shared = ("wait_input_ns", "wait_output_ns", "idle_ns", "residence_ns")
            line |= {name: policy[name] for name in shared}


def _line(kind: str, seq: int) -> Fields:
    return {"kind": kind, "seq": seq, "generation": 0, "epoch": 0, "phase": "bring-up"}


def _send(end: socket.socket, k: int) -> None:
    end.sendall(k.to_bytes(FRAME, "little"))


def _receive(end: Any) -> int:
    return int.from_bytes(end.recv(FRAME, socket.MSG_WAITALL), "little")
