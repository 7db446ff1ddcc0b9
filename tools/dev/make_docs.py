"""The documentation site: ``python tools/dev/make_docs.py [FOLDER]``.

The pages that the project ships, and the API reference from the docstrings, with Sphinx, whose
settings are in ``conf.py``. A warning is an error: a dead link, a docstring that does not parse, a
module that does not import. What needs the libraries of another kind of machine is left out where
they are missing, and said.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import pkgutil
import re
import shutil
import sys
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / room) for room in ("", "kernels", "stages")]

from sphinx.cmd.build import build_main

from ppstream.core.interpreter import GcControl

PACKAGES: Final = ("ppstream", "ppstream_kernels", "ppstream_stages")
#: Libraries of one kind of machine, or of an extra alone: without them their modules are left out.
OPTIONAL: Final = ("cuda", "ray", "triton", "torch.distributed._symmetric_memory")
#: Public names that a reader looks for first; the others follow in the order of ``__all__``.
FIRST: Final = ("RobotClient", "ControlLoop", "Policy", "TensorSpec", "start")
HOUSE: Final = ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
#: What pages link to as files: they stay where they are.
ROOMS: Final = ("kernels", "ppstream", "stages", "tests", "tools")
#: The tables of runbooks/README.md that order the pages, by the words above their first column.
GROUPS: Final = {"you want": "Guides", "you see": "Troubleshooting"}
OPTIONS: Final = ("--fail-on-warning", "--keep-going", "--quiet", "--jobs", "auto")


def main() -> int:
    """Build the site; the exit code of Sphinx."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "build" / "docs")
    folder = parser.parse_args().folder.resolve()
    pages, read = (folder.with_name(f"{folder.name}-{part}") for part in ("pages", "read"))
    lay_out(pages)
    settings = Path(__file__).parent
    # Trees of pages only grow; collections would walk them for nothing.
    with GcControl():
        code = build_main([*OPTIONS, "-c", str(settings), "-d", str(read), str(pages), str(folder)])
    if code == 0:
        (folder / "index.html").touch()  # for make: Sphinx leaves a page that stays the same
        print(folder / "index.html")
    return code


def lay_out(pages: Path) -> None:
    """Copy and write the pages into ``pages``; what stays the same keeps its time."""
    shutil.rmtree(pages / "runbooks", ignore_errors=True)  # a page may be gone
    shutil.copytree(ROOT / "runbooks", pages / "runbooks")
    for name in HOUSE:
        shutil.copy2(ROOT / name, pages / name)
    for room in ROOMS:
        if not (pages / room).is_symlink():
            (pages / room).symlink_to(ROOT / room)
    write(pages / "index.md", (ROOT / "README.md").read_text() + contents())
    modules = [module for package in PACKAGES for module in import_all(package)]
    top = modules.pop(0)
    chapters = {name: list(group) for name, group in groupby(modules, chapter)}
    for name, inside in chapters.items():
        write(pages / "api" / f"{name}.rst", "\n".join(api_page(inside, top.__all__)))
    for page in (pages / "api").glob("*.rst"):
        if page.stem not in (*chapters, "index"):
            page.unlink()  # of a package that is gone
    write(pages / "api" / "index.rst", "\n".join(api_index(top, list(chapters))))


def write(path: Path, text: str) -> None:
    """Write the file unless it has this text already."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def contents() -> str:
    """The site's table of contents, with the run-books in the order of their own index."""
    index = (ROOT / "runbooks" / "README.md").read_text()
    tables = {words: index.split(f"| {words} |")[1].split("\n\n")[0] for words in GROUPS}
    chapters = {
        title: [f"runbooks/{page}" for page in re.findall(r"\]\(([\w-]+)\.\w+\)", tables[words])]
        for words, title in GROUPS.items()
    }
    chapters["Reference"] = [
        "api/index",
        "runbooks/README",
        *(n.removesuffix(".md") for n in HOUSE),
    ]
    return "".join(
        f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n" + "\n".join(names) + "\n```\n"
        for title, names in chapters.items()
    )


def chapter(module: ModuleType) -> str:
    """The page of a module: its package below ``ppstream``, or the package that it is in."""
    top, _, rest = module.__name__.partition(".")
    return f"{top}.{rest.split('.')[0]}" if rest and top == "ppstream" else top


def api_index(package: ModuleType, chapters: list[str]) -> list[str]:
    """The reference's first page: the public names, then a list of the packages."""
    lines = [*title("API reference", "="), inspect.getdoc(package) or "", ""]
    for name in (*FIRST, *(n for n in package.__all__ if n not in FIRST)):
        thing = getattr(package, name)
        kind = "class" if inspect.isclass(thing) else "function"
        lines += [*title(f"``{name}``", "-"), f".. auto{kind}:: ppstream.{name}", ""]
    lines += [*title("Packages", "-"), ".. toctree::", "   :maxdepth: 1", ""]
    return [*lines, *(f"   {name}" for name in chapters if name != package.__name__), ""]


def api_page(modules: list[ModuleType], public: list[str]) -> list[str]:
    """The page of a package: its own docstring, then a section for each module."""
    first, *rest = (module.__name__ for module in modules)
    without = f"   :exclude-members: {', '.join(public)}"  # they stand on the first page
    lines = [*title(f"``{first}``", "="), f".. automodule:: {first}", without, ""]
    for name in rest:
        heading = title(f"``{name.removeprefix(first)[1:]}``", "-")
        lines += [*heading, f".. automodule:: {name}", without, ""]
    return lines


def title(text: str, under: str) -> list[str]:
    """A heading of reStructuredText."""
    return [text, under * len(text), ""]


def import_all(package: str) -> list[ModuleType]:
    """The package and every module below it that this machine can import."""
    top = importlib.import_module(package)
    found = [top]
    for info in pkgutil.walk_packages(top.__path__, f"{package}."):
        found += import_one(info.name)
    return found


def import_one(name: str) -> list[ModuleType]:
    """The module, or nothing where it needs what only another kind of machine has."""
    try:
        return [importlib.import_module(name)]
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith(OPTIONAL):
            raise
        print(f"left out: {name} needs {error.name}", file=sys.stderr)
        return []


if __name__ == "__main__":
    sys.exit(main())
