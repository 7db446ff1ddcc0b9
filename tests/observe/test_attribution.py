import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline_in_process import NewestValues, PipelineInProcess, small_config
from policy_calls import OnlyLabelled

from ppstream.analysis.judge import judge
from ppstream.analysis.log_reader import read_run
from ppstream.analysis.verdict import Verdict
from ppstream.config import rules
from ppstream.config.load import read
from ppstream.core.clock import now_ns
from ppstream.core.errors import ConfigError
from ppstream.ingest.synthetic import SyntheticSource
from ppstream.observe import attribution
from ppstream.observe.attribution import BLOCKS_MAX, Attribution, block, end_of_stream
from ppstream.observe.log_writer import EnvelopeRecord, TimestampLog
from ppstream.pipeline import bringup as block_timing
from ppstream.pipeline.bringup import STOP_REASON, time_blocks
from ppstream.policy.compiled import compile_counts
from ppstream.report import attribution as block_report

CPU = torch.device("cpu")


class Named(NewestValues):
    """A policy with three blocks, one of them inside another."""

    def __call__(self, window: Any, out: Any) -> None:
        with block("encode"), block("attend"):
            torch.zeros(64).sum()
        with block("decode"):
            super().__call__(window, out)


def attributed(
    folder: Path, patch: pytest.MonkeyPatch, *settings: str, inline: bool
) -> tuple[Any, list[dict[str, Any]]]:
    if not inline:
        patch.setattr(block_timing, "Attribution", OnlyLabelled)
    config = small_config('mode="attribution"', "bringup.envelopes=150", *settings)
    with PipelineInProcess(config, Named(), folder, inline=inline) as pipeline:
        if not inline:  # as Watching does for a policy rank; phases come by frames there
            policy = Attribution(pipeline.policy_log, end_of_stream(CPU))
            pipeline.rank0.on_phase.append(lambda phase: policy.line(phase_line(phase)))
        source = SyntheticSource(config, pipeline.intake.rows[0], seed=1, start_ns=now_ns())
        time_blocks(pipeline.rank0, pipeline.intake, source)
        assert pipeline.rank0.stop_reason == STOP_REASON
        pipeline.rank0.log.flush()
        if not inline:
            pipeline.policy_log.flush()
        topology = {"world_size": 1 if inline else 2, "d_in": 2, "d_out": 2, "threads": "serial"}
        manifest = {"schema": "ppstream.log/1", "run_id": "r", "topology": topology}
        (folder / "run.json").write_text(json.dumps(manifest))
        return judge(read_run(folder), profile="bringup"), pipeline.envelopes()


def phase_line(phase: str) -> dict[str, str]:
    return {"kind": "event", "name": "phase", "phase": phase}


@pytest.mark.parametrize("inline", [False, True])
def test_blocks_are_timed_and_no_gate_accepts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inline: bool
) -> None:
    report, envelopes = attributed(tmp_path, monkeypatch, inline=inline)
    assert report.verdict is Verdict.INCONCLUSIVE
    assert inline or "PERTURBED" in report.reasons
    modes = {(line["phase"], line["mode"]) for line in envelopes}
    assert modes == {("warming", "throughput"), ("bring-up", "attribution")}
    text = block_report.report(tmp_path)
    assert text is not None
    rows = [line.split() for line in text.splitlines()]
    assert [row[0] for row in rows[3:]] == ["A", "B", "encode", "attend", "decode", "(in", "C"]
    assert "no gate accepts" in text
    assert "perturbation" in text
    calls = {row[0]: int(row[1]) for row in rows[3:] if row[0] in ("B", "encode", "attend")}
    assert calls["B"] == 150
    assert calls["encode"] == calls["attend"]
    # inline the newest may not be written yet; a policy rank starts with its phase, a little late
    assert calls["encode"] >= (140 if inline else 75)
    assert block("a") is block("b")  # nothing: it is over


def test_outside_attribution_a_block_is_nothing() -> None:
    assert block("a") is block("b")


