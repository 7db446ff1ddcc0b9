"""Requirements of a rank before it starts: a Python, packages, a configuration without problems."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ppstream.config.gateway_rules import missing_libraries
from ppstream.config.rules import rank_problems
from ppstream.core.errors import ConfigError, ExitCode, counted
from ppstream.launch.placement import place
from ppstream.launch.rank_exit import RankEnd
from ppstream.observe.run_folder import check_root
from ppstream.wire.keys import server_keys

if TYPE_CHECKING:
    from ppstream.config.schema import PipelineConfig

PYTHON_MIN: Final = (3, 11)
MODULES: Final = {"pillow": "PIL"}  # where a library's name is another
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


def missing_packages(config: PipelineConfig) -> list[str]:
    """Lists packages that the configuration needs and that are not installed."""
    missing = []
    robot = config.demo.robot if config.demo is not None else ""
    if robot.startswith(DEMO_ROBOTS) and find_spec("mujoco") is None:
        missing.append(
            f"demo.robot: {robot} needs mujoco: pip install 'ppstream[demo]', or demo = none"
        )
    elif robot and not _is_there(robot):
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
    return found + file_problems(config)


def file_problems(config: PipelineConfig) -> list[str]:
    """Lists problems of the log's folder and of the keys of a run."""
    found: list[str] = []
    with collecting(found):
        check_root(Path(config.log.root))
    with collecting(found):
        server_keys(config.service.secret_key, config.service.allowed_keys)
    return found


@contextmanager
def collecting(found: list[str]) -> Iterator[None]:
    """Inside: problems are added to ``found``, and raised no further."""
    try:
        yield
    except ConfigError as error:
        found += error.problems


def _is_there(module: str) -> bool:
    """Looks where a process of this folder would find ``module``; imports nothing."""
    top, *parts = module.split(".")
    try:
        spec = find_spec(top) or PathFinder.find_spec(top, [""])
    except ValueError:  # no import has made it, as __main__
        return False
    for part in parts:
        where = spec and spec.submodule_search_locations
        spec = PathFinder.find_spec(f"{spec.name}.{part}", where) if spec and where else None
    return spec is not None and spec.name == module  # that of __main__ may be another module's
