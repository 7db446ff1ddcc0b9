"""``ppstream gateway``: serves robots of foreign wires, as the ``[[gateway]]`` of a run say.

Started by hand, or by rank 0, with which it ends. Once it listens it prints a line for each wire,
with the address. SIGTERM and SIGINT end it.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import logging
import signal
import ssl
import stat
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from ppstream.config import load
from ppstream.config.gateway_rules import listen_of, missing_libraries
from ppstream.core.errors import ConfigError, ExitCode
from ppstream.core.interpreter import set_switch_interval
from ppstream.gateway.modality_file import run_of
from ppstream.gateway.request_log import RequestCounts, RequestLog
from ppstream.gateway.shared_server import HandedOver, SharedServer, process_count
from ppstream.gateway.wires import Access, sockets_max, wire_of

if TYPE_CHECKING:
    from ppstream.config.schema import GatewayConfig, PipelineConfig
    from ppstream.gateway.wires import WireServer

logger = logging.getLogger("ppstream")

KEY_CHARACTERS_MIN: Final = 16
KEY_CHARACTERS_MAX: Final = 1024
OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
PYTHON_MIN: Final = (3, 11)  # for asyncio.timeout
STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
KEPT_BYTES: Final = 32 << 20  # the most that M_MMAP_THRESHOLD takes


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and do what it asks for; returns the exit code."""
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="ppstream: %(message)s", stream=sys.stderr)
    try:
        if sys.version_info < PYTHON_MIN:
            raise ConfigError(["this Python is too old, want 3.11 or newer"])
        if args.origin is not None:
            print(run_of(args.origin))
            return 0
        config = _with_endpoint(load.load(args), args.endpoint)
        if not config.gateway:
            raise ConfigError(["gateway: got none, want [[gateway]] with wire = 'openpi' at least"])
        if missing := missing_libraries(config):
            raise ConfigError(missing)
        if args.describe:
            print("\n\n".join(wire_of(one).describe(config, one) for one in config.gateway))
            return 0
        given = None if args.connections is None else (args.serve, args.connections)
        keep_freed_memory()
        asyncio.run(serve(config, args.log, arguments=_arguments(args), given=given))
    except ConfigError as error:
        print(error, file=sys.stderr, flush=True)
        return int(ExitCode.CONFIG)
    return 0


async def serve(
    config: PipelineConfig,
    folder: Path | None = None,
    *,
    arguments: Sequence[str] | None = None,
    given: tuple[int, int] | None = None,
) -> None:
    """Serve every gateway of ``config`` until a signal comes.

    Args:
        config: of the run.
        folder: the run's, for the log of requests; None: they are not logged.
        arguments: that start another gateway like this; None: there shall be no other.
        given: a gateway's index, and the descriptor that its connections come from, when another
            process accepts them: only that one is served.

    Raises:
        ConfigError: an address cannot be bound, or a file not be used.
    """
    gateways = (
        [*enumerate(config.gateway)] if given is None else [(given[0], config.gateway[given[0]])]
    )
    counts = {index: RequestCounts(gateway.wire) for index, gateway in gateways}
    log = None if folder is None else RequestLog(folder, [*counts.values()])
    set_switch_interval()  # the event loop's thread, and one that receives for each robot
    stopping = asyncio.Event()
    for number in STOP_SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    async with AsyncExitStack() as stack:
        if log is not None:
            stack.callback(log.start().close)  # once the servers have answered the last requests
        for index, gateway in gateways:
            path = f"gateway[{index}]"
            accepted = None if given is None else HandedOver(given[1], stopping.set)
            access = Access(api_key(path, gateway), tls_context(path, gateway), accepted)
            server: WireServer = wire_of(gateway).build(config, gateway, access, counts[index])
            processes = process_count(config, gateway)
            if given is None and arguments is not None and processes > 1:
                most = sockets_max(config)
                server = SharedServer(gateway, index, processes, most, arguments)
            try:
                await stack.enter_async_context(server)
            except OSError as error:
                reason = f"{path}.listen: {listen_of(gateway)}: {error.strerror}"
                raise ConfigError([reason]) from error
            if given is None:
                logger.info("clients of %s connect to %s", gateway.wire, server.address)
            print(gateway.wire, server.address, flush=True)
        await stopping.wait()


