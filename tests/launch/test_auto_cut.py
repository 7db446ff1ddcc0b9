"""The cut that a run chooses itself: what is timed, which cut is taken, and what is told of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
import torch
from peers import two_peers
from pipeline_in_process import small_config

from ppstream.analysis.period_model import PipelineForm
from ppstream.analysis.policy_cut import cut_table
from ppstream.config.schema import PipelineConfig, PlacementConfig, SimulateConfig
from ppstream.control.peer import Peer
from ppstream.core.errors import ConfigError, PeerLostError
from ppstream.core.specs import TensorSpec
from ppstream.launch.auto_cut import (
    TIMED_CALLS,
    MeasuredParts,
    choose_cut,
    costs_of,
    facts_of,
    follow_cut,
    table_lines,
    time_parts,
)
from ppstream.launch.course import Course
from ppstream.observe.run_folder import Run
from ppstream.policy.compatibility import build_parts
from ppstream.policy.graphed import WARM_UP_CALLS
from ppstream.policy.parts import specs_of
from ppstream.wire.rank_messages import Ready

CPU = torch.device("cpu")
OPTIONS = "policy.options={steps=8, dim=5, horizon=4, action_dim=2}"
MS = 1_000_000


def configured(*policy: str, rank0: str = "cpu", **changes: Any) -> PipelineConfig:
    config = small_config("policy.target=policy_in_parts:build", OPTIONS)
    placement = PlacementConfig(rank0=rank0, policy=policy, parts="auto")
    changes = {"simulate": SimulateConfig(), "placement": placement, **changes}
    return msgspec.structs.replace(config, **changes)


CONFIG = configured("cpu", "cpu")
SPECS = specs_of(build_parts(CONFIG, CPU))
TIMES = MeasuredParts(SPECS, (3 * MS, 2 * MS, 4 * MS))


def test_costs_are_the_parts_times_and_the_bytes_that_cross_in_front_of_each() -> None:
    costs = costs_of(CONFIG, TIMES)
    assert costs.parts == (3 * MS, 2 * MS, 4 * MS)
    assert set(costs.hops) == {0}  # no link is open yet: nobody knows
    values, mean, present, rows = 8 * 5 * 4, 5 * 4, 1, 4 * 8
    window = values + 8 * 2 + 8 * 2 * 4 + present + rows
    first, second = (values + present + rows + 2 * mean,) * 2  # mean and newest, newest and sum
    assert costs.hop_bytes == (window, first, second, 4 * 2 * 4)


def test_simulated_stages_of_rank_0_count_and_a_batch_multiplies_the_bytes() -> None:
    batch = msgspec.structs.replace(CONFIG.batch, rows=3)
    busy = configured("cpu", "cpu", simulate=SimulateConfig(a_ms=2, c_ms=0.5), batch=batch)
    costs = costs_of(busy, TIMES)
    assert (costs.a, costs.c) == (2 * MS, MS // 2)
    assert costs.hop_bytes == tuple(3 * size for size in costs_of(CONFIG, TIMES).hop_bytes)


@pytest.mark.parametrize(
    ("rank0", "policy", "placement"),
    [("cpu", "cpu", (0, 1, 2)), ("cpu", "cuda:0", (1, 1, 2)), ("cuda:0", "cuda:1", (0, 1, 2))],
)
def test_rank_0_has_parts_only_on_a_device_of_the_kind_they_were_timed_on(
    rank0: str, policy: str, placement: tuple[int, ...]
) -> None:
    config = configured(policy, policy, rank0=rank0)
    table = cut_table(costs_of(config, TIMES), 3, PipelineForm("split", d_in=3), 5)
    assert table[0].cut.placement == placement
    says_so = [line for line in table_lines(config, TIMES, table) if "gets no part" in line]
    assert len(says_so) == (placement[0] == 1)


def test_the_table_says_what_each_cut_would_give_and_which_one_is_taken() -> None:
    form = PipelineForm("split", d_in=3)
    table = cut_table(costs_of(CONFIG, TIMES), 3, form, 5)
    lines = [" ".join(line.split()) for line in table_lines(CONFIG, TIMES, table)]
    assert lines[0] == "parts alone on cpu: first 3.00 ms, middle 2.00 ms, last 4.00 ms"
    assert lines[1] == "placement.parts by place bytes by hop period age"
    assert lines[2] == (
        "[0, 1, 2] 3.00 ms | 2.00 ms | 4.00 ms 233 B | 233 B | 32 B 4.00 ms 13.0 ms taken"
    )
    assert lines[3] == "[1, 1, 2] 0.00 ms | 5.00 ms | 4.00 ms 273 B | 233 B | 32 B 5.00 ms 14.0 ms"
    assert lines[4] == "[1, 2, 2] 0.00 ms | 3.00 ms | 6.00 ms 273 B | 233 B | 32 B 6.00 ms 15.0 ms"
    assert "latency 9.00 ms and period" in lines[5]
    told = json.loads(json.dumps(facts_of(TIMES, table)))
    assert told["parts"] == ["first", "middle", "last"]
    assert told["parts_ns"] == [3 * MS, 2 * MS, 4 * MS]
    assert told["chosen"] == [0, 1, 2]
    assert told["cuts"][1] == {
        "parts": [1, 1, 2],
        "places_ns": [0, 5 * MS, 4 * MS],
        "hop_bytes": [273, 233, 32],
        "period_ns": 5 * MS,
        "latency_ns": 9 * MS,
        "age_ns": 14 * MS,
    }


class Watched:
    """A part that writes down what it is asked for, and may raise."""

    stateless = False

    def __init__(self, number: int, diary: list[str], alive: list[int], fails: str) -> None:
        hop = [TensorSpec("state.values", (8, 5)), *(TensorSpec(f"h{k}", (2,)) for k in (1, 2))]
        self.name = f"p{number}"
        self.inputs = (hop[number], TensorSpec("present", (), "bool"))
        self.outputs = (TensorSpec("actions", (4, 2)) if number == 2 else hop[number + 1],)
        self._diary, self._alive, self._fails = diary, alive, fails

    def _did(self, what: str) -> None:
        self._diary.append(f"{self.name} {what}")
        if self._fails == self._diary[-1]:
            raise RuntimeError("no such checkpoint")

    def load(self) -> None:
        self._alive.append(1)
        self._did("load")
        self._me = self  # only a collection frees it

    def __del__(self) -> None:
        if hasattr(self, "_me"):
            self._alive.pop()

    def reset(self, rows: torch.Tensor) -> None:
        assert rows.tolist() == [True, True]
        self._did("reset")

    def __call__(self, window: Mapping[str, torch.Tensor], out: Mapping[str, torch.Tensor]) -> None:
        assert window["present"].tolist() == [True, True]
        assert {*window} == {spec.name for spec in self.inputs}
        assert len(self._alive) == 1, "another part was not let go"
        for spec in self.outputs:
            assert out[spec.name].shape == (2, *spec.shape)
        self._did("call")


Build = Callable[..., PipelineConfig]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> tuple[Build, list[str]]:
    """Makes a configuration of the policy; and what its parts were asked for."""
    module, diary, alive = ModuleType("watched_policy"), list[str](), list[int]()

    def config(ranks: int = 2, fails: str = "") -> PipelineConfig:
        module.build = lambda options, device: [  # type: ignore[attr-defined]
            Watched(number, diary, alive, fails) for number in range(3)
        ]
        made = configured(*["cpu"] * ranks)
        policy = msgspec.structs.replace(made.policy, target="watched_policy:build")
        batch = msgspec.structs.replace(made.batch, rows=2)
        return msgspec.structs.replace(made, policy=policy, batch=batch)

    monkeypatch.setitem(sys.modules, "watched_policy", module)
    return config, diary


def test_one_part_at_a_time_is_loaded_reset_called_and_let_go(watched: Any) -> None:
    config, diary = watched
    times = time_parts(config(), CPU)
    assert [part.name for part in times.parts] == ["p0", "p1", "p2"]
    assert all(0 < ns < 10**9 for ns in times.parts_ns)
    calls = WARM_UP_CALLS + TIMED_CALLS
    of_each = ["load", "reset", *["call"] * calls]
    assert diary == [f"p{number} {what}" for number in range(3) for what in of_each]


@pytest.mark.parametrize("fails", ["p1 load", "p2 reset", "p0 call"])
def test_a_part_that_raises_is_one_configuration_error_that_names_it(
    watched: Any, fails: str
) -> None:
    config, _ = watched
    with pytest.raises(ConfigError) as caught:
        time_parts(config(fails=fails), CPU)
    (problem,) = caught.value.problems
    assert problem.startswith(f"policy.target: part {fails[:2]!r} of watched_policy:build raised")
    assert "no such checkpoint" in problem


def test_fewer_parts_than_policy_ranks_are_refused_before_one_is_loaded(watched: Any) -> None:
    config, diary = watched
    with pytest.raises(ConfigError) as caught:
        time_parts(config(ranks=4), CPU)
    assert caught.value.problems == [
        "placement.parts: got 'auto' for 3 parts (p0, p1, p2) on 4 policy ranks, want a part for "
        "each: cut the policy into more parts, or list fewer devices in placement.policy"
    ]
    assert diary == []


@pytest.fixture
def two_pairs() -> Iterator[tuple[tuple[Peer, ...], tuple[Peer, ...]]]:
    """Rank 0's ends to two policy ranks, and theirs."""
    near, far = zip(two_peers(), two_peers(), strict=True)
    yield near, far
    for peer in (*near, *far):
        peer.close()


