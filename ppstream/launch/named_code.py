"""Code that a configuration names, as its files tell of it: nothing is imported, and none is run.

A rank would say the same once it has imported torch. What files cannot tell for sure, as names that
a module makes while it runs, is the rank's to find.
"""

from __future__ import annotations

import ast
import sys
import warnings
from collections.abc import Iterator
from contextlib import suppress
from difflib import get_close_matches
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ppstream.config.schema import PipelineConfig

#: A module that uses one of these may have names that its text has not.
MAKES_NAMES: Final = frozenset(
    {"__dict__", "__getattr__", "exec", "globals", "locals", "modules", "setattr", "vars"}
)
MAKES_MODULES: Final = frozenset({"__path__", "meta_path", "modules", "path_hooks"})
GIVEN: Final = 2  # arguments, by position

Function = ast.FunctionDef | ast.AsyncFunctionDef


def code_problems(config: PipelineConfig) -> list[str]:
    """Lists why the policy or the decoder could not be imported, or called."""
    named = (
        ("policy.target", config.policy.target, "build(options, device)"),
        ("decode.target", config.decode.target, "build(options, actions)"),
    )
    return [f"{path}: {text}" for path, *about in named for text in _problems(*about)]


def is_module(name: str) -> bool:
    """True when a process of this folder would find the module ``name``."""
    return _spec_of(name) is not None


def _problems(target: str, how: str) -> Iterator[str]:
    module, _, name = target.partition(":")
    spec = _spec_of(module)
    if spec is None:
        outer = module.rpartition(".")[0]
        if not _makes_modules(outer):
            yield f"got {target!r}, but there is no module {module!r}; install it, or mend the name"
        return
    if spec.origin is None or not isinstance(spec.loader, SourceFileLoader):  # as in a zip file
        return
    try:
        tree = _tree_of(spec.origin)
    except OSError as error:
        yield f"got {target!r}, but {spec.origin} cannot be read: {error.strerror}"
    except (SyntaxError, ValueError) as error:
        where = f"{spec.origin}:{getattr(error, 'lineno', None) or 1}"
        yield f"got {target!r}, but {where} is no Python: {getattr(error, 'msg', error)}"
    else:
        names = set(_names_in(tree))
        if name not in names and not names & MAKES_NAMES:
            close = get_close_matches(name, names, n=1)
            hint = f"did you mean {close[0]}?" if close else f"want the name of {how} there"
            yield f"got {target!r}, but {spec.origin} has no {name!r} ({hint})"
        found = [node for node in tree.body if isinstance(node, Function) and node.name == name]
        if len(found) == 1 and not found[0].decorator_list and not _takes(found[0].args):
            taken = f"{name}({ast.unparse(found[0].args)})"
            yield f"got {target!r}, but {spec.origin}:{found[0].lineno} is {taken}, want {how}"


def _tree_of(file: str) -> ast.Module:
    with warnings.catch_warnings(action="ignore"):
        return ast.parse(Path(file).read_bytes())


def _makes_modules(package: str) -> bool:
    """True where an import of ``package`` may bring modules that are no files of it."""
    spec = _spec_of(package) if package else None
    if spec is None or spec.origin is None:
        return False
    with suppress(OSError, SyntaxError, ValueError):
        return not MAKES_MODULES.isdisjoint(_names_in(_tree_of(spec.origin)))
    return True


def _names_in(tree: ast.Module) -> Iterator[str]:
    """Yields each name that is bound or used anywhere, and ``exec`` for an import of all names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, Function | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.alias):
            yield "exec" if node.name == "*" else (node.asname or node.name).partition(".")[0]


def _takes(arguments: ast.arguments) -> bool:
    """True when a function can be called with the arguments that a rank gives."""
    by_position = len(arguments.posonlyargs) + len(arguments.args)
    is_enough = by_position >= GIVEN or arguments.vararg is not None
    needs_more = by_position - len(arguments.defaults) > GIVEN or None in arguments.kw_defaults
    return is_enough and not needs_more


def _spec_of(module: str) -> ModuleSpec | None:
    """Looks where a process of this folder would find ``module``."""
    top, *parts = module.split(".")
    try:
        spec = PathFinder.find_spec(top, ["", *sys.path]) or find_spec(top)
    except ValueError:  # no import has made it, as __main__
        return None
    for part in parts:
        where = spec and spec.submodule_search_locations
        spec = PathFinder.find_spec(f"{spec.name}.{part}", where) if spec and where else None
    # that of __main__ may be another module's
    return spec if spec is not None and spec.name == module else None
