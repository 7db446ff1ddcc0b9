"""The parts of rank 0 are its loops' arguments: a loop is made of all of them, in order."""

from __future__ import annotations

from contextlib import ExitStack
from inspect import signature
from pathlib import Path

import pytest
from pipeline_in_process import small_config

from ppstream.launch.rank0_parts import Rank0Parts, rank0_parts
from ppstream.observe.run_folder import Run
from ppstream.pipeline.rank0 import Rank0

GPUS = ("placement.rank0=cuda:0", "placement.policy=cuda:1")


def test_parts_are_named_as_the_arguments_of_rank_0_in_their_order() -> None:
    assert ["self", *Rank0Parts._fields] == list(signature(Rank0.__init__).parameters)


@pytest.mark.parametrize(("kind", "places", "taken_ns"), [("sleep", (), 5e6), ("gpu", GPUS, 0)])
def test_work_on_a_gpu_takes_no_time_of_rank_0s_thread(
    tmp_path: Path, kind: str, places: tuple[str, ...], taken_ns: float
) -> None:
    config = small_config(*places, f"simulate={{kind = '{kind}', a_ms = 5, c_ms = 5}}")
    with ExitStack() as stack:
        parts = rank0_parts(config, Run.create(tmp_path, 20), 0, stack)
        for stage in (parts.stage_a, parts.stage_c):
            assert stage._simulated._mean_ns == taken_ns  # type: ignore[union-attr]
