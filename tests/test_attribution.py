import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline_in_process import NewestValues, PipelineInProcess, small_config

from ppstream import attribution, block_report, config_problems
from ppstream.attribution import BLOCKS_MAX, Attribution, block
from ppstream.block_timing import STOP_REASON, time_blocks
from ppstream.clock import now_ns
from ppstream.config_file import read
from ppstream.overlap import judge
from ppstream.runlog import read_run
from ppstream.synthetic import SyntheticSource
from ppstream.timestamps import EnvelopeRecord, TimestampLog
from ppstream.verdict import Verdict

CPU = torch.device("cpu")


class Named(NewestValues):
    """A policy with three blocks, one of them inside another."""

    def __call__(self, window: Any, out: Any) -> None:
        with block("encode"), block("attend"):
            torch.zeros(64).sum()
        with block("decode"):
            super().__call__(window, out)


def attributed(folder: Path, *, inline: bool) -> tuple[Any, list[dict[str, Any]]]:
    config = small_config('mode="attribution"', "bringup.envelopes=150")
    with PipelineInProcess(config, Named(), folder, inline=inline) as pipeline:
        if not inline:  # as Watching does for a policy rank; phases come by frames there
            policy = Attribution(pipeline.policy_log, CPU)
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
def test_blocks_are_timed_and_no_gate_accepts_it(tmp_path: Path, inline: bool) -> None:
    report, envelopes = attributed(tmp_path, inline=inline)
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
    assert calls["encode"] == calls["attend"] >= 140  # the newest may not be written yet
    assert attribution._open is None


def test_outside_attribution_a_block_is_nothing() -> None:
    assert block("a") is block("b")


def test_names_are_bounded(tmp_path: Path) -> None:
    log = TimestampLog(tmp_path / "log", EnvelopeRecord, 64, run_id="r", generation=0)
    timing = Attribution(log, CPU)
    timing.start()
    try:
        for number in range(2 * BLOCKS_MAX):
            with block(f"block{number}"):
                pass
        log.commit(log.take())
        assert log.flush()
    finally:
        timing.stop()
        log.close()
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    (blocks,) = [line["blocks"] for line in lines if line["kind"] == "blocks"]
    assert len(blocks) == BLOCKS_MAX
    assert [line["mode"] for line in lines if line["kind"] == "envelope"] == ["attribution"]


def test_block_that_raises_is_closed(tmp_path: Path) -> None:
    log = TimestampLog(tmp_path / "log", EnvelopeRecord, 64, run_id="r", generation=0)
    timing = Attribution(log, CPU)
    timing.start()
    try:
        with pytest.raises(ValueError, match="policy"), block("outer"), block("inner"):
            raise ValueError("policy")
        with block("next"):
            pass
        assert list(timing._names) == ["outer", "outer/inner", "next"]
    finally:
        timing.stop()
        log.close()


def test_run_in_throughput_mode_has_no_table(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "rank0.gen0.jsonl").write_text('{"kind":"envelope","mode":"throughput"}\n')
    assert block_report.main([str(tmp_path)]) == 2
    assert "not in attribution mode" in capsys.readouterr().out
    assert block_report.main([str(tmp_path / "nowhere")]) == 3


def test_shares_are_those_of_the_newest_generation(tmp_path: Path) -> None:
    line = {"kind": "envelope", "mode": "attribution", "tA0": 0, "tA1": 1, "tDecode": 5, "tEmit": 6}
    (tmp_path / "rank0.gen0.jsonl").write_text(json.dumps(line | {"B_ns": 98}) + "\n")
    newer = [json.dumps(line | {"B_ns": 2}), '{"kind":"envelope","mo']
    (tmp_path / "rank0.gen1.jsonl").write_text("\n".join(newer))
    (tmp_path / "rank1.gen1.jsonl").write_text('{"kind":"blocks","blocks":{"encode":1}}\n')
    text = block_report.report(tmp_path)
    assert text is not None
    shares = {line.split()[0]: line.split()[-1] for line in text.splitlines()[2:]}
    assert shares == {"A": "25.0%", "B": "50.0%", "encode": "25.0%", "(in": "25.0%", "C": "25.0%"}


def test_attribution_is_refused_where_it_would_hang_or_see_nothing() -> None:
    small = str(Path(__file__).parent / "multirank/small.toml")
    gpus = ('placement.rank0="cuda:0"', 'placement.policy="cuda:1"', 'mode="attribution"')
    with pytest.raises(Exception, match="wait for ever") as caught:
        read(small, gpus)
    assert "policy.graph" in str(caught.value)
    assert config_problems.problems(read(small, ('mode="attribution"',))) == []
