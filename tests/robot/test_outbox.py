from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ppstream.core.errors import SpecError
from ppstream.robot.outbox import BATCH_SAMPLES, Batch, Outbox

STREAMS = [("joints", 2), ("imu", 1, "float64")]


def content(batch: Batch, dtype: str = "float32") -> tuple[list[int], list[float]]:
    stamps = np.frombuffer(batch.stamps, np.int64).tolist()
    return stamps, np.frombuffer(batch.values, dtype).tolist()


def test_without_batching_a_push_comes_back_at_once() -> None:
    (batch,) = Outbox(STREAMS, 0).add("imu", 5, [0.25], now_ns=0)
    assert (batch.stream, batch.samples) == (1, 1)
    assert content(batch, "float64") == ([5], [0.25])


def test_the_quick_way_and_the_careful_way_give_the_same_bytes() -> None:
    values = np.array([1.5, -2], np.float32)
    for stamp in (-(2**63), -1, 2**63 - 1):
        (quick,) = Outbox(STREAMS, 0).add("joints", stamp, values, now_ns=0)
        (careful,) = Outbox(STREAMS, 0).add("joints", np.array([stamp]), values[None], now_ns=0)
        assert (quick.stream, quick.samples) == (careful.stream, careful.samples)
        assert bytes(quick.stamps) == bytes(careful.stamps)
        assert bytes(quick.values) == bytes(careful.values)


def test_gathered_samples_leave_together_when_the_oldest_is_due() -> None:
    outbox = Outbox(STREAMS, 10)
    assert outbox.add("joints", 1, [1, 2], now_ns=100) == []
    assert outbox.add("imu", 2, 7.0, now_ns=105) == []
    assert outbox.due_ns == 110
    assert outbox.pop_due(109) == []
    joints, imu = outbox.pop_due(110)
    assert content(joints) == ([1], [1.0, 2.0])
    assert content(imu, "float64") == ([2], [7.0])
    assert outbox.due_ns is None
    assert outbox.pop_due(1000) == []


def test_the_push_that_finds_samples_due_sends_them_in_order() -> None:
    outbox = Outbox(STREAMS, 10)
    outbox.add("joints", 1, [1, 2], now_ns=0)
    (batch,) = outbox.add("joints", np.array([2, 3]), np.ones((2, 2)), now_ns=10)
    assert content(batch) == ([1, 2, 3], [1.0, 2.0, 1.0, 1.0, 1.0, 1.0])


def test_a_full_batch_leaves_before_its_time_and_before_the_newer_samples() -> None:
    outbox = Outbox(STREAMS, 10**9)
    for stamp in range(BATCH_SAMPLES):
        assert outbox.add("joints", stamp, [0, 0], now_ns=0) == []
    older, newer = outbox.add("joints", BATCH_SAMPLES, [0, 0], now_ns=0)
    assert content(older)[0] + content(newer)[0] == list(range(BATCH_SAMPLES + 1))


def test_a_camera_s_frames_are_taken_as_they_are() -> None:
    shape = (4, 6, 3)
    outbox = Outbox([("top", shape, "uint8")], 0)
    (declared,) = outbox.declarations
    assert (declared.dim, declared.shape) == (72, shape)
    frames = np.arange(144, dtype=np.uint8).reshape(2, *shape)
    (one,) = outbox.add("top", 7, frames[0], 0)
    (flat,) = outbox.add("top", 7, frames[0].reshape(-1), 0)
    (mirrored,) = outbox.add("top", 7, frames[0, ::-1, ::-1, ::-1], 0)
    (both,) = outbox.add("top", np.array([7, 8]), frames, 0)
    assert bytes(one.values) == bytes(flat.values) == frames[0].tobytes()
    assert bytes(mirrored.values) == frames[0, ::-1, ::-1, ::-1].tobytes()
    assert bytes(both.values) == frames.tobytes()
    with pytest.raises(SpecError, match=r"\(6, 4, 3\) with 1 stamp, expected \(4, 6, 3\) with one"):
        outbox.add("top", 7, np.zeros((6, 4, 3), np.uint8), 0)


@pytest.mark.parametrize("batch_ns", [0, 10])
def test_a_frame_larger_than_a_push_of_samples_goes_alone(batch_ns: int) -> None:
    shape = (720, 1280, 3)
    outbox = Outbox([("top", shape, "uint8"), ("eye", shape, "uint8", "jpeg")], batch_ns)
    frame = np.arange(720 * 1280 * 3, dtype=np.uint8).reshape(shape)
    sent = [*outbox.add("top", 7, frame, 0), *outbox.add("top", 8, frame[::-1], 0)]
    sent += outbox.pop_due(0, everything=True)
    assert [bytes(batch.values) for batch in sent] == [frame.tobytes(), frame[::-1].tobytes()]
    assert len(outbox.encoded("eye", 7, frame.tobytes()).values) == frame.size
    with pytest.raises(SpecError, match="2 samples in one push, limit 1; push fewer"):
        outbox.add("top", np.array([7, 8]), np.stack([frame, frame]), 0)
    with pytest.raises(SpecError, match=f"want 1 to {frame.size}"):
        outbox.encoded("eye", 7, bytes(frame.size + 1))


