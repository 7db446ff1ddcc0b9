"""A policy that another server runs: an unmodified server of openpi or GR00T as stage B.

Stage B is that server's client, with a connection for each row, so rows are apart there, too. What
the window holds at its end goes into one request a row; all are sent before the first answer is
waited for. A row whose answer is late, an error or of another shape gets no actions, and its
connection is not used again: a late answer is never taken for a later one. Connections are opened
behind the requests of the rows that have theirs. Without an answer for any row the envelope fails.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
import numpy as np

from ppstream import ConfigError, TensorSpec
from ppstream.config.field_types import Count, Positive
from ppstream.config.schema import CHANNELS
from ppstream.core.clock import NS_PER_MS, NS_PER_S, now_ns
from ppstream_stages.building import options_of
from ppstream_stages.remote_links import (
    FAILURES,
    Array,
    Generation,
    GrootLink,
    Link,
    OpenpiLink,
    ServerError,
    Slice,
    reason_of,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

logger = logging.getLogger("ppstream")

WHITE: Final = 255.0
LOG_EVERY_NS: Final = NS_PER_S  # of rows that have no actions while others have
PAUSE: Final = 10  # times the limit, between two tries of a row to connect that ran out of time
ENOUGH: Final = 0.75  # of the limit: tries that had less together say nothing of their row
SCHEMES: Final = {"openpi": ("ws://", "wss://"), "groot": ("tcp://",)}


class ServerCamera(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A camera stream as the server wants it; its stream has mean 0, std 1 and dtype float32."""

    name: str
    height: Count
    width: Count
    frames: Count = 1  # of the stream's; the newest is sent
    layout: Literal["hwc", "chw"] = "hwc"


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[policy.options]``; keys of GR00T are as N1.5 has them: ``state.NAME``, ``video.NAME``."""

    wire: Literal["openpi", "groot"]
    url: str  # ws://HOST:PORT, tcp://HOST:PORT
    numbers: dict[str, Slice]  # by key of the request: first and behind-last value of the group
    cameras: dict[str, ServerCamera] = {}  # by key of the request
    steps: Count  # of the window; the last one is sent
    dim: Count  # values of the group, all its streams together
    group: str = "state"
    horizon: Count  # at most what the server answers
    action_dim: Count
    timeout_ms: Positive = 1000.0  # for the answers to one envelope
    prompt: str | None = None  # key of the text
    text: str = ""  # without an instruction
    instructions: bool = False  # as policy.instructions
    api_key_file: str | None = None
    action_keys: dict[str, Slice] = {}  # of GR00T: by key of the answer the actions it has
    generation: Generation = "n1.6"  # of GR00T
    weights: None = None  # the server has them


class _Vain:
    """Tries of a row to connect that ran out of time, since it was connected last."""

    def __init__(self) -> None:
        self.last_ns = 0  # end of the newest; 0: the others' had left it no time
        self.took_ns = 0  # all of them
        self.next_ns = 0  # end of the pause before the next


class RemotePolicy:
    """As ``Policy``, on the CPU: a client of a policy server."""

    plain_frames = True  # the server gets pixels

    def __init__(self, options: Options, open_link: Callable[[int], Link]) -> None:
        self.inputs = tuple(_inputs(options))
        self.outputs = (TensorSpec("actions", (options.horizon, options.action_dim)),)
        self._options, self._open = options, open_link
        self._links: dict[int, Link] = {}
        self._vain: dict[int, _Vain] = {}  # by row
        self._texts = {0: options.text}
        self._told_ns = 0
        if options.instructions:
            self.instruct = self._instruct

    def reset(self, rows: Tensor) -> None:
        """Begin a new episode of each row at the server, within the time of one call."""
        until_ns = self._until()
        for row in rows.nonzero().flatten().tolist():
            self._vain.pop(row, None)
            link = self._links.get(row)
            try:
                if link is None or link.reset(until_ns):
                    continue
            except FAILURES:
                pass  # a new connection begins one, too
            self._drop(row)

    def __call__(self, window: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        """Ask for every row that is present; actions of one without an answer become NaN.

        Raises:
            ServerError: no row has an answer.
        """
        until_ns = self._until()
        rows = window["present"].nonzero().flatten().tolist()
        actions = out["actions"].zero_()
        waiting = set(rows)
        failed: dict[int, Exception] = {}
        try:
            self._ask(rows, window, until_ns, failed)
            for row in [row for row in rows if row not in failed]:
                with _kept_in(failed, row):
                    found = self._links[row].answer(until_ns)
                    actions[row].numpy()[:] = self._fitting(found)
                    waiting.discard(row)
        finally:
            for row in waiting:  # an answer of theirs may still come
                self._drop(row)
        if not failed:
            return
        actions[list(failed)] = math.nan  # stage C refuses these rows alone
        url = self._options.url
        said = [f"{url}: {reason_of(error)} (row {row})" for row, error in failed.items()]
        if len(failed) == len(rows):
            raise ServerError(said[0]) from next(iter(failed.values()))
        if now_ns() - self._told_ns >= LOG_EVERY_NS:
            self._told_ns = now_ns()
            logger.warning("%s", "; ".join(said))

    def close(self) -> None:
        """End every connection; a later call opens them again."""
        for row in list(self._links):
            self._drop(row)

    def _instruct(self, number: int, text: str) -> None:
        self._texts[number] = text

    def _until(self) -> int:
        return now_ns() + round(self._options.timeout_ms * NS_PER_MS)

    def _ask(
        self,
        rows: list[int],
        window: Mapping[str, Tensor],
        until_ns: int,
        failed: dict[int, Exception],
    ) -> None:
        """Send every request: a row that has to connect takes no time from those that need not."""
        missing = []
        for row in rows:
            with _kept_in(failed, row):
                link = self._links.get(row)
                if link is not None and link.is_open():
                    link.ask(self._request(row, window), until_ns)
                else:
                    missing.append(row)
        has_asked = len(missing) + len(failed) < len(rows)
        vain = self._vain
        for row in sorted(missing, key=lambda row: vain[row].last_ns if row in vain else 0):
            with _kept_in(failed, row):
                self._connect(row, until_ns, may_pause=has_asked)
                self._links[row].ask(self._request(row, window), until_ns)
                has_asked = True

    def _connect(self, row: int, until_ns: int, *, may_pause: bool) -> None:
        """Open a row's connection; one that takes too long is tried seldom while others wait.

        A row that connects after it had no time to shows that the server takes robots again. One
        that always could shows nothing of the others.
        """
        self._drop(row)
        began_ns, vain = now_ns(), self._vain.get(row)
        if vain is not None and may_pause and began_ns < vain.next_ns:
            left_s = (vain.next_ns - began_ns) / NS_PER_S
            raise ServerError(
                f"no connection within policy.options.timeout_ms; the next try is in {left_s:.1f} s"
            )
        if began_ns >= until_ns:
            if not may_pause:
                self._vain.setdefault(row, _Vain())
            raise TimeoutError
        try:
            self._links[row] = self._open(until_ns)
        except FAILURES:
            if (ended_ns := now_ns()) >= until_ns:
                self._note_vain(row, began_ns, ended_ns)
            raise
        if self._vain.pop(row, None) is not None:
            for other in self._vain.values():
                other.took_ns = other.next_ns = 0

    def _note_vain(self, row: int, began_ns: int, ended_ns: int) -> None:
        vain = self._vain.setdefault(row, _Vain())
        limit_ns = self._options.timeout_ms * NS_PER_MS
        vain.last_ns = ended_ns
        vain.took_ns += ended_ns - began_ns
        if vain.took_ns >= ENOUGH * limit_ns:
            vain.next_ns = ended_ns + round(PAUSE * limit_ns)

    def _drop(self, row: int) -> None:
        link = self._links.pop(row, None)
        if link is not None:
            link.close()

    def _request(self, row: int, window: Mapping[str, Tensor]) -> dict[str, Any]:
        """Values, frames and text at the end of a row's window, by the keys of the server."""
        options = self._options
        values = window[f"{options.group}.values"][row, -1].numpy()
        found: dict[str, Any] = {
            key: values[first:end] for key, (first, end) in options.numbers.items()
        }
        for key, camera in options.cameras.items():
            frame = (window[f"{camera.name}.frames"][row, -1].numpy() * WHITE).round()
            pixels = frame.clip(0, WHITE).astype(np.uint8)
            found[key] = pixels.transpose(1, 2, 0) if camera.layout == "hwc" else pixels
        if options.prompt is not None:
            number = int(window["instruction_id"][row]) if options.instructions else 0
            found[options.prompt] = self._texts[number]
        return found

    def _fitting(self, actions: Array) -> Array:
        wanted = self.outputs[0].shape
        if actions.ndim != 2 or len(actions) < wanted[0] or actions.shape[1] != wanted[1]:
            raise ServerError(
                f"got actions {actions.dtype} {list(actions.shape)}, want {list(wanted)} or more "
                "steps: see policy.options.horizon and action_dim"
            )
        return actions[: wanted[0]]


