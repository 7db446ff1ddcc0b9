"""One declaration of the log's lines: a stamp that is added there is written, sent and read."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import pytest
from golden_runs import manifest

from ppstream.analysis import records
from ppstream.analysis.log_reader import read_run
from ppstream.analysis.period_model import PipelineForm
from ppstream.analysis.records import EnvelopeLine, PolicyLine
from ppstream.links.headers import RESULT_HEADER, STAGE_B
from ppstream.observe.log_writer import EnvelopeRecord, PolicyRecord, TimestampLog
from ppstream.sessions.requests import NamedRobotState

ROOT = Path(__file__).resolve().parents[2]
# In the order of older logs and runs: nothing is renamed, removed or moved.
BEGIN = "kind run_id generation epoch lane seq mode phase"
RANK0 = """pacing tA0 tA1 tSend tRecv tDecode tEmit tPick tRx eA_ns eC_ns B_ns eB_ns idle_ns
    wait_input_ns wait_output_ns residence_ns w_input_ns w_credit_ns w_slot_ns w_result_ns w_emit_ns
    busy_link_ns busy_link_c_ns cpu_a_ns cpu_c_ns run_delay_ns run_delay_c_ns delay_a_ns delay_c_ns
    outstanding q_decode outstanding_max q_decode_max outstanding_ns_total q_decode_ns_total
    age_rank0_ns window_end_ns expires_ns session session_epoch input_age_ns drop"""
POLICY = """tB0 tB1 eB_ns wait_input_ns wait_output_ns idle_ns residence_ns busy_link_ns
    cpu_b_ns run_delay_ns delay_b_ns allocs recompiles drop"""
HEADER = """index generation epoch seq failed
    tB0 tB1 B_ns eB_ns wait_input_ns wait_output_ns idle_ns residence_ns busy_link_ns"""
LINES: dict[type, type] = {EnvelopeLine: EnvelopeRecord, PolicyLine: PolicyRecord}


@pytest.mark.parametrize(("record", "own"), [(EnvelopeRecord, RANK0), (PolicyRecord, POLICY)])
def test_keys_of_a_line_are_those_of_older_logs_in_their_order(record: Any, own: str) -> None:
    keys = [*BEGIN.split(), *own.split()]
    written = msgspec.to_builtins(record(**dict.fromkeys(keys, 7)))
    assert [key for key in written if key in keys] == keys
    assert msgspec.json.encode(record()) == b"{}"  # what is absent costs no byte


def test_words_of_a_results_header_stay_where_they_are() -> None:
    words = HEADER.split()
    assert list(RESULT_HEADER)[: len(words)] == words


def test_words_are_counted_from_0_without_a_hole_and_given_once() -> None:
    rank0, policy = records.header_words(EnvelopeLine), records.header_words(PolicyLine)
    assert sorted((rank0 | policy).values()) == [*range(len(rank0 | policy))]
    assert all(rank0[name] == policy[name] for name in rank0.keys() & policy.keys())


def test_every_number_and_text_that_is_written_is_read(tmp_path: Path) -> None:
    given: dict[type, dict[str, Any]] = {}
    for rank, (line, record) in enumerate(LINES.items()):
        hints = get_type_hints(line)
        given[line] = {"epoch": 4, "seq": 5}
        for n, name in enumerate(f.name for f in fields(line)):
            if hints[name] in (int | None, str | None):
                given[line][name] = 1000 * rank + n if hints[name] == int | None else f"a {name}"
        path = tmp_path / f"rank{rank}.gen2.jsonl"
        log = TimestampLog(path, record, 1, run_id="golden", generation=2)
        filled = log.acquire()
        for name, value in given[line].items():
            setattr(filled, name, value)
        log.commit(filled)
        log.close()
    (tmp_path / "run.json").write_text(json.dumps(manifest(PipelineForm())))
    (envelope,) = read_run(tmp_path).envelopes
    for read, line in ((envelope, EnvelopeLine), (envelope.stage1, PolicyLine)):
        expected = given[line] | {"run_id": "golden", "generation": 2, "lane": 0}
        assert {name: getattr(read, name) for name in expected} == expected


def test_a_robots_account_is_read_by_the_names_of_its_message() -> None:
    assert {*records.RobotStateLine._fields} == {*NamedRobotState.__struct_fields__}


# ---- a new stamp is one line in one file ---------------------------------------------------------

#: Fills the new stamp in the record of each line that has it.
WRITE = """
import sys
from pathlib import Path
import ppstream
from ppstream.observe.log_writer import EnvelopeRecord, PolicyRecord, TimestampLog
folder = Path(sys.argv[1])
assert Path(ppstream.__file__).is_relative_to(folder), ppstream.__file__
for rank, kind in enumerate((EnvelopeRecord, PolicyRecord)):
    log = TimestampLog(folder / f"rank{rank}.gen0.jsonl", kind, 4, run_id="golden", generation=0)
    record = log.acquire()
    record.seq = record.epoch = 0
    if "new_ns" in kind.__struct_fields__:
        record.new_ns = 77
    log.commit(record)
    log.close()
