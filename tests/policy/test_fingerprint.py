"""Fingerprint of weights: every tensor of a part by name, shape, dtype and bytes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from ppstream.policy.fingerprint import shared_weights, weights_fingerprint


class Part:
    """A part that shows the weights of a network."""

    def __init__(self, name: str, network: nn.Module) -> None:
        self.name = name
        self.state_dict = network.state_dict


def drawn(seed: int, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(seed)
    return Part("head", nn.Linear(3, 2).to(dtype))


def test_equal_weights_have_equal_fingerprints_and_one_bit_makes_another() -> None:
    one, same, other = drawn(1), drawn(1), drawn(1)
    other.state_dict()["bias"][1] = torch.nextafter(
        other.state_dict()["bias"][1], torch.tensor(9.0)
    )
    found = weights_fingerprint([one])
    assert found == weights_fingerprint([same])
    assert found.keys() == {"head.weight", "head.bias"}
    changed = {name for name, text in weights_fingerprint([other]).items() if found[name] != text}
    assert changed == {"head.bias"}


def test_a_text_has_shape_and_dtype_of_any_kind() -> None:
    texts = weights_fingerprint([drawn(1, torch.bfloat16)])
    assert texts["head.weight"].startswith("[2, 3] bfloat16 ")
    assert texts["head.weight"] != weights_fingerprint([drawn(1)])["head.weight"]


def test_modules_of_a_part_without_state_are_its_weights_where_it_is_whole() -> None:
    part: Any = SimpleNamespace(name="arm", eye=nn.Linear(3, 2), scale=2.0, scratch=torch.empty(4))
    assert weights_fingerprint([part]) == {}
    assert weights_fingerprint([part], whole=True).keys() == {"arm.eye.weight", "arm.eye.bias"}


def test_of_a_tensor_without_plain_bytes_the_layout_counts() -> None:
    part: Any = Part("head", nn.Linear(3, 2, device="meta"))
    assert weights_fingerprint([part])["head.weight"] == "[2, 3] float32"


def test_a_part_that_shows_no_weights_has_none() -> None:
    quiet: Any = object()
    assert weights_fingerprint([quiet]) == {}


class Broken:
    """A part whose weights are there once another rank has loaded it."""

    name = "broken"

    def state_dict(self) -> Any:
        raise AttributeError("not loaded here")


def test_a_weight_that_parts_of_two_ranks_have_is_named_by_the_first_of_them() -> None:
    core, own = nn.Linear(3, 2), nn.Linear(2, 2)
    tied = nn.Linear(3, 2, bias=False)
    tied.weight = core.weight
    head: Any = SimpleNamespace(name="head", core=core, own=own)
    tail: Any = SimpleNamespace(name="tail", again=core)
    last: Any = SimpleNamespace(name="last", tied=tied, empty=nn.Linear(3, 2, device="meta"))
    parts: Any = head, Broken(), tail, last
    found = shared_weights(parts, parts[:2])
    assert found.keys() == {"head.core.weight", "head.core.bias"}
    assert shared_weights(parts, [tail]) == found
    assert shared_weights(parts, [last]).keys() == {"head.core.weight"}
    assert shared_weights(parts, parts) == {}  # one rank runs them all
    core.weight.data[0, 0] += 1
    changed = shared_weights(parts, [tail])
    assert changed["head.core.weight"] != found["head.core.weight"]
    assert changed["head.core.bias"] == found["head.core.bias"]
