"""The house's own rules, read from the source: what no general linter knows.

Every rule is a function from a parsed file to what breaks it; each is shown to catch something.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Final

import pytest
from drill.mutants import MUTANTS, Mutant

ROOT: Final = Path(__file__).resolve().parents[2]
ROOMS: Final = ("ppstream", "kernels", "stages", "tools")
LINES_MAX: Final = 500
FUNCTION_LINES_MAX: Final = 60
NAMELESS: Final = {"util", "utils", "helper", "helpers", "common", "misc", "manager", "managers"}

UNPICKLERS: Final = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
CODE_LOADERS: Final = {
    "torch.jit.load",
    "torch.export.load",
    "torch.package.PackageImporter",
    "torch._inductor.aoti_load_package",
}
CLOCKS: Final = {
    f"time.{name}{suffix}"
    for name in ("monotonic", "perf_counter", "process_time", "thread_time", "time")
    for suffix in ("", "_ns")
} | {"time.clock_gettime", "time.clock_gettime_ns"}
WALL_CLOCKS: Final = {
    "time.time",
    "time.time_ns",
    "datetime.datetime.now",
    "datetime.datetime.today",
    "datetime.datetime.utcnow",
}
INTERPRETER: Final = "ppstream/core/interpreter.py"  # its table has every limit
TURNS: Final = {"sys.setswitchinterval"} | {
    f"gc.{name}" for name in ("collect", "disable", "enable", "freeze", "set_threshold", "unfreeze")
}
MAY_READ_A_CLOCK: Final = {"ppstream/core/clock.py"}  # logic takes now_ns
MAY_READ_WALL_TIME: Final = {"ppstream/observe/run_folder.py"}  # a run's name and dates, for people
MAY_IMPORT: Final = {
    # links: the only place that may know how ranks find and reach each other through torch;
    # and what has a mesh: the policies that are sharded over it, and their ranks
    "torch.distributed": {
        "ppstream/launch/launcher.py",
        "ppstream/control/launcher_store.py",
        "ppstream/links/gloo.py",
        "ppstream/links/nccl.py",
        "ppstream/launch/mesh.py",
        "ppstream/policy/compatibility.py",
        "stages/ppstream_stages/act.py",
        "stages/ppstream_stages/building.py",
        "stages/ppstream_stages/tensor_parallel.py",
        "stages/ppstream_stages/vla.py",
        "tools/drill/policy.py",
    },
    "ray": {"ppstream/fleet/cluster.py"},  # a control plane: no sample passes through it
    "foxglove": {"ppstream/view/live_view.py"},  # viewers: a process of its own
    # the robot wire, both of its ends and nothing between the ranks
    "zmq": {
        "ppstream/wire/zmq_socket.py",
        "ppstream/wire/zmq_auth.py",
        "ppstream/wire/keys.py",
        "ppstream/gateway/groot.py",
        "ppstream/gateway/groot_socket.py",  # a wire of others that is ZeroMQ
    },
}

#: Documented, for all their underscore.
NAMED_TUPLE: Final = {"_asdict", "_field_defaults", "_fields", "_make", "_replace"}
#: Private names of others that tests may use, and why.
MAY_REACH: Final = {
    "os._exit": "ends a process as a crash does",
    "torch.cuda._sleep": "torch has no public kernel that only takes time",
    "strands_robots.policies.groot.client._decode": "the codec of a client that others publish",
    "strands_robots.policies.groot.client._encode": "the same",
}
ATTRIBUTE_CALLS: Final = {"getattr", "setattr", "hasattr", "delattr"}

#: First words of a docstring that are refused.
HEADLESS: Final = re.compile(r"(What|How|Whether|Where|Who|Whose|Why)\b")

Rule = Callable[[str, ast.Module], Iterator[str]]


def imported(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of everything that is imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def used(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of every attribute reached through an imported name."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            bound = [(a.asname or a.name.partition(".")[0], a) for a in node.names]
            names |= {name: a.name if a.asname else name for name, a in bound}
        elif isinstance(node, ast.ImportFrom):
            names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name) and (text := dotted(node)):
            first, _, rest = text.partition(".")
            if first in names:
                yield node.lineno, f"{names[first]}.{rest}".rstrip(".")


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)):
        return f"{before}.{node.attr}"
    return ""


def nothing_unpickles(file: str, tree: ast.Module) -> Iterator[str]:
    for line, name in imported(tree):
        if name.split(".")[0] in UNPICKLERS:
            yield f"{file}:{line} imports {name}: reading it can run code"
    for line, name in used(tree):
        if name in CODE_LOADERS:
            yield f"{file}:{line} {name} can run code from a file"
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and dotted(node.func) == "torch.load":
            safe = [ast.unparse(k.value) for k in node.keywords if k.arg == "weights_only"]
            if safe != ["True"]:
                yield f"{file}:{node.lineno} torch.load without weights_only=True"


def one_file_reads_the_clock(file: str, tree: ast.Module) -> Iterator[str]:
    if not file.startswith("ppstream/"):
        return  # a simulated stage, a demo robot and a tool measure for themselves
    for line, name in used(tree):
        if name in WALL_CLOCKS:
            if file not in MAY_READ_WALL_TIME:
                yield f"{file}:{line} {name}: wall time stands in logs and nowhere else"
        elif name in CLOCKS and file not in MAY_READ_A_CLOCK:
            yield f"{file}:{line} {name}: take now_ns, or clock.now_ns at the top of a loop"


def each_third_party_library_has_its_room(file: str, tree: ast.Module) -> Iterator[str]:
    if not file.startswith("ppstream/"):
        return
    for line, name in [*imported(tree), *used(tree)]:
        for library, rooms in MAY_IMPORT.items():
            if f"{name}.".startswith(f"{library}.") and file not in rooms:
                yield f"{file}:{line} {name}: only {', '.join(sorted(rooms))} may use {library}"


def one_file_says_who_holds_the_interpreter(file: str, tree: ast.Module) -> Iterator[str]:
    for line, name in used(tree):
        if name in TURNS and file != INTERPRETER:
            yield f"{file}:{line} {name}: only {INTERPRETER} may use it"


def functions_fit_a_screen(file: str, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES_MAX:
                yield f"{file}:{node.lineno} {node.name} has {length} lines"


def docstrings_begin_with_a_verb_or_a_noun(file: str, tree: ast.Module) -> Iterator[str]:
    """A headless relative ("What the loop asks of a link.") makes the reader look for its noun."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(tree):
        text = (ast.get_docstring(node) or "") if isinstance(node, documented) else ""
        if HEADLESS.match(text):
            yield f"{file}:{getattr(node, 'lineno', 1)} {text.splitlines()[0]}"