"""
#: Both loops over a real link; the policy rank's measures the new stamp.
RUN = """
import sys
from pathlib import Path
import ppstream
import pipeline_in_process as whole
folder = Path(sys.argv[1])
assert Path(ppstream.__file__).is_relative_to(folder), ppstream.__file__
class Measuring(whole.HostPolicyRank):
    def run_policy(self, *envelope):
        self.measured.new_ns = 77
        return super().run_policy(*envelope)
whole.HostPolicyRank = Measuring
with whole.PipelineInProcess(whole.small_config(), whole.NewestValues(), folder) as pipeline:
    pipeline.saturate()
    pipeline.rank0.run(5)
"""
READ = """
import json, sys
from pathlib import Path
from ppstream.analysis.log_reader import read_run
envelopes = read_run(Path(sys.argv[1])).envelopes
print(json.dumps([[getattr(e, "new_ns", None) for e in envelopes],
                  [getattr(e.stage1, "new_ns", None) for e in envelopes]]))
"""


@pytest.mark.parametrize(
    ("declared_in", "line", "script", "found"),
    [
        ("EnvelopeLine", "new_ns: int | None = None", WRITE, [[77], [None]]),
        ("PolicyLine", "new_ns: int | None = None", WRITE, [[None], [77]]),
        (
            "PolicyRankTimes",
            f"new_ns: int | None = in_header({len(STAGE_B)})",
            RUN,
            [[77] * 5, [77] * 5],
        ),
    ],
)
def test_a_new_stamp_is_one_line_in_one_file(
    declared_in: str, line: str, script: str, found: list[Any], tmp_path: Path
) -> None:
    """Declared in a copy of the package it stands in the files of the ranks, and is read."""
    shutil.copytree(ROOT / "ppstream", tmp_path / "ppstream")  # with its bytecode
    path = tmp_path / "ppstream/analysis/records.py"
    lines = path.read_text().splitlines()
    lines.insert(last_field(path.read_text(), declared_in), f"    {line}")
    path.write_text("\n".join(lines) + "\n")
    run = manifest(PipelineForm()) | ({"run_id": "r"} if script is RUN else {})
    (tmp_path / "run.json").write_text(json.dumps(run))
    places = [tmp_path, ROOT / "kernels", ROOT / "stages", ROOT / "tests/support"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, places))}
    command = [sys.executable, "-c", script + READ, str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, env=environment, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == found
    assert [[*written(tmp_path / f"rank{rank}.gen0.jsonl")] for rank in (0, 1)] == found


def written(path: Path) -> Iterator[int | None]:
    for line in map(json.loads, path.read_text().splitlines()):
        if line["kind"] in ("envelope", "stage1"):
            yield line.get("new_ns")


def last_field(source: str, name: str) -> int:
    """The number of the line where the last field of class ``name`` ends."""
    (found,) = (
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == name
    )
    return max(part.end_lineno or 0 for part in found.body if isinstance(part, ast.AnnAssign))
