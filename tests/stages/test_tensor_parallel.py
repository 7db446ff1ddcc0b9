"""Policies that are sharded over a mesh: the outputs of one rank, from less weights a rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sharded_rank import sharded

from ppstream.core.errors import ConfigError
from ppstream_stages.tensor_parallel import check_divides

ACT = {
    "module": "ppstream_stages.act",
    "steps": 4,
    "dim": 5,
    "streams": 2,
    "horizon": 6,
    "action_dim": 3,
    "width": 192,
    "encoder_blocks": 1,
    "decoder_blocks": 1,
    "dtype": "float32",
}
VLA = {
    "module": "ppstream_stages.vla",
    "steps": 4,
    "dim": 5,
    "streams": 2,
    "horizon": 6,
    "action_dim": 3,
    "cameras": ["front"],
    "image_side": 28,
    "text_tokens": 3,
    "denoising_steps": 2,
    "layers": 3,
    "heads": 6,
    "head_width": 8,
    "image": {"layers": 1, "width": 32, "heads": 2, "feed_forward": 48},
    "language": {"width": 48, "feed_forward": 96},
    "expert": {"width": 32, "feed_forward": 64},
    "dtype": "float32",
    "language_layers_per_part": 2,
}


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("options", "size"), [(ACT, 3), (VLA, 3), (VLA, 2)], ids=["act-3", "vla-3", "vla-2"]
)
def test_a_sharded_policy_equals_the_whole_one(
    options: dict[str, Any], size: int, tmp_path: Path
) -> None:
    whole, *ranks = sharded(options, size, tmp_path)
    for found in ranks:
        assert found.keys() == whole.keys()
        for name, tensor in whole.items():
            assert (found[name] - tensor).abs().max() < 1e-5, name
            assert tensor.abs().max() > 1e-3, name  # a policy of zeros would always be equal
    weights = [int((tmp_path / f"{name}0.json").read_text()) for name in ("whole", "sharded")]
    assert weights[1] < 0.8 * weights[0]


class Mesh:
    """As many ranks; nothing else is asked of it here."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def size(self) -> int:
        return self._ranks


def test_a_mesh_that_does_not_divide_heads_is_told_which_would() -> None:
    mesh: Any = Mesh(4)
    with pytest.raises(ConfigError, match=r"got 4, which does not divide 6 heads; want one of 1,"):
        check_divides(mesh, {"heads": 6, "features": 96})
    check_divides(mesh, {"heads": 8, "features": 96})
    check_divides(None, {"heads": 7})
