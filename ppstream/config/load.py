"""Sources of a configuration: a TOML file, ``--set`` on the command line, the defaults.

Precedence: command line > file > default; the environment changes nothing. A relative path in a
file is relative to that file, one on the command line to the working directory. ``"none"`` stands
for "no value" wherever a field may be without one. All problems are reported at once.
"""

from __future__ import annotations

import re
import sys
from argparse import SUPPRESS, Action, ArgumentParser, Namespace
from collections.abc import Iterable
from contextlib import suppress
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import msgspec

from ppstream.config.rules import PartialConfig, UnsoundError, problems
from ppstream.config.schema import PipelineConfig, StreamConfig
from ppstream.config.to_toml import as_toml
from ppstream.config.validate import find_problems, normalise
from ppstream.core.errors import ConfigError

__all__ = ["add_arguments", "as_toml", "load", "locate", "read"]

if sys.version_info >= (3, 11):
    import tomllib
else:  # a robot's side, as a replay is; serve says so itself
    import tomli as tomllib

DEFAULT: Final = "demo"
SHIPPED_PACKAGE: Final = "ppstream_stages"  # where a bare name is looked for
#: What names a configuration, for the command line.
NAMES: Final = (
    "a TOML file, package.module:name.toml from an installed package, or the name of one "
    f"that {SHIPPED_PACKAGE} ships (default: {DEFAULT})"
)

_FIRST_KEY = re.compile(r"\w+")  # of a problem's path
_STEP = re.compile(r"[^.\[\]]+")  # of an override's path: a.b, a[0].b and a.0.b all work


class _OneName(Action):
    """Takes the name of a configuration, wherever it stands; two names are a mistake."""

    def __call__(
        self,
        parser: ArgumentParser,
        namespace: Namespace,
        values: Any,
        _option: str | None = None,
    ) -> None:
        before = getattr(namespace, "stated", values)
        if before != values:
            parser.error(f"got two configurations, {before!r} and {values!r}, want one")
        namespace.stated = namespace.config = values


def add_arguments(parser: ArgumentParser, *, is_positional: bool = False) -> None:
    """Add ``--config`` and ``--set``, which ``load`` reads.

    Args:
        parser: of a command.
        is_positional: the file may stand by itself, too.
    """
    if is_positional:
        parser.add_argument(
            "config", nargs="?", default=SUPPRESS, action=_OneName, metavar="FILE", help=NAMES
        )
    parser.add_argument(
        "--config",
        default=DEFAULT,
        action=_OneName,
        metavar="FILE",
        help="the same" if is_positional else NAMES,
    )
    add_override_argument(parser)


def add_override_argument(parser: ArgumentParser) -> None:
    """Add ``--set``."""
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="PATH=VALUE",
        dest="overrides",
        help="change one value, e.g. pipeline.d_in=3 or streams.imu.rate_hz=400; VALUE is TOML, "
        'or plain text; "none" takes a value away; may be repeated, the last one counts',
    )


def arguments_of(args: Namespace) -> list[str]:
    """The arguments that give another process the same configuration."""
    settings = [part for setting in args.overrides for part in ("--set", setting)]
    return ["--config", args.config, *settings]


def load(args: Namespace) -> PipelineConfig:
    """The checked configuration that ``add_arguments``' arguments name.

    Modules beside its file become importable, for ``policy.target`` and the like. The folder comes
    last on ``sys.path``: nothing that is installed is hidden. A file inside a package is left
    alone.

    Raises:
        ConfigError: holds every problem found, each with its path.
    """
    config = read(args.config, args.overrides)
    make_importable(args.config)
    return config


def make_importable(name: str) -> None:
    """Puts the folder of ``name``'s file on ``sys.path``, as ``load`` does."""
    folder = locate(name).parent
    if not (folder / "__init__.py").exists() and str(folder) not in sys.path:
        sys.path.append(str(folder))


def read(name: str, overrides: Iterable[str] = ()) -> PipelineConfig:
    """The checked configuration of ``name`` (a file, ``module:file`` or a shipped name).

    Args:
        name: as ``--config``.
        overrides: ``path=value`` texts as ``--set``, applied in order.

    Raises:
        ConfigError: holds every problem found, each with its path.
    """
    file = locate(name)
    table = normalise(_parse(file), PipelineConfig, file.parent)
    broken = [text for item in overrides if (text := _override(table, item)) is not None]
    table = normalise(table, PipelineConfig, Path.cwd())
    if found := broken + list(find_problems(table, PipelineConfig)):
        if not broken and table.keys() <= set(PipelineConfig.__struct_fields__):
            found += problems(_sound_part(table, found))  # else nobody knows which table was meant
        raise ConfigError(found)
    config = _with_defaults(msgspec.convert(table, PipelineConfig), table)
    if found := problems(config):
        raise ConfigError(found)
    return config


def _sound_part(table: dict[str, Any], found: list[str]) -> PipelineConfig:
    """``table`` without the tables in which problems were found."""
    wrong = {key[0] for line in found if (key := _FIRST_KEY.match(line))}
    types = {field.name: field.type for field in msgspec.structs.fields(PipelineConfig)}
    values: dict[str, Any] = dict.fromkeys(wrong, msgspec.UNSET)
    for name in table.keys() - wrong:
        values[name] = msgspec.convert(table[name], types[name])
    return _with_defaults(PartialConfig(**values), table)