def build(config: Mapping[str, Any], device: torch.device) -> RemotePolicy:
    """A client of a policy server, with the given ``Options``; it connects when it is first called.

    Raises:
        ConfigError: an option is missing, unknown or not allowed, or the device is no CPU.
    """
    options = options_of(config, Options)
    if found := [f"policy.options.{problem}" for problem in _problems(options, device)]:
        raise ConfigError(found)
    key = None
    if options.api_key_file is not None:
        try:
            key = Path(options.api_key_file).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError([f"policy.options.api_key_file: {error}"]) from error

    def open_link(until_ns: int) -> Link:
        if options.wire == "groot":
            return GrootLink(options.url, key, options.action_keys, options.generation)
        return OpenpiLink(options.url, key, until_ns)

    return RemotePolicy(options, open_link)


@contextmanager
def _kept_in(failed: dict[int, Exception], row: int) -> Iterator[None]:
    """A failure of one row leaves the others theirs."""
    try:
        yield
    except FAILURES as error:
        failed[row] = error


def _inputs(options: Options) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{options.group}.values", (options.steps, options.dim))
    for camera in options.cameras.values():
        shape = (camera.frames, CHANNELS, camera.height, camera.width)
        yield TensorSpec(f"{camera.name}.frames", shape)
    if options.instructions:
        yield TensorSpec("instruction_id", (), "int64")
    yield TensorSpec("present", (), "bool")


