from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ppstream_kernels.cuda_call import MOST_STREAMS, Gpu, make_forms, stream_address_at
from ppstream_kernels.cuda_tiling import STAGED_STAMPS, Load, choose_tiles, stage_shift
from ppstream_kernels.source import Mode, StreamSource, to_columns

SHARED_BYTES_EVERYWHERE = 48 << 10  # without asking the driver for more
PARAMETER_BYTES_EVERYWHERE = 4096
H200 = Gpu(132, (9, 0))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 100_000),
    targets=st.integers(1, 5000),
    loads=st.lists(
        st.builds(
            Load,
            st.integers(0, 70_000),
            st.integers(1, 10**6),
            st.sampled_from([1, 3]),
            st.integers(0, 10**5),
        ),
        min_size=1,
    ),
    multiprocessors=st.integers(1, 200),
)
def test_every_tiling_can_be_launched(
    rows: int, targets: int, loads: list[Load], multiprocessors: int
) -> None:
    tiling = choose_tiles(rows, targets, loads, multiprocessors)
    assert tiling.threads % 32 == 0
    assert 32 <= tiling.threads <= 256
    assert all(1 <= n <= min(targets, tiling.threads) for n in tiling.tile_targets)
    assert tiling.shared_bytes <= SHARED_BYTES_EVERYWHERE
    for n, load, is_whole in zip(tiling.tile_targets, loads, tiling.is_whole, strict=True):
        if is_whole:
            assert n == targets
            assert tiling.shared_bytes >= 16 * n + 8 * load.slots + load.whole_bytes


@settings(max_examples=200, deadline=None, derandomize=True)
@given(slots=st.integers(1, 2**31 - 1))
def test_staged_stamps_fit_and_are_not_thinned_needlessly(slots: int) -> None:
    shift = stage_shift(slots)
    assert ((slots - 1) >> shift) + 1 <= STAGED_STAMPS
    assert shift == 0 or slots >> (shift - 1) >= STAGED_STAMPS


def test_a_small_call_spreads_over_the_multiprocessors() -> None:
    tiling = choose_tiles(1, 250, [Load(135, 500)], 132)
    assert -(-250 // tiling.tile_targets[0]) >= 125


def test_a_large_call_shares_a_search_among_items() -> None:
    tiling = choose_tiles(1024, 250, [Load(32, 500)], 132)
    assert tiling.tile_targets[0] * 32 > tiling.threads


FILLING_ROWS = 16 * H200.multiprocessors
BF16, FP32 = torch.bfloat16, torch.float32


def is_whole(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    rows: int = FILLING_ROWS,
    mode: Mode = "linear",
    out: torch.Tensor | None = None,
) -> bool:
    """True when rings of samples x targets x values are staged with their samples."""
    slots, targets, dim = shape
    stamps_ns = torch.zeros(1, dtype=torch.int64)
    values = torch.zeros(rows, slots, dim, dtype=dtype)
    columns = to_columns([StreamSource(values, stamps_ns.expand(rows, slots), mode=mode)])
    out = torch.zeros(rows, targets, dim, dtype=dtype) if out is None else out
    (form,) = make_forms(columns, stamps_ns.expand(rows, targets), out, H200)
    found = bool(form.variant.rings & 4)
    assert not found or form.grid == (1, rows, 1)
    return found


@pytest.mark.parametrize(
    "shape",
    [(120, 100, 14), (120, 100, 7), (128, 128, 6), (120, 100, 3), (100, 50, 14), (200, 100, 9)],
    ids=str,
)
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_a_row_of_narrow_samples_is_taken_whole(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    assert is_whole(shape, dtype)
    assert not is_whole(shape, dtype, FILLING_ROWS - 1)


@pytest.mark.parametrize(
    ("why", "shape", "dtype", "mode"),
    [
        ("words are as wide as can be", (120, 100, 8), BF16, "linear"),
        ("words are as wide as can be", (120, 100, 4), FP32, "linear"),
        ("most samples are not wanted", (120, 59, 14), BF16, "linear"),
        ("rows begin anywhere", (121, 100, 7), BF16, "linear"),
        ("results of a row end anywhere", (120, 101, 7), BF16, "linear"),
        ("too few blocks would fit", (400, 250, 10), FP32, "linear"),
        ("there is a thread for each of 256", (400, 400, 3), BF16, "linear"),
        ("neighbours are read, too", (120, 100, 14), BF16, "cubic"),
        ("angles turn", (120, 100, 14), BF16, "angle"),
    ],
)
def test_a_row_is_taken_in_tiles_where(
    why: str, shape: tuple[int, int, int], dtype: torch.dtype, mode: Mode
) -> None:
    assert not is_whole(shape, dtype, mode=mode), why


def test_a_row_is_taken_in_tiles_where_results_are_in_8_bits_or_apart() -> None:
    shape = (120, 100, 14)
    for out in (torch.int8, torch.float8_e4m3fn):
        assert not is_whole(shape, BF16, out=torch.zeros(FILLING_ROWS, 100, 14, dtype=out))
    assert not is_whole(shape, BF16, out=torch.zeros(FILLING_ROWS, 100, 15, dtype=BF16))
    beside = torch.zeros(FILLING_ROWS * 1400 + 1, dtype=BF16)[1:].view(FILLING_ROWS, 100, 14)
    assert not is_whole(shape, BF16, out=beside)


def source(slots: int, dim: int) -> StreamSource:
    return StreamSource(torch.zeros(2, slots, dim), torch.zeros(2, slots, dtype=torch.int64))


@pytest.mark.parametrize("streams", [1, 2, 4, 5, MOST_STREAMS, MOST_STREAMS + 1, 60])
def test_every_stream_is_in_one_launch_whose_parameters_fit(streams: int) -> None:
    columns = to_columns([source(4, 1 + s) for s in range(streams)])
    tgt_ns, values = torch.zeros(2, 6, dtype=torch.int64), torch.zeros(2, 6, 1)
    forms = make_forms(columns, tgt_ns, values, H200)
    assert [s for form in forms for s in form.streams] == list(range(streams))
    for form in forms:
        assert len(form.parameters) == stream_address_at(form.variant.streams)
        assert len(form.parameters) <= PARAMETER_BYTES_EVERYWHERE


def test_rows_beyond_a_grid_dimension_are_layered() -> None:
    rows = 70_000
    columns = to_columns(
        [StreamSource(torch.zeros(rows, 1, 1), torch.zeros(rows, 1, dtype=torch.int64))]
    )
    tgt_ns = torch.zeros(rows, 1, dtype=torch.int64)
    (form,) = make_forms(columns, tgt_ns, torch.zeros(rows, 1, 1), H200)
    x, y, z = form.grid
    assert (x, z) == (1, 2)
    assert y <= 65_535
    assert rows <= y * z < rows + 2


def test_a_ring_beyond_32_bits_is_refused() -> None:
    values = torch.zeros(1).expand(1, 2**16, 2**15)
    huge = StreamSource(values, torch.zeros(1).long().expand(1, 2**16))
    tgt_ns = torch.zeros(1, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match="spans 2147483648 elements"):
        make_forms(to_columns([huge]), tgt_ns, torch.zeros(1, 1, 1), H200)