def _with_defaults(config: PipelineConfig, table: dict[str, Any]) -> PipelineConfig:
    """Fills in what follows from other settings, as far as these are sound."""
    for fill_in in (_with_devices, _with_depth, _with_float32_frames):
        with suppress(UnsoundError):
            config = fill_in(config, table)
    return config


def _with_devices(config: PipelineConfig, _table: dict[str, Any]) -> PipelineConfig:
    """One device stands for those of all replicas."""
    placement = config.placement
    if len(placement.policy) == 1:
        devices = placement.policy * placement.replicas
        placement = msgspec.structs.replace(placement, policy=devices)
    return msgspec.structs.replace(config, placement=placement)


def _with_depth(config: PipelineConfig, table: dict[str, Any]) -> PipelineConfig:
    """``d_in`` is the number of ranks, a mesh counted as one."""
    shape = config.pipeline
    if "d_in" not in table.get("pipeline", {}):
        shape = msgspec.structs.replace(shape, d_in=1 + config.placement.leaders)
    return msgspec.structs.replace(config, pipeline=shape)


def _with_float32_frames(config: PipelineConfig, table: dict[str, Any]) -> PipelineConfig:
    """Frames are float32 where every rank is on a CPU."""
    streams, placement = config.streams, config.placement
    if {placement.rank0, *placement.policy} == {"cpu"}:
        stated = ["dtype" in (stream.get("image") or {}) for stream in table["streams"]]
        streams = tuple(
            one if is_stated or one.image is None else _in_float32(one)
            for one, is_stated in zip(streams, stated, strict=True)
        )
    return msgspec.structs.replace(config, streams=streams)


def _in_float32(stream: StreamConfig) -> StreamConfig:
    assert stream.image is not None
    image = msgspec.structs.replace(stream.image, dtype="float32")
    return msgspec.structs.replace(stream, image=image)


def locate(name: str) -> Path:
    """The absolute path of the file that ``name`` means.

    Raises:
        ConfigError: there is no such file, module or shipped configuration.
    """
    try:
        if Path(name).is_file():
            return Path(name).absolute()
    except PermissionError as error:
        raise ConfigError([f"{name}: cannot be read: {error.strerror}"]) from error
    module, colon, file_name = name.rpartition(":")
    if not colon and "." not in name and "/" not in name:
        module, file_name = SHIPPED_PACKAGE, f"{name}.toml"
    if not module:
        folder = Path(name).parent
        there = sorted(path.name for path in folder.glob("*.toml"))
        close = get_close_matches(Path(name).name, there, n=1)
        hint = f" (did you mean {folder / close[0]}?)" if close else ""
        raise ConfigError([f"configuration: there is no file {name!r} in {Path.cwd()}{hint}"])
    folder = _module_folder(module)
    if (folder / file_name).is_file():
        return folder / file_name
    shipped = ", ".join(sorted(path.name for path in folder.glob("*.toml"))) or "none"
    raise ConfigError(
        [f"configuration: got {name!r}, but {module} has no {file_name} (it has: {shipped})"]
    )


def _module_folder(module: str) -> Path:
    """Finds the folder of ``module``'s files; the module itself is not run."""
    try:
        spec = find_spec(module)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise ConfigError(
            [f"configuration: there is no module {module!r} to look in; is it installed?"]
        )
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    return Path(spec.origin or "").parent


def _parse(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError([f"{file}: not TOML: {error}"]) from error
    except OSError as error:
        raise ConfigError([f"{file}: cannot be read: {error.strerror}"]) from error


def _override(table: dict[str, Any], item: str) -> str | None:
    """Apply one ``path=value`` to ``table`` in place; returns what is wrong with it, or None."""
    path, equals, text = item.partition("=")
    steps = _STEP.findall(path)
    if not equals or not steps:
        return f"--set {item}: want PATH=VALUE, e.g. pipeline.d_in=3"
    place: Any = table
    for step in steps[:-1]:
        below = _entry(place, step)
        if below is None and isinstance(place, dict):
            below = place[step] = {}
        if not isinstance(below, dict | list):
            return f"--set {path}: there is no {step!r} to change{_entries(place)}"
        place = below
    if isinstance(place, dict):
        place[steps[-1]] = _value(text)
    elif _entry(place, steps[-1]) is not None and steps[-1].isdecimal():
        place[int(steps[-1])] = _value(text)
    else:
        return f"--set {path}: there is no {steps[-1]!r} to change{_entries(place)}"
    return None


def _entry(place: Any, step: str) -> Any:
    """Finds what ``step`` names: a table's key, a list's index, or an entry's ``name``."""
    if isinstance(place, dict):
        return place.get(step)
    if step.isdecimal():
        return place[int(step)] if int(step) < len(place) else None
    return next((e for e in place if isinstance(e, dict) and e.get("name") == step), None)


def _entries(place: Any) -> str:
    if not isinstance(place, list):
        return ""
    names = [e.get("name", i) if isinstance(e, dict) else i for i, e in enumerate(place)]
    return f" (there are: {', '.join(map(str, names))})"


def _value(text: str) -> Any:
    """``text`` as TOML, else as it stands: 3, 0.5, true, [1, 2] or plain text without quotes."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if parsed.keys() == {"value"} else text
