from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ppstream_kernels.cuda_call import MOST_STREAMS, Gpu, make_forms, stream_address_at
from ppstream_kernels.cuda_tiling import STAGED_STAMPS, Load, choose_tiles, stage_shift
from ppstream_kernels.source import StreamSource, to_columns

SHARED_BYTES_EVERYWHERE = 48 << 10  # without asking the driver for more
PARAMETER_BYTES_EVERYWHERE = 4096
H200 = Gpu(132, (9, 0))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 100_000),
    targets=st.integers(1, 5000),
    loads=st.lists(
        st.builds(Load, st.integers(0, 70_000), st.integers(1, 10**6), st.sampled_from([1, 3])),
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
