"""Which sizes of batches a policy is called with, and what it is given."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from pipeline_in_process import small_config
from torch import Tensor

from ppstream.core.errors import ConfigError
from ppstream.core.specs import TensorSpec
from ppstream.launch.device_ranks import PreparedPolicy, sizes_at_front
from ppstream.links.device_link import LONG_STAGE_NS
from ppstream.links.headers import ENVELOPE_HEADER, link_shape
from ppstream.links.slots import SlotLayout, new_slots
from ppstream.observe.log_writer import EnvelopeRecord
from ppstream.pipeline.flight import Flight
from ppstream.pipeline.stage_a import TIMED_CALLS, FrontParts
from ppstream.pipeline.stage_b import StageB
from ppstream.policy.batch_sizes import BatchSizes, batch_sizes, rows_call
from ppstream.policy.parts import Joined, cut, specs_of
from ppstream.policy.unwritten import FilledPolicy, Results, UnwrittenError

INTEGERS = 1 << 30
X, ACTIONS = TensorSpec("x", (2,)), TensorSpec("actions", (2,))
WHO = (TensorSpec("present", (), "bool"), TensorSpec("rows", (4,), "int64"))
ROWS = 4
CPU = torch.device("cpu")


class Adding:
    """Adds up what each row gave since its reset; ``forgets`` leaves a row's output out."""

    any_rows = True
    name = "adding"

    def __init__(
        self, forgets: int | None = None, into: TensorSpec = X, out: TensorSpec = ACTIONS
    ) -> None:
        self.inputs, self.outputs = (into, WHO[0]), (out,)
        self.total = torch.zeros(ROWS, 2)
        self.given: list[int] = []
        self.resets: list[list[bool]] = []
        self.forgets = forgets

    def reset(self, rows: Tensor) -> None:
        self.resets.append(rows.tolist())
        self.total[rows] = 0

    def __call__(self, window: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        given, made = window[self.inputs[0].name], out[self.outputs[0].name]
        n = len(given)
        assert len(window["present"]) == len(made) == n
        self.given.append(n)
        self.total[:n] += given
        for row in range(n):
            if row != self.forgets:
                made[row] = self.total[row]


def sizes_of(policy: object, *settings: str) -> tuple[int, ...]:
    found = batch_sizes(small_config("batch.rows=12", *settings), policy)  # type: ignore[arg-type]
    return (*found.smaller, found.whole)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ((), (1, 2, 4, 8, 12)),
        (("batch.sizes=all",), tuple(range(1, 13))),
        (("batch.sizes=whole",), (12,)),
        (("batch.sizes=[3, 6]",), (3, 6, 12)),
        (("batch.sizes=[3, 12]",), (3, 12)),
        (("policy.compile=true",), (12,)),
    ],
)
def test_the_configuration_names_the_sizes(settings: Any, expected: Any) -> None:
    assert sizes_of(Adding(), *settings) == expected


def test_a_policy_that_does_not_say_so_has_the_whole_batch() -> None:
    assert sizes_of(SimpleNamespace()) == (12,)
    assert sizes_of(SimpleNamespace(any_rows=False)) == (12,)


@pytest.mark.parametrize(
    ("nodes", "took_ns", "ahead", "expected"),
    [
        (9, LONG_STAGE_NS, 0, (1, 2, 4, 8)),
        (2000, 1, 0, (1, 2, 4, 8)),  # too many to be queued ahead
        (None, 0, 0, (1, 2, 4, 8)),  # no graphs: nobody knows
        (9, 1, 0, ()),  # queued ahead of credits: who is there by then is not known
        (9, LONG_STAGE_NS, 2, ()),  # stages B are, and read every row
    ],
)
def test_parts_on_rank_0_s_gpu_have_sizes_where_it_is_known_who_is_there(
    nodes: int | None, took_ns: int, ahead: int, expected: tuple[int, ...]
) -> None:
    config = small_config("batch.rows=12")
    prepared = PreparedPolicy(Adding(), is_stateless=False, nodes=nodes, duration_ns=took_ns)
    shape = link_shape(config, (X, *WHO), (ACTIONS,), 0, ahead)
    sizes = sizes_at_front(config, prepared, shape)
    assert (() if sizes is None else sizes.smaller) == expected


