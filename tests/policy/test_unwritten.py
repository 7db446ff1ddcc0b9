"""What a call left out is found, whatever its type and size; what a policy wrote never is."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ppstream.core.specs import TensorSpec
from ppstream.links.slots import Slot, SlotLayout, new_slots
from ppstream.pipeline.stage_b import StageB
from ppstream.policy.unwritten import (
    FLOATS,
    SAMPLE_BYTES,
    STRIDE_BYTES,
    WHOLE_BYTES,
    FilledPolicy,
    Outputs,
    Results,
    UnwrittenError,
    drawn_for,
    rebinding,
)

torch.set_num_threads(1)
INTEGERS = drawn_for("2026-01-01T00-00-00-abcd")
BYTES = ["uint8", "int8", "float8_e4m3fn"]
DTYPES = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "bool", *BYTES]
SMALL = 24  # values of a row
LARGE = 5 * STRIDE_BYTES // 2 + 40  # of uint8, two and a half strides; of float64, twenty
HERE = (True, True, True)
Write = Callable[[Mapping[str, Tensor]], None]


def slot_of(dtype: str, values: int = SMALL, rows: int = 3) -> Slot:
    specs = (TensorSpec("first", (2,)), TensorSpec("second", (values,), dtype))
    return new_slots(SlotLayout(("index",), specs, rows), 1)[0]


class Policy:
    """Writes as it is told."""

    inputs = ()
    outputs = ()

    def __init__(self, write: Write) -> None:
        self._write = write

    def reset(self, rows: Tensor) -> None: ...

    def __call__(self, window: Any, out: Mapping[str, Tensor]) -> None:
        self._write(out)


def on_host(slot: Slot, write: Write, present: Any = HERE) -> str:
    """What is said of a call on the host; empty: nothing."""
    outputs = Outputs(slot, INTEGERS)
    outputs.fill()
    write(outputs.given)
    try:
        outputs.hand_over(present)
    except UnwrittenError as error:
        return str(error)
    return ""


def on_device(slot: Slot, write: Write, present: Any = HERE) -> str:
    """The same where the fill is queued before the policy, and its result looked at elsewhere."""
    FilledPolicy(Policy(write), INTEGERS)({}, slot.tensors)
    return Results(INTEGERS).unwritten(slot, present)


BOTH = pytest.mark.parametrize("call", [on_host, on_device])
SIZES = pytest.mark.parametrize("values", [SMALL, LARGE], ids=["small", "large"])


def everything(out: Mapping[str, Tensor]) -> None:
    for tensor in out.values():
        tensor.zero_()


def random_bits(tensor: Tensor) -> None:
    """Any bits, of floats NaN and infinity among them."""
    raw = tensor.view(-1).view(torch.uint8)
    generator = torch.Generator().manual_seed(7)
    raw.copy_(torch.randint(0, 256, raw.shape, generator=generator))


@BOTH
@SIZES
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_output_that_was_not_written_is_named(call: Any, values: int, dtype: str) -> None:
    slot = slot_of(dtype, values)
    random_bits(slot.raw)  # the result before
    text = call(slot, lambda out: out["first"].zero_())
    assert text.startswith("output 'second': ")
    assert " words (100%) were not written by this call; out['actions'] = x only binds" in text
    assert "\n" not in text  # its last line is all of it


@BOTH
@SIZES
@pytest.mark.parametrize("dtype", DTYPES)
def test_half_an_output_is_found(call: Any, values: int, dtype: str) -> None:
    def write(out: Mapping[str, Tensor]) -> None:
        everything({"first": out["first"], "second": out["second"][:, : values // 2]})

    text = call(slot_of(dtype, values), write)
    assert "output 'second'" in text
    share = int(text.partition("(")[2].partition("%")[0])
    assert 30 < share < 70


@BOTH
@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype not in BYTES])
def test_up_to_64_kib_a_single_value_is_found(call: Any, dtype: str) -> None:
    size = torch.empty(0, dtype=getattr(torch, dtype)).element_size()
    slot = slot_of(dtype, WHOLE_BYTES // size // 3)
    left = slot.tensors["second"].shape[1] - 1

    def write(out: Mapping[str, Tensor]) -> None:
        everything({"first": out["first"], "all but one": out["second"][:, :left]})
        everything({"rows": out["second"][1:]})

    assert "output 'second': 1 of " in call(slot, write)


@BOTH
@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    row_words=st.integers(1, 40 * STRIDE_BYTES // 8).filter(lambda n: n * 8 * 3 > WHOLE_BYTES),
)
def test_the_last_bytes_of_every_row_are_looked_at(call: Any, dtype: str, row_words: int) -> None:
    """They are the last actions of a chunk: a policy that leaves those out repeats older ones."""
    size = torch.empty(0, dtype=getattr(torch, dtype)).element_size()
    slot = slot_of(dtype, row_words * 8 // size)
    left = 8 // size

    def write(out: Mapping[str, Tensor]) -> None:
        everything({"first": out["first"], "all but some": out["second"][:, :-left]})

    assert "output 'second': 3 of " in call(slot, write)


@BOTH
@SIZES
@pytest.mark.parametrize("dtype", DTYPES)
def test_whatever_was_written_passes_bit_for_bit(call: Any, values: int, dtype: str) -> None:
    wanted = slot_of(dtype, values).tensors["second"]
    odd = {"bool": [0, 1], "uint8": [0, 255], "int32": [-1, 2**31 - 1], "int64": [-1, 2**63 - 1]}
    odd |= {"int8": [-128, 127], "float8_e4m3fn": [448.0, -448.0, 0.0]}
    for value in odd.get(dtype, [math.nan, -math.nan, math.inf, 0.0]):
        slot = slot_of(dtype, values)

        def write(out: Mapping[str, Tensor], value: Any = value) -> None:
            everything(out)
            out["second"].fill_(value)

        assert call(slot, write) == ""
        wanted.fill_(value)
        found = slot.tensors["second"].view(torch.uint8)
        assert torch.equal(found, wanted.view(torch.uint8))


@BOTH
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "int64", *BYTES])
def test_random_bits_are_no_match(call: Any, dtype: str) -> None:
    def write(out: Mapping[str, Tensor]) -> None:
        everything(out)
        random_bits(out["second"])
        if dtype in ("float16", "bfloat16"):  # every one of 65,536 bits may come, ours too
            bits = out["second"].view(torch.int16)
            bits[bits == FLOATS & 0xFFFF] = 0

    assert call(slot_of(dtype, 1000), write) == ""


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_what_arithmetic_makes_of_nonsense_is_not_taken_for_unwritten(dtype: str) -> None:
    """A policy that computes NaN is told so by the rules of actions, under another name."""
    kind = getattr(torch, dtype)
    makers = [
        torch.zeros(SMALL, dtype=kind) / 0,
        torch.full((SMALL,), math.inf, dtype=kind) * 0,
        torch.full((SMALL,), -1.0, dtype=kind).sqrt(),
        torch.tensor([math.nan] * SMALL, dtype=torch.float64).to(kind),
        torch.tensor([math.nan] * SMALL, dtype=torch.float32).to(kind),
    ]
    for made in makers:

        def write(out: Mapping[str, Tensor], made: Tensor = made) -> None:
            everything(out)
            out["second"].copy_(made.expand(3, SMALL))

        assert made.isnan().all()
        assert on_host(slot_of(dtype), write) == ""


@BOTH
@SIZES
def test_rows_of_absent_robots_may_be_left_out(call: Any, values: int) -> None:
    def write(out: Mapping[str, Tensor]) -> None:
        everything({name: tensor[1:2] for name, tensor in out.items()})

    assert call(slot_of("float32", values), write, (False, True, False)) == ""
    assert "output 'first': 2 of 4 words" in call(
        slot_of("float32", values), write, np.array([False, True, True])
    )


@BOTH
def test_each_row_of_a_large_batch_is_looked_at(call: Any) -> None:
    rows = 70
    slot = slot_of("float32", 300, rows)
    assert slot.tensors["second"].nbytes > WHOLE_BYTES

    def write(out: Mapping[str, Tensor]) -> None:
        everything(out | {"second": out["second"][:-1]})

    words = SAMPLE_BYTES // 8 * 2  # at both ends
    assert f"output 'second': {words} of {words * rows} words" in call(slot, write, (True,) * rows)


def test_a_policy_that_uses_its_old_output_is_found() -> None:
    slot = slot_of("float32")

    def write(out: Mapping[str, Tensor]) -> None:
        out["first"].zero_()
        out["second"].mul_(0.9).add_(1.0)

    assert "a use of what out held before" in on_host(slot, write)


def test_what_a_thread_writes_later_reaches_neither_the_result_nor_the_next_call() -> None:
    slot = slot_of("float32")
    outputs = Outputs(slot, INTEGERS)
    kept: list[Tensor] = []
    outputs.fill()
    everything(outputs.given)
    kept.append(outputs.given["second"])
    outputs.hand_over(HERE)
    kept[0].fill_(9.0)  # the call is over
    assert slot.tensors["second"].eq(0).all()


KEEPERS: dict[str, Callable[[Tensor], object]] = {
    "the tensor": lambda tensor: tensor,
    "a view": lambda tensor: tensor[1:],
    "an array": lambda tensor: tensor.numpy(),
    "its storage": lambda tensor: tensor.untyped_storage(),
}


@pytest.mark.parametrize("keeper", KEEPERS)
def test_memory_is_lent_again_unless_a_call_kept_it(keeper: str) -> None:
    outputs = Outputs(slot_of("float32"), INTEGERS)
    lent = outputs.given["second"].data_ptr()
    for _ in range(3):
        outputs.prove(lambda: everything(outputs.given), HERE)
        outputs.settle()
        assert outputs.given["second"].data_ptr() == lent
    kept: list[object] = []

    def write() -> None:
        everything(outputs.given)
        kept.append(KEEPERS[keeper](outputs.given["second"]))

    outputs.prove(write, HERE)
    outputs.settle()
    assert outputs.given["second"].data_ptr() != lent


@pytest.mark.parametrize("settles", [False, True])
def test_what_is_written_to_kept_memory_between_two_calls_hides_nothing(*, settles: bool) -> None:
    outputs = Outputs(slot_of("float32"), INTEGERS)
    kept: list[Tensor] = []

    def write() -> None:
        everything(outputs.given)
        kept.extend(outputs.given.values())

    outputs.prove(write, HERE)
    if settles:
        outputs.settle()
    for tensor in kept:
        tensor.fill_(9.0)
    with pytest.raises(UnwrittenError, match="were not written"):
        outputs.prove(lambda: None, HERE)


def test_a_call_that_writes_nothing_behind_one_that_was_settled_is_found() -> None:
    outputs = Outputs(slot_of("float32"), INTEGERS)
    for _ in range(2):
        outputs.prove(lambda: everything(outputs.given), HERE)
        outputs.settle()
    with pytest.raises(UnwrittenError, match="were not written"):
        outputs.prove(lambda: None, HERE)


def test_a_word_of_the_fill_between_two_words_was_written() -> None:
    slot = slot_of("float32")
    between = torch.tensor([0x7FFD << 16, 0x7FFD, *[0] * (SMALL - 2)], dtype=torch.int32)

    def write(out: Mapping[str, Tensor]) -> None:
        everything(out)
        out["second"].copy_(between.view(torch.float32))

    assert on_host(slot, write) == ""


def test_a_large_output_that_is_kept_fails_every_result_until_it_is_let_go() -> None:
    slot, kept = slot_of("float32", LARGE), []
    outputs = Outputs(slot, INTEGERS)

    def write() -> None:
        everything(outputs.given)
        kept.append(outputs.given["second"].numpy())

    for _ in range(2):
        with pytest.raises(UnwrittenError, match=r"'second' is still referenced .*\.clone\(\)"):
            outputs.prove(write, HERE)
    kept.clear()
    outputs.prove(lambda: everything(outputs.given), HERE)


def test_an_exception_that_held_a_large_output_costs_one_result() -> None:
    outputs = Outputs(slot_of("float32", LARGE), INTEGERS)

    def fail() -> None:
        second = outputs.given["second"]
        error = ValueError(second)
        error.__context__ = error  # a cycle, which frees itself only when garbage is collected
        raise error

    with pytest.raises(ValueError, match="tensor"):
        outputs.prove(fail, HERE)
    outputs.prove(lambda: everything(outputs.given), HERE)


def test_what_a_policy_does_to_the_mask_of_present_rows_hides_nothing_it_left_out() -> None:
    class Liar(Policy):
        inputs = (TensorSpec("present", (), "bool"),)  # type: ignore[assignment]

        def __call__(self, window: Any, out: Mapping[str, Tensor]) -> None:
            window["present"].zero_()

    specs = (*Liar.inputs, TensorSpec("rows", (4,), "int64"))
    envelope = new_slots(SlotLayout(("index",), specs, 3), 1)[0]
    envelope.tensors["present"].fill_(value=True)
    stage_b = StageB(Liar(everything), 3, INTEGERS)
    with pytest.raises(UnwrittenError, match="output 'first'"):
        stage_b(0, envelope, slot_of("float32"))


REBINDERS: list[Write] = [
    lambda out: out.__setitem__("actions", torch.zeros(1)),  # type: ignore[attr-defined]
    lambda out: out.__delitem__("first"),  # type: ignore[attr-defined]
    lambda out: out.update(first=torch.zeros(1)),  # type: ignore[attr-defined]
    lambda out: out.clear(),  # type: ignore[attr-defined]
]


@pytest.mark.parametrize("rebind", REBINDERS)
def test_an_output_cannot_be_bound_to_other_memory(rebind: Write) -> None:
    slot = slot_of("float32")
    with pytest.raises(UnwrittenError, match=r"copy_\(x\)") as caught:
        FilledPolicy(Policy(rebind), INTEGERS)({}, slot.tensors)
    assert isinstance(caught.value.__cause__, TypeError | AttributeError)
    given = Outputs(slot, INTEGERS).given
    with pytest.raises((TypeError, AttributeError)) as raised:
        rebind(given)
    assert rebinding(raised.value)


def test_other_errors_of_a_policy_stay_what_they_are() -> None:
    def fail(out: Mapping[str, Tensor]) -> None:
        raise TypeError("no idea")

    with pytest.raises(TypeError, match="no idea"):
        FilledPolicy(Policy(fail), INTEGERS)({}, slot_of("float32").tensors)


def test_integers_are_filled_with_a_large_number_of_the_run() -> None:
    drawn = {drawn_for(f"run {number}") for number in range(1000)}
    assert len(drawn) == 1000
    assert all(1 << 30 <= number < 1 << 31 for number in drawn)
    assert drawn_for("run 7") == drawn_for("run 7")


class Operations(TorchDispatchMode):
    """Whatever torch is asked to do."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def test_once_warm_a_call_takes_no_memory_and_a_device_is_asked_for_one_fill_each() -> None:
    slot = slot_of("float32", LARGE)
    outputs, filled = Outputs(slot, INTEGERS), FilledPolicy(Policy(lambda out: None), INTEGERS)
    filled({}, slot.tensors)
    with Operations() as host:
        outputs.fill()
    with Operations() as device:
        filled({}, slot.tensors)
    assert host.found == []
    assert device.found == ["aten.fill_.Scalar"] * 2


def test_a_rehearsal_calls_no_policy_and_hides_nothing() -> None:
    calls = []

    def write(out: Mapping[str, Tensor]) -> None:
        calls.append(out)
        if len(calls) < 3:
            out["actions"].fill_(len(calls))

    policy = Policy(write)
    stage_b = StageB(policy, 3, INTEGERS)  # type: ignore[arg-type]
    rows = TensorSpec("rows", (4,), "int64"), TensorSpec("present", (), "bool")
    envelope = new_slots(SlotLayout(("index",), rows, 3), 1)[0]
    envelope.tensors["present"].fill_(1)
    actions = SlotLayout(("index",), (TensorSpec("actions", (SMALL,)),), 3)
    first, second = new_slots(actions, 2)
    stage_b.get_ready()  # nothing is known yet
    for number, result in enumerate((first, second), 1):
        stage_b(1, envelope, result)
        for _ in range(2):
            stage_b.get_ready()
        assert len(calls) == number
        assert (result.tensors["actions"] == number).all()
    with pytest.raises(UnwrittenError):
        stage_b(1, envelope, first)