def private_names_stay_in_their_file(file: str, tree: ast.Module) -> Iterator[str]:
    """A private name is used in the file that defines it, and nowhere else."""
    own = NAMED_TUPLE | set(defined(tree))
    for node in ast.walk(tree):
        for line, name in reached(node):
            last = name.rpartition(".")[2]
            is_private = last.startswith("_") and not last.endswith("__") and last.strip("_")
            if is_private and last not in own and name not in MAY_REACH:
                yield f"{file}:{line} {name}: test what it gives, or make a public seam"


def defined(tree: ast.Module) -> Iterator[str]:
    """Names of functions, classes, variables and of attributes that objects give themselves."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield from [node.attr] if dotted(node.value) in ("self", "cls") else []


def reached(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of what a node reaches: an attribute, an import, a name in ``setattr``."""
    if isinstance(node, ast.Attribute):
        yield node.lineno, dotted(node) or node.attr
    elif isinstance(node, ast.ImportFrom):
        yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
    elif isinstance(node, ast.Call) and dotted(node.func).rpartition(".")[2] in ATTRIBUTE_CALLS:
        for given in node.args[:2]:
            if isinstance(given, ast.Constant) and isinstance(given.value, str):
                yield node.lineno, given.value


def import_circle(parsed: Mapping[str, ast.Module]) -> list[str]:
    """Modules of one circle, each of which imports the next; none: there is no circle.

    Imports inside functions and for type checkers count, too. A name that is no module of its own
    belongs to the longest part of it that is one: a package may import its compiled module.
    """
    modules = {module_of(file): tree for file, tree in parsed.items()}
    imports: dict[str, set[str]] = {}
    for file, (module, tree) in zip(parsed, modules.items(), strict=True):
        found = {home for _, name in imported(tree) if (home := longest_of(name, modules))}
        imports[module] = found - {module} if Path(file).name == "__init__.py" else found
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        circle: list[str] = error.args[1]
        return circle[::-1]  # it has each behind what it imports
    return []