def test_a_gathered_sample_is_a_copy() -> None:
    outbox = Outbox(STREAMS, 10)
    values = np.zeros(2, np.float32)
    outbox.add("joints", 1, values, now_ns=0)
    values[:] = 9
    (batch,) = outbox.pop_due(0, everything=True)
    assert content(batch)[1] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("stream", "stamp", "values", "says"),
    [
        ("wrist", 1, [0, 0], "not declared; declared: .'joints', 'imu'"),
        ("joints", 1, [0, 0, 0], r"got values \(3,\)"),
        ("joints", [1, 2], [[0, 0]], "with 2 stamps"),
        ("joints", 1.5, [0, 0], "integer nanoseconds"),
        ("joints", 2**63, [0, 0], "not numbers"),
        ("joints", 2**63, np.zeros(2, np.float32), "not numbers"),
        ("joints", 1, ["a", "b"], "not numbers"),
        ("joints", 1, [[0], [0, 1]], "not numbers"),
        ("joints", np.arange(2**18), np.zeros((2**18, 2)), "limit 65536; push fewer"),
    ],
)
def test_wrong_samples_are_refused_with_what_was_expected(
    stream: str, stamp: Any, values: Any, says: str
) -> None:
    with pytest.raises(SpecError, match=says):
        Outbox(STREAMS, 0).add(stream, stamp, values, now_ns=0)


@pytest.mark.parametrize(
    ("stream", "values", "says"),
    [
        (
            "eye",
            np.array([0.5, 0.75]),
            r"to 0.75 are not numbers that uint8 holds; push an integer dtype, of pixels from",
        ),
        ("eye", [0.5, 0.99], "float64 values"),
        ("eye", np.array([np.nan, 3.0], np.float32), "float32 values"),
        ("eye", np.array([300, 1]), "int64 values from 1 to 300 are not numbers that uint8 holds"),
        ("eye", [-1, 255], "from -1 to 255"),
        ("eye", np.array([256, 0], np.uint16), "from 0 to 256"),
        ("joints", np.array([1e300, 0]), r"from 0.0 to 1e\+300 are not numbers that float32 holds"),
        ("joints", [2 + 3j, 0], "complex128 values are not numbers that float32 holds"),
        ("imu", [2 + 3j], "complex128 values are not numbers that float64"),
        ("joints", ["1", "2"], "<U1 values are not numbers"),
        ("joints", [None, 2], "object values are not"),
    ],
)
def test_values_that_the_declared_dtype_does_not_hold_are_refused(
    stream: str, values: Any, says: str
) -> None:
    outbox = Outbox([*STREAMS, ("eye", 2, "uint8")], 0)
    with pytest.raises(SpecError, match=says):
        outbox.add(stream, 1, values, now_ns=0)


@pytest.mark.parametrize(
    ("stream", "values", "sent"),
    [
        ("eye", [0, 255], [0, 255]),
        ("eye", np.array([True, False]), [1, 0]),
        ("eye", np.array([7, 255], np.int64), [7, 255]),
        ("joints", [1, 2], [1, 2]),
        ("joints", [True, 0.5], [1, 0.5]),
        ("joints", np.array([1.5, -np.inf]), [1.5, -np.inf]),
        ("joints", np.array([1.5, -2], ">f4"), [1.5, -2]),
        ("imu", np.array([2**40], np.uint64), [2**40]),
    ],
)
def test_values_that_the_declared_dtype_holds_are_converted(
    stream: str, values: Any, sent: list[float]
) -> None:
    (batch,) = Outbox([*STREAMS, ("eye", 2, "uint8")], 0).add(stream, 1, values, now_ns=0)
    dtype = {"eye": "uint8", "joints": "float32", "imu": "float64"}[stream]
    assert content(batch, dtype)[1] == sent


@pytest.mark.parametrize(
    "streams",
    [
        [("a", 0)],
        [("a", 1, "int8")],
        [("a", 1), ("a", 2)],
        [("a", (1080, 1920, 3), "uint8")],
        [("a", (1,) * 9)],
    ],
)
def test_streams_that_cannot_be_declared_are_refused(streams: Any) -> None:
    with pytest.raises(SpecError):
        Outbox(streams, 0)


def test_a_camera_that_states_no_dtype_is_told_which_one() -> None:
    says = r"limit 3145728; declare frames of bytes as \('top', \(480, 640, 3\), 'uint8'\)$"
    with pytest.raises(SpecError, match=says):
        Outbox([("top", (480, 640, 3))], 0)
