"""The parts of rank 0 are its loops' arguments: a loop is made of all of them, in order."""

from __future__ import annotations

from contextlib import ExitStack
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from pipeline_in_process import small_config

from ppstream.launch import rank0_parts as module
from ppstream.launch.rank0_parts import Rank0Parts, rank0_parts
from ppstream.observe.run_folder import Run
from ppstream.pipeline.rank0 import Rank0

GPUS = ("placement.rank0=cuda:0", "placement.policy=cuda:1")


def test_parts_are_named_as_the_arguments_of_rank_0_in_their_order() -> None:
    assert ["self", *Rank0Parts._fields] == list(signature(Rank0.__init__).parameters)


@pytest.mark.parametrize(("kind", "places", "taken_ns"), [("sleep", (), 5e6), ("gpu", GPUS, 0)])
def test_work_on_a_gpu_takes_no_time_of_rank_0s_thread(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    places: tuple[str, ...],
    taken_ns: float,
) -> None:
    monkeypatch.setattr(module, "StageA", lambda config, delay: delay)
    monkeypatch.setattr(module, "StageC", lambda config, decoder, delay: delay)
    config = small_config(*places, f"simulate={{kind = '{kind}', a_ms = 5, c_ms = 5}}")
    with ExitStack() as stack:
        parts = rank0_parts(config, Run.create(tmp_path, 20), 0, stack)
    delays: Any = parts.stage_a, parts.stage_c
    assert [delay.draw_ns() for delay in delays] == [taken_ns] * 2