def module_of(file: str) -> str:
    path = Path(file).with_suffix("")
    parts = path.parts if path.parts[0] == "ppstream" else path.parts[1:]  # of a room's folder
    return ".".join(parts[:-1] if path.name == "__init__" else parts)


def longest_of(name: str, modules: Mapping[str, ast.Module]) -> str:
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name


RULES: Final[tuple[Rule, ...]] = (
    nothing_unpickles,
    one_file_reads_the_clock,
    each_third_party_library_has_its_room,
    one_file_says_who_holds_the_interpreter,
    functions_fit_a_screen,
    docstrings_begin_with_a_verb_or_a_noun,
)


TEST_RULES: Final[tuple[Rule, ...]] = (private_names_stay_in_their_file,)


def source_files() -> list[Path]:
    return sorted(file for room in ROOMS for file in (ROOT / room).rglob("*.py"))


@pytest.fixture(scope="module")
def parsed() -> dict[str, ast.Module]:
    return {f.relative_to(ROOT).as_posix(): ast.parse(f.read_text()) for f in source_files()}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_source_keeps_the_rule(rule: Rule, parsed: dict[str, ast.Module]) -> None:
    assert len(parsed) > 10
    assert [text for file, tree in parsed.items() for text in rule(file, tree)] == []


@pytest.mark.parametrize("rule", TEST_RULES, ids=lambda rule: rule.__name__)
def test_tests_keep_the_rule(rule: Rule) -> None:
    files = sorted((ROOT / "tests").rglob("*.py"))
    assert len(files) > 10
    trees = {file.relative_to(ROOT).as_posix(): ast.parse(file.read_text()) for file in files}
    assert [text for file, tree in trees.items() for text in rule(file, tree)] == []


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        (private_names_stay_in_their_file, "import x\nx.y._z"),
        (private_names_stay_in_their_file, "made()._z = 1"),
        (private_names_stay_in_their_file, "class A(B):\n    def f(self):\n        self._z()"),
        (private_names_stay_in_their_file, "from x import _y"),
        (private_names_stay_in_their_file, 'monkeypatch.setattr(x, "_y", 1)'),
        (private_names_stay_in_their_file, 'monkeypatch.setattr("x._y", 1)'),
        (docstrings_begin_with_a_verb_or_a_noun, 'def f():\n    """Whether it is."""'),
        (docstrings_begin_with_a_verb_or_a_noun, '"""What a link is."""'),
        (nothing_unpickles, "import pickle"),
        (nothing_unpickles, "from pickle import loads"),
        (nothing_unpickles, "import torch\ntorch.load(path)"),
        (nothing_unpickles, "import torch\ntorch.load(path, weights_only=False)"),
        (nothing_unpickles, "import torch\ntorch.export.load(path)"),
        (nothing_unpickles, "from torch import jit\njit.load(path)"),
        (one_file_reads_the_clock, "import time\nnow = time.monotonic_ns()"),
        (one_file_reads_the_clock, "import time as t\nnow = t.perf_counter()"),
        (one_file_reads_the_clock, "from time import monotonic\nnow = monotonic()"),
        (one_file_reads_the_clock, "import time\nnow = time.time()"),
        (one_file_reads_the_clock, "import datetime\nnow = datetime.datetime.now()"),
        (one_file_reads_the_clock, "from datetime import datetime\nnow = datetime.now()"),
        (each_third_party_library_has_its_room, "import torch.distributed as dist"),
        (each_third_party_library_has_its_room, "from torch import distributed"),
        (each_third_party_library_has_its_room, "import torch\ntorch.distributed.barrier()"),
        (each_third_party_library_has_its_room, "def f():\n    import zmq.asyncio"),
        (one_file_says_who_holds_the_interpreter, "import sys\nsys.setswitchinterval(0.001)"),
        (one_file_says_who_holds_the_interpreter, "from gc import freeze\nfreeze()"),
        (functions_fit_a_screen, "def f():\n" + "    x = 1\n" * 60),
    ],
)
def test_rule_catches_what_it_is_for(rule: Rule, source: str) -> None:
    assert list(rule("ppstream/somewhere.py", ast.parse(source)))


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        (
            private_names_stay_in_their_file,
            "class A:\n    def f(self):\n        self._z = other._z",
        ),
        (private_names_stay_in_their_file, "import os\nos._exit(point._replace(x=1).__class__)"),
        (nothing_unpickles, "import torch\ntorch.load(path, weights_only=True)"),
        (one_file_reads_the_clock, "import time\ntime.sleep(0.1)"),
        (one_file_reads_the_clock, "def f(time):\n    return time.time"),
        (each_third_party_library_has_its_room, "import torch\nimport zmqtools"),
        (functions_fit_a_screen, "def f():\n" + "    x = 1\n" * 59),
    ],
)
def test_rule_lets_the_rest_pass(rule: Rule, source: str) -> None:
    assert list(rule("ppstream/somewhere.py", ast.parse(source))) == []