def test_every_rank_takes_the_cut_that_rank_0_chose(tmp_path: Path, two_pairs: Any) -> None:
    near, far = two_pairs
    far[0].send(Ready(msgspec.to_builtins(TIMES)))
    chosen = choose_cut(CONFIG, near, Course(CONFIG), Run(tmp_path))
    assert chosen.placement.parts == (0, 1, 2)
    followed = follow_cut(CONFIG, 2, CPU, far[1], Course(CONFIG))
    assert followed == chosen
    assert json.loads((tmp_path / "run.json").read_text())["cut"]["chosen"] == [0, 1, 2]


def test_stated_places_are_taken_as_they_are(tmp_path: Path, two_pairs: Any) -> None:
    stated = msgspec.structs.replace(CONFIG, placement=PlacementConfig(parts=(0, 1, 1)))
    assert choose_cut(stated, (), Course(stated), Run(tmp_path)) is stated
    assert follow_cut(stated, 1, CPU, two_pairs[1][0], Course(stated)) is stated
    assert not [*tmp_path.iterdir()]


def test_a_rank_that_waits_in_vain_says_for_what(
    tmp_path: Path, two_pairs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = two_pairs
    monkeypatch.setattr("ppstream.launch.handshake.SPARE_NS", 0)
    hasty = msgspec.structs.replace(
        CONFIG, liveness=msgspec.structs.replace(CONFIG.liveness, start_s=0.05)
    )
    with pytest.raises(PeerLostError, match="did not send the times of the policy's parts within"):
        choose_cut(hasty, near, Course(hasty), Run(tmp_path))
    with pytest.raises(PeerLostError, match="did not send the cut of the policy within 0"):
        follow_cut(hasty, 2, CPU, far[1], Course(hasty))
