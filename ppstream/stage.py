"""The contracts of stages B and C, and how user code is found by ``module:attr``.

Nothing here runs a stage: ``stage0.py`` and ``stage1.py`` do.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from ppstream.errors import ConfigError
from ppstream.messages import MAX_TEXT

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, device

    from ppstream.specs import TensorSpec


class Policy(Protocol):
    """Stage B, on the policy rank.

    ``inputs`` and ``outputs`` give shapes per robot row; the runtime adds the leading batch B.
    ``outputs`` must contain ``actions [horizon, action_dim]`` float32 in the units of the action
    configuration. Input names are ``<group>.values [T, D]``, ``<group>.valid [T, S]`` bool,
    ``<group>.age_s [T, S]`` float32 (S streams of the group) and ``present []`` bool.

    With ``actions.prefix_steps`` there are ``executed_prefix [P, action_dim]`` float32, what the
    robot executes at the first P steps of the chunk to be made, and ``delay_steps []`` int64, how
    many of them will be over when it comes (``executed_prefix.py``).

    With ``policy.instructions`` there are ``instruction_id []`` and ``conditioning_epoch []`` int64
    too, and the policy must have ``instruct(number: int, text: str) -> None``: called once for each
    text, before any window names it by ``instruction_id`` (0: none); keep what comes of it.
    On a GPU it must not be the first to launch a kernel: that would wait for what stands queued.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def reset(self, rows: Tensor) -> None:
        """Forget all state of the rows marked in ``rows`` (bool ``[B]``): a new episode began."""

    def __call__(self, window: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        """Write every output in place into ``out``; neither may be kept after returning.

        Tensors are ``[B, *shape]`` and live in the link's slots. On a GPU: current stream, no host
        synchronisation. An exception is one failed envelope, counted, and told to the robot.

        ``out`` is read-only: ``out["actions"] = x`` raises, ``out["actions"].copy_(x)`` writes. It
        holds no older result but what proves (``unwritten.py``) that this call wrote each output of
        each row that is present: one that is left out, in part, or written by a thread after the
        call has returned, fails the envelope as ``unwritten``. A policy that wants its last output
        keeps a copy. Outputs in uint8 have a multiple of 8 bytes in a row.
        """


class Decoder(Protocol):
    """Stage C, on rank 0: one result of the policy to the actions of one robot row."""

    def reset(self, row: int) -> None:
        """A new episode of ``row`` began."""

    def __call__(self, row: int, result: Mapping[str, np.ndarray], actions: np.ndarray) -> None:
        """Write the row's action chunk, ``[horizon, action_dim]`` float32, into ``actions``.

        ``result`` maps the policy's output names to that row's arrays (read only, valid during the
        call). Non-finite values are caught behind this call, and limits enforced; both are counted.
        """


def told(policy: Policy, number: int, text: str) -> str:
    """Have the policy take in a text that rows will name by ``number``; the fault, or ''."""
    try:
        policy.instruct(number, text)  # type: ignore[attr-defined] # checked when built
    except Exception as error:  # noqa: BLE001 - user code: the row keeps what it followed
        return "".join(traceback.format_exception(error))[-MAX_TEXT:]
    return ""


BuildPolicy = Callable[[Mapping[str, Any], "device"], Policy]


def load(target: str) -> Any:
    """The object named ``module:attr``.

    Raises:
        ConfigError: the name is malformed, or the module or attribute does not exist. An exception
            raised *inside* the module while it is imported passes through with its traceback.
    """
    module_name, _, attribute = target.partition(":")
    if not module_name or not attribute:
        raise ConfigError([f"{target!r} does not name an object; write 'package.module:attr'"])
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise
        raise ConfigError([f"{target!r}: there is no module {error.name!r} to import"]) from error
    try:
        return getattr(module, attribute)
    except AttributeError as error:
        raise ConfigError([f"{target!r}: module {module_name!r} has no {attribute!r}"]) from error