def test_no_module_imports_itself_through_others(parsed: dict[str, ast.Module]) -> None:
    assert " imports ".join(import_circle(parsed)) == ""


PACKAGE: Final = "ppstream/room/__init__.py"
ONE, OTHER, THIRD = (f"ppstream/room/{name}.py" for name in ("one", "other", "third"))
STAGE: Final = "stages/ppstream_stages/stage.py"


@pytest.mark.parametrize(
    "sources",
    [
        {ONE: "import ppstream.room.other", OTHER: "from ppstream.room import one"},
        {ONE: "def f():\n    from ppstream.room.other import g", OTHER: "import ppstream.room.one"},
        {
            ONE: "from ppstream.room.other import f",
            OTHER: "if TYPE_CHECKING:\n    from ppstream.room.one import A",
        },
        {
            ONE: "import ppstream.room.other",
            OTHER: "import ppstream.room.third",
            THIRD: "import ppstream.room.one",
        },
        {PACKAGE: "from ppstream.room.one import f", ONE: "from ppstream.room import compiled"},
        {ONE: "import ppstream_stages.stage", STAGE: "import ppstream.room.one"},
        {ONE: "from ppstream.room import one"},
    ],
    ids=["top", "lazy", "types alone", "of three", "its own package", "of two trees", "of one"],
)
def test_a_circle_of_imports_is_found(sources: dict[str, str]) -> None:
    circle = import_circle({file: ast.parse(source) for file, source in sources.items()})
    assert circle[0] == circle[-1]
    assert {*circle} == {module_of(file) for file in sources}


def test_imports_without_a_circle_pass() -> None:
    sources = {
        PACKAGE: "import sys\nfrom ppstream.room import compiled",
        ONE: "from ppstream.room import other, third",
        OTHER: "from ppstream.room import third",
        THIRD: "import ppstream.room",
    }
    assert import_circle({file: ast.parse(source) for file, source in sources.items()}) == []


def test_every_file_is_one_concept_with_a_name() -> None:
    lengths = {str(f.relative_to(ROOT)): len(f.read_text().splitlines()) for f in source_files()}
    assert {file: lines for file, lines in lengths.items() if lines > LINES_MAX} == {}
    assert [f for f in source_files() if f.stem in NAMELESS or f.parent.name in NAMELESS] == []


def test_every_file_says_what_it_is(parsed: dict[str, ast.Module]) -> None:
    assert [file for file, tree in parsed.items() if not ast.get_docstring(tree)] == []


def test_one_class_name_means_one_thing(parsed: dict[str, ast.Module]) -> None:
    """A private class belongs to its file; every policy of ``stages/`` has its own Options."""
    files: dict[str, list[str]] = {}
    for file, tree in parsed.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files.setdefault(node.name, []).append(file)
    del files["Options"]
    assert {name: where for name, where in files.items() if len(where) > 1} == {}


def test_folders_that_are_no_packages_stay_none() -> None:
    """A package named ``kernels`` would shadow Hugging Face's in the same environment."""
    folders = ("kernels", "stages", "tools", "runbooks", "tests")
    assert [folder for folder in folders if (ROOT / folder / "__init__.py").exists()] == []


def test_no_tool_shadows_the_standard_library() -> None:
    """A tool's folder comes first on sys.path: tools/profile.py would break cProfile."""
    tools = {file.stem for file in (ROOT / "tools").rglob("*.py")}
    assert tools & sys.stdlib_module_names == set()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.fault)
def test_every_mutant_of_the_drill_still_finds_the_line_it_changes(mutant: Mutant) -> None:
    assert (ROOT / mutant.file).read_text().count(mutant.old) == 1
    assert mutant.new != mutant.old