def keep_freed_memory() -> None:
    """Have glibc keep what is freed for the next message, for this process's whole life.

    It gives freed memory above 128 KB back at once, so that each frame of a camera faults its pages
    in again: some 90 of a request with two frames. Where malloc is another, nothing changes.
    """
    with suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(M_MMAP_THRESHOLD, KEPT_BYTES)


def api_key(path: str, gateway: GatewayConfig) -> str | None:
    """The key that robots say; None: none is asked for.

    Raises:
        ConfigError: the file holds none, or others than its owner may read it.
    """
    name = gateway.api_key_file
    if name is None:
        return None
    try:
        mode, key = Path(name).stat().st_mode, Path(name).read_bytes()[: KEY_CHARACTERS_MAX + 2]
    except OSError as error:
        raise ConfigError([f"{path}.api_key_file: {name}: {error.strerror}"]) from error
    if mode & OTHERS:
        raise ConfigError([f"{path}.api_key_file: {name} can be read by others; chmod 600 {name}"])
    text = key.decode("ascii", "replace").strip()
    if not KEY_CHARACTERS_MIN <= len(text) <= KEY_CHARACTERS_MAX or not text.isprintable():
        raise ConfigError(
            [
                f"{path}.api_key_file: got {len(text)} characters, want {KEY_CHARACTERS_MIN} to "
                f"{KEY_CHARACTERS_MAX} that print, such as openssl rand -hex 32 makes"
            ]
        )
    return text


def tls_context(path: str, gateway: GatewayConfig) -> ssl.SSLContext | None:
    """The certificate to show; None: no TLS.

    Raises:
        ConfigError: the files are no certificate and its key, or that is encrypted.
    """
    if gateway.certfile is None or gateway.keyfile is None:
        return None
    key = gateway.keyfile

    def refuse() -> str:  # else OpenSSL would ask the terminal
        remedy = f"openssl pkey -in {key} -out NEW.pem, readable by its owner alone"
        raise ConfigError(
            [f"{path}.keyfile: {key} is encrypted, want it without a pass phrase: {remedy}"]
        )

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(gateway.certfile, key, refuse)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError([f"{path}.certfile: {gateway.certfile}: {error}"]) from error
    return context


def _arguments(args: argparse.Namespace) -> list[str]:
    """Start another gateway with the same configuration, at the same rank 0, in the same folder."""
    found = load.arguments_of(args)
    if args.endpoint is not None:
        found += ["--endpoint", args.endpoint]
    return found if args.log is None else [*found, "--log", str(args.log)]


def _with_endpoint(config: PipelineConfig, endpoint: str | None) -> PipelineConfig:
    """Puts rank 0's address in, where it is known only once rank 0 has bound it."""
    if endpoint is None:
        return config
    gateways = tuple(
        one if one.endpoint else msgspec.structs.replace(one, endpoint=endpoint)
        for one in config.gateway
    )
    return msgspec.structs.replace(config, gateway=gateways)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ppstream gateway",
        description="Serve robots that run a client of openpi, GR00T or LeRobot, as the "
        "[[gateway]] tables of a run say.",
    )
    load.add_arguments(parser, is_positional=True)
    parser.add_argument(
        "--describe", action="store_true", help="print the map and an example request, and leave"
    )
    parser.add_argument(
        "--from",
        dest="origin",
        metavar="PATH",
        help="print a gateway for GR00T's clients from a modality.json, or a run's streams, too, "
        "from a LeRobot dataset (without that file: for LeRobot's clients), and leave",
    )
    parser.add_argument(
        "--endpoint", metavar="ENDPOINT", help="where rank 0 listens (default: as configured)"
    )
    parser.add_argument(
        "--log",
        type=Path,
        metavar="FOLDER",
        help="the run's folder, such as logs/latest: count requests there, for the report",
    )
    # of a process that SharedServer starts: whose connections it serves, and where they come from
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--connections", type=int, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