def _problems(options: Options, device: torch.device) -> Iterator[str]:
    """Every disagreement of the options, each with its name."""
    is_groot = options.wire == "groot"
    if device.type != "cpu":
        yield f"wire: got {options.wire!r} on {device}, want placement.policy = 'cpu'"
    if not is_groot and find_spec("websockets") is None:
        yield "wire: 'openpi' needs websockets: pip install 'ppstream[gateway]'"
    if not options.url.startswith(SCHEMES[options.wire]):
        yield f"url: got {options.url!r}, want {' or '.join(SCHEMES[options.wire])}HOST:PORT"
    for key, (first, end) in options.numbers.items():
        if not first < end <= options.dim:
            yield f"numbers.{key}: got [{first}, {end}], want a part of the {options.dim} values"
    yield from _clashes(options)
    if options.instructions and options.prompt is None:
        yield "prompt: missing, want the key of the instruction"
    if not is_groot:
        if options.action_keys:
            yield "action_keys: got some, want none: openpi answers with 'actions'"
        return
    for keys, prefix in ((options.numbers, "state."), (options.cameras, "video.")):
        yield from (f"{key}: want {prefix}NAME" for key in keys if not key.startswith(prefix))
    parts = sorted(options.action_keys.values())
    ends = [0, *(end for _, end in parts)]
    is_whole = [first for first, _ in parts] == ends[:-1] and ends[-1] == options.action_dim
    if not is_whole or any(first == end for first, end in parts):
        yield (
            f"action_keys: want each of the {options.action_dim} actions in one key, such as "
            f"{{ arm = [0, {options.action_dim}] }}"
        )


def _clashes(options: Options) -> Iterator[str]:
    """Keys of which one request cannot have both; for openpi what is before a dot is a map."""
    texts = [] if options.prompt is None else [options.prompt]
    keys = sorted([*options.numbers, *options.cameras, *texts])
    for one, other in combinations(keys, 2):
        if one == other:
            yield f"{one}: it is the key of two of numbers, cameras and prompt, want a key each"
        elif options.wire == "openpi" and other.startswith(f"{one}."):
            yield f"{one}, {other}: the first is a map of the second, want another key for one"
