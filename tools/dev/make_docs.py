"""The API reference from the docstrings, as pages: ``python tools/dev/make_docs.py [FOLDER]``.

Every module of the runtime, the kernels and the shipped stages, with pdoc. A warning is an error:
a name that is announced and missing, an annotation that cannot be resolved, a module that does not
import. What needs a GPU's libraries is left out where they are missing, and said.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import pkgutil
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Final, get_type_hints

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / room) for room in ("", "kernels", "stages")]

import pdoc
import pdoc.render

PACKAGES: Final = ("ppstream", "ppstream_kernels", "ppstream_stages")
#: Libraries of one kind of machine, or of an extra alone: without them their modules have no page.
OPTIONAL: Final = ("cuda", "ray", "triton", "torch.distributed._symmetric_memory")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "build" / "docs")
    folder = parser.parse_args().folder
    left_out: list[str] = []
    modules = [module for package in PACKAGES for module in import_all(package, left_out)]
    for module in modules:
        resolve(module)
    pdoc.render.configure(
        docformat="google", show_source=False, footer_text="ppstream", search=True
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="The module specification .* adds a module")
        for name in left_out:
            warnings.filterwarnings("ignore", message=f"Couldn't import {name}:")
        names = [*(module.__name__ for module in modules), *(f"!{name}$" for name in left_out)]
        pdoc.pdoc(*names, output_directory=folder)
    print(f"{len(modules)} modules: {folder / 'index.html'}")
    return 0


def import_all(package: str, left_out: list[str]) -> list[ModuleType]:
    """The package and every module below it; ``left_out`` gets the names of those that lack one."""
    top = importlib.import_module(package)
    found = [top]
    for info in pkgutil.walk_packages(top.__path__, f"{package}."):
        found += import_one(info.name, left_out)
    return found


def import_one(name: str, left_out: list[str]) -> list[ModuleType]:
    """The module, or nothing where it needs what only another kind of machine has."""
    try:
        return [importlib.import_module(name)]
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith(OPTIONAL):
            raise
        print(f"left out: {name} needs {error.name}", file=sys.stderr)
        left_out.append(name)
        return []


def resolve(module: ModuleType) -> None:
    """Load what is loaded lazily, and evaluate the annotations that pdoc cannot: named tuples'."""
    for name in getattr(module, "__all__", ()):
        setattr(module, name, getattr(module, name))
    names = dict(vars(module))
    for statement in type_checking_imports(module):
        exec(statement, names)  # import statements of our own source, nothing else
    for kind in vars(module).values():
        own = isinstance(kind, type) and kind.__module__ == module.__name__
        if own and hasattr(kind, "_field_defaults"):
            hints = get_type_hints(kind, names)
            kind.__annotations__ = kind.__new__.__annotations__ = hints


def type_checking_imports(module: ModuleType) -> list[str]:
    """The import statements under ``if TYPE_CHECKING``."""
    is_source = (module.__file__ or "").endswith(".py")  # the compiled core has its stub
    source = (is_source and inspect.getsource(module)) or "pass"
    return [
        ast.unparse(statement)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for statement in node.body
        if isinstance(statement, ast.Import | ast.ImportFrom)
    ]


if __name__ == "__main__":
    sys.exit(main())