@pytest.mark.parametrize("wrong", ["[]", "[4, 2]", "[2, 2]", "[13]"])
def test_sizes_that_cannot_be_are_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match=r"batch\.sizes: got .* up to batch\.rows = 12"):
        small_config("batch.rows=12", f"batch.sizes={wrong}")


@pytest.mark.parametrize(
    ("present", "rows"),
    [
        ([0, 0, 0, 0, 0], 1),
        ([1, 0, 0, 0, 0], 1),
        ([0, 1, 0, 0, 0], 2),
        ([1, 0, 1, 0, 0], 4),
        ([0, 0, 0, 1, 0], 4),
        ([1, 1, 1, 1, 1], None),
        ([0, 0, 0, 0, 1], None),
    ],
)
def test_the_smallest_size_holds_every_robot(present: list[int], rows: int | None) -> None:
    assert BatchSizes((1, 2, 4, 5)).rows_for(bytes(present)) == rows


def test_user_code_is_given_views_that_it_cannot_rebind() -> None:
    seen: list[Mapping[str, Tensor]] = []

    def policy(window: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        seen.extend((window, out))
        out["actions"].fill_(7)

    window, out = {"x": torch.zeros(ROWS, 2)}, MappingProxyType({"actions": torch.zeros(ROWS, 2)})
    rows_call(policy)(window, out, 3)  # type: ignore[arg-type]
    assert [len(tensor) for given in seen for tensor in given.values()] == [3, 3]
    assert out["actions"][:, 0].tolist() == [7, 7, 7, 0]
    with pytest.raises(TypeError):
        seen[1]["actions"] = out["actions"]  # type: ignore[index]


def envelope(*sessions: int) -> Any:
    (slot,) = new_slots(SlotLayout(("index",), (X, *WHO), ROWS), 1)
    show(slot, *sessions)
    return slot


def show(slot: Any, *sessions: int) -> None:
    """A robot in each row whose session is not 0; each gives ones."""
    for row, session in enumerate(sessions):
        slot.tensors["present"][row] = session != 0
        slot.tensors["rows"][row, 0] = session
        slot.tensors["x"][row] = float(session != 0)


def result() -> Any:
    (slot,) = new_slots(SlotLayout(("index",), (ACTIONS,), ROWS), 1)
    return slot


def test_stage_b_calls_with_few_rows_and_keeps_each_row_s_memory() -> None:
    policy = Adding()
    stage_b = StageB(policy, ROWS, INTEGERS, BatchSizes((1, 2, 4)))
    into, out = envelope(5, 0, 0, 0), result()
    stage_b(0, into, out)
    warmed, policy.given = policy.given, []
    assert warmed == [1, 2, 1]  # each smaller size once, before the first envelope
    assert policy.resets == [[True] * ROWS]
    for sessions, rows, totals in [
        ((5, 6, 0, 0), 2, [2, 1]),
        ((5, 6, 7, 0), 4, [3, 2, 1]),
        ((5, 0, 0, 0), 1, [4]),
        ((5, 8, 0, 0), 2, [5, 1]),  # another robot in row 1
        ((0, 8, 0, 9), 4, [None, 2, None, 1]),
    ]:
        show(into, *sessions)
        stage_b(0, into, out)
        assert stage_b.computed == policy.given[-1] == rows
        got = out.tensors["actions"][:, 0].tolist()
        assert [a for a, b in zip(got, totals, strict=False) if b is not None] == [
            b for b in totals if b is not None
        ]
    assert policy.resets[-1] == [True, False, False, True]


class InTwo:
    """Parts on rank 0 and on a policy rank, with the first called before the other is."""

    def __init__(self, sizes: BatchSizes) -> None:
        total = TensorSpec("total", (2,))
        self.parts = Adding(out=total), Adding(into=total)
        places = cut(specs_of(self.parts), (0, 1), (X, *WHO))
        front, back = (
            StageB(Joined(at.of(self.parts), at, ROWS, CPU, INTEGERS), ROWS, INTEGERS, sizes)
            for at in places
        )
        window, self.hop, self.out = (
            new_slots(SlotLayout(ENVELOPE_HEADER, specs, ROWS), 1)[0]
            for specs in (places[0].inputs, places[0].outputs, places[1].outputs)
        )
        self.front, self.back = FrontParts(front, window, lambda _calls: {}), back
        self.faults: list[BaseException] = []
        self.front.on_fault = lambda _flight, error: self.faults.append(error)

    def actions(self, values: Tensor, *sessions: int) -> Tensor:
        """Of those who are there; each gives its row of ``values``."""
        show(self.front.window, *sessions)
        self.front.window.tensors["x"].copy_(values)
        assert self.front.run(Flight(0, 0, 0, EnvelopeRecord()), self.hop) == 0, self.faults
        self.back(0, self.hop, self.out)
        return self.out.tensors["actions"][[session != 0 for session in sessions]].clone()


def test_parts_on_rank_0_have_few_rows_too_and_robots_are_told_the_same_bit_for_bit() -> None:
    few, whole = InTwo(BatchSizes((1, 2, 4))), InTwo(BatchSizes((ROWS,)))
    generator = torch.Generator().manual_seed(1)
    seen = []
    for sessions in [
        (5, 0, 0, 0),
        (5, 6, 0, 0),
        (5, 6, 7, 0),
        (5, 0, 7, 8),
        (5, 0, 0, 0),
        (5, 9, 0, 0),
        (0, 9, 0, 0),
        (0, 0, 0, 4),
    ]:
        values = torch.randn(ROWS, 2, generator=generator)
        assert torch.equal(few.actions(values, *sessions), whole.actions(values, *sessions))
        seen.append([part.given[-1] for part in few.parts])
    assert seen == [[size] * 2 for size in (1, 2, 4, 4, 1, 2, 2, 4)]
    assert [set(part.given) for part in whole.parts] == [{ROWS}] * 2
    assert [part.resets for part in few.parts] == [part.resets for part in whole.parts]


def test_what_parts_on_rank_0_take_is_timed_with_every_row() -> None:
    run = InTwo(BatchSizes((1, 2, 4)))
    assert run.front.shortest_ns(run.hop) > 0
    warmed = [1, 2]
    assert run.parts[0].given == [*warmed, *[ROWS] * TIMED_CALLS]


def test_a_row_that_no_call_was_made_for_holds_no_older_actions() -> None:
    stage_b = StageB(Adding(), ROWS, INTEGERS, BatchSizes((1, 2, 4)))
    into, out = envelope(5, 6, 7, 8), result()
    stage_b(0, into, out)
    assert bool(out.tensors["actions"].isfinite().all())
    show(into, 5, 0, 0, 0)
    stage_b(0, into, out)
    assert out.tensors["actions"].isnan().all(1).tolist() == [False, True, True, True]


def test_a_present_row_that_is_left_out_is_found_whatever_the_size() -> None:
    stage_b = StageB(Adding(forgets=1), ROWS, INTEGERS, BatchSizes((1, 2, 4)))
    into, out = envelope(5, 0, 0, 0), result()
    stage_b(0, into, out)
    show(into, 5, 6, 0, 0)
    with pytest.raises(UnwrittenError, match="actions"):
        stage_b(0, into, out)


def test_rows_behind_a_call_are_filled_too() -> None:
    slot, filled = result(), FilledPolicy(Adding(), INTEGERS)
    slot.tensors["actions"].fill_(3)
    window = {"x": torch.ones(ROWS, 2), "present": torch.ones(ROWS, dtype=torch.bool)}
    filled(window, slot.tensors, 2)
    results = Results(INTEGERS)
    assert results.unwritten(slot, [True, True, False, False]) == ""
    assert "actions" in results.unwritten(slot, [True, True, True, False])
