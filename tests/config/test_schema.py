"""What a configuration's values must agree on, and what is derived from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from ppstream.config.doubts import warnings
from ppstream.config.rules import problems
from ppstream.config.schema import PipelineConfig

PLAIN: dict[str, Any] = {
    "name": "arm",
    "streams": [
        {"name": "joints", "dim": 7, "rate_hz": 1000.0},
        {"name": "pose", "dim": 4, "rate_hz": 100.0, "interpolation": "slerp", "group": "pose"},
        {"name": "imu", "dim": 6, "rate_hz": 200.0},
    ],
    "window": {"steps": 11, "dt_ms": 10.0},
    "actions": {
        "names": ["x", "y"],
        "horizon": 16,
        "dt_ms": 10.0,
        "low": [-1.0, -2.0],
        "high": [1.0, 2.0],
        "lease_ms": 200.0,
    },
    "policy": {"target": "acme.stages:build"},
}
FILMED = {
    "streams__2__dim": 72,
    "streams__2__dtype": "uint8",
    "streams__2__image": {"height": 4, "width": 6},
}
SLOW_REFERENCE: dict[str, Any] = {
    "streams__2__reference": True,
    "streams__2__rate_hz": 4.0,
    "streams__2__max_gap_ms": 250.0,
}


def config(**changes: Any) -> PipelineConfig:
    """``PLAIN`` with tables merged and other values replaced; ``a__b=v`` changes one value."""
    table = msgspec.json.decode(msgspec.json.encode(PLAIN))
    for path, value in changes.items():
        *steps, last = path.split("__")
        place = table
        for step in steps:
            place = place[int(step)] if step.isdigit() else place.setdefault(step, {})
        place[last] = value
    return msgspec.convert(table, PipelineConfig)


def test_plain_configuration_has_no_problem() -> None:
    assert problems(config()) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"streams": []}, "streams: got 0 of them, want 1 to 256"),
        (
            {"streams__2__dim": 400_000, "streams__2__dtype": "float64"},
            "streams[2].dim: got 400000 float64, 3200000 bytes a sample, want 3145728 at most",
        ),
        (
            FILMED
            | {"streams__2__dim": 1080 * 1920 * 3}
            | {"streams__2__image": {"height": 1080, "width": 1920}},
            "streams[2].image: got 6220800 bytes a frame, want 3145728 at most",
        ),
        ({"actions__dt_ms": 1e-9}, "actions.dt_ms: got 1e-09, want 1e-06 (1 ns) to 3.1536e+10"),
        ({"window__dt_ms": 1e-7}, "window.dt_ms: got 1e-07, want 1e-06 (1 ns)"),
        ({"liveness__start_s": 1e300}, "liveness.start_s: got 1e+300, want 1e-09 (1 ns) to 3.15"),
        ({"streams__1__max_age_ms": 1e12}, "streams[1].max_age_ms: got 1e+12, want 1e-06 (1 ns)"),
        ({"streams__0__rate_hz": 1e10}, "streams[0].rate_hz: got 1e+10, want 3e-08 (one a year)"),
        ({"streams__0__rate_hz": 5e-324}, "streams[0].rate_hz: got 4.94066e-324, want 3e-08"),
        ({"streams__0__rate_hz": None}, "streams[0].rate_hz: missing, want either rate_hz, of a"),
        (
            {"streams__0__max_request_hz": 50.0},
            "streams[0].rate_hz: got 1000 beside max_request_hz, want either rate_hz, of a sensor",
        ),
        (
            {"streams__0__rate_hz": None, "streams__0__max_request_hz": 1e8},
            "streams[0].max_request_hz: got 1e+08, which needs a ring of",
        ),
        ({"streams__2__name": "joints"}, "streams: got 'joints' 2 times, want each name once"),
        (
            FILMED | {"streams__0__group": "imu"},
            "streams[0].group: got 'imu', want another name: stream 'imu' is a camera, which has "
            "tensors imu.valid and imu.age_s, too",
        ),
        (
            {"streams__0__reference": True, "streams__2__reference": True},
            "streams: got reference = true on joints, imu, want it on one at most",
        ),
        ({"streams__1__dim": 3}, "streams[1].dim: got 3, want 4: slerp interpolates quaternions"),
        ({"streams__1__joints": ["a"]}, "streams[1].joints: got 1 name, want 4: one per value"),
        ({"streams__1__joints": [*"abca"]}, "streams[1].joints: got 'a' 2 times"),
        ({**FILMED, "streams__2__joints": ["a"]}, "streams[2].joints: got 1 name, want none: a"),
        ({"streams__1__max_gap_ms": 9.0}, "streams[1].max_gap_ms: got 9, want at least the 10 ms"),
        ({"window__dt_ms": 1e6}, "streams[0].rate_hz: got 1000, which needs a ring of"),
        ({"actions__names": [], "actions__low": [], "actions__high": []}, "actions.names: got 0"),
        ({"actions__names": ["x", "x"]}, "actions.names: got 'x' 2 times"),
        ({"actions__low": [-1.0]}, "actions.low: got 1 limit, want 2: one for each name"),
        ({"actions__high": [1.0, 2.0, 3.0]}, "actions.high: got 3 limits, want 2"),
        ({"actions__low": [-1.0, 2.0]}, "actions.low: got 2 for 'y', want it below its high, 2"),
        (
            {"actions__low": [-1e39, -1.0]},
            "actions.low: got -1e+39 for 'x', want at least -3.40282e",
        ),
        (
            {"actions__low": [4e38, -1.0], "actions__high": [5e38, 1.0]},
            "actions.high: got 5e+38 for 'x', want at most 3.40282e+38 (float32)",
        ),
        ({"actions__lease_ms": 10.0}, "actions.lease_ms: got 10, want more than actions.dt_ms"),
        (
            {"pipeline__pacing": "sample:gps"},
            "pipeline.pacing: got stream 'gps', want one of joints, pose, imu",
        ),
        ({"pipeline__pacing": "tick"}, "pipeline.tick_hz: missing, want a number above 0"),
        ({"pipeline__pacing": "rows"}, "pipeline.gather_ms: missing, want a number above 0 and"),
        (
            {"pipeline__pacing": "rows", "pipeline__gather_ms": 200.0},
            "pipeline.gather_ms: got 200, want a number above 0 and below actions.lease_ms = 200",
        ),
        (
            {"pipeline__gather_ms": 10.0},
            "pipeline.gather_ms: got 10 with pacing = 'sample', want pacing = 'rows', or",
        ),
        (
            {"pipeline__tick_hz": 5.0},
            "pipeline.tick_hz: got 5 with pacing = 'sample', want pacing = 'tick', or",
        ),
        (
            {"pipeline__pacing": "tick", "pipeline__tick_hz": 4.0},
            "pipeline.tick_hz: got 4, a chunk every 250 ms with pacing = 'tick', want at most "
            "actions.lease_ms = 200 between two: raise the rate or the lease",
        ),
        (
            {"pipeline__pacing": "sample:pose", "actions__lease_ms": 9.9, "actions__dt_ms": 5.0},
            "streams[1].rate_hz: got 100, a chunk every 10 ms with pacing = 'sample:pose', want",
        ),
        (
            {"actions__lease_ms": 0.9, "actions__dt_ms": 0.5},
            "streams[0].rate_hz: got 1000, a chunk every 1 ms with pacing = 'sample', want at most",
        ),
        (
            SLOW_REFERENCE | {"pipeline__pacing": "tick", "pipeline__tick_hz": 30.0},
            "streams[2].rate_hz: got 4, a chunk every 250 ms with pacing = ",
        ),
        (
            SLOW_REFERENCE | {"pipeline__pacing": "sample:pose"},
            "streams[2].rate_hz: got 4, a chunk every 250 ms with pacing = ",
        ),
        (
            SLOW_REFERENCE | {"pipeline__pacing": "free"},
            "streams[2].rate_hz: got 4, a chunk every 250 ms with pacing = ",
        ),
        (
            SLOW_REFERENCE | {"pipeline__pacing": "rows", "pipeline__gather_ms": 10.0},
            "streams[2].rate_hz: got 4, a chunk every 250 ms with pacing = ",
        ),
        ({"pipeline__windows": "scheduled"}, "pipeline.windows: got 'scheduled' without service"),
        ({"bringup__source": "recording"}, "bringup.recording: missing, want a file"),
        (
            {"bringup__source": "recording", "bringup__recording": "/no/such.npz"},
            "bringup.recording: got '/no/such.npz', which is",
        ),
        (
            {"bringup__source": "recording", "bringup__recording": __file__},
            "want a file ending in .npz or .npy",
        ),
        (
            {"bringup__recording": str(Path(__file__).parent)},
            "bringup.recording: got one beside bringup.source = 'synthetic'",
        ),
        ({"record__file": "/tmp/run.json"}, "record.file: got '/tmp/run.json', want a .mcap file"),
        ({"record__file": "/no/such/run.mcap"}, "want it in a folder that can be written to"),
        ({"service__recording": "/no/such.npy"}, "service.recording: got '/no/such.npy', which is"),
        ({"service__actions_file": "/tmp/a.npz"}, "service.actions_file: got a file without serv"),
        ({"policy__weights": __file__}, "want a .safetensors or .onnx file: it holds no code"),
        ({"policy__weights": "/no/w.safetensors"}, "policy.weights: got '/no/w.safetensors', whi"),
        ({"demo": {"robot": "a.b"}, "service__endpoint": None}, "service.endpoint: got none, want"),
        ({"service__endpoint": "127.0.0.1:5870"}, "service.endpoint: got '127.0.0.1:5870', want"),
        ({"service__endpoint": "tcp://127.0.0.1"}, "want 'unix://PATH' or 'tcp://ADDRESS:PORT'"),
        ({"service__endpoint": "tcp://127.0.0.1:65536"}, "or 'tcp://ADDRESS:PORT'"),
        (
            {"service__endpoint": "ipc:///tmp/r"},
            "service.endpoint: got 'ipc:///tmp/r', want 'unix:",
        ),
        ({"service__endpoint": "unix://"}, "service.endpoint: got path '', want that of a file"),
        ({"service__endpoint": "unix:///" + "x" * 107}, "got 108 bytes of path"),
        (
            {"service__endpoint": "unix:///no/such/folder/robots"},
            "/no/such does not exist; make it",
        ),
        ({"service__endpoint": "unix:///usr/robots"}, "want a folder of your own with mode 700"),
        ({"liveness__heartbeat_ms": 700.0}, "liveness.heartbeat_ms: got 700, want less than a th"),
        ({"log__root": __file__}, "which is a file; want a folder"),
        ({"log__root": __file__ + "/logs/arm"}, f"is below {__file__}, a file; want a folder"),
    ],
)
def test_disagreement_is_named_with_its_path_and_remedy(changes: dict[str, Any], said: str) -> None:
    (found,) = problems(config(**changes))
    assert said in found


@pytest.mark.parametrize(
    "changes",
    [
        {"pipeline__pacing": "sample:imu"},
        {"pipeline__pacing": "tick", "pipeline__tick_hz": 50.0},
        {"pipeline__pacing": "rows", "pipeline__gather_ms": 10.0},
        {"pipeline__pacing": "tick", "pipeline__tick_hz": 5.0},
        {
            "pipeline__pacing": "tick",
            "pipeline__tick_hz": 3.0,
            "actions__lease_ms": 333.333,
        },
        {
            "pipeline__pacing": "tick",
            "pipeline__tick_hz": 1000 / 13.9,
            "actions__lease_ms": 13.9,
        },
        {"pipeline__pacing": "sample:pose", "actions__lease_ms": 10.0, "actions__dt_ms": 5.0},
        {"pipeline__pacing": "saturated", "actions__lease_ms": 1.0, "actions__dt_ms": 0.5},
        {"service__endpoint": "tcp://[::1]:0"},
        {"service__endpoint": "tcp://127.0.0.1:*"},
        {"service__endpoint": "unix:///tmp/" + "x" * 97 + "/r"},
        {"service__endpoint": None},
        {"streams__1__max_gap_ms": 10.0},
        {"actions__low": [-3.4028235e38, -1.0]},
    ],
)
def test_values_at_their_limits_are_accepted(changes: dict[str, Any]) -> None:
    assert problems(config(**changes)) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"actions__dt_ms": 0.05},
            "actions.dt_ms: got 0.05 x horizon 16 = 0.8 ms a chunk, less than the 1 ms between two "
            "(streams[0].rate_hz = 1000)",
        ),
        (
            {"actions__dt_ms": 0.05, "pipeline__pacing": "saturated"},
            "less than the 1 ms between two (streams[0].rate_hz = 1000)",
        ),
        (
            {"actions__horizon": 1, "pipeline__pacing": "sample:pose", "actions__dt_ms": 9.9},
            "= 9.9 ms a chunk, less than the 10 ms between two (streams[1].rate_hz = 100)",
        ),
        (
            {"pipeline__pacing": "tick", "pipeline__tick_hz": 6.0},
            "less than the 166.667 ms between two (pipeline.tick_hz = 6): robots hold its last "
            "action meanwhile, and execute none of a chunk that is 170 ms old",
        ),
    ],
)
def test_chunks_that_end_before_the_next_one_are_a_warning(
    changes: dict[str, Any], said: str
) -> None:
    (found,) = warnings(config(**changes))
    assert said in found
    assert "raise dt_ms, which is in milliseconds, or horizon" in found
    assert problems(config(**changes)) == []


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"actions__horizon": 1, "pipeline__pacing": "sample:pose"},
        {"actions__dt_ms": 66.666, "actions__horizon": 1}
        | {"pipeline__pacing": "tick", "pipeline__tick_hz": 15.0},
        {"actions__dt_ms": 0.05, "service__recording": "r.npy"},
        {"actions__dt_ms": 0.05, "streams__0__rate_hz": None, "streams__0__max_request_hz": 1000.0},
    ],
)
def test_chunks_that_reach_the_next_one_or_may_are_none(changes: dict[str, Any]) -> None:
    assert list(warnings(config(**changes))) == []


def test_steps_that_are_nearly_one_are_a_warning() -> None:
    (found,) = warnings(config(window__dt_ms=0.005))
    assert found.startswith("window.dt_ms: got 0.005, so that ")
    assert "all steps are nearly equal; raise dt_ms, which is in milliseconds" in found
    assert problems(config(window__dt_ms=0.005)) == []
    assert list(warnings(config(window__dt_ms=0.005, window__steps=1))) == []


@pytest.mark.parametrize(
    ("name", "why"), [("net.pt2", "torch.export.load unpickles"), ("net.pth", "a pickle")]
)
def test_weights_that_can_run_code_are_refused_with_the_reason(
    name: str, why: str, tmp_path: Path
) -> None:
    (tmp_path / name).touch()
    (found,) = problems(config(policy__weights=str(tmp_path / name)))
    assert why in found


def test_recording_and_weights_that_exist_are_accepted(tmp_path: Path) -> None:
    recording, weights = tmp_path / "r.npy", tmp_path / "w.safetensors"
    recording.touch()
    weights.touch()
    changes = {
        "bringup": {"source": "recording", "recording": str(recording)},
        "service": {"recording": str(recording), "actions_file": str(tmp_path / "new.npz")},
        "policy__weights": str(weights),
        "pipeline__windows": "scheduled",
    }
    assert problems(config(**changes)) == []


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no/such/new.npz", "want it in a folder that can be written to"),
        ("new.csv", "want a .npz file"),
        ("new", "want a .npz file"),
    ],
)
def test_a_file_of_actions_that_cannot_be_written_is_refused_before_the_run(
    name: str, said: str, tmp_path: Path
) -> None:
    recording, actions = tmp_path / "r.npy", tmp_path / name
    recording.touch()
    changes = {"service": {"recording": str(recording), "actions_file": str(actions)}}
    (found,) = problems(config(**changes))
    assert found == f"service.actions_file: got {str(actions)!r}, {said}"


@pytest.mark.parametrize("windows", ["scheduled", "live"])
@pytest.mark.parametrize("pacing", [{}, {"pipeline__pacing": "tick", "pipeline__tick_hz": 4.0}])
def test_chunks_of_a_recording_hold_no_robot_however_short_their_lease(
    pacing: dict[str, Any], windows: str, tmp_path: Path
) -> None:
    recording = tmp_path / "r.npy"
    recording.touch()
    played = {"service": {"recording": str(recording)}, "pipeline__windows": windows}
    short = {"actions__lease_ms": 0.9, "actions__dt_ms": 0.5}
    assert problems(config(**played, **short, **pacing)) == []


def test_recording_is_served_instead_of_the_demo_robot(tmp_path: Path) -> None:
    recording = tmp_path / "r.npy"
    recording.touch()
    (found,) = problems(config(service__recording=str(recording), demo={"robot": "a.b"}))
    assert found.startswith("service.recording: got one beside a demo robot")


def test_all_disagreements_are_found_in_one_go() -> None:
    assert (
        len(problems(config(actions__low=[0.0], pipeline__pacing="tick", log__root=__file__))) == 3
    )


def test_reference_is_the_marked_stream_else_the_fastest() -> None:
    assert config().reference.name == "joints"
    assert config(streams__2__reference=True).reference.name == "imu"


def test_groups_keep_the_order_of_the_streams() -> None:
    groups = {name: [s.name for s in streams] for name, streams in config().groups.items()}
    assert groups == {"state": ["joints", "imu"], "pose": ["pose"]}


def test_ring_holds_window_gap_and_lead_at_twice_the_nominal_rate() -> None:
    plain = config()
    # 10 steps of 10 ms, a gap of 200 ms and a lead of 200 ms: 500 ms at 100 Hz, twice, and 16.
    assert plain.window_span_ms == 100.0
    assert plain.ring_samples(plain.streams[1]) == 116


def test_a_camera_on_request_holds_few_frames_where_the_window_s_end_comes_with_it() -> None:
    on_request = {"rate_hz": None, "max_request_hz": 100.0}
    camera = {f"streams__2__{name}": value for name, value in on_request.items()} | FILMED
    asked = config(**camera, **{f"streams__0__{name}": value for name, value in on_request.items()})
    assert asked.reference.is_on_request
    assert asked.ring_samples(asked.streams[2]) == 9
    pushed = config(**camera)  # a camera may be ahead of it by 200 ms, twice, and 16
    assert pushed.ring_samples(pushed.streams[2]) == 17 + 40


def test_a_stream_on_request_is_sized_by_its_most_requests_and_may_have_any_gap() -> None:
    asked = {"rate_hz": None, "max_request_hz": 1000.0, "max_gap_ms": 0.1}
    changes = {f"streams__0__{name}": value for name, value in asked.items()}
    found = config(**changes, streams__2__max_gap_ms=100.0)
    assert problems(found) == []
    assert found.reference.name == "joints"
    by_rate = config(streams__0__max_gap_ms=0.1)
    assert found.ring_samples(found.streams[0]) == by_rate.ring_samples(by_rate.streams[0])
