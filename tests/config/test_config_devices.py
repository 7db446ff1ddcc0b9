"""What only a GPU can do is refused where a configuration names none, and the other way round."""

from __future__ import annotations

import pytest
import torch
from ranks import CONFIG

from ppstream.config import load
from ppstream.core.errors import ConfigError
from ppstream_stages.simulated import build

GPUS = ("placement.rank0=cuda:0", "placement.policy=cuda:1")


def problems(*settings: str) -> list[str]:
    try:
        load.read(str(CONFIG), settings)
    except ConfigError as error:
        return error.problems
    return []


def test_devices_are_the_cpu_unless_named() -> None:
    placement = load.read(str(CONFIG), ()).placement
    assert (placement.rank0, placement.policy) == ("cpu", ("cpu",))


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "CPU", "cuda:123"])
def test_a_device_that_torch_would_not_read_is_refused(device: str) -> None:
    (problem,) = problems(f"placement.policy={device}")
    assert "placement.policy" in problem
    assert "cuda:<number>" in problem


def test_one_device_stands_for_those_of_all_replicas() -> None:
    config = load.read(str(CONFIG), ("placement.replicas=3",))
    assert config.placement.policy == ("cpu",) * 3
    assert config.pipeline.d_in == 4
    assert (config.placement.places, config.placement.fewest) == (1, 3)
    assert [config.placement.place_of(rank) for rank in range(4)] == [0, 1, 1, 1]
    listed = load.read(str(CONFIG), ('placement.policy=["cuda:0", "cpu"]', "placement.replicas=2"))
    assert listed.placement.policy == ("cuda:0", "cpu")


@pytest.mark.parametrize(
    ("settings", "texts"),
    [
        (
            ("placement.replicas=2", 'placement.policy=["cpu", "cpu", "cpu"]'),
            ["got 2 with 3 devices in placement.policy", "places of a chain have no replicas"],
        ),
        (("placement.replicas=2", "placement.parts=auto"), ["placement.parts: got 'auto' with"]),
        (
            ("placement.replicas=2", "simulate.a_ms=0", "link.kind=nccl", *GPUS),
            ["placement.replicas: got 2 with link.kind = 'nccl'", "'peer' or 'pinned'"],
        ),
        (
            (
                "placement.replicas=2",
                "simulate.a_ms=0",
                "placement.rank0=cuda:0",
                'placement.policy=["cuda:1", "cpu"]',
            ),
            ["a replica on the CPU, want CUDA devices for all of placement.policy"],
        ),
        (("placement.replicas=2", "placement.replicas_min=3"), ["replicas_min: got 3, want 2"]),
        (("placement.replicas_min=2",), ["placement.replicas_min: got 2, want 1 at most"]),
        (("placement.replicas=0",), ["placement.replicas: got 0"]),
    ],
)
def test_what_replicas_cannot_be_is_refused(settings: tuple[str, ...], texts: list[str]) -> None:
    (problem,) = problems(*settings)
    for text in texts:
        assert text in problem


@pytest.mark.parametrize("kind", ["auto", "peer", "pinned"])
def test_replicas_may_be_on_gpus_with_rank_0(kind: str) -> None:
    settings = ("placement.replicas=3", "simulate.a_ms=0", f"link.kind={kind}", *GPUS)
    assert not problems(*settings)
    assert load.read(str(CONFIG), settings).placement.policy == ("cuda:1",) * 3
    assert not problems("placement.replicas=2", "link.kind=nccl", "placement.policy=cuda:0")


def test_places_of_parts_are_a_list_or_chosen_by_the_run() -> None:
    chosen = load.read(str(CONFIG), ("placement.parts=auto",)).placement
    stated = load.read(str(CONFIG), ("placement.parts=[0, 1]",)).placement
    assert (chosen.parts, chosen.cut) == ("auto", ())
    assert stated.parts == stated.cut == (0, 1)


@pytest.mark.parametrize("got", ["automatic", "2", '["auto"]', "[0, -1]", "[0.5]"])
def test_other_places_are_refused(got: str) -> None:
    (problem,) = problems(f"placement.parts={got}")
    assert problem.startswith("placement.parts")
    assert ("auto" in problem) == ("[" not in got or "auto" in got)
    assert "a whole number, at least 0" in problem