def blocks_of(log: Path) -> dict[str, Any]:
    """The blocks of the only envelope."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    (blocks,) = [line["blocks"] for line in lines if line["kind"] == "blocks"]
    return blocks


def test_names_are_bounded(tmp_path: Path) -> None:
    log = TimestampLog(tmp_path / "log", EnvelopeRecord, 64, run_id="r", generation=0)
    timing = Attribution(log, end_of_stream(CPU))
    timing.start()
    try:
        for number in range(2 * BLOCKS_MAX):
            with block(f"block{number}"):
                pass
        log.commit(log.acquire())
        assert log.flush()
    finally:
        timing.stop()
        log.close()
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert len(blocks_of(tmp_path / "log")) == BLOCKS_MAX
    assert [line["mode"] for line in lines if line["kind"] == "envelope"] == ["attribution"]


def test_block_that_raises_is_closed(tmp_path: Path) -> None:
    log = TimestampLog(tmp_path / "log", EnvelopeRecord, 64, run_id="r", generation=0)
    timing = Attribution(log, end_of_stream(CPU))
    timing.start()
    try:
        with pytest.raises(ValueError, match="policy"), block("outer"), block("inner"):
            raise ValueError("policy")
        with block("next"):
            pass
        log.commit(log.acquire())
        assert log.flush()
    finally:
        timing.stop()
        log.close()
    assert list(blocks_of(tmp_path / "log")) == ["outer", "outer/inner", "next"]


def test_run_in_throughput_mode_has_no_table(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "rank0.gen0.jsonl").write_text('{"kind":"envelope","mode":"throughput"}\n')
    assert block_report.main([str(tmp_path)]) == 2
    assert "not in attribution mode" in capsys.readouterr().out
    assert block_report.main([str(tmp_path / "nowhere")]) == 3


def test_shares_are_those_of_the_newest_generation(tmp_path: Path) -> None:
    line = {"kind": "envelope", "mode": "attribution", "tA0": 0, "tA1": 1, "tDecode": 5, "tEmit": 6}
    (tmp_path / "rank0.gen0.jsonl").write_text(json.dumps(line | {"B_ns": 98}) + "\n")
    decoder = {"kind": "blocks", "blocks": {"choose": 1}}
    newer = [json.dumps(line | {"B_ns": 2}), json.dumps(decoder), '{"kind":"envelope","mo']
    (tmp_path / "rank0.gen1.jsonl").write_text("\n".join(newer))
    (tmp_path / "rank1.gen1.jsonl").write_text('{"kind":"blocks","blocks":{"encode":1}}\n')
    text = block_report.report(tmp_path)
    assert text is not None
    shares = [(line.split()[0], line.split()[-1]) for line in text.splitlines()[2:]]
    in_b = [("B", "50.0%"), ("encode", "25.0%"), ("(in", "25.0%")]
    in_c = [("C", "25.0%"), ("choose", "25.0%"), ("(in", "0.0%")]  # rank 0's blocks: a decoder's
    assert shares == [("A", "25.0%"), *in_b, *in_c]
    (tmp_path / "rank1.gen1.jsonl").rename(tmp_path / "rank1.gen1.part0.jsonl")
    assert block_report.report(tmp_path) == text


def test_a_dropped_envelope_and_an_event_without_numbers_are_no_fault(tmp_path: Path) -> None:
    line = {"kind": "envelope", "mode": "attribution", "tA0": 0, "tA1": 1, "tDecode": 5, "tEmit": 6}
    lines = [line | {"B_ns": 2}, line | {"drop": "expired", "tEmit": None}]
    lines.append({"kind": "event", "name": "attribution"})
    (tmp_path / "rank0.gen0.jsonl").write_text("\n".join(map(json.dumps, lines)))
    text = block_report.report(tmp_path)
    assert text is not None
    assert "perturbation" not in text
    rows = [line.split() for line in text.splitlines()[2:]]
    calls = [(name, n, p99) for name, n, _, _, p99, _ in rows]
    assert calls == [("A", "2", "NA"), ("B", "1", "NA"), ("C", "1", "NA")]


def test_file_that_is_no_log_is_refused_by_its_line(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "rank0.gen0.jsonl").write_text("{}\nhello\n")
    assert block_report.main([str(tmp_path)]) == 3
    assert "rank0.gen0.jsonl:2: not JSON" in capsys.readouterr().err


def test_blocks_are_averaged_over_the_envelopes_that_had_any(tmp_path: Path) -> None:
    envelope = {"kind": "envelope", "mode": "attribution", "eA_ns": 10, "tA0": 0, "tA1": 10}
    (tmp_path / "rank0.gen0.jsonl").write_text((json.dumps(envelope) + "\n") * 4)
    late = {"kind": "stage1", "mode": "throughput", "eB_ns": 1000}
    policy = {"kind": "stage1", "mode": "attribution", "eB_ns": 10}
    found = [{"kind": "blocks", "blocks": {"encode": 6}}, {"kind": "blocks", "blocks": {}}]
    lines = [late, policy, policy, policy, *found]
    (tmp_path / "rank1.gen0.jsonl").write_text("\n".join(map(json.dumps, lines)))
    text = block_report.report(tmp_path)
    assert text is not None
    *rows, note = text.splitlines()[2:]
    shares = {line.split()[0]: line.split()[-1] for line in rows}
    assert shares == {"A": "50.0%", "B": "50.0%", "encode": "15.0%", "(in": "35.0%", "C": "0.0%"}
    assert note.startswith("A and C are times between events")


def test_blocks_in_compiled_code_are_nothing_and_change_nothing() -> None:
    called: list[str] = []

    def opener(name: str) -> Any:
        called.append(name)
        return nullcontext()

    def policy(x: torch.Tensor) -> torch.Tensor:
        with block("outer"), block("inner"):
            return x + 1

    graphs = compile_counts().graphs
    compiled = torch.compile(policy, backend="eager", fullgraph=True)  # no block breaks the graph
    assert compiled(torch.zeros(2)).tolist() == [1, 1]
    attribution.set_block_opener(opener)
    try:
        assert compiled(torch.zeros(2)).tolist() == [1, 1]
        assert policy(torch.zeros(2)).tolist() == [1, 1]
    finally:
        attribution.set_block_opener(None)
    assert called == ["outer", "inner"]  # of the call that is not compiled
    assert compile_counts().graphs == graphs + 1


def test_only_the_stream_in_use_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []

    class Stream:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def synchronize(self) -> None:
            waited.append(self.device)

    def never(device: object = None) -> None:
        raise AssertionError("receipts that stand queued would be waited for")

    monkeypatch.setattr("torch.cuda.current_stream", Stream)
    monkeypatch.setattr("torch.cuda.synchronize", never)
    device = torch.device("cuda", 1)
    end_of_stream(device)()
    assert waited == [device]
    end_of_stream(CPU)()
    assert waited == [device]


@pytest.mark.parametrize(("inline", "device"), [(True, "cuda:1"), (False, "cpu")])
def test_rank_0_waits_for_a_device_only_where_it_runs_the_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inline: bool, device: str
) -> None:
    asked: list[str] = []

    def recorded(device: torch.device) -> Any:
        asked.append(str(device))
        return lambda: None

    monkeypatch.setattr("ppstream.pipeline.bringup.end_of_stream", recorded)
    settings = ('placement.policy="cuda:1"', "policy.graph=false")
    attributed(tmp_path, monkeypatch, *settings, inline=inline)
    assert asked == [device]


def test_blocks_on_gpus_are_refused_where_they_would_not_be_seen() -> None:
    small = str(Path(__file__).parents[1] / "support/small.toml")
    asked = ('placement.policy="cuda:1"', 'mode="attribution"')
    with pytest.raises(ConfigError) as caught:
        read(small, (*asked, "policy.compile=true"))
    assert [line.split(":")[0] for line in caught.value.problems] == [
        "policy.graph",
        "policy.compile",
    ]
    eager = (*asked, "policy.graph=false")
    assert rules.problems(read(small, eager)) == []
    both = (*eager, 'placement.rank0="cuda:0"', 'simulate.kind="gpu"')
    assert rules.problems(read(small, both)) == []
