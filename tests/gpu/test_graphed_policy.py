from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pi0_folder
import pytest
import torch
from lerobot_folder import loaded, saved
from pi0_sizes import PREFIX
from torch import Tensor

from ppstream.config.schema import PolicyConfig
from ppstream.core.errors import ConfigError
from ppstream.core.specs import TensorSpec
from ppstream.cuda.driver import CudaStream
from ppstream.cuda.linear_graph import CapturedPart, LinearGraph
from ppstream.links.device_link import new_device_slots
from ppstream.links.slots import SlotLayout, new_slots
from ppstream.policy.compiled import RecompileMeter
from ppstream.policy.graphed import GraphedPolicy, prepared_policy
from ppstream.policy.unwritten import INTEGERS, Results, UnwrittenError
from ppstream_kernels.cuda_put import Route, Stamps
from ppstream_kernels.cuda_stamped import StampedLaunches
from ppstream_kernels.cuda_wait import StampedWait
from ppstream_stages.act import build

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
ACT = {"steps": 16, "dim": 14, "streams": 2, "horizon": 20, "action_dim": 7, "width": 128}


class Doubling:
    name = "doubling"
    inputs = (TensorSpec("x", (8,)),)
    outputs = (TensorSpec("y", (8,)),)
    stateless = True

    def reset(self, rows: Tensor) -> None:
        """Nothing is kept."""

    def __call__(self, window: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        torch.mul(window["x"], 2, out=out["y"])


class Drawing(Doubling):
    name = "drawing"

    def __call__(self, window: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        out["y"].copy_(window["x"] + torch.randn_like(window["x"]))


class Counting:
    """Keeps a state in place, and may wait for the GPU, which no graph can hold."""

    inputs = (TensorSpec("x", (4,)),)
    outputs = (TensorSpec("actions", (4,)),)

    def __init__(self, *, waits: bool = False) -> None:
        self.total = torch.zeros(4, device=CUDA)
        self.waits = waits

    def reset(self, rows: Tensor) -> None:
        self.total.zero_()

    def __call__(self, window: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        self.total += window["x"][0]
        if self.waits and self.total[0].item() > 1e9:
            return
        out["actions"].copy_(self.total.expand(1, 4))


def slots(count: int) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    return [
        ({"x": torch.zeros(1, 4, device=CUDA)}, {"actions": torch.zeros(1, 4, device=CUDA)})
        for _ in range(count)
    ]


def test_act_from_graphs_equals_act() -> None:
    (policy,) = build(ACT, CUDA)
    policy.load()
    graphed = prepared_policy(policy, PolicyConfig(target="a:b"), CUDA)
    assert isinstance(graphed, GraphedPolicy)
    pairs = []
    for _ in range(3):
        window = {
            spec.name: torch.ones(2, *spec.shape, dtype=torch.bool, device=CUDA)
            if spec.dtype == "bool"
            else torch.zeros(2, *spec.shape, device=CUDA)
            for spec in policy.inputs
        }
        pairs.append((window, {"actions": torch.zeros(2, 20, 7, device=CUDA)}))
        graphed.prepare(*pairs[-1])
    for turn in range(9):
        window, out = pairs[turn % 3]
        window["state.values"].normal_()
        graphed(window, out)
        expected = {"actions": torch.zeros_like(out["actions"])}
        policy(window, expected)
        torch.testing.assert_close(out["actions"], expected["actions"], rtol=0, atol=2e-2)
        assert out["actions"].abs().max() > 0
    assert graphed.statistics() == (3, 9, 0)


@pytest.mark.parametrize(
    ("kind", "options"),
    [("act", {}), ("diffusion", {}), ("diffusion", {"noise": "fresh"})],
    ids=["act", "fixed", "fresh"],
)
def test_a_policy_of_lerobot_is_replayed_and_draws_fresh_noise_each_time(
    tmp_path: Path, kind: str, options: Mapping[str, str]
) -> None:
    policy = loaded(saved(tmp_path / kind, kind=kind, has_camera=True), CUDA, **options)
    graphed = prepared_policy(policy, PolicyConfig(target="a:b"), CUDA)
    assert isinstance(graphed, GraphedPolicy)
    window = {
        spec.name: torch.rand(2, *spec.shape, device=CUDA).to(getattr(torch, spec.dtype))
        for spec in policy.inputs
    }
    out = {"actions": torch.zeros(2, *policy.outputs[0].shape, device=CUDA)}
    graphed.prepare(window, out)
    made = []
    for _ in range(2):
        graphed(window, out)
        made.append(out["actions"].clone())
    expected = {"actions": torch.zeros_like(out["actions"])}
    policy(window, expected)
    is_same = not options
    assert torch.equal(made[0], made[1]) == is_same
    close = torch.allclose(made[0], expected["actions"], rtol=0, atol=1e-3)
    assert close == is_same


@pytest.mark.parametrize(
    ("kind", "options", "tolerance"),
    [
        ("float32", {}, 1e-4),  # of cuDNN, whose convolutions take TF32
        ("linear", {"rtc": {"execution_horizon": PREFIX}}, 1e-4),
        ("bfloat16", {"dtype": "bfloat16"}, 1e-2),
    ],
    ids=["float32", "guided", "bfloat16"],
)
def test_pi0_of_lerobot_from_graphs_makes_lerobots_actions_for_each_text(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    options: Mapping[str, Any],
    tolerance: float,
) -> None:
    pi0_folder.make_small(monkeypatch)
    window, expected = pi0_folder.reference()
    parts = pi0_folder.loaded(pi0_folder.saved(tmp_path / "pi0"), CUDA, **options)
    rows = len(pi0_folder.TEXTS)
    given = {name: tensor.to(CUDA) for name, tensor in window.items()}
    tensors = {
        spec.name: torch.zeros(rows, *spec.shape, device=CUDA, dtype=getattr(torch, spec.dtype))
        for part in parts
        for spec in part.outputs
    } | given
    graphed = []
    for part in parts:
        policy = prepared_policy(part, PolicyConfig(target="a:b"), CUDA)
        assert isinstance(policy, GraphedPolicy)
        names = [{s.name: tensors[s.name] for s in specs} for specs in (part.inputs, part.outputs)]
        policy.prepare(*names)
        graphed.append((policy, names))
    for order in ([0, 1, 2], [2, 0, 1]):  # the graph reads what its slot holds now
        for name, tensor in given.items():
            tensor.copy_(window[name][order])
        for policy, (inputs, out) in graphed:
            policy(inputs, out)
        off = (tensors["actions"].cpu() - expected[kind][order]).abs().max()
        assert off <= tolerance
    assert all(policy.statistics()[1:] == (2, 0) for policy, _ in graphed)


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns about itself
def test_a_compiled_policy_is_recorded_and_compiles_no_more() -> None:
    config = PolicyConfig(target="a:b", compile=True)
    prepared: Any = prepared_policy(Counting(), config, CUDA)
    pairs = slots(3)
    meter = RecompileMeter()
    for pair in pairs:
        prepared.prepare(*pair)
    assert meter.drain() >= 1
    meter.seal()
    prepared.reset(torch.ones(1, dtype=torch.bool))
    for turn in range(6):
        window, out = pairs[turn % 3]
        window["x"].fill_(1)
        prepared(window, out)
        assert out["actions"].tolist() == [[float(turn + 1)] * 4]
    assert meter.after_warm_up() == (0, 0)
    assert prepared.statistics() == (3, 6, 0)


def test_state_lives_in_place_across_slots_and_resets() -> None:
    graphed = GraphedPolicy(Counting())
    pairs = slots(2)
    for window, out in pairs:
        graphed.prepare(window, out)
    graphed.reset(torch.ones(1, dtype=torch.bool))
    for turn in range(4):
        window, out = pairs[turn % 2]
        window["x"].fill_(turn + 1)
        graphed(window, out)
        assert out["actions"].tolist() == [[float(sum(range(turn + 2)))] * 4]
    graphed.reset(torch.ones(1, dtype=torch.bool))
    graphed(*pairs[0])
    assert pairs[0][1]["actions"].tolist() == [[3.0] * 4]


class Half:
    """Writes the first two of four values."""

    inputs = (TensorSpec("x", (4,)),)
    outputs = (TensorSpec("actions", (4,)), TensorSpec("kv", (5 << 16,), "bfloat16"))

    def reset(self, rows: Tensor) -> None: ...

    def __call__(self, window: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        out["actions"][:, :2].copy_(window["x"][:, :2])
        out["kv"].zero_()


@pytest.mark.parametrize("graph", [True, False])
def test_what_a_policy_leaves_out_is_found_in_a_copy_at_every_call(graph: bool) -> None:
    layout = SlotLayout(("index",), Half.outputs, 1)
    policy = prepared_policy(Half(), PolicyConfig(target="a:b", graph=graph), CUDA)
    (there,), (here,) = new_device_slots(layout, 1, CUDA), new_slots(layout, 1)
    window, results = {"x": torch.zeros(1, 4, device=CUDA)}, Results(INTEGERS)
    for _ in range(3):
        policy(window, there.tensors)
        here.raw.copy_(there.raw)
        text = results.unwritten(here, [True])
        assert text.startswith("output 'actions': 2 of 4 words (50%)")
        there.raw.zero_()  # what a fill that was not recorded would leave


def test_an_output_cannot_be_bound_to_other_memory_on_a_gpu() -> None:
    class Rebinding(Half):
        def __call__(self, window: Mapping[str, Tensor], out: Any) -> None:
            out["actions"] = window["x"] * 2

    (slot,) = new_device_slots(SlotLayout(("index",), Half.outputs, 1), 1, CUDA)
    policy = prepared_policy(Rebinding(), PolicyConfig(target="a:b"), CUDA)
    with pytest.raises(UnwrittenError, match=r"out\['actions'\]\.copy_\(x\)"):
        policy({"x": torch.zeros(1, 4, device=CUDA)}, slot.tensors)
    assert torch.ones(3, device=CUDA).sum().item() == 3


def test_a_policy_that_waits_is_refused_with_the_switch_to_turn() -> None:
    graphed = GraphedPolicy(Counting(waits=True))
    with pytest.raises(ConfigError, match=r"policy\.graph = false"):
        graphed(*slots(1)[0])
    assert torch.rand(3, device=CUDA).max().item() < 1  # the device is as good as before


def test_a_reset_that_waits_is_not_counted_and_the_policy_may_draw() -> None:
    class Drawing(Counting):
        def reset(self, rows: Tensor) -> None:
            self.total.fill_(self.total.max().item())

    graphed = GraphedPolicy(Drawing())
    rows = torch.ones(1, dtype=torch.bool, device=CUDA)
    assert graphed.rehearse(*slots(1)[0], rows).nodes is None
    assert torch.rand(3, device=CUDA).max().item() < 1


def test_after_the_warm_up_new_slots_run_eagerly_and_are_counted() -> None:
    graphed = GraphedPolicy(Counting())
    known, new = slots(2)
    graphed(*known)
    graphed.seal()
    new[0]["x"].fill_(5)
    graphed(*new)
    assert graphed.statistics() == (1, 1, 1)
    assert new[1]["actions"].max().item() >= 5


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_replays_neither_synchronise_nor_allocate() -> None:
    graphed: Any = GraphedPolicy(Counting())
    pairs = slots(2)
    for pair in pairs:
        graphed.prepare(*pair)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    try:
        torch.cuda.set_sync_debug_mode("error")
        for turn in range(40):
            graphed(*pairs[turn % 2])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_its_graph_is_a_part_of_a_larger_one_with_kernels_around_it() -> None:
    """A wait, the policy and a put start as one; each start reads its words anew."""
    policy = GraphedPolicy(Doubling())
    window, out = {"x": torch.zeros(1, 8, device=CUDA)}, {"y": torch.zeros(1, 8, device=CUDA)}
    policy.prepare(window, out)
    handle = policy.recorded(window, out)
    assert handle is not None
    words = torch.zeros(32, dtype=torch.int64, pin_memory=True)
    counters = torch.zeros(2, dtype=torch.int64, device=CUDA)
    target = torch.zeros(8, device=CUDA)
    at = words.data_ptr()
    launches = StampedLaunches(CUDA, 1)
    begin = launches.wait(StampedWait(counters.data_ptr(), at, at + 64))
    route = Route(out["y"].data_ptr(), target.data_ptr(), 32)
    send = launches.put(route, counters.data_ptr() + 8, Stamps(at + 16, at + 72, at + 80), 0)
    whole = LinearGraph((begin, CapturedPart(handle, policy), send))
    stream = CudaStream()
    for count in (1, 2):
        window["x"].fill_(count)
        words[0], words[2] = count, 10 + count
        words[8:11] = 0
        torch.cuda.synchronize()
        whole.queue(stream.handle)
        CudaStream().write_value(counters.data_ptr(), count)
        torch.cuda.synchronize()
        assert (target == 2 * count).all()
        assert int(counters[1]) == 10 + count
        assert 0 < int(words[8]) < int(words[9]) <= int(words[10])


def test_a_policy_that_draws_numbers_is_no_part_of_a_larger_graph() -> None:
    policy = GraphedPolicy(Drawing())
    window, out = {"x": torch.zeros(1, 8, device=CUDA)}, {"y": torch.zeros(1, 8, device=CUDA)}
    policy.prepare(window, out)
    assert policy.recorded(window, out) is None
    found = []
    for _ in range(3):
        policy(window, out)
        found.append(tuple(out["y"].flatten().tolist()))
    assert len({*found}) == 3
