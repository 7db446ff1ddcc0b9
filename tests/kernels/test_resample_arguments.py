from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ppstream_kernels import StreamSource, resample, resample_streams

INT64 = torch.int64
GOOD: dict[str, Any] = {
    "src": torch.zeros(2, 5, 3),
    "src_ns": torch.zeros(2, 5, dtype=INT64),
    "tgt_ns": torch.zeros(2, 4, dtype=INT64),
}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"src": torch.zeros(2, 5)}, r"values is \[2, 5\] float32 on cpu, needs \[B, N, D\]"),
        ({"src": torch.zeros(2, 5, 3, dtype=torch.int32)}, "int32 on cpu, needs .* of float32"),
        ({"src": torch.zeros(2, 0, 3)}, "N >= 1"),
        ({"src": torch.zeros(2, 5, 3, requires_grad=True)}, "no gradient: detach"),
        ({"src_ns": torch.zeros(2, 4, dtype=INT64)}, r"stamps_ns is \[2, 4\] .* needs \[2, 5\]"),
        ({"src_ns": torch.zeros(2, 5)}, "stamps_ns is .* float32 .* int64"),
        ({"src_ns": torch.zeros(2, 5, dtype=INT64, device="meta")}, "on meta, needs .* on cpu"),
        ({"tgt_ns": torch.zeros(2, 4)}, "tgt_ns is .* float32 .* int64"),
        ({"tgt_ns": torch.zeros(2, dtype=INT64)}, r"tgt_ns is \[2\] .* needs \[B, T\]"),
        ({"tgt_ns": torch.zeros(3, 4, dtype=INT64)}, r"sources\[0\] .* B and device must agree"),
        ({"count": torch.zeros(2)}, r"count is \[2\] float32 .* needs \[2\] int64"),
        ({"head": torch.zeros(3, dtype=INT64)}, r"head is \[3\] int64 .* needs \[2\] int64"),
        ({"count": torch.tensor([5, 6])}, r"count\[1\] is 6, this ring allows 0\.\.5"),
        ({"count": torch.tensor([-1, 5])}, r"count\[0\] is -1"),
        ({"head": torch.tensor([0, 5])}, r"head\[1\] is 5, this ring allows 0\.\.4"),
        ({"mode": "spline"}, "mode is 'spline', needs one of linear, previous"),
        ({"mode": "slerp"}, r"slerp needs D = 4 .* \[2, 5, 3\]"),
        ({"max_gap_ns": -1}, "max_gap_ns is -1, needs >= 0"),
        ({"max_age_ns": -5}, "max_age_ns is -5, needs >= 0"),
    ],
)
def test_bad_arguments_say_what_was_seen_and_what_is_needed(
    bad: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        resample(**(GOOD | bad))


@pytest.mark.parametrize(
    ("position", "tensor", "message"),
    [
        (0, torch.zeros(2, 4, 2), r"out values is \[2, 4, 2\] .* needs contiguous \[2, 4, 3\]"),
        (0, torch.zeros(2, 4, 3, dtype=torch.int8), "out values is .* int8"),
        (0, torch.zeros(2, 3, 4).mT, r"strides \(12, 1, 4\)"),
        (0, torch.zeros(2, 4, 3, device="meta"), "on meta"),
        (1, torch.zeros(2, 4), r"out valid is .* needs contiguous \[2, 4\] bool"),
        (2, torch.zeros(2, 4, 1), r"out age_s is \[2, 4, 1\] .* needs contiguous \[2, 4\] float32"),
    ],
)
def test_an_output_that_cannot_be_written_in_place_is_refused(
    position: int, tensor: torch.Tensor, message: str
) -> None:
    out = [torch.zeros(2, 4, 3), torch.zeros(2, 4, dtype=torch.bool), torch.zeros(2, 4)]
    out[position] = tensor
    with pytest.raises(ValueError, match=message):
        resample(**GOOD, out=tuple(out))


@pytest.mark.parametrize(
    ("argument", "name"),
    [
        ("src", "values"),
        ("src_ns", "stamps_ns"),
        ("tgt_ns", "tgt_ns"),
        ("count", "count"),
        ("head", "head"),
        ("out", "out values"),
    ],
)
def test_an_array_of_numpy_is_refused_by_name(argument: str, name: str) -> None:
    array = np.zeros((2, 5, 3), np.float32)
    arrays = {"out": (array, array, array)}.get(argument, array)
    with pytest.raises(ValueError, match=rf"^{name} is a numpy\.ndarray, needs a torch\.Tensor"):
        resample(**(GOOD | {argument: arrays}))


def test_no_sources_are_refused() -> None:
    with pytest.raises(ValueError, match="sources is empty"):
        resample_streams([], GOOD["tgt_ns"])


def test_a_source_of_another_batch_is_named_by_its_position() -> None:
    fits = StreamSource(GOOD["src"], GOOD["src_ns"])
    other = StreamSource(GOOD["src"][:1], GOOD["src_ns"][:1])
    with pytest.raises(ValueError, match=r"sources\[1\] holds values \[1, 5, 3\]"):
        resample_streams([fits, other], GOOD["tgt_ns"])
