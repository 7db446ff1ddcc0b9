"""Fingerprints of a policy's weights, by which ranks prove that they agree, and of their file.

Ranks of a mesh and replicas compare all weights, those of a chain the ones that parts share. Every
parameter and buffer that a part's ``state_dict()`` has: shape, dtype and, of a tensor that a
rank holds whole, a digest of its bytes. Of a tensor that is sharded over ranks each one holds
another piece: its layout is compared, and its bytes are the business of the file's fingerprint.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from ppstream.core.errors import ConfigError
from ppstream.policy.parts import name_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ppstream.policy.protocol import Policy

DIGITS: Final = 16  # of a digest that are shown and compared
PIECE_BYTES: Final = 1 << 20

_digests: Final[dict[tuple[str, int, int], str]] = {}  # by path, time of change and size


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


def shared_weights(parts: Sequence[Policy], mine: Sequence[Policy]) -> dict[str, str]:
    """Returns a text for each weight of ``mine``, loaded, that another one of ``parts`` has, too.

    Each rank of a chain builds all parts: a module that two of them share is then as many modules
    as there are ranks. Its weights are named by the first part that has them.
    """
    seen: dict[tuple[int, int, torch.Size], tuple[str, Tensor, set[int]]] = {}
    for index, part in enumerate(parts):
        for name, tensor in _state_or_none(part):
            if place := _memory_of(tensor):
                first = f"{name_of(part)}.{name}", tensor, set[int]()
                *_, holders = seen.setdefault(place, first)
                holders.add(index)
    ours = {index for index, part in enumerate(parts) if any(part is one for one in mine)}
    return {
        name: _text(tensor)
        for name, tensor, holders in seen.values()
        if holders & ours and holders - ours
    }


def _state_or_none(part: Policy) -> list[tuple[str, Any]]:
    try:
        return list(_state_of(part, whole=True))
    except Exception:  # noqa: BLE001 - user code, of a part that another rank loads
        return []


def _memory_of(tensor: Any) -> tuple[int, int, torch.Size] | None:
    """Returns where a tensor's values lie; None: it is none, or has no values here."""
    try:
        place = tensor.data_ptr(), tensor.get_device(), tensor.shape
    except (AttributeError, RuntimeError):
        return None
    return place if place[0] else None


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


def file_digest(path: str | None, on_read: Callable[[], None] = lambda: None) -> str | None:
    """SHA-256 of the file of weights, wherever each host keeps it; None: there is none.

    A file is read once, until it changes; ``on_read`` is called behind each piece.

    Raises:
        ConfigError: the file cannot be read.
    """
    if path is None:
        return None
    digest = sha256()
    try:
        seen = Path(path).stat()
        state = path, seen.st_mtime_ns, seen.st_size
        if state in _digests:
            return _digests[state]
        with Path(path).open("rb", buffering=0) as file:
            while piece := file.read(PIECE_BYTES):
                digest.update(piece)
                on_read()
    except OSError as error:
        text = f"policy.weights: {path} cannot be read: {error.strerror}; let this user read it"
        raise ConfigError([text]) from error
    _digests[state] = digest.hexdigest()
    return _digests[state]
