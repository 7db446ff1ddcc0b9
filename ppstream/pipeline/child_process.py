"""ChildProcess: ``ppstream gateway`` or the live view as a child of rank 0, which ends with it.

The gateway is given the run's effective configuration as a file of the run, the endpoint that rank
0 has bound, and the run's folder, where it logs its requests; the live view gets the recorder's
messages through a pipe. A child that ends by itself costs those it serves alone: the run goes on,
and starts a gateway that crashed again. One that was asked to end, or that its configuration keeps
from serving, is not: it would end again.
"""

from __future__ import annotations

import logging
import os
import select
import shlex
import subprocess
import threading
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from ppstream.config.gateway_rules import listen_address, listen_of
from ppstream.config.schema import GatewayConfig, PipelineConfig
from ppstream.config.to_toml import as_toml
from ppstream.control.peer_process import bound_command, status_text
from ppstream.core.clock import NS_PER_S, now_ns
from ppstream.core.errors import ConfigError, ExitCode
from ppstream.observe.run_folder import Run
from ppstream.wire.endpoints import bracketed

logger = logging.getLogger("ppstream")

FILE: Final = "gateway.toml"
START_LIMIT_S: Final = 30.0
MS_PER_S: Final = 1000
GATEWAY_END_LIMIT_S: Final = 8.0  # it answers what it has begun, and says goodbye
GATEWAY_AGAIN_S: Final = (1.0, 2.0, 4.0, 8.0, 16.0)  # before each further start
SERVED_NS: Final = 600 * NS_PER_S  # an end after so long is the first one again
NOT_AGAIN: Final = (ExitCode.DRAINED, ExitCode.CONFIG)
STOP_S: Final = 2.0  # a stop of the run reaches whoever is asked to end with it so much later
VIEW_MESSAGE_BYTES: Final = 64 << 10  # of the largest but frames
VIEW_END_LIMIT_S: Final = 1.0  # of a view that is frozen: it owes nobody an answer


def start_gateway(
    config: PipelineConfig, run: Run, endpoint: str, on_end: Callable[[str, float | None], None]
) -> ChildProcess:
    """One process for every ``[[gateway]]`` of ``config``."""
    file = run.directory / FILE
    file.write_text(as_toml(config), encoding="utf-8")

    def keep_ports(lines: list[str]) -> None:  # for a start in its stead: clients know these
        gateways = tuple(map(_listening, config.gateway, lines))
        kept = msgspec.structs.replace(config, gateway=gateways)
        file.write_text(as_toml(kept), encoding="utf-8")

    options = ("--config", str(file), "--endpoint", endpoint, "--log", str(run.directory))
    remedy = shlex.join(["ppstream", "gateway", *options])
    return ChildProcess(
        "gateway",
        bound_command("ppstream.gateway", *options),
        addresses=len(config.gateway),
        effect=f"its robots hold until you start one: {remedy}",
        end_limit_s=GATEWAY_END_LIMIT_S,
        again_s=GATEWAY_AGAIN_S,
        on_end=on_end,
        on_listening=keep_ports,
    )


def _listening(gateway: GatewayConfig, line: str) -> GatewayConfig:
    """``gateway`` at the port that it has said; ``line`` is ``WIRE ADDRESS``."""
    address = listen_address(listen_of(gateway))
    assert address is not None, "checked with the configuration"
    listen = f"{bracketed(address[0])}:{line.rpartition(':')[2]}"
    return msgspec.structs.replace(gateway, listen=listen)


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
        again_s: pauses before it is started again, one for each of its ends that follow each other.
        on_end: called by a thread with how it ended, and the pause; None: it stays so.
        on_listening: called with the lines that it has printed.
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
        again_s: Sequence[float] = (),
        on_end: Callable[[str, float | None], None] = lambda _how, _pause_s: None,
        on_listening: Callable[[list[str]], None] = lambda _lines: None,
    ) -> None:
        self._name = name
        self._command = command
        self._count = addresses
        self._effect = effect
        self._end_limit_s = end_limit_s
        self._again_s = again_s
        self._on_end = on_end
        self._on_listening = on_listening
        self._starting = threading.Lock()
        self._closing = threading.Event()
        self._keeper: threading.Thread | None = None
        self._process = subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE)
        assert self._process.stdout is not None, "a pipe"
        self._stdout = self._process.stdout

    def check_started(self) -> None:
        """Wait until it listens: it prints a line for each address. From then on it is kept.

        Raises:
            ConfigError: it has ended, or does not listen in time.
        """
        fd, lines = self._stdout.fileno(), b""
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
        self._on_listening(lines.decode().splitlines())
        self._keeper = threading.Thread(target=self._keep, name=self._name, daemon=True)
        self._keeper.start()

    def close(self) -> None:
        """End it, after what it still has to say."""
        self._closing.set()
        with self._starting:
            self._process.terminate()
        try:
            self._process.wait(self._end_limit_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._keeper is not None:
            self._keeper.join()
        self._stdout.close()

    def _keep(self) -> None:
        """Say each time that it has ended, and start it again while that may help."""
        ends, begun_ns = 0, now_ns()
        while True:
            code = self._process.wait()
            if self._closing.wait(0 if code else STOP_S):
                return
            if now_ns() - begun_ns >= SERVED_NS:
                ends = 0
            is_last = code in NOT_AGAIN or ends == len(self._again_s)
            pause_s = None if is_last else self._again_s[ends]
            ends += 1
            self._tell_end(f"ended with {status_text(code)}", pause_s, ends)
            if pause_s is None or self._closing.wait(pause_s):
                return
            with self._starting:
                if self._closing.is_set():
                    return
                try:
                    self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
                except OSError as error:
                    self._tell_end(f"cannot be started: {error.strerror}", None, ends)
                    return
            begun_ns = now_ns()

    def _tell_end(self, how: str, pause_s: float | None, ends: int) -> None:
        then = self._effect
        if pause_s is not None:
            then = f"it is started again in {pause_s:g} s ({ends} of {len(self._again_s)})"
        logger.error("the %s %s: %s", self._name, how, then)
        self._on_end(how, pause_s)
