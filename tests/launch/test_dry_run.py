"""``--check`` says what would run, finds every problem at once, and starts nothing."""

from __future__ import annotations

import ctypes
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from ppstream import native
from ppstream.config import load
from ppstream.config.schema import PipelineConfig
from ppstream.core.errors import ConfigError
from ppstream.core.host_memory import limit_bytes
from ppstream.core.specs import TensorSpec
from ppstream.cuda import startup
from ppstream.launch.dry_run import describe
from ppstream.launch.placement import place
from ppstream.pipeline.decode import build as build_decoder
from ppstream.serve import main

TABLE: dict[str, Any] = {
    "name": "arm",
    "streams": [
        {"name": "joints", "dim": 7, "rate_hz": 1000.0},
        {"name": "imu", "dim": 6, "rate_hz": 200.0, "interpolation": "previous"},
    ],
    "window": {"steps": 32, "dt_ms": 4.0},
    "actions": {
        "names": ["x", "y"],
        "horizon": 16,
        "dt_ms": 10.0,
        "low": [-1.0, -1.0],
        "high": [1.0, 1.0],
        "lease_ms": 200.0,
    },
    "policy": {"target": "given_policy:build", "options": {"b_ms": 10}},
    "decode": {"target": "given_policy:build_decoder"},
    "simulate": {"a_ms": 3.0, "c_ms": 2.0},
}

ACTIONS = TensorSpec("actions", (16, 2))
VALUES = TensorSpec("state.values", (32, 13))


