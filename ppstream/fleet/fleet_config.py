"""FleetConfig: one TOML that says which run a fleet's pipelines are, how many, and where."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from ppstream.config import load
from ppstream.config.field_types import Count, Name, NonNegative, Table, Text
from ppstream.config.schema import PipelineConfig
from ppstream.config.validate import find_problems, normalise
from ppstream.core.errors import ConfigError
from ppstream.fleet.directory_server import listen_problem
from ppstream.robot.fleet_directory import bearer
from ppstream.wire.endpoints import bracketed, endpoint_problem
from ppstream.wire.keys import server_keys

LISTEN: Final = "127.0.0.1:5871"


class DirectoryConfig(Table, frozen=True):
    """The directory's face for robots."""

    listen: Text = LISTEN
    """HOST:PORT on the node where ppstream fleet up was called."""
    token_file: Text | None = None
    """File with the token that robots show; wanted where others reach the port."""


class FleetConfig(Table, frozen=True, kw_only=True):
    """A whole fleet; every node has the same files at the same paths."""

    name: Name
    """Name of the fleet, of which a cluster may have several."""
    run: Text
    """Configuration of every pipeline: a file, beside this one unless its path begins at the root,
    or the name of a shipped one."""
    set: tuple[Text, ...] = ()
    """Values of it that are changed, as --set."""
    pipelines: Count
    """Pipelines to keep running."""
    cpus: NonNegative = 2.0
    """CPUs that Ray reserves for each; all its ranks are on one node."""
    gpus: NonNegative | None = None
    """GPUs that Ray reserves for each; none: those that its placement names."""
    endpoint: Text = "unix:///tmp/ppstream-{uid}/{pipeline}"
    """Address of each pipeline: {pipeline} is its name, {node} its node's address, {port} a free
    port there. Beyond one host tcp://{node}:{port}, with the run's service.secret_key."""
    restarts: Annotated[int, Meta(ge=-1)] = -1
    """Times that Ray starts a failed pipeline anew; -1: always."""
    directory: DirectoryConfig = DirectoryConfig()
    """The directory."""

    def pipeline_names(self) -> tuple[str, ...]:
        return tuple(f"{self.name}-{k}" for k in range(self.pipelines))


class FleetPlan(msgspec.Struct, frozen=True):
    """A checked fleet: its configuration, and that of its runs."""

    fleet: FleetConfig
    run_file: str
    rows: int
    gpus: float
    server_key: str | None  # public
    token: str | None


def read(file: Path) -> FleetPlan:
    """A checked fleet.

    Raises:
        ConfigError: holds every problem found.
    """
    fleet, folder = _fleet(file), file.resolve().parent
    beside = folder / fleet.run
    run_file = str(beside) if beside.is_file() else fleet.run
    problems = [*_listen_problems(fleet.directory), *_endpoint_problems(fleet.endpoint)]
    token = public = None
    with _noting(problems):
        token = _token(fleet.directory, folder)
    with _noting(problems):
        run = _run(fleet, run_file)
        public = _public_key(run)
    if problems:
        raise ConfigError(problems)
    gpus = _gpus(run) if fleet.gpus is None else fleet.gpus
    return FleetPlan(fleet, run_file, run.batch.rows, gpus, public, token)


def endpoint_of(template: str, pipeline: str, node: str, port: int) -> str:
    """The address of one pipeline; ``{uid}`` stays for the run to fill in."""
    bare = template.replace("[{node}]", "{node}")
    filled = bare.replace("{pipeline}", pipeline).replace("{node}", bracketed(node))
    return filled.replace("{port}", str(port))


def settings_of(fleet: FleetConfig, endpoint: str) -> tuple[str, ...]:
    """Values of the run that a pipeline at ``endpoint`` changes, as --set."""
    return (*fleet.set, f"service.endpoint={endpoint}")


@contextmanager
def _noting(problems: list[str]) -> Iterator[None]:
    """Adds what is refused to ``problems``."""
    try:
        yield
    except ConfigError as error:
        problems += error.problems


def _fleet(file: Path) -> FleetConfig:
    """The fleet as the file has it, each value sound by itself."""
    try:
        parsed = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError([f"{file}: cannot be read: {error.strerror}"]) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError([f"{file}: not TOML: {error}"]) from error
    table = normalise(parsed, FleetConfig, file.parent)
    if problems := list(find_problems(table, FleetConfig)):
        raise ConfigError(problems)
    return msgspec.convert(table, FleetConfig)


def _run(fleet: FleetConfig, run_file: str) -> PipelineConfig:
    """The run of each pipeline; of an endpoint that is none nothing is said again."""
    endpoint = _example(fleet.endpoint)
    problem = endpoint_problem(endpoint)
    try:
        return load.read(run_file, settings_of(fleet, endpoint))
    except ConfigError as error:
        if problem is None:
            raise
        said = [one for one in error.problems if problem not in one and endpoint not in one]
        raise ConfigError(said) from error


def _token(directory: DirectoryConfig, folder: Path) -> str | None:
    if directory.token_file is None:
        return None
    return bearer(folder / directory.token_file)["Authorization"].removeprefix("Bearer ")


def _public_key(run: PipelineConfig) -> str | None:
    keys = server_keys(run.service.secret_key, run.service.allowed_keys)
    if keys is None:
        return None
    from ppstream.wire.keys import public_half  # here: it needs ZeroMQ

    return public_half(keys.secret).decode()


def _example(template: str) -> str:
    return endpoint_of(template, "pipeline-0", "192.0.2.1", 5870)


def _listen_problems(directory: DirectoryConfig) -> list[str]:
    problem = listen_problem(directory.listen, has_token=directory.token_file is not None)
    return [] if problem is None else [problem]


def _endpoint_problems(template: str) -> list[str]:
    problems = []
    if problem := endpoint_problem(_example(template)):
        problems.append(f"endpoint: {problem}")
    if "{pipeline}" not in template and "{port}" not in template:
        problems.append(
            f"endpoint: got {template!r}, want {{pipeline}} or {{port}} in it: each pipeline has "
            "an address of its own"
        )
    return problems


def _gpus(run: PipelineConfig) -> float:
    """GPUs that the placement names, each once."""
    devices = {run.placement.rank0, *run.placement.policy}
    return float(sum(device.startswith("cuda") for device in devices))
