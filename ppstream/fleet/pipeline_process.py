"""PipelineProcess: ``ppstream run`` of one pipeline, and what its rank 0 says of itself.

Its state is read where everybody may read it: ``/readyz`` and ``/metrics`` on this host's loopback.
It ends with the process that started it. Who starts it again is Ray's to say.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import tempfile
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Final

import msgspec

from ppstream.config import load
from ppstream.control.peer_process import bound_command, environment_to_import
from ppstream.core.errors import FINAL_CODES, ConfigError, ExitCode
from ppstream.fleet.directory import PipelineReport
from ppstream.fleet.fleet_config import FleetPlan, endpoint_of, settings_of
from ppstream.observe import top
from ppstream.observe.run_folder import Run
from ppstream.observe.top import Endpoint
from ppstream.wire.endpoints import unix_path
from ppstream.wire.http_answer import get_whole

ANSWER_LIMIT_S: Final = 1.0  # to the last byte
ANSWER_BYTES_MAX: Final = 1 << 16
END_LIMIT_S: Final = 20.0
DIGITS: Final = 16  # of a digest that are shown and compared
TAIL: Final = 2000  # characters of what it printed last
ENDED: Final = "ended"  # phase of a pipeline that nobody starts anew
FAILED: Final = "failed"  # and of one that Ray does


class PipelineProcess:
    """Starts at once.

    Args:
        plan: of the fleet.
        name: of this pipeline.
        node: this host's address.
    """

    def __init__(self, plan: FleetPlan, name: str, node: str) -> None:
        fleet = plan.fleet
        port = _free_port(node) if "{port}" in fleet.endpoint else 0
        own = endpoint_of(fleet.endpoint, name, node, port)
        if path := unix_path(own):  # the one of before may still be there
            own = f"unix://{path}-{os.getpid()}"
            Path(path).parent.mkdir(0o700, parents=True, exist_ok=True)
        self._report = _report(plan, name, node, own, "starting")
        settings = (*settings_of(fleet, own), "metrics.port=0")
        words = [word for setting in settings for word in ("--set", setting)]
        self._root = Path(load.read(plan.run_file, settings).log.root)
        self._endpoint: Endpoint | None = None
        self._run: Run | None = None
        self._is_drained = False
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - for as long as the process
        self._process = subprocess.Popen(
            bound_command("ppstream.launch.commands", "run", plan.run_file, *words),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env=environment_to_import(),
            start_new_session=True,
        )
        self._report = msgspec.structs.replace(self._report, pid=self._process.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    def report(self) -> PipelineReport:
        """Its state now, as its rank 0 says it."""
        code = self._process.poll()
        if code is not None:
            phase = ENDED if self.is_final() else FAILED
            return self._changed(phase=phase, robots=0, exit=self._ended(code))
        if self._endpoint is None:
            self._endpoint = self._metrics_endpoint()
        if self._endpoint is None or self._run is None:
            return self._report
        if not self._report.weights:
            found = self._run.weights_digest()[:DIGITS]
            self._report = msgspec.structs.replace(self._report, weights=found)
        phase = _phase(self._endpoint.port) or "silent"
        metrics = top.read(self._endpoint)
        if not metrics.values:  # rank 0 is busy: its rows are as taken as they were
            return self._changed(phase=phase, robots=self._report.robots)
        return self._changed(phase=phase, robots=int(metrics.get("ppstream_robots")))

    def is_final(self) -> bool:
        """True when it has ended and starting it again would not help, or was not wanted."""
        code = self._process.poll()
        if code is None:
            return False
        return self._is_drained or code == ExitCode.DRAINED or code in set(FINAL_CODES)

    def drain(self) -> None:
        """Ask it to stop; its robots are told. However it ends, it is not wanted any more."""
        self._is_drained = True
        self._process.send_signal(signal.SIGTERM)

    def end(self) -> None:
        """Drain, wait, and kill what does not leave."""
        self.drain()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_LIMIT_S)
        self._process.kill()
        self._process.wait()
        self.report()
        self._output.close()

    def _changed(self, *, phase: str, robots: int, exit: str = "") -> PipelineReport:  # noqa: A002
        self._report = msgspec.structs.replace(self._report, phase=phase, robots=robots, exit=exit)
        return self._report

    def _metrics_endpoint(self) -> Endpoint | None:
        """Endpoint of rank 0's metrics, once its log names it."""
        if self._run is None:
            self._run = Run.of_launcher(self._root, self._process.pid)
        if self._run is None:
            return None
        with suppress(ConfigError):
            return top.endpoints(self._run.directory).get(0)
        return None

    def _ended(self, code: int) -> str:
        """Its exit code and its last line."""
        if self._report.exit:
            return self._report.exit
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace")[-TAIL:].splitlines()
        name = ExitCode(code).name if code in set(ExitCode) else f"signal {-code}"
        return f"{code} {name}: {lines[-1] if lines else ''}"


def start(plan: FleetPlan, name: str, node: str) -> PipelineProcess | UnstartedPipeline:
    """Starts a pipeline; of one that this node cannot start, the reason."""
    try:
        return PipelineProcess(plan, name, node)
    except ConfigError as error:  # its files are not on this node
        why = str(error)
    except OSError as error:  # an address or a folder that this node has not
        why = f"node {node} cannot start it: {error}; see endpoint of the fleet's file"
    return UnstartedPipeline(plan, name, node, why)


class UnstartedPipeline:
    """A pipeline that this node cannot start, and why; for whoever looks at the status."""

    pid: Final = 0

    def __init__(self, plan: FleetPlan, name: str, node: str, why: str) -> None:
        report = _report(plan, name, node, "", ENDED)
        self._report = msgspec.structs.replace(report, exit=why)

    def report(self) -> PipelineReport:
        return self._report

    def is_final(self) -> bool:
        return True

    def drain(self) -> None:
        """Nothing runs."""

    def end(self) -> None:
        """Nothing runs."""


def _report(plan: FleetPlan, name: str, node: str, endpoint: str, phase: str) -> PipelineReport:
    return PipelineReport(
        pipeline=name,
        phase=phase,
        endpoint=endpoint,
        server_key=plan.server_key,
        rows=plan.rows,
        node=node,
    )


def _phase(port: int) -> str:
    """Phase of the run, as ``/readyz`` says it; empty: no answer."""
    url = f"http://127.0.0.1:{port}/readyz"
    try:
        answer = get_whole(url, {}, ANSWER_LIMIT_S, ANSWER_BYTES_MAX)
    except (OSError, HTTPException):
        return ""
    try:
        return str(json.loads(answer.body)["phase"])
    except (ValueError, KeyError):
        return ""


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as probe:
        return int(probe.getsockname()[1])
