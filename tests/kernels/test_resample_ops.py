from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from ppstream_kernels import StreamSource, ops, resample, resample_streams
from ppstream_kernels.source import NO_LIMIT, to_columns

TRIO_SHAPES = ((2, 6), (2, 6, 2))  # of valid and age_s: one stream, two streams


def streams(device: str) -> tuple[list[StreamSource], torch.Tensor]:
    torch.manual_seed(0)
    stamps_ns = torch.arange(0, 80, 10, device=device).repeat(2, 1)
    rows = torch.tensor([8, 5], device=device)
    first = StreamSource(torch.randn(2, 8, 3, device=device), stamps_ns, rows, rows // 2)
    second = StreamSource(
        torch.randn(2, 8, 4, device=device), stamps_ns, mode="slerp", max_gap_ns=9
    )
    return [first, second], torch.arange(0, 90, 15, device=device).repeat(2, 1)


def out_for(width: int, trust_shape: Sequence[int], device: str) -> tuple[torch.Tensor, ...]:
    return (
        torch.empty(2, 6, width, device=device),
        torch.empty(*trust_shape, dtype=torch.bool, device=device),
        torch.empty(*trust_shape, device=device),
    )


@pytest.mark.parametrize("name", ["resample", "resample_out", "resample_options_out"])
def test_opcheck_accepts_the_op_for_one_stream(device: str, name: str) -> None:
    (source, _), tgt_ns = streams(device)
    given = (source.values, source.stamps_ns, tgt_ns)
    out = out_for(3, TRIO_SHAPES[0], device) if name.endswith("out") else ()
    torch.library.opcheck(getattr(ops, name), (*given, *out))
    if name != "resample_out":
        options = (source.count, source.head, "linear", 100, NO_LIMIT)
        torch.library.opcheck(getattr(ops, name), (*given, *out, *options))


@pytest.mark.parametrize("name", ["resample_streams", "resample_streams_out"])
def test_opcheck_accepts_the_op_for_several_streams(device: str, name: str) -> None:
    sources, tgt_ns = streams(device)
    out = out_for(7, TRIO_SHAPES[1], device) if name.endswith("out") else ()
    torch.library.opcheck(getattr(ops, name), (*to_columns(sources), tgt_ns, *out))


@pytest.mark.parametrize("name", ["resample_scaled", "resample_scaled_out"])
def test_opcheck_accepts_the_op_in_8_bits(device: str, name: str) -> None:
    sources, tgt_ns = streams(device)
    values, *trust = out_for(7, TRIO_SHAPES[1], device)
    last = (values.to(torch.int8), *trust) if name.endswith("out") else (torch.int8,)
    scale = torch.full((7,), 0.1, device=device)
    torch.library.opcheck(getattr(ops, name), (*to_columns(sources), tgt_ns, scale, *last))


@pytest.mark.parametrize("option", ["count", "head", "mode", "max_gap_ns", "max_age_ns"])
def test_each_option_holds_for_a_given_output(device: str, option: str) -> None:
    (source, _), tgt_ns = streams(device)
    given = (source.values, source.stamps_ns, tgt_ns)
    ring = {"count": source.count, "head": source.head}
    choice = {**ring, "mode": "previous", "max_gap_ns": 9, "max_age_ns": 4}[option]
    fresh = resample(*given, **{option: choice})
    written = resample(*given, **{option: choice}, out=out_for(3, TRIO_SHAPES[0], device))
    plain = resample(*given, out=out_for(3, TRIO_SHAPES[0], device))
    assert all(map(torch.equal, written, fresh))
    assert not all(map(torch.equal, written, plain))


def test_one_stream_compiles_without_a_graph_break(device: str) -> None:
    (source, _), tgt_ns = streams(device)

    def window(values: torch.Tensor, stamps_ns: torch.Tensor, tgt_ns: torch.Tensor) -> torch.Tensor:
        result = resample(values * 2, stamps_ns, tgt_ns, max_gap_ns=50)
        return result.values * result.valid.unsqueeze(2) + result.age_s.unsqueeze(2)

    arguments = (source.values, source.stamps_ns, tgt_ns)
    compiled = torch.compile(window, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*arguments), window(*arguments))


@pytest.mark.parametrize("max_gap_ns", [None, 9], ids=["plain", "with a limit"])
def test_one_stream_into_a_given_output_compiles_without_a_graph_break(
    device: str, max_gap_ns: int | None
) -> None:
    (source, _), tgt_ns = streams(device)
    out = out_for(3, TRIO_SHAPES[0], device)

    def window(values: torch.Tensor, out: tuple[torch.Tensor, ...]) -> torch.Tensor:
        resample(values, source.stamps_ns, tgt_ns, max_gap_ns=max_gap_ns, out=out)
        return out[0] + 1

    fresh = resample(source.values, source.stamps_ns, tgt_ns, max_gap_ns=max_gap_ns)
    compiled = torch.compile(window, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(source.values, out), fresh.values + 1)
    assert torch.equal(out[1], fresh.valid)


def test_streams_into_a_given_output_compile_without_a_graph_break(device: str) -> None:
    sources, tgt_ns = streams(device)
    out = out_for(7, TRIO_SHAPES[1], device)

    def window(
        sources: list[StreamSource], tgt_ns: torch.Tensor, out: tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        resample_streams(sources, tgt_ns, out=out)
        return out[0] + 1

    fresh = resample_streams(sources, tgt_ns)
    compiled = torch.compile(window, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(sources, tgt_ns, out), fresh.values + 1)
    torch.testing.assert_close(out[0], fresh.values)
    assert torch.equal(out[1], fresh.valid)


def test_tensors_without_data_get_shapes_without_data() -> None:
    with torch.device("meta"):
        stamps_ns = torch.zeros(2, 8, dtype=torch.int64)
        result = resample(torch.zeros(2, 8, 3, dtype=torch.bfloat16), stamps_ns, stamps_ns[:, :5])
    assert result.values.shape == (2, 5, 3)
    assert result.values.dtype is torch.bfloat16
    assert result.valid.dtype is torch.bool
    assert result.age_s.dtype is torch.float32
