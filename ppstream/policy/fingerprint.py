"""Fingerprint of a policy's weights, by which the ranks of a mesh, and replicas, prove they agree.

Every parameter and buffer that a part's ``state_dict()`` has: shape, dtype and, of a tensor that a
rank holds whole, a digest of its bytes. Of a tensor that is sharded over ranks each one holds
another piece: its layout is compared, and its bytes are the business of the file's fingerprint.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

import torch

from ppstream.policy.parts import name_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ppstream.policy.protocol import Policy

DIGITS: Final = 16  # of a digest that are shown and compared


def weights_fingerprint(parts: Sequence[Policy], *, whole: bool = False) -> dict[str, str]:
    """Returns a text for each weight, by ``part.weight``; nothing of parts that show none.

    ``whole``: this rank shares no layer with another one, so that modules among the attributes of a
    part without ``state_dict()`` are its weights, too.
    """
    found = {}
    for part in parts:
        for name, tensor in _state_of(part, whole=whole):
            if isinstance(tensor, torch.Tensor):
                found[f"{name_of(part)}.{name}"] = _text(tensor)
    return found


def _state_of(part: Policy, *, whole: bool) -> Iterator[tuple[str, Any]]:
    state: Any = getattr(part, "state_dict", None)
    if callable(state):
        weights = state()
        yield from weights.items() if isinstance(weights, Mapping) else ()
        return
    attributes: dict[str, Any] = getattr(part, "__dict__", {}) if whole else {}
    for attribute, module in attributes.items():
        if isinstance(module, torch.nn.Module):
            yield from module.state_dict(prefix=f"{attribute}.").items()


def _text(tensor: Tensor) -> str:
    layout = f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
    # no tensor is sharded without that module, whose import takes long
    sharded: Any = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    if isinstance(tensor, sharded):
        if any(not placement.is_replicate() for placement in tensor.placements):
            return f"{layout} {', '.join(map(str, tensor.placements))}"
        tensor = tensor.to_local()
    digest = sha256()
    try:
        flat = tensor.detach().reshape(-1).view(torch.uint8)
        digest.update(flat.cpu().numpy().data)
    except (RuntimeError, TypeError):  # no plain bytes, as of quantized ones and of "meta"
        return layout
    return f"{layout} {digest.hexdigest()[:DIGITS]}"
