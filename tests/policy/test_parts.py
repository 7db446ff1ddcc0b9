"""The cut of a policy into places: what travels, what is refused, and what runs in between."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec
import pytest
import torch
from pipeline_in_process import small_config

from ppstream.config.schema import PlacementConfig
from ppstream.core.errors import ConfigError, PolicyError
from ppstream.core.specs import TensorSpec
from ppstream.ingest.window import input_specs
from ppstream.launch.device_ranks import policy_at, stage_b_on_host_slots
from ppstream.links.slots import SlotLayout, new_slots
from ppstream.policy.compatibility import build_parts, other_parts, places_of
from ppstream.policy.compiled import compile_counts, compiled
from ppstream.policy.parts import (
    Joined,
    PartSpecs,
    blind_reads,
    cut,
    load,
    part_times_of,
    specs_of,
)
from ppstream.policy.unwritten import WHOLE_BYTES, UnwrittenError

CPU = torch.device("cpu")
OPTIONS = "policy.options={steps=8, dim=5, horizon=4, action_dim=2}"
CONFIG = small_config("policy.target=policy_in_parts:build", OPTIONS)
WINDOW = input_specs(CONFIG)


def names(specs: tuple[TensorSpec, ...]) -> list[str]:
    return [spec.name for spec in specs]


def test_a_hop_carries_what_a_later_part_reads_and_who_is_there() -> None:
    parts = specs_of(build_parts(CONFIG, CPU))
    first, second, third = cut(parts, (0, 1, 2), WINDOW)
    assert first.inputs == tuple(WINDOW)
    assert names(first.outputs) == ["state.values", "present", "rows", "mean", "newest"]
    assert second.inputs == first.outputs
    assert names(second.outputs) == ["state.values", "present", "rows", "newest", "sum"]
    assert names(third.outputs) == ["actions"]
    assert [place.names for place in (first, second, third)] == [("first",), ("middle",), ("last",)]


def test_without_front_parts_the_whole_window_goes_to_the_policy() -> None:
    parts = specs_of(build_parts(CONFIG, CPU))
    rank0, whole = cut(parts, (1, 1, 1), WINDOW)
    assert rank0.names == ()
    assert rank0.outputs == whole.inputs == tuple(WINDOW)
    assert names(whole.outputs) == ["actions"]


def placed(parts: list[PartSpecs], where: tuple[int, ...], ranks: int = 2) -> list[str]:
    devices = PlacementConfig(policy=("cpu",) * ranks, parts=where)
    config = msgspec.structs.replace(CONFIG, placement=devices)
    try:
        places_of(config, parts, WINDOW)
    except ConfigError as error:
        return error.problems
    return []


@pytest.mark.parametrize(
    ("where", "ranks", "text"),
    [
        ((), 2, "got none, want one for each of 3 parts (first, middle, last)"),
        ((0, 1), 1, "got 2 places, want one for each of 3 parts"),
        ((0, 2, 1), 2, "want places that never decrease"),
        ((0, 1, 1), 2, "at place 0 those of rank 0: 2 has none"),
        ((1, 2, 3), 2, "at place 0 those of rank 0: there is no place 3"),
        ((0, 0, 0), 1, "at place 0 those of rank 0: 1 has none"),
        ((), 4, "got none for 3 parts (first, middle, last) on 4 policy ranks, want a part for"),
        ((1, 2, 3), 4, "on 4 policy ranks, want a part for each: cut the policy into more parts"),
    ],
)
def test_places_that_cannot_be_are_one_error_with_the_remedy(where, ranks, text) -> None:
    (problem,) = placed(list(specs_of(build_parts(CONFIG, CPU))), where, ranks)
    assert problem.startswith("placement.parts: got")
    assert text in problem


def test_a_policy_without_a_part_is_one_error() -> None:
    with pytest.raises(ConfigError, match=r"returned no part, want a policy, or its parts"):
        build_parts(CONFIG, CPU, lambda _options, _device: [])


def test_parts_that_ranks_built_differently_are_named() -> None:
    first = specs_of(build_parts(CONFIG, CPU))
    text = other_parts(first, first[:2], 3)
    assert "rank 3 built other parts (first, middle) than rank 1 (first, middle, last);" in text
    wider = msgspec.structs.replace(first[1], outputs=(TensorSpec("sum", (9,)),))
    text = other_parts(first, (first[0], wider, first[2]), 2)
    assert "rank 2 built other parts than rank 1: middle with other tensors;" in text


def test_all_that_is_wrong_with_parts_is_said_at_once() -> None:
    values, actions = TensorSpec("state.values", (8, 5)), TensorSpec("actions", (4, 2))
    short, total = TensorSpec("mean", (4,)), TensorSpec("sum", (5,))
    parts = [
        PartSpecs("eyes", (values, total), (TensorSpec("mean", (5,)), TensorSpec("left", (1,)))),
        PartSpecs("hand", (short, TensorSpec("meen", (5,))), (total, values)),
        PartSpecs("hand", (total,), (TensorSpec("actions", (3, 2)),)),
    ]
    found = "\n".join(placed(parts, (2, 1, 1)))
    for text in (
        "part 'eyes' reads 'sum', which no window or earlier part has (part 'hand' writes it, and",
        "part 'eyes' writes 'left', which no later part reads",
        "part 'hand' reads mean [4] float32, but part 'eyes' writes mean [5] float32",
        "part 'hand' reads 'meen', which no window or earlier part has (did you mean mean?)",
        "part 'hand' writes 'state.values', which the window or an earlier part has",
        f"part 'hand' writes actions [3, 2] float32, but actions.horizon and actions.names want "
        f"{actions.name} [4, 2] float32",
        "names a part twice: eyes, hand, hand",
        "placement.parts: got [2, 1, 1]",
    ):
        assert text in found, (text, found)


@pytest.mark.parametrize("name", ["", "eyes\n", "\x1b[2J", "x" * 65])
def test_a_name_that_no_table_can_show_is_refused(name: str) -> None:
    first, *others = specs_of(build_parts(CONFIG, CPU))
    (problem,) = placed([msgspec.structs.replace(first, name=name), *others], (0, 1, 2))
    assert "want 1 to 64 printable characters" in problem
    assert problem.isprintable()


def reading(*inputs: str, needs_samples: bool = False) -> PartSpecs:
    specs = tuple(TensorSpec(name, (1,)) for name in inputs)
    return PartSpecs("part", specs, (), needs_samples=needs_samples)


def test_what_parts_read_without_seeing_what_is_missing_is_told_part_by_part() -> None:
    seeing = reading("cam.frames", "cam.valid", "state.values", "state.age_s", "present")
    assert blind_reads([seeing]) == {}
    assert blind_reads([seeing, reading("cam.frames")]) == {"cam": True}
    strict = reading("cam.frames", "cam.valid", needs_samples=True)
    assert blind_reads([strict, seeing]) == blind_reads([seeing, strict]) == {"cam": False}
    assert blind_reads([strict, reading("cam.frames", "cam.value")]) == {"cam": True}
    assert blind_reads([reading("cam.valid", "rows", needs_samples=True)]) == {}


def test_a_part_that_makes_its_weights_late_is_asked_to_and_others_are_not() -> None:
    parts: Any = build_parts(CONFIG, CPU)
    load(parts[:1], "m:build")
    assert not parts[1].loaded
    load(parts, "m:build")
    assert parts[1].loaded


class Forgetful:
    """A part that writes its output in the first call alone."""

    def __init__(self, name: str, inputs: Any, outputs: Any) -> None:
        self.name, self.inputs, self.outputs = name, inputs, outputs
        self.calls = 0

    def reset(self, rows: torch.Tensor) -> None:
        """Nothing to forget."""

    def __call__(self, window: Any, out: Any) -> None:
        self.calls += 1
        if self.calls == 1 or self.name == "last":
            for tensor in out.values():
                tensor.copy_(torch.ones_like(tensor))


def test_what_one_part_leaves_unwritten_never_reaches_the_next() -> None:
    kept, actions = TensorSpec("kept", (3,)), TensorSpec("actions", (4, 2))
    parts: Any = [Forgetful("first", (), (kept,)), Forgetful("last", (kept,), (actions,))]
    (_, place) = cut(specs_of(parts), (1, 1), WINDOW)
    policy = Joined(parts, place, 2, CPU, 7)
    out = {"actions": torch.zeros(2, 4, 2)}
    there = {"present": torch.tensor([True, True])}
    policy(there, out)
    with pytest.raises(UnwrittenError, match="output 'kept': 6 of 6 words"):
        policy(there, out)
    policy({"present": torch.tensor([False, False])}, out)  # nobody is there: nothing is looked at


class Told(Forgetful):
    """A part that does as it is told."""

    def __init__(self, name: str, inputs: Any, outputs: Any, work: Any, resets: Any = None) -> None:
        super().__init__(name, inputs, outputs)
        self._work, self.resets = work, resets

    def reset(self, rows: torch.Tensor) -> None:
        if self.resets is not None:
            self.resets(rows)

    def __call__(self, window: Any, out: Any) -> None:
        self._work(window, out)


def joined(*parts: Told) -> Joined:
    """All at one place."""
    (_, place) = cut(specs_of(parts), (1,) * len(parts), WINDOW)
    return Joined(parts, place, 2, CPU, 7)


def test_parts_are_called_with_few_rows_and_what_is_carried_stays_whole() -> None:
    values, kept, total, actions = (TensorSpec(n, ()) for n in ("x", "kept", "sum", "actions"))
    who = WINDOW[-2:]  # present, rows
    given: list[list[int]] = []

    def keep(window: Any, out: Any) -> None:
        out["kept"].copy_(window["x"])

    def add(window: Any, out: Any) -> None:
        given.append([len(tensor) for tensor in (*window.values(), *out.values())])
        out["sum"].copy_(window["kept"] + window["present"])

    parts = [
        Told("first", (values,), (kept,), keep),
        Told("second", (kept, who[0]), (total,), add),
        Told("last", (total, values), (actions,), None),
    ]
    (_, place, _) = cut(specs_of(parts), (1, 1, 2), (values, *who))
    window = {
        "x": torch.arange(4.0),
        "present": torch.tensor([True, True, False, False]),
        "rows": torch.arange(16).view(4, 4),
    }
    out = {
        spec.name: torch.ones(4, *spec.shape, dtype=getattr(torch, spec.dtype))
        for spec in place.outputs
    }
    Joined(parts[:2], place, 4, CPU, 7)(window, out, 2)
    assert given == [[2, 2, 2]]
    assert out["sum"].tolist() == [1, 2, 1, 1]  # behind the rows as it was: the fill's
    for name in ("x", "present", "rows"):
        assert torch.equal(out[name], window[name])
    everybody = window | {"present": torch.ones(4, dtype=torch.bool)}  # as in a dry run of bring-up
    Joined(parts[:2], place, 4, CPU, 7)(everybody, out, 2)
    assert out["present"].tolist() == [True] * 4


def test_joined_parts_take_any_rows_when_each_one_does() -> None:
    (one, other) = (Told(name, (), (), None) for name in ("one", "other"))
    one.any_rows = True  # type: ignore[attr-defined]
    assert not Joined((one, other), cut(specs_of((one,)), (1,), ())[1], 2, CPU, 7).any_rows
    other.any_rows = True  # type: ignore[attr-defined]
    assert Joined((one, other), cut(specs_of((one,)), (1,), ())[1], 2, CPU, 7).any_rows


def test_a_place_takes_any_rows_only_where_every_place_does() -> None:
    """Rows that one place leaves out hold its fill, which another one would compute with."""
    kept, actions = TensorSpec("kept", ()), TensorSpec("actions", ())
    parts: Any = [Told("first", (), (kept,), None), Told("last", (kept,), (actions,), None)]
    _, place, _ = cut(specs_of(parts), (1, 2), WINDOW)
    parts[0].any_rows = True
    at = partial(policy_at, place, parts, small_config("batch.rows=4"), CPU, "run")
    assert not getattr(at(), "any_rows", False)
    parts[1].any_rows = True
    assert getattr(at(), "any_rows", False)


SIZES = pytest.mark.parametrize("values", [3, WHOLE_BYTES // 4], ids=["small", "large"])
ACTIONS = TensorSpec("actions", (4, 2))


def last(kept: TensorSpec) -> Told:
    return Told(
        "last", (kept,), (ACTIONS,), lambda w, out: out["actions"].fill_(float(w["kept"].max()))
    )


@SIZES
def test_what_a_thread_of_a_part_writes_late_reaches_no_later_part(values: int) -> None:
    kept, held, calls = TensorSpec("kept", (values,)), [], []

    def work(_window: Any, out: Any) -> None:
        calls.append(len(calls))
        out["kept"].fill_(len(calls))
        if held:  # as a thread does that the first call has started
            held[0].fill_(99.0)
        if len(calls) == 1:
            held.append(out["kept"])

    policy = joined(Told("first", (), (kept,), work), last(kept))
    out = {"actions": torch.zeros(2, 4, 2)}
    there = {"present": torch.tensor([True, True])}
    if values == 3:
        policy(there, out)
        assert out["actions"].eq(1).all()
        policy(there, out)
    else:  # no second memory
        for _ in range(3):
            with pytest.raises(UnwrittenError, match=r"'kept' is still referenced .* 128 KiB"):
                policy(there, out)
        held.clear()
        policy(there, out)
    assert out["actions"].eq(len(calls)).all()


def test_a_part_that_changes_what_others_read_is_refused_by_name() -> None:
    left, kept = TensorSpec("left", (3,)), TensorSpec("kept", (3,))
    first = Told("first", (), (left, kept), lambda _w, out: [t.fill_(1.0) for t in out.values()])
    second = Told("last", (left, kept), (ACTIONS,), lambda w, _out: w["kept"][0].neg_())
    out = {"actions": torch.zeros(2, 4, 2)}
    with pytest.raises(PolicyError, match="part 'last' changed its input kept in place"):
        joined(first, second)({"present": torch.tensor([True, True])}, out)


def test_a_part_may_write_beside_what_it_reads_in_the_memory_of_one_slot() -> None:
    left, right = TensorSpec("left", (3,)), TensorSpec("right", (3,))
    parts = (
        Told("first", (), (left,), lambda _w, out: out["left"].fill_(1.0)),
        Told("second", (left,), (right,), lambda w, out: out["right"].copy_(w["left"])),
        Told("last", (left, right), (ACTIONS,), None),
    )
    place = cut(specs_of(parts), (1, 1, 2), WINDOW)[1]
    slot = new_slots(SlotLayout(("index",), place.outputs, 2), 1)[0]
    rows = torch.zeros(2, 4, dtype=torch.int64)
    window = {"present": torch.tensor([True, True]), "rows": rows}
    Joined(parts[:2], place, 2, CPU, 7)(window, slot.tensors)
    assert slot.tensors["right"].eq(1).all()


def test_what_a_part_does_to_the_mask_of_present_rows_hides_nothing_it_left_out() -> None:
    kept = TensorSpec("kept", (3,))
    present = TensorSpec("present", (), "bool")
    liar = Told("first", (present,), (kept,), lambda w, _out: w["present"].numpy().fill(0))
    with pytest.raises(UnwrittenError, match="output 'kept'"):
        joined(liar, last(kept))(
            {"present": torch.tensor([True, True])}, {"actions": torch.zeros(2, 4, 2)}
        )


def test_every_part_hears_which_rows_are_reset_whatever_another_one_does_to_the_mask() -> None:
    kept, heard = TensorSpec("kept", (3,)), []
    first = Told("first", (), (kept,), None, lambda rows: rows.logical_not_())
    second = last(kept)
    second.resets = lambda rows: heard.append(rows.tolist())
    joined(first, second).reset(torch.tensor([True, False]))
    assert heard == [[True, False]]


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns about itself
def test_parts_of_a_place_are_compiled_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("launch.device_ranks", "policy.graphed"):
        monkeypatch.setattr(f"ppstream.{module}.compiled", lambda part: compiled(part, "eager"))
    kept = TensorSpec("kept", (3,))
    parts: Any = [
        Told("first", (), (kept,), lambda _w, out: out["kept"].fill_(1.0)),
        Told("last", (kept,), (ACTIONS,), lambda w, out: out["actions"].copy_(w["kept"].sum())),
    ]
    config = small_config("policy.compile=true", "batch.rows=2")
    place = cut(specs_of(parts), (1, 1), WINDOW)[1]
    stage_b = stage_b_on_host_slots(policy_at(place, parts, config, CPU, "run"), config, CPU, "run")
    layouts = (SlotLayout(("index",), specs, 2) for specs in (WINDOW, place.outputs))
    envelope, result = (new_slots(layout, 1)[0] for layout in layouts)
    envelope.tensors["present"].fill_(value=True)
    before = compile_counts().graphs
    for _ in range(2):
        stage_b(0, envelope, result)
    assert result.tensors["actions"].eq(6).all()
    assert compile_counts().graphs == before + 2


def test_a_policy_of_one_part_runs_as_it_is() -> None:
    (policy,) = build_parts(small_config(), CPU)
    _, place = cut(specs_of([policy]), (1,), WINDOW)
    assert policy_at(place, [policy], small_config(), CPU, "run") is policy


def test_each_part_of_a_place_is_named_around_its_call_and_timed() -> None:
    kept, actions = TensorSpec("kept", (3,)), TensorSpec("actions", (4, 2))
    parts: Any = [Forgetful("first", (), (kept,)), Forgetful("last", (kept,), (actions,))]
    (_, place) = cut(specs_of(parts), (1, 1), WINDOW)
    entered: list[str] = []

    @contextmanager
    def around(name: str) -> Iterator[None]:
        entered.append(name)
        yield

    policy = Joined(parts, place, 1, CPU, 7, around)
    policy({"present": torch.tensor([True])}, {"actions": torch.zeros(1, 4, 2)})
    assert entered == ["first", "last"]
    times = part_times_of(policy)(5)
    assert [*times] == entered
    assert all(0 < ns < 10**9 for ns in times.values())
    assert part_times_of(parts[0])(5) == {}
