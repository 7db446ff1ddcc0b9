"""FleetConfig: one TOML that says which run a fleet's pipelines are, how many, and where."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from ppstream.config import load
from ppstream.config.field_types import Count, Name, NonNegative, Table, Text
from ppstream.config.schema import PipelineConfig
from ppstream.core.errors import ConfigError
from ppstream.robot.fleet_directory import bearer
from ppstream.wire.endpoints import endpoint_problem
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
    try:
        fleet = msgspec.convert(tomllib.loads(file.read_text()), FleetConfig)
    except OSError as error:
        raise ConfigError([f"{file}: cannot be read: {error.strerror}"]) from error
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError([f"{file}: {error}"]) from error
    beside = file.resolve().parent / fleet.run
    run_file = str(beside) if beside.is_file() else fleet.run
    if problems := _endpoint_problems(fleet.endpoint):
        raise ConfigError(problems)
    run = load.read(run_file, settings_of(fleet, _example(fleet.endpoint)))
    token = None
    if fleet.directory.token_file is not None:
        header = bearer(file.resolve().parent / fleet.directory.token_file)
        token = header["Authorization"].removeprefix("Bearer ")
    keys = server_keys(run.service.secret_key, run.service.allowed_keys)
    public = None
    if keys is not None:
        from ppstream.wire.keys import public_half  # here: it needs ZeroMQ

        public = public_half(keys.secret).decode()
    gpus = _gpus(run) if fleet.gpus is None else fleet.gpus
    return FleetPlan(fleet, run_file, run.batch.rows, gpus, public, token)


def endpoint_of(template: str, pipeline: str, node: str, port: int) -> str:
    """The address of one pipeline; ``{uid}`` stays for the run to fill in."""
    filled = template.replace("{pipeline}", pipeline).replace("{node}", node)
    return filled.replace("{port}", str(port))


def settings_of(fleet: FleetConfig, endpoint: str) -> tuple[str, ...]:
    """Values of the run that a pipeline at ``endpoint`` changes, as --set."""
    return (*fleet.set, f"service.endpoint={endpoint}")


def _example(template: str) -> str:
    return endpoint_of(template, "pipeline-0", "192.0.2.1", 5870)


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
