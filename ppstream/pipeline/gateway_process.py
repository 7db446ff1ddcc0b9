"""GatewayProcess: ``ppstream-gateway`` as a child of rank 0, which ends with it.

It is given the run's effective configuration as a file of the run, and the endpoint that rank 0 has
bound. A gateway that ends by itself costs its robots alone: they hold, the run goes on.
"""

from __future__ import annotations

import logging
import os
import select
import subprocess
from typing import Final

from ppstream.config.schema import PipelineConfig
from ppstream.config.to_toml import as_toml
from ppstream.control.peer_process import bound_command
from ppstream.core.errors import ConfigError
from ppstream.observe.run_folder import Run

logger = logging.getLogger("ppstream")

MODULE: Final = "ppstream.gateway"
FILE: Final = "gateway.toml"
START_LIMIT_S: Final = 30.0
MS_PER_S: Final = 1000
END_LIMIT_S: Final = 8.0  # it answers what it has begun, and says goodbye


class GatewayProcess:
    """One process for every ``[[gateway]]`` of ``config``."""

    def __init__(self, config: PipelineConfig, run: Run, endpoint: str) -> None:
        file = run.directory / FILE
        file.write_text(as_toml(config), encoding="utf-8")
        options = ("--config", str(file), "--endpoint", endpoint)
        self._process = subprocess.Popen(bound_command(MODULE, *options), stdout=subprocess.PIPE)
        self._count = len(config.gateway)
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
                raise ConfigError([f"gateway: it did not listen within {START_LIMIT_S:g} s"])
            part = os.read(fd, 4096)
            if not part:
                code = self._process.wait(END_LIMIT_S)
                raise ConfigError(
                    [f"gateway: it ended with code {code} before the run was ready; see above"]
                )
            lines += part

    def check(self, _now_ns: int) -> None:
        """Say once that it has ended."""
        code = self._process.poll()
        if code is not None and not self._is_told:
            self._is_told = True
            logger.error("the gateway ended with code %d: its robots hold", code)

    def close(self) -> None:
        """End it, after what it still has to say."""
        self._process.terminate()
        try:
            self._process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