class GivenPolicy:
    """A policy that is all specification; a part of one tells its size, too."""

    name = "given"
    parameters: int
    flops: float
    weights: Mapping[str, tuple[int, ...]]

    def __init__(self, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> None:
        self.inputs = inputs
        self.outputs = outputs

    def reset(self, rows: object) -> None: ...

    def __call__(self, window: object, out: object) -> None: ...


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module that the configuration names; a test sets the specs its policy has."""
    module = ModuleType("given_policy")
    module.inputs = (VALUES, TensorSpec("present", (), "bool"))
    module.outputs = (ACTIONS, TensorSpec("proposals", (8, 16, 2)))
    module.received = []

    def build(options: Mapping[str, Any], device: object) -> GivenPolicy:
        module.received.append((dict(options), str(device)))
        return GivenPolicy(module.inputs, module.outputs)

    module.build = build
    module.build_decoder = build_decoder
    monkeypatch.setitem(__import__("sys").modules, "given_policy", module)
    return module


def config(**changes: Any) -> PipelineConfig:
    return msgspec.convert(TABLE | changes, PipelineConfig)


def row(text: str, name: str) -> str:
    (line,) = (line for line in text.splitlines() if line.split()[:1] == [name])
    return " ".join(line.split())


def test_text_names_ranks_link_tensors_and_memory(given: ModuleType) -> None:
    text = describe(config(), 2)
    assert "rank 0 stage A + C (serial) on cpu" in " ".join(text.split())
    assert "rank 1 stage B (given_policy:build) on cpu" in " ".join(text.split())
    assert row(text, "link").startswith("link host: both ranks share one host")
    assert "envelope: 3 slots of" in text
    assert "result: 5 slots of" in text
    assert row(text, "state.values") == "state.values [1, 32, 13] float32, 1.6 KiB"
    assert row(text, "proposals") == "proposals [1, 8, 16, 2] float32, 1.0 KiB"
    # 32 steps of 4 ms reach 124 ms, and 400 ms more, at twice 1000 Hz: 1048 samples and 16.
    assert "ring of 1064 samples, ends the window" in row(text, "joints")
    rings = 2 * (1064 * (7 * 4 + 8) + 226 * (6 * 4 + 8))
    assert row(text, "rings") == f"rings {rings / 1024:.1f} KiB on rank 0"
    assert row(text, "slots").endswith("shared by both ranks")
    assert max(map(len, text.splitlines())) <= 100


def test_seconds_for_milliseconds_are_a_warning(given: ModuleType) -> None:
    first, second = describe(config(actions=TABLE["actions"] | {"dt_ms": 0.01}), 2).splitlines()[:2]
    assert first == "ppstream arm: nothing started, no problem found"
    assert second.startswith("warning: actions.dt_ms: got 0.01 x horizon 16 = 0.16 ms a chunk")


def test_threads_are_decided_by_front_parts_at_start_unless_stated(given: ModuleType) -> None:
    middle = TensorSpec("middle", (3,))
    front, behind = GivenPolicy(given.inputs, (middle,)), GivenPolicy((middle,), (ACTIONS,))
    front.name, behind.name = "front", "behind"
    given.build = lambda options, device: [front, behind]
    cut = {"placement": {"parts": (0, 1)}}
    text = " ".join(describe(config(**cut), 2).split())
    assert "stage A + C (split if front parts take more than 2 ms, else serial) on cpu" in text
    stated = describe(config(**cut, pipeline={"threads": "split"}), 2)
    assert "stage A + C (split) on cpu" in " ".join(stated.split())


@pytest.mark.parametrize(("used", "told"), [(True, "compiled"), (False, "in Python: no")])
def test_text_tells_whether_the_core_is_compiled(
    given: ModuleType, monkeypatch: pytest.MonkeyPatch, used: bool, told: str
) -> None:
    monkeypatch.setattr(native, "is_used", used)
    monkeypatch.setattr(native, "why_not", "no")
    assert row(describe(config(), 2), "core") == f"core {told}"


def test_a_port_that_metrics_of_a_later_rank_have_is_told_of_one_host(given: ModuleType) -> None:
    ports = {"metrics": {"port": 8000}, "view": {"port": 8001}}
    assert row(describe(config(**ports), 2), "ports") == (
        "ports a run on one host is refused: view.port: got port 8001, which metrics of rank 1 "
        "has; want another, or 0"
    )
    assert "\n  ports " not in describe(config(**ports | {"view": {"port": 8002}}), 2)
    with pytest.raises(ConfigError, match="which metrics of rank 0 has"):
        describe(config(**ports | {"view": {"port": 8000}}), 2)


def test_all_parts_count_a_tensor_that_several_have_once(given: ModuleType) -> None:
    middle, shared = TensorSpec("middle", (3,)), {"shared.weight": (1000, 2000)}
    front, behind = GivenPolicy(given.inputs, (middle,)), GivenPolicy((middle,), (ACTIONS,))
    front.name, behind.name = "front", "behind"
    given.build = lambda options, device: [front, behind]
    cut = config(placement={"parts": (0, 1)})
    assert "\n  all " not in describe(cut, 2)
    front.parameters, front.flops = 3_000_000, 2e9
    behind.parameters, behind.flops = 2_500_000, 1e9
    assert row(describe(cut, 2), "all") == "all 5.5 M parameters, 3 GFLOP a row"
    front.weights, behind.weights = shared | {"a": (1_000_000,)}, shared | {"b": (500_000,)}
    text = describe(cut, 2)
    assert row(text, "front") == "front rank 0, writes 12 B, 3 M parameters, 2 GFLOP a row"
    assert row(text, "all") == "all 3.5 M parameters, 3 GFLOP a row"
    del behind.flops
    assert row(describe(cut, 2), "all") == "all 3.5 M parameters"


def test_policy_gets_its_options_and_weights_on_the_planned_device(given: ModuleType) -> None:
    describe(config(), 2)
    assert given.received == [({"b_ms": 10, "weights": None}, "cpu")]


def test_model_period_of_simulated_stages_depends_on_the_ranks(given: ModuleType) -> None:
    assert row(describe(config(), 2), "period") == "period 10 ms = B"
    assert row(describe(config(), 1), "period") == "period 15 ms = A + x_in + B + x_out + C"
    narrow = config(pipeline={"d_in": 1})
    assert row(describe(narrow, 2), "period") == "period 13 ms = (A + x_in + B + x_out) / D_in"


def test_no_period_is_claimed_for_a_real_policy(given: ModuleType) -> None:
    text = describe(config(policy={"target": "given_policy:build"}), 2)
    assert "period" not in text


def test_one_rank_has_one_slot_each_way_and_no_link(given: ModuleType) -> None:
    text = describe(config(), 1)
    assert "stage A + B + C (given_policy:build) on cpu" in text
    assert row(text, "link") == "link none: one rank runs every stage in turn"
    assert "envelope: 1 slot of" in text
    assert "result: 1 slot of" in text
    assert "D_in" not in row(text, "pacing")


def test_one_rank_cuts_windows_where_both_places_are_gpus() -> None:
    for rank0, policy, where in (
        ("cuda:0", "cuda:1", ", with windows cut on cuda:1"),
        ("cpu", "cuda:0", ""),
        ("cuda:0", "cpu", ""),
    ):
        asked = config(placement={"rank0": rank0, "policy": [policy]}, simulate={"a_ms": 0})
        assert place(asked, 1, 1).why == f"one rank runs every stage in turn{where}"


def test_streams_on_request_and_rows_are_said(given: ModuleType) -> None:
    stream = {"name": "joints", "dim": 13, "max_request_hz": 50.0}
    text = describe(config(streams=[stream], pipeline={"pacing": "rows", "gather_ms": 15}), 2)
    assert "13 values on request, 50 Hz at most, linear" in row(text, "joints")
    assert row(text, "pacing") == "pacing rows within 15 ms, live windows"


def test_one_of_a_kind_is_no_plural(given: ModuleType) -> None:
    given.inputs = (TensorSpec("state.values", (1, 7)),)
    gripper = {"name": "gripper", "dim": 1, "rate_hz": 50.0}
    joints = {"name": "joints", "dim": 6, "rate_hz": 1000.0}
    text = describe(config(streams=[joints, gripper], window={"steps": 1, "dt_ms": 4.0}), 1)
    assert "window: 1 step of 4 ms" in text
    assert row(text, "gripper").startswith("gripper 1 value at 50 Hz")
    assert row(text, "joints").startswith("joints 6 values at")


def test_every_problem_is_found_at_once(given: ModuleType) -> None:
    given.inputs = (TensorSpec("state.value", (32, 13)), TensorSpec("present", (), "bool"))
    given.outputs = (TensorSpec("actions", (8, 2)), TensorSpec("x", ()), TensorSpec("x", ()))
    with pytest.raises(ConfigError) as caught:
        describe(config(decode={"target": "given_policy:decode"}), 3)
    assert caught.value.problems == [
        "world size: got 3 ranks, want 2 (pipelined) or 1 (inline); "
        "start with ppstream run --nproc 2, or torchrun --nproc-per-node=2",
        "policy.target: given_policy:build reads 'state.value', which no window has "
        "(did you mean state.values?)",
        "policy.target: given_policy:build names an output twice: actions, x, x",
        "policy.target: given_policy:build writes actions [8, 2] float32, but actions.horizon "
        "and actions.names want actions [16, 2] float32",
        "'given_policy:decode': module 'given_policy' has no 'decode'",
    ]


def test_a_recording_that_cannot_be_served_is_a_problem(given: ModuleType, tmp_path: Path) -> None:
    stamps = np.arange(2000, dtype=np.int64) * 1_000_000
    values = np.zeros((2000, 7), np.float32)
    np.savez(tmp_path / "r.npz", **{"joints.stamps_ns": stamps, "joints.values": values})
    served = config(service={"recording": str(tmp_path / "r.npz")})
    with pytest.raises(ConfigError, match="'imu' is not recorded, want one of joints"):
        describe(served, 2)


def test_every_problem_of_user_code_is_found_at_once(
    given: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    def build_decoder(_options: object, _actions: object) -> None:
        sys.exit("no calibration")

    given.build, given.build_decoder = lambda options, device: None, build_decoder
    with pytest.raises(ConfigError) as caught:
        describe(config(metrics={"port": 65535}), 2)
    port, policy, decoder = caught.value.problems
    assert port == (
        "metrics.port: got 65535, want 65534 at most with 2 ranks: rank r listens at port + r"
    )
    assert policy.startswith("policy.target: given_policy:build returned None, want a policy: it ")
    assert "no __call__; no reset(); no inputs, a tuple of TensorSpec; no outputs" in policy
    said = "decode.target: given_policy:build_decoder called sys.exit('no calibration') at "
    assert decoder.startswith(said + __file__)


def test_a_stream_that_comes_too_seldom_for_a_policy_that_cannot_see_it_is_a_problem(
    given: ModuleType,
) -> None:
    joints, imu = TABLE["streams"]
    seldom = config(streams=[joints, imu | {"max_age_ms": 4}])
    with pytest.raises(ConfigError, match=r"streams\[1\]\.max_age_ms: got 4 for 'imu', want at"):
        describe(seldom, 2)
    given.inputs += (TensorSpec("state.valid", (32, 2), "bool"),)
    describe(seldom, 2)


def test_a_log_that_cannot_be_made_is_a_problem_and_trying_leaves_nothing(
    given: ModuleType, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"log\.root: cannot write to /proc/none: No such file"):
        describe(config(log={"root": "/proc/none"}), 2)
    assert "no problem found" in describe(config(log={"root": f"{tmp_path}/new/logs"}), 2)
    assert [*tmp_path.iterdir()] == []


def test_a_log_below_a_link_to_nothing_or_of_a_name_too_long_is_a_problem(
    given: ModuleType, tmp_path: Path
) -> None:
    link = tmp_path / "logs"
    link.symlink_to(tmp_path / "gone")
    for root in (link, link / "of" / "robots"):
        with pytest.raises(ConfigError) as caught:
            describe(config(log={"root": str(root)}), 2)
        (found,) = caught.value.problems
        assert found.startswith(f"log.root: cannot write to {root}: {link} is a link to {tmp_path}")
    with pytest.raises(ConfigError, match=r"log\.root: cannot write to .*: File name too long; "):
        describe(config(log={"root": f"{tmp_path}/new/{'x' * 300}"}), 2)
    link.unlink()
    link.symlink_to(tmp_path)
    assert "no problem found" in describe(config(log={"root": f"{link}/new/../../logs"}), 2)
    assert [*tmp_path.iterdir()] == [link]


@pytest.mark.parametrize(
    ("stream", "rows", "steps", "said"),
    [
        ({"dim": 786432, "max_age_ms": 1e7}, 1, 8, "streams: got rings of 23438.1 GiB for batch.r"),
        ({"dim": 3000, "max_age_ms": 1e7}, 1024, 8, "streams: got rings of 91"),
        ({"dim": 9999, "rate_hz": 9.0}, 1024, 65536, "window: got 2499.8 GiB for batch.rows = "),
        (
            {"image": {"height": 8, "width": 8, "resize": [8192, 8192], "frames": 64}, "dim": 192},
            1024,
            8,
            "window: got 49152.0 GiB for batch.rows = 1024, want less than the ",
        ),
    ],
)
def test_what_is_larger_than_the_memory_is_refused_before_it_is_made(
    given: ModuleType, stream: dict[str, Any], rows: int, steps: int, said: str
) -> None:
    dtype = "uint8" if "image" in stream else "float32"
    streams = [{"name": "imu", "rate_hz": 200.0, "dtype": dtype, **stream}]
    window = {"steps": steps, "dt_ms": 1e-5}
    with pytest.raises(ConfigError) as caught:
        describe(config(streams=streams, window=window, batch={"rows": rows}), 2)
    (found,) = caught.value.problems
    assert found.startswith(said)
    has = f"want less than the {limit_bytes() / (1 << 30):.1f} GiB that this host or container has"
    assert f"{has}: lower " in found


def test_rings_of_a_camera_keep_bytes(given: ModuleType) -> None:
    image = {"height": 48, "width": 64}
    camera = {"name": "top", "dim": 9216, "dtype": "uint8", "rate_hz": 30.0, "image": image}
    text = describe(config(streams=[camera, *TABLE["streams"]]), 2)
    samples = int(row(text, "top").partition("ring of ")[2].split()[0])
    rings = 2 * (1064 * (7 * 4 + 8) + 226 * (6 * 4 + 8) + samples * (9216 + 8))
    assert row(text, "rings") == f"rings {rings / 1024:.1f} KiB on rank 0"


def test_the_last_port_is_the_last_rank_s(given: ModuleType) -> None:
    assert "no problem found" in describe(config(metrics={"port": 65534}), 2)
    assert "no problem found" in describe(config(metrics={"port": 65535}), 1)


@pytest.mark.parametrize("lacking", ["reset", "inputs", "outputs"])
def test_a_policy_that_lacks_a_part_is_a_problem(given: ModuleType, lacking: str) -> None:
    made = GivenPolicy(given.inputs, given.outputs)
    setattr(made, lacking, None)
    given.build = lambda options, device: made
    with pytest.raises(ConfigError, match=f"returned a GivenPolicy, want a policy: .* {lacking}"):
        describe(config(), 2)


@pytest.mark.parametrize(
    "spec",
    [
        TensorSpec("state.values", (31, 13)),
        TensorSpec("state.values", (32, 12)),
        TensorSpec("state.values", (32, 13), "float64"),
    ],
)
def test_input_of_another_shape_or_dtype_is_a_problem(given: ModuleType, spec: TensorSpec) -> None:
    given.inputs = (spec,)
    with pytest.raises(ConfigError, match=r"but streams and window make it state\.values \[32, 13"):
        describe(config(), 2)


def test_policy_without_actions_is_a_problem(given: ModuleType) -> None:
    given.outputs = (TensorSpec("logits", (16, 2)),)
    with pytest.raises(ConfigError, match=r"writes no actions, but actions\.horizon"):
        describe(config(), 2)


def test_module_that_is_not_installed_is_a_problem() -> None:
    with pytest.raises(ConfigError, match="there is no module 'acme_absent' to import"):
        describe(config(policy={"target": "acme_absent.policy:build"}), 2)


@pytest.mark.parametrize("rank", [0, 1])
def test_under_a_launcher_one_rank_says_it_for_all(
    rank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["--check", "--config", "bench"]) == 0
    assert capsys.readouterr().out.count("nothing started") == (rank == 0)


DECODER = "ppstream.pipeline.decode:build"
CHOSEN: dict[str, Any] = {
    "placement": {"policy": ["cpu", "cpu"], "parts": "auto"},
    "policy": {
        "target": "ppstream_stages.simulated:build",
        "options": {"parts_ms": [1, 1, 1], "hop_bytes": 2048, "horizon": 16, "action_dim": 2},
    },
}


def test_a_cut_that_the_run_chooses_is_said_to_be_with_what_each_part_writes() -> None:
    text = describe(config(decode={"target": DECODER}, **CHOSEN), 3)
    assert row(text, "cut") == "cut best of the parts' times, which rank 1 measures at the start"
    assert row(text, "part_1") == "part_1 any rank, writes 2.0 KiB"
    assert row(text, "part_3") == "part_3 any rank, writes 128 B"
    assert row(text, "slots") == "slots as the cut needs them"
    assert "envelope:" not in text
    alone = describe(config(decode={"target": DECODER}, **CHOSEN), 1)
    assert row(alone, "part_3") == "part_3 rank 0, writes 128 B"
    assert "envelope: 1 slot of" in alone


def test_a_cut_that_no_run_could_choose_is_refused_with_everything_else() -> None:
    few = CHOSEN["policy"] | {"options": CHOSEN["policy"]["options"] | {"parts_ms": [1]}}
    with pytest.raises(ConfigError) as caught:
        describe(config(**(CHOSEN | {"policy": few}), decode={"target": "a.b:absent"}), 3)
    places, decoder = caught.value.problems
    assert places.startswith("placement.parts: got 'auto' for 1 part (part_1) on 2 policy ranks")
    assert "a.b:absent" in decoder


GPUS = {"rank0": "cuda:0", "policy": ["cuda:1"]}


class Machine:
    """What torch and the driver answer; a test may change it before it asks."""

    def __init__(self) -> None:
        self.gpus = 2
        self.reaches = {(0, 1), (1, 0)}  # peer access, from one to the other
        self.release = b"580.159.04"

    def nvmlInit_v2(self) -> int:
        return 0 if self.release else 9

    def nvmlSystemGetDriverVersion(self, text: Any, size: int) -> int:
        assert size >= 80
        text.value = self.release
        return 0

    def nvmlShutdown(self) -> int:
        return 0


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine()
    about = SimpleNamespace(name="NVIDIA H200", total_memory=140 << 30, major=9, minor=0)
    answers: dict[str, Any] = {
        "is_available": lambda: found.gpus > 0,
        "device_count": lambda: found.gpus,
        "get_device_properties": lambda index: about,
        "can_device_access_peer": lambda *pair: pair in found.reaches,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    driver, nvrtc = ModuleType("driver"), ModuleType("nvrtc")
    driver.cuDriverGetVersion = lambda: (0, 13010)  # type: ignore[attr-defined]
    nvrtc.nvrtcVersion = lambda: (0, 13, 0)  # type: ignore[attr-defined]
    for name, module in (("driver", driver), ("nvrtc", nvrtc)):
        monkeypatch.setitem(sys.modules, f"cuda.bindings.{name}", module)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: found)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64 << 10, 64 << 10))
    monkeypatch.setenv(startup.CONNECTIONS, "32")
    return found


def on_gpus(**changes: Any) -> PipelineConfig:
    return config(**{"placement": GPUS, "simulate": {"kind": "gpu"}, **changes})


@pytest.mark.usefixtures("given", "machine")
def test_each_rank_has_its_device_and_the_link_its_reason() -> None:
    text = describe(on_gpus(), 2)
    assert row(text, "cuda:0") == "cuda:0 NVIDIA H200, 140.0 GiB, sm_90, for rank 0"
    assert row(text, "cuda:1") == "cuda:1 NVIDIA H200, 140.0 GiB, sm_90, for rank 1"
    assert "rank 0 stage A + C (streams of their own) on cuda:0" in " ".join(text.split())
    assert "rank 1 stage B (given_policy:build) on cuda:1" in " ".join(text.split())
    assert row(text, "peer") == "peer access yes, both ways"
    link = "link peer: both GPUs are in one host and reach each other's memory"
    assert row(text, "link") == link
    assert sys.modules["given_policy"].received[0][1] == "cuda:1"  # where it will run


@pytest.mark.usefixtures("given", "machine")
def test_what_drives_the_gpus_is_named_by_version() -> None:
    text = describe(on_gpus(), 2)
    assert row(text, "torch") == f"torch {torch.__version__}, CUDA 13.0"
    assert row(text, "driver") == "driver 580.159.04, for CUDA 13.1"
    assert row(text, "NVRTC") == "NVRTC 13.0"
    assert row(text, "lockable") == "lockable memory 64 KiB"
    assert row(text, startup.CONNECTIONS) == f"{startup.CONNECTIONS} 32"


@pytest.mark.parametrize("reaches", [set(), {(0, 1)}, {(1, 0)}])
@pytest.mark.usefixtures("given")
def test_peer_access_counts_only_both_ways(machine: Machine, reaches: set[tuple[int, int]]) -> None:
    machine.reaches = reaches
    text = describe(on_gpus(), 2)
    assert row(text, "peer") == "peer access no"
    assert row(text, "link").startswith("link pinned: both GPUs are in one host, but do not reach")


@pytest.mark.usefixtures("given")
def test_replicas_need_to_reach_rank_0_alone(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GivenPolicy, "stateless", True, raising=False)
    machine.gpus, machine.reaches = 3, {(0, 1), (1, 0), (0, 2), (2, 0)}
    placement = {"rank0": "cuda:0", "policy": ["cuda:1", "cuda:2"], "replicas": 2}
    text = describe(on_gpus(placement=placement), 3)
    assert row(text, "peer") == "peer access yes, both ways"
    assert row(text, "link").startswith("link peer: all 3 GPUs are in one host")
    machine.reaches.remove((2, 0))
    assert row(describe(on_gpus(placement=placement), 3), "peer") == "peer access no"


@pytest.mark.usefixtures("given")
def test_a_driver_whose_library_is_missing_still_says_its_cuda(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.release = b""
    assert row(describe(on_gpus(), 2), "driver") == "driver for CUDA 13.1"

    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert row(describe(on_gpus(), 2), "driver") == "driver for CUDA 13.1"


@pytest.mark.usefixtures("given")
def test_what_cannot_be_loaded_is_said_in_its_row(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    assert row(describe(on_gpus(), 2), "NVRTC").startswith("NVRTC not usable: ")


@pytest.mark.usefixtures("given")
def test_a_gpu_that_is_named_and_not_there_is_a_problem(machine: Machine) -> None:
    machine.gpus = 1
    with pytest.raises(ConfigError) as caught:
        describe(on_gpus(), 2)
    assert (
        "placement.policy: got cuda:1, but this machine has 1 CUDA devices" in caught.value.problems
    )


@pytest.mark.usefixtures("given", "machine")
def test_the_twin_on_one_gpu_has_no_peer_to_reach() -> None:
    text = describe(on_gpus(), 1)
    assert row(text, "cuda:1").endswith("for rank 0")
    assert "peer access" not in text


@pytest.mark.usefixtures("given", "machine")
def test_nothing_is_said_of_gpus_where_none_is_used() -> None:
    assert "NVRTC" not in describe(config(**TABLE), 2)


def test_members_of_a_mesh_are_listed_behind_their_leader() -> None:
    options = (
        "policy.options={steps=8, dim=5, streams=2, horizon=4, action_dim=2, width=128, "
        'encoder_blocks=1, decoder_blocks=1, dtype="float32"}'
    )
    settings = ("policy.target=ppstream_stages.act:build", options, "placement.mesh=3")
    config = load.read("tests/support/small.toml", settings)
    text = describe(config, 4)
    for rank in (2, 3):
        assert f"rank {rank}           stage B on cpu, in the mesh that rank 1 leads" in text


def test_members_of_a_replica_s_mesh_are_listed_with_its_leader() -> None:
    shape = "policy.options={steps=8, dim=5, horizon=4, action_dim=2, stateless=true}"
    settings = ("policy.target=mesh_policy:build", shape, "placement.mesh=3")
    config = load.read("tests/support/small.toml", (*settings, "placement.replicas=2"))
    text = describe(config, 7)
    for rank, leader in ((3, 1), (4, 1), (5, 2), (6, 2)):
        where = f"stage B on cpu, in the mesh that rank {leader} leads"
        assert f"rank {rank}           {where}" in text


def test_gpus_of_a_mesh_are_listed_with_their_ranks(given: ModuleType, machine: Machine) -> None:
    made = given.build
    given.build = lambda options, device, mesh=None: made(options, device)
    placement = {"policy": ["cuda:0", "cuda:1"], "mesh": 2}
    text = describe(config(placement=placement), 3)
    assert row(text, "cuda:1").endswith("for rank 2")
    assert "rank 2 stage B on cuda:1, in the mesh that rank 1 leads" in " ".join(text.split())
    assert row(text, "link").startswith("link host: all 3 ranks share one host")
    assert "peer access" not in text  # NCCL's business
    machine.gpus = 1
    with pytest.raises(ConfigError) as caught:
        describe(config(placement=placement), 3)
    assert "placement.policy: got cuda:1, but this machine has 1 CUDA devices" in (
        caught.value.problems
    )
