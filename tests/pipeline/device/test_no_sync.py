"""No loop on a GPU waits for it, allocates, or reads a tensor on the host: read from the source.

What runs per envelope is everything that a hot entry can reach through calls of its own file. The
same promise is checked at run time by the tests on GPUs, under ``set_sync_debug_mode("error")``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

PPSTREAM: Final = Path(__file__).resolve().parents[3] / "ppstream"

#: Where each envelope enters a file.
HOT: Final = {
    "ingest/device/sample_blocks.py": ("write",),
    "ingest/device/rings.py": ("ingest", "order", "hold"),
    "ingest/device/window.py": ("ingest", "enqueue", "pop"),
    "ingest/device/window_records.py": ("account",),
    "policy/graphed.py": ("__call__",),
    "pipeline/device/stage_a.py": ("ingest", "enqueue", "settle"),
    "pipeline/device/stage_b.py": ("__call__",),
    "pipeline/device/executor.py": ("begin", "finished", "result", "settle", "wait"),
    "pipeline/device/policy_rank.py": ("step", "wait", "queue"),
    "pipeline/device/rank0_queue.py": ("envelope",),
    "pipeline/device/rank0_stamped.py": ("envelope",),
    "pipeline/device/stamped_hop.py": (
        *("queue_receive", "queue_wait", "queue_header", "queue_send"),
    ),
    "pipeline/device/in_flight.py": ("add", "is_oldest_done", "oldest_due_ns", "finish"),
    "links/device_counters.py": (
        *("queue_header", "queue_send", "queue_receive", "queue_wait"),
        *("message_of", "count_of"),
    ),
    "cuda/device_stamps.py": ("ns_since",),
    "cuda/linear_graph.py": ("queue",),
    "links/nccl.py": ("queue_header", "queue_send", "queue_receive"),
    "observe/nvtx_ranges.py": ("push", "pop"),
}
#: Reached from a hot entry, but only before the run is warm.
COLD: Final = {("ingest/device/window.py", "prepare"), ("policy/graphed.py", "prepare")}

WAITS: Final = {"synchronize", "item", "cpu", "numpy", "nonzero", "is_nonzero", "allclose", "equal"}
MAKES: Final = {
    *("tensor", "empty", "zeros", "ones", "full", "rand", "randn", "arange", "as_tensor"),
    *("cat", "stack"),
    *("empty_like", "zeros_like", "ones_like", "full_like", "clone", "contiguous", "pin_memory"),
    *("Stream", "Event", "CUDAGraph", "empty_cache", "cuda", "to"),
}
READS: Final = {"tolist", "__bool__"}

#: What looks like a breach and is none, with the reason.
ALLOWED: Final = {
    (
        "ingest/device/window.py",
        "pop",
        "tolist",
    ): "numpy over pinned memory, of an envelope that is over",
    (
        "pipeline/device/policy_rank.py",
        "finish",
        "tolist",
    ): "pinned memory, of an envelope that is over",
    (
        "pipeline/device/executor.py",
        "result",
        "tolist",
    ): "pinned memory, of an envelope that is over",
    (
        "pipeline/device/stage_a.py",
        "_await_end",
        "synchronize",
    ): "of one rank, which waits for each envelope; the policy is queued behind it",
}


def functions(tree: ast.Module) -> dict[str, list[ast.FunctionDef]]:
    found: dict[str, list[ast.FunctionDef]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            found.setdefault(node.name, []).append(node)
    return found


def called(function: ast.FunctionDef) -> Iterator[tuple[int, str]]:
    """Line and last name of every call."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute):
                yield node.lineno, node.func.attr
            elif isinstance(node.func, ast.Name):
                yield node.lineno, node.func.id


def breaches(file: str, source: str, entries: tuple[str, ...]) -> Iterator[str]:
    """Every call that must not happen per envelope, in what ``entries`` reach."""
    for line, name, call in suspects(file, source, entries):
        if (file, name, call) not in ALLOWED:
            yield f"{file}:{line} {name}() calls {call}()"


def suspects(file: str, source: str, entries: tuple[str, ...]) -> Iterator[tuple[int, str, str]]:
    known = functions(ast.parse(source))
    queue, seen = list(entries), set(entries)
    while queue:
        name = queue.pop()
        for function in known[name]:
            for line, call in called(function):
                if call in WAITS | MAKES | READS:
                    yield line, name, call
                if call in known and call not in seen and (file, call) not in COLD:
                    seen.add(call)
                    queue.append(call)


@pytest.mark.parametrize("file", HOT)
def test_nothing_waits_allocates_or_reads_back(file: str) -> None:
    source = (PPSTREAM / file).read_text()
    assert set(HOT[file]) <= set(functions(ast.parse(source))), "an entry was renamed"
    assert list(breaches(file, source, HOT[file])) == []


def test_every_exception_is_still_needed() -> None:
    used = {
        (file, name, call)
        for file, entries in HOT.items()
        for _, name, call in suspects(file, (PPSTREAM / file).read_text(), entries)
    }
    assert set(ALLOWED) == used


@pytest.mark.parametrize(
    "line",
    [
        "x.item()",
        "torch.cuda.synchronize()",
        "event.synchronize()",
        "x = torch.zeros(3)",
        "x = x.cpu()",
        "x = x.to('cpu')",
        "if torch.equal(x, y): pass",
        "x.tolist()",
        "e = torch.cuda.Event()",
    ],
)
def test_the_rule_catches_what_it_is_for(line: str) -> None:
    source = f"def start(x, y):\n    deeper(x, y)\ndef deeper(x, y):\n    {line}\n"
    assert len(list(breaches("somewhere.py", source, ("start",)))) == 1


def test_the_rule_lets_the_rest_pass() -> None:
    source = (
        "def start(out, x, stream):\n"
        "    out.copy_(x)\n    stream.wait_event(x)\n    prepare(x)\n"
        "def prepare(x):\n    return x.item()\n"
        "def elsewhere(x):\n    return x.item()\n"
    )
    assert list(breaches("ingest/device/window.py", source, ("start",))) == []
