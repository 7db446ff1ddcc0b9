"""Requirements of a rank before it starts: a Python, packages, a configuration without problems."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ppstream.config.gateway_rules import listen_address, listen_of, missing_libraries
from ppstream.config.rules import rank_problems
from ppstream.core.clock import NS_PER_S, now_ns
from ppstream.core.errors import ConfigError, ExitCode, counted
from ppstream.launch.named_code import code_problems, is_module
from ppstream.launch.placement import place
from ppstream.launch.rank_exit import RankEnd
from ppstream.observe.run_folder import check_root
from ppstream.wire.endpoints import PORT_MAX, bracketed, tcp_address, unix_path
from ppstream.wire.keys import server_keys
from ppstream.wire.unix_socket import taken_problem

if TYPE_CHECKING:
    from ppstream.config.schema import PipelineConfig

PYTHON_MIN: Final = (3, 11)
MODULES: Final = {"pillow": "PIL"}  # where a library's name is another
HERE: Final = "127.0.0.1"  # a host's own name may take a resolver seconds
LAUNCH: Final = "start ranks with ppstream run or torchrun, which set it"
FREE: Final = "give another, or 0 for any free port"
IPV6: Final = 6
FREED_S: Final = 3.0  # a run whose launcher was killed leaves its addresses within this
LOOK_S: Final = 0.1
DEMO_ROBOTS: Final = "ppstream_stages."  # simulated with what the extra ``demo`` brings


def refuse_python() -> int:
    """Say which Python is needed; returns the exit code."""
    found, wanted = (".".join(map(str, v[:2])) for v in (sys.version_info, PYTHON_MIN))
    text = f"this is Python {found}, rank 0 and policy ranks need {wanted} or newer"
    RankEnd(0).print_last_line(
        ExitCode.CONFIG, f"{text}; a robot's side (ppstream.robot) runs here"
    )
    return int(ExitCode.CONFIG)


def refuse(error: ConfigError, rank: int = 0) -> int:
    """Say every problem of a configuration, which this rank has found; returns the exit code."""
    print(error, file=sys.stderr, flush=True)
    RankEnd(rank).print_last_line(
        ExitCode.CONFIG, f"{counted(len(error.problems), 'problem')}, listed above"
    )
    return int(ExitCode.CONFIG)


def rank_numbers(environment: Mapping[str, str]) -> tuple[int, int]:
    """Returns RANK and WORLD_SIZE, 0 and 1 where nobody has set them.

    Raises:
        ConfigError: they, or LOCAL_WORLD_SIZE, are no numbers, or do not go together.
    """
    defaults = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    texts = {name: environment.get(name, default) for name, default in defaults.items()}
    found = [
        f"{name}: got {text!r}, want a whole number; {LAUNCH}"
        for name, text in texts.items()
        if not text.isdecimal()
    ]
    if not found:
        rank, world_size, _ = map(int, texts.values())
        if rank < world_size:
            return rank, world_size
        found = [f"RANK: got {rank} with WORLD_SIZE = {world_size}, want less; {LAUNCH}"]
    raise ConfigError(found)


def missing_packages(config: PipelineConfig) -> list[str]:
    """Lists packages that the configuration needs and that are not installed."""
    missing = []
    robot = config.demo.robot if config.demo is not None else ""
    if robot.startswith(DEMO_ROBOTS) and find_spec("mujoco") is None:
        missing.append(
            f"demo.robot: {robot} needs mujoco: pip install 'ppstream[demo]', or demo = none"
        )
    elif robot and not is_module(robot):
        missing.append(f"demo.robot: got {robot!r}, which is no module here; install it")
    if config.record.file is not None:
        wanted = [("file", "mcap")]
        if config.record.frames == "jpeg" and config.cameras:
            wanted += [("frames", "pillow")]
        missing += [
            f"record.{key}: recording needs {library}: pip install 'ppstream[record]'"
            for key, library in wanted
            if find_spec(MODULES.get(library, library)) is None
        ]
    if config.view.port is not None:
        missing += [
            f"view.port: the live view needs {library}: pip install 'ppstream[view]'"
            for library in ("foxglove", "mcap")
            if find_spec(library) is None
        ]
    return missing + missing_libraries(config)


def problems_here(config: PipelineConfig, ranks: int) -> list[str]:
    """Lists problems of ``ranks`` on this host that each of them would find once it has begun."""
    found = rank_problems(config, ranks, ranks)
    with collecting(found):
        place(config, ranks, ranks, has_peer_access=True)  # a rank knows whether it has
    found += code_problems(config) + file_problems(config)
    patience_s = 0.0 if found else FREED_S
    return found + addresses_taken(config, ranks, patience_s)


def file_problems(config: PipelineConfig) -> list[str]:
    """Lists problems of the log's folder and of the keys of a run."""
    found: list[str] = []
    with collecting(found):
        check_root(Path(config.log.root))
    with collecting(found):
        server_keys(config.service.secret_key, config.service.allowed_keys)
    return found


def addresses_taken(config: PipelineConfig, ranks: int, patience_s: float = 0.0) -> list[str]:
    """Lists where this run would listen and cannot, as another program does.

    ``patience_s``: for one that is about to end, as the run before this one.
    """
    until_ns = now_ns() + round(patience_s * NS_PER_S)
    while found := list(_taken(config, ranks)):
        if now_ns() >= until_ns:
            break
        time.sleep(LOOK_S)
    return found


def _taken(config: PipelineConfig, ranks: int) -> Iterator[str]:
    wanted: list[tuple[str, tuple[str, int] | None]] = []
    if first := config.metrics.port:
        last = min(first + ranks - 1, PORT_MAX)  # what is above is told as such
        wanted += (("metrics.port", (HERE, port)) for port in range(first, last + 1))
    wanted.append(("view.port", (HERE, config.view.port or 0)))
    for index, gateway in enumerate(config.gateway):
        wanted.append((f"gateway[{index}].listen", listen_address(listen_of(gateway))))
    endpoint = config.service.endpoint or ""
    wanted.append(("service.endpoint", tcp_address(endpoint)))
    for path, address in wanted:
        if address is not None and address[1] and (problem := _cannot_bind(*address)):
            where = f"{bracketed(address[0])}:{address[1]}"
            yield f"{path}: cannot listen on {where}: {problem}; {FREE}"
    if (file := unix_path(endpoint)) and (problem := taken_problem(Path(file))):
        yield f"service.endpoint: cannot listen on {endpoint!r}: {problem}"


def _cannot_bind(host: str, port: int) -> str | None:
    """Returns why nothing can listen there; None: it can, or a name would have to be looked up."""
    try:
        is_six = ip_address(HERE if host == "localhost" else host).version == IPV6
    except ValueError:
        return None
    with socket.socket(socket.AF_INET6 if is_six else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.strerror
    return None


@contextmanager
def collecting(found: list[str]) -> Iterator[None]:
    """Inside: problems are added to ``found``, and raised no further."""
    try:
        yield
    except ConfigError as error:
        found += error.problems