def test_parts_are_timed_for_policy_ranks_of_one_kind_alone() -> None:
    auto = "placement.parts=auto"
    (problem,) = problems(auto, 'placement.policy=["cpu", "cuda:0"]')
    assert problem.startswith("placement.parts: got 'auto' with policy ranks on cpu and cuda, want")
    assert not problems(auto, 'placement.policy=["cuda:0", "cuda:1"]')


def test_simulated_work_of_a_gpu_needs_one_on_rank_0() -> None:
    assert any("simulate.kind: got 'gpu'" in line for line in problems("simulate.kind=gpu"))
    assert not problems("simulate.kind=gpu", *GPUS)


def test_a_sleeping_stage_a_is_refused_on_a_gpu() -> None:
    (problem,) = problems(*GPUS)  # small.toml sleeps in A
    assert "want 'gpu'" in problem


def test_throughput_before_freshness_is_for_gpus() -> None:
    credit = "pipeline.credit=after_window"
    assert any("pipeline.credit" in line for line in problems(credit))
    assert not problems(credit, "simulate.kind=gpu", *GPUS)


def test_simulated_gpu_work_of_a_policy_is_refused_on_the_cpu() -> None:
    options = {"b_ms": 1.0, "kind": "gpu", "horizon": 4, "action_dim": 2, "weights": None}
    with pytest.raises(ConfigError, match=r"policy\.options\.kind: got 'gpu' on cpu"):
        build(options, torch.device("cpu"))


def test_replicas_may_be_meshes_and_the_places_of_a_chain_neither() -> None:
    assert not problems("placement.mesh=2", "placement.replicas=3")
    chain = 'placement.policy=["cpu", "cpu"]', "placement.parts=[0, 1, 2]"
    for setting, remedy in (
        ("placement.mesh=2", "or placement.mesh = 1: the places of a chain are one rank each"),
        ("placement.replicas=3", "or placement.replicas = 1: the places of a chain have no rep"),
    ):
        (found,) = problems(setting, *chain)
        assert remedy in found


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ('placement.policy=["cpu", "cpu"]', "got 2 with 2 devices in placement.policy, want one"),
        ("placement.policy=cuda:1", "got 2 with cuda:1 in placement.policy, want 2 CUDA devices"),
        ('placement.policy=["cuda:0", "cpu"]', "got 2 with placement.policy on cpu and cuda, want"),
        ("placement.parts=auto", "got 2 with placement.parts = 'auto', want a list or none"),
        ("mode=attribution", "got 2 with mode = 'attribution', want 'throughput'"),
    ],
)
def test_what_does_not_go_with_a_mesh_is_one_problem(setting: str, says: str) -> None:
    found = [text for text in problems("placement.mesh=2", setting) if "mesh" in text]
    assert len(found) == 1
    assert found[0].startswith(f"placement.mesh: {says}")
    assert not any("placement.mesh" in text for text in problems(setting))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (('["cuda:0", "cuda:1", "cuda:2"]',), "got 2 with cuda:0, cuda:1, cuda:2 in"),
        (('["cuda:0", "cuda:1"]', "placement.replicas=2"), "want 4 CUDA devices: one for each"),
        (('["cuda:0", "cuda:1"]', "placement.parts=[1, 2]"), "the places of a chain are one rank"),
    ],
)
def test_a_mesh_of_gpus_wants_a_device_for_each_of_its_ranks(
    settings: tuple[str, ...], says: str
) -> None:
    devices, *others = settings
    (found,) = problems("placement.mesh=2", f"placement.policy={devices}", *others)
    assert found.startswith("placement.mesh: got 2 with")
    assert says in found


def test_devices_of_meshes_are_listed_by_rank_leaders_first() -> None:
    devices = 'placement.policy=["cuda:0", "cuda:2", "cuda:1", "cuda:3"]'
    config = load.read(str(CONFIG), ("placement.mesh=2", "placement.replicas=2", devices))
    placement = config.placement
    assert [placement.mesh_of(leader) for leader in (1, 2)] == [(1, 3), (2, 4)]
    assert [placement.device_of(rank) for rank in (1, 3, 2, 4)] == [f"cuda:{k}" for k in range(4)]
    assert (placement.places, placement.ranks, config.pipeline.d_in) == (1, 5, 3)
    on_cpus = load.read(str(CONFIG), ("placement.mesh=2", "placement.replicas=2"))
    assert [on_cpus.placement.device_of(rank) for rank in range(1, 5)] == ["cpu"] * 4
    assert (on_cpus.placement.ranks, on_cpus.pipeline.d_in) == (5, 3)
