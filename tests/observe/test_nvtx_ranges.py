from __future__ import annotations

import os
import subprocess
import sys
import timeit
from collections import Counter
from pathlib import Path

import pytest

from ppstream.observe import nvtx_ranges

TOOL = Path(__file__).parents[1] / "nvtx_injection.c"
ENVELOPES = 6

#: A whole pipeline under the tool, pipelined and inline, with a cut in between.
RUN = f"""
import sys, tempfile, pathlib
sys.path.insert(0, {str(Path(__file__).parents[1] / "support")!r})
from pipeline_in_process import NewestValues, PipelineInProcess, small_config
for inline in (False, True):
    with tempfile.TemporaryDirectory() as folder:
        with PipelineInProcess(
            small_config(), NewestValues(), pathlib.Path(folder), inline=inline
        ) as pipeline:
            pipeline.saturate()
            pipeline.rank0.run({ENVELOPES})
"""


@pytest.fixture(scope="module")
def tool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("nvtx") / "tool.so"
    command = ["cc", "-shared", "-fPIC", "-Wall", "-Wextra", "-Wno-unused-parameter"]
    try:
        subprocess.run([*command, "-o", str(library), str(TOOL)], check=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("no C compiler")
    return library


def lines_of(tool: Path, program: str, folder: Path) -> list[str]:
    file = folder / "lines"
    environment = os.environ | {"NVTX_INJECTION64_PATH": str(tool), "NVTX_LINES": str(file)}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=100)
    return file.read_text().splitlines()


def test_without_a_tool_a_range_costs_a_flag() -> None:
    assert not nvtx_ranges.on
    pair = "if trace.on: trace.A.push(1, 2)\nif trace.on: trace.A.pop()"
    cost_s = min(
        timeit.repeat(
            pair, "from ppstream.observe import nvtx_ranges as trace", number=20_000, repeat=5
        )
    )
    assert cost_s / 20_000 < 2e-6  # 0.02 us measured; the bound is for a machine that is busy


def test_ranges_carry_name_colour_epoch_and_seq(tool: Path, tmp_path: Path) -> None:
    program = (
        "from ppstream.observe import nvtx_ranges as trace\n"
        "assert trace.on\n"
        "trace.B.push(3, 70); trace.C.push(3, 71); trace.C.pop(); trace.B.pop()"
    )
    assert lines_of(tool, program, tmp_path) == [
        "domain ppstream",
        f"push B {3 << 32 | 70} ffe69f00 2",
        f"push C {3 << 32 | 71} ff009e73 2",
        "pop",
        "pop",
    ]


def test_every_step_of_every_envelope_is_one_range(tool: Path, tmp_path: Path) -> None:
    lines = lines_of(tool, RUN, tmp_path)
    pushes = [line.split()[1:3] for line in lines if line.startswith("push")]
    counts = Counter(name for name, _ in pushes)
    both, pipelined = 2 * ENVELOPES, ENVELOPES  # inline, nothing is sent
    assert counts == {"A": both, "B": both, "C": both, "send": pipelined, "recv": pipelined}
    assert lines.count("pop") == len(pushes)
    for name in counts:
        seqs = [int(payload) & 0xFFFFFFFF for one, payload in pushes if one == name]
        assert Counter(seqs) == Counter(list(range(ENVELOPES)) * (counts[name] // ENVELOPES))
