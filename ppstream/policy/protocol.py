"""The contracts of stages B and C, and how user code is found by ``module:attr``.

Nothing here runs a stage: the executors and the policy rank's loop do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Protocol

from ppstream.core.errors import ConfigError, PpstreamError, SpecError, StoppedEarlyError
from ppstream.core.interpreter import uncollected
from ppstream.core.user_code import UserExitError, fault_of, is_a, traceback_of

logger = logging.getLogger("ppstream")

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from ppstream.core.specs import TensorSpec


class Policy(Protocol):
    """Stage B, on the policy rank.

    ``inputs`` and ``outputs`` give shapes per robot row; the runtime adds the leading batch B.
    ``outputs`` must contain ``actions [horizon, action_dim]`` float32 in the units of the action
    configuration. Input names are ``<group>.values [T, D]``, ``<group>.valid [T, S]`` bool,
    ``<group>.age_s [T, S]`` float32 (S streams of the group) and ``present []`` bool. Of a group in
    8 bits (``window.groups``) values are int8 or float8_e4m3fn, to be multiplied by
    ``<group>.scale [D]`` float32, and saturate beyond their ranges. Of a camera there are
    ``<name>.frames [F, 3, H, W]`` in ``image.dtype``, oldest first, RGB scaled to 0..1, then less
    ``mean`` and over ``std``; ``.valid [F]`` bool and ``.age_s [F]`` float32.

    Of a stream whose ``.valid`` and ``.age_s`` it does not name, it gets no window without newest
    samples: a robot is absent while the stream has none at the window's end, or is older than its
    ``max_age_ms``, or a camera has fewer than F frames; of one on request, which sends the next
    behind the answer, one is enough. Steps and frames before an episode's first sample are zeros.
    For one that sets ``needs_samples = True`` that holds of every stream, whatever it names, but of
    a camera that it can see one frame is enough. One that sets ``plain_frames = True`` normalises
    frames itself: a camera that it reads has ``mean`` 0 and ``std`` 1.

    With ``actions.prefix_steps`` there are ``executed_prefix [P, action_dim]`` float32, the actions
    that the robot executes at the first P steps of the next chunk, and ``delay_steps []`` int64,
    the number of those steps that end before the chunk arrives (``executed_prefix.py``).

    With ``policy.instructions`` there are ``instruction_id []`` and ``conditioning_epoch []`` int64
    too, and the policy must have ``instruct(number: int, text: str) -> None``: called once for each
    text, before any window names it by ``instruction_id`` (0: none); keep its result.
    On a GPU it must not be the first to launch a kernel, which would wait for all queued work.

    A policy that sets ``any_rows = True`` is called with as few first rows as hold all robots that
    are there (``batch.sizes``); ``reset`` still gets a mask of all rows. Of a policy in parts each
    part says so, and is called so, on whatever rank. Without, B never changes.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def reset(self, rows: Tensor) -> None:
        """Forget all state of the rows marked in ``rows`` (bool ``[B]``): a new episode began."""

    def __call__(self, window: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        """Write every output in place into ``out``; neither may be kept after returning.

        Tensors are ``[B, *shape]`` and live in the link's slots. On a GPU: current stream, no host
        synchronisation. Gradients are off: a call that needs them uses ``torch.enable_grad()``,
        and writes detached tensors. An exception, also a KeyboardInterrupt, fails one envelope and
        is counted; ``sys.exit()`` ends the run.

        ``out`` is read-only: ``out["actions"] = x`` raises, ``out["actions"].copy_(x)`` writes. It
        holds no older result: a fill value (``unwritten.py``) shows whether this call wrote each
        output of each present row. An output that is omitted, incomplete, or written by a thread
        after the return fails the envelope as ``unwritten``. A policy that needs its last output
        keeps a copy. Outputs in uint8 have a multiple of 8 bytes in a row.
        """


class Decoder(Protocol):
    """Stage C, on rank 0: turns one result of the policy into the actions of one robot row."""

    def reset(self, row: int) -> None:
        """Forget all state of ``row``: a new episode began, or the run's epoch was cut."""

    def __call__(self, row: int, result: Mapping[str, np.ndarray], actions: np.ndarray) -> None:
        """Write the row's action chunk, ``[horizon, action_dim]`` float32, into ``actions``.

        ``actions`` holds NaN before the call, no older chunk.

        ``result`` maps the policy's output names to that row's arrays (read only, valid during the
        call). Rank 0 then drops non-finite values and enforces limits; both are counted. After
        an exception this row gets no action, counted as ``decoder_error``.
        """


def instruct(policy: Policy, number: int, text: str) -> str:
    """Have the policy take in a text that rows will name by ``number``; the fault, or ''.

    A part that takes none is left alone: that another one does is checked when they are built.

    Raises:
        UserExitError: it called ``sys.exit()``.
    """
    try:
        if (take := getattr(policy, "instruct", None)) is not None:
            take(number, text)
    except BaseException as error:  # noqa: BLE001 - user code: the row keeps what it followed
        return fault_of(error, POLICY).text
    return ""


#: Who did it, in errors.
POLICY: Final = "the policy"
DECODER: Final = "the decoder"


def load_target(target: str) -> Any:
    """The object named ``module:attr``.

    Raises:
        ConfigError: the name is malformed, the module or attribute does not exist, or the module
            raised while it was imported; then its traceback is printed.
    """
    module_name, _, attribute = target.partition(":")
    if not module_name or not attribute:
        raise ConfigError([f"{target!r} does not name an object; write 'package.module:attr'"])
    try:
        with uncollected():
            module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and module_name.startswith(error.name):
            missing = f"{target!r}: there is no module {error.name!r} to import"
            raise ConfigError([missing]) from error
        raise refused(error, f"{target!r}: the import of {module_name!r}") from None
    except BaseException as error:  # noqa: BLE001 - user code
        raise refused(error, f"{target!r}: the import of {module_name!r}") from None
    try:
        return getattr(module, attribute)
    except AttributeError as error:
        raise ConfigError([f"{target!r}: module {module_name!r} has no {attribute!r}"]) from error


def call_target(
    path: str, target: str, what: str, call: Callable[[Any], Any], found: Any = None
) -> Any:
    """Returns what the object named ``target`` makes; ``call`` calls it.

    Args:
        path: of the setting that names it, for errors.
        target: ``module:attr``.
        what: it has to make, and how; for errors.
        call: is given the object.
        found: the object, where nobody can import it.

    Raises:
        ConfigError: as ``load_target``; it cannot be called, or raised: its traceback is printed.
            Other errors of ours, a KeyboardInterrupt, and memory that ran out pass through.
    """
    maker = load_target(target) if found is None else found
    if not callable(maker):
        kind = type(maker).__name__
        raise ConfigError([f"{path}: {target} is a {kind}, which cannot be called; want {what}"])
    try:
        return call(maker)
    except BaseException as error:  # noqa: BLE001 - user code
        raise refused(error, f"{path}: {target}") from None


def refused(error: BaseException, who: str) -> BaseException:
    """Returns what to raise for user code that raised before a run: a configuration problem."""
    is_ours = is_a(error, PpstreamError, StoppedEarlyError, KeyboardInterrupt)
    try:
        fault = fault_of(error, who)
    except UserExitError as left:
        return ConfigError([str(left)])
    if is_a(error, SpecError):  # of a tensor that it declares
        return ConfigError([f"{who}: {error}"])
    if is_ours or fault.kind == "memory":
        return error
    logger.error("%s raised\n%s", who, traceback_of(error))
    return ConfigError([f"{who} raised {fault.line}"])
