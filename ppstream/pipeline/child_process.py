"""ChildProcess: ``ppstream gateway`` or the live view as a child of rank 0, which ends with it.

The gateway is given the run's effective configuration as a file of the run, the endpoint that rank
0 has bound, and the run's folder, where it logs its requests; the live view gets the recorder's
messages through a pipe. A child that ends by itself costs those it serves alone: the run goes on.
"""

from __future__ import annotations

import logging
import os
import select
import shlex
import subprocess
from typing import Final

from ppstream.config.schema import PipelineConfig
from ppstream.config.to_toml import as_toml
from ppstream.control.peer_process import bound_command
from ppstream.core.errors import ConfigError
from ppstream.observe.run_folder import Run

logger = logging.getLogger("ppstream")

FILE: Final = "gateway.toml"
START_LIMIT_S: Final = 30.0
MS_PER_S: Final = 1000
GATEWAY_END_LIMIT_S: Final = 8.0  # it answers what it has begun, and says goodbye
VIEW_MESSAGE_BYTES: Final = 64 << 10  # of the largest but frames
VIEW_END_LIMIT_S: Final = 1.0  # of a view that is frozen: it owes nobody an answer


def start_gateway(config: PipelineConfig, run: Run, endpoint: str) -> ChildProcess:
    """One process for every ``[[gateway]]`` of ``config``."""
    file = run.directory / FILE
    file.write_text(as_toml(config), encoding="utf-8")
    options = ("--config", str(file), "--endpoint", endpoint, "--log", str(run.directory))
    remedy = shlex.join(["ppstream", "gateway", *options])
    return ChildProcess(
        "gateway",
        bound_command("ppstream.gateway", *options),
        addresses=len(config.gateway),
        effect=f"its robots hold until you start one: {remedy}",
        end_limit_s=GATEWAY_END_LIMIT_S,
    )


def start_view(config: PipelineConfig) -> tuple[ChildProcess, int]:
    """The live view, and the pipe that it reads: the caller's to close."""
    frames = [stream.dim for stream in config.streams if stream.image is not None]
    largest = max(VIEW_MESSAGE_BYTES, 4 * max(frames, default=0) // 3)  # frames go as base64
    options = ("--port", str(config.view.port), "--message-bytes", str(largest))
    read_fd, write_fd = os.pipe()
    try:
        child = ChildProcess(
            "view",
            bound_command("ppstream.view", *options),
            addresses=1,
            effect="the run goes on",
            end_limit_s=VIEW_END_LIMIT_S,
            stdin=read_fd,
        )
    finally:
        os.close(read_fd)
    return child, write_fd


class ChildProcess:
    """A started process.

    Args:
        name: in messages: the gateway, the view.
        command: its command line.
        addresses: lines that it prints once it listens.
        effect: of its end on those it serves, for the message about it.
        end_limit_s: after SIGTERM it has so long before it is killed.
        stdin: descriptor of its standard input; None: rank 0's.
    """

    def __init__(
        self,
        name: str,
        command: list[str],
        *,
        addresses: int,
        effect: str,
        end_limit_s: float,
        stdin: int | None = None,
    ) -> None:
        self._name = name
        self._process = subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE)
        self._count = addresses
        self._effect = effect
        self._end_limit_s = end_limit_s
        self._is_told = False

    def check_started(self) -> None:
        """Wait until it listens: it prints a line for each address.

        Raises:
            ConfigError: it has ended, or does not listen in time.
        """
        assert self._process.stdout is not None, "a pipe"
        fd, lines = self._process.stdout.fileno(), b""
        arrivals = select.poll()
        arrivals.register(fd, select.POLLIN)
        while lines.count(b"\n") < self._count:
            if not arrivals.poll(START_LIMIT_S * MS_PER_S):
                raise ConfigError([f"{self._name}: it did not listen within {START_LIMIT_S:g} s"])
            part = os.read(fd, 4096)
            if not part:
                code = self._process.wait(self._end_limit_s)
                raise ConfigError(
                    [
                        f"{self._name}: it ended with code {code} before the run was ready; its "
                        "message stands above (a port that is taken: another, or 0)"
                    ]
                )
            lines += part

    def check(self, _now_ns: int) -> None:
        """Say once that it has ended."""
        code = self._process.poll()
        if code is not None and not self._is_told:
            self._is_told = True
            logger.error("the %s ended with code %d: %s", self._name, code, self._effect)

    def close(self) -> None:
        """End it, after what it still has to say."""
        self._process.terminate()
        try:
            self._process.wait(self._end_limit_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
