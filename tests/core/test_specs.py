import pytest
import torch

from ppstream.core.errors import SpecError
from ppstream.core.specs import TensorSpec
from ppstream.links.slots import ALIGNMENT_BYTES, SlotLayout

SPECS = (
    TensorSpec("q.values", (3, 5)),
    TensorSpec("q.valid", (3, 1), "bool"),
    TensorSpec("wrist.frames", (2, 3, 7, 9), "uint8"),
    TensorSpec("present", (), "bool"),
    TensorSpec("rows", (4,), "int64"),
)


def test_views_have_batch_first_and_do_not_overlap():
    layout = SlotLayout(("index", "seq"), SPECS, rows=2)
    slot = torch.zeros(layout.slot_bytes, dtype=torch.uint8)
    layout.header_view(slot)[:] = torch.tensor([7, 8])
    views = layout.views(slot)
    for mark, (name, view) in enumerate(views.items(), 1):
        spec = next(spec for spec in SPECS if spec.name == name)
        assert view.shape == (2, *spec.shape)
        view.fill_(mark % 2 if spec.dtype == "bool" else mark)
    for mark, (name, view) in enumerate(views.items(), 1):
        assert (view == (mark % 2 if view.dtype == torch.bool else mark)).all(), name
    assert layout.header_view(slot).tolist() == [7, 8]


def test_every_tensor_is_aligned():
    layout = SlotLayout(("index",), SPECS, rows=3)
    assert all(offset % ALIGNMENT_BYTES == 0 for offset in layout.offsets.values())
    assert layout.slot_bytes % ALIGNMENT_BYTES == 0


@pytest.mark.parametrize("dtype", ["torch.float64", torch.float64])
def test_a_dtype_of_torch_is_the_one_of_its_name(dtype):
    assert TensorSpec("x", (1,), dtype) == TensorSpec("x", (1,), "float64")


def test_unknown_dtype_and_empty_shape_are_refused():
    with pytest.raises(SpecError, match="dtype 'float8'"):
        TensorSpec("x", (1,), "float8")
    with pytest.raises(SpecError, match="below 1"):
        TensorSpec("x", (0,))


def test_two_tensors_of_one_name_are_refused():
    with pytest.raises(SpecError, match="unique"):
        SlotLayout((), (TensorSpec("x", (1,)), TensorSpec("x", (2,))), rows=1)
