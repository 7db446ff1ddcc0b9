"""WindowCutter: the aligned slice of all rings that ends at one moment, resampled into a slot.

A row's window ends at ``end``; target i of T lies at ``end - (T - 1 - i) * dt``. Streams of one
group stand side by side in one tensor. A row without a robot, whose reference stream has no
sample yet, or that awaits its text is all zeros and marked by ``present``. When to cut is
``pacing.py``'s, and how values between samples arise ``ppstream_kernels``'.
"""

from __future__ import annotations

from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch

from ppstream import native
from ppstream.config.window_ranges import ranges_of
from ppstream.core.clock import NS_PER_MS
from ppstream.core.specs import AGE_S, VALID, VALUES, TensorSpec
from ppstream.ingest.camera_frames import CameraCutter, CameraViews, camera_specs
from ppstream.ingest.executed_prefix import PrefixWriter, prefix_specs
from ppstream.ingest.stamp_filter import NEVER_NS
from ppstream_kernels import ResamplePlan, StreamSource, scale_for
from ppstream_kernels.blend import FEW_ELEMENTS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from ppstream.config.schema import PipelineConfig, StreamConfig
    from ppstream.ingest.ring import RingBank
    from ppstream.ingest.rows import RowInput

COMPILED_MODES: Final = ("linear", "previous", "nearest")  # by the core's numbers, into float32
VIEWS_MAX: Final = 64  # more than a link has slots

#: What the int64 tensor ``rows [B, 4]`` of an envelope holds.
ROW_FIELDS: Final = ("session", "session_epoch", "window_end_ns", "expires_ns")

#: int64 ``[B]`` with ``policy.instructions``: the text's number, and the robot's count of texts.
INSTRUCTION_INPUTS: Final = ("instruction_id", "conditioning_epoch")

Ages = dict[str, int | None] | dict[str, list[int | None]]


class WindowInfo(NamedTuple):
    """Contents of a window; all but ``newest_rx_ns`` in the robots' own clocks."""

    window_end_ns: list[int]  # per row, 0 where absent
    newest_rx_ns: int  # arrival of the newest reference sample used, rank 0's clock; 0: none
    input_age_ns: Ages  # end - newest stamp used, by stream; a list of rows when B > 1


class _Group(NamedTuple):
    """One resampling plan, its streams, and the names of the three tensors it writes."""

    plan: ResamplePlan
    streams: Sequence[StreamConfig]
    out: tuple[str, str, str]
    scale: _Scale | None


class _Scale(NamedTuple):
    """Of a group in 8 bits."""

    name: str
    scale_BW: Tensor  # the same in each row


class _Views(NamedTuple):
    """One envelope's tensors, made ready to be written again and again."""

    out: Mapping[str, Tensor]
    resample: tuple[Callable[[], None], ...]  # by group
    lines: tuple[tuple[Callable[[int | None], bool], ...], ...]  # the core's, by row and stream
    values: tuple[Tensor, ...]
    valid: tuple[NDArray[np.bool_], ...]  # by group
    scales: tuple[tuple[NDArray[np.float32], NDArray[np.float32]], ...]  # written, and with what
    cameras: tuple[CameraViews, ...]
    present: memoryview  # bool [B]
    fields: memoryview  # int64 [B, 4]


class WindowCutter:
    """Cuts one window per call; for the thread that writes the rings.

    ``inputs`` are the tensors of an envelope that ``cut`` fills, shapes per row: for each group g
    ``g.values [T, sum of D]`` float32, ``g.valid [T, S]`` bool and ``g.age_s [T, S]`` float32, then
    the frames of cameras (``camera_frames.py``), ``present []`` bool and ``rows [4]`` int64
    (``ROW_FIELDS``). Of a group in 8 bits (``window.groups``) ``g.values`` is int8 or
    float8_e4m3fn, to be multiplied by ``g.scale [sum of D]`` float32; what is beyond a range
    saturates.

    ``targets`` and ``invalid`` (by stream) count what was asked of the rings since the start, and
    what they could not give.

    Args:
        config: streams, window and groups.
        rows: B places of robots.
        banks: the memory of the rows' rings, by stream.
    """

    def __init__(
        self,
        config: PipelineConfig,
        rows: Sequence[RowInput],
        banks: Mapping[str, RingBank],
    ) -> None:
        steps = config.window.steps
        dt_ns = round(config.window.dt_ms * NS_PER_MS)
        self.inputs = input_specs(config)
        self._rows = rows
        self._row_numbers = range(len(rows))
        self._is_there = [False] * len(rows)  # in the window that was written last
        self._dt_ns = dt_ns
        self._span_ns = (steps - 1) * dt_ns
        self._offsets_ns: NDArray[np.int64] = np.arange(1 - steps, 1, dtype=np.int64) * dt_ns
        self._targets_ns = torch.empty(len(rows), steps, dtype=torch.int64)
        self._targets_view: NDArray[np.int64] = self._targets_ns.numpy()
        self._views: dict[int, _Views] = {}  # by identity of the mapping, which it keeps alive
        self._groups = [self._group(config, group, banks) for group in config.groups]
        self._is_compiled = native.is_used and all(
            group.scale is None and _is_compiled(stream, len(rows) * steps)
            for group in self._groups
            for stream in group.streams
        )
        self._streams = tuple(stream.name for stream in config.streams)
        self._steps = steps
        self._group_streams = [tuple(s.name for s in group.streams) for group in self._groups]
        self.targets = 0  # of every stream that is no camera, over all rows
        self.invalid = {name: 0 for names in self._group_streams for name in names}  # of them
        is_asked = config.actions.prefix_steps > 0
        self._prefixes = PrefixWriter(config.actions, rows) if is_asked else None
        self._is_instructed = config.policy.instructions
        self._cameras = {
            stream.name: CameraCutter(stream, banks[stream.name]) for stream in config.cameras
        }

    def _group(self, config: PipelineConfig, group: str, banks: Mapping[str, RingBank]) -> _Group:
        streams, scale = config.groups[group], group_scale(config, group)
        plan = ResamplePlan(
            [_source(stream, banks[stream.name]) for stream in streams],
            config.window.steps,
            distinct=True,  # a SensorRing takes each stamp once
            wide=True,  # a data set's windows are these, whatever the batch
            scale=scale,
        )
        scaled = None
        if scale is not None:
            scaled = _Scale(scale_name(group), scale.repeat(len(self._rows), 1))
        return _Group(plan, streams, group_names(group), scaled)

    def cut(
        self, out: Mapping[str, Tensor], ends_ns: Sequence[int | None], lease_ns: int
    ) -> WindowInfo:
        """Write every tensor of ``inputs``, in full, into ``out``; settle the rings' ledgers.

        Args:
            out: tensors ``[B, *shape]`` by name, views of a slot, which are kept, since slots come
                again; others in it are left alone.
            ends_ns: where each row's window ends, robot clock; None: at the newest sample of the
                reference stream. Of no account for an absent row.
            lease_ns: actions made from this window expire so long after its end.
        """
        return self.account(self.write(out, ends_ns, lease_ns))

    def write(
        self, out: Mapping[str, Tensor], ends_ns: Sequence[int | None], lease_ns: int
    ) -> list[int]:
        """As ``cut``, whose ledgers and ages ``account`` gives; returns each row's window end."""
        views = self._views.get(id(out)) or self._view(out)
        ends = []
        for row in self._row_numbers:
            ends.append(self._begin_row(row, ends_ns[row], lease_ns, views))  # noqa: PERF401 - cold
        if self._is_compiled:
            self._cut_compiled(ends, views)
        else:
            self._cut_rows(ends, views)
        if self._cameras:
            self._cut_cameras(views, ends)
        if self._prefixes is not None:
            self._prefixes.write(out, ends)
        if self._is_instructed:
            self._cut_instructions(out)
        return ends

    def account(self, ends: list[int]) -> WindowInfo:
        """Settle the rings' ledgers of a window; before they take in anything else."""
        return WindowInfo(ends, self._newest_rx_ns(), self._account(ends))

    def rehearse(self, out: Mapping[str, Tensor]) -> None:
        """Write a window as of now, without cameras, that nobody will use or account for."""
        views = self._views.get(id(out)) or self._view(out)
        counted = self.targets, dict(self.invalid)
        ends = [self._begin_row(row, None, 0, views) for row in self._row_numbers]
        if self._is_compiled:
            self._cut_compiled(ends, views)
        else:
            self._cut_rows(ends, views)
        self.targets, self.invalid = counted

    def _cut_rows(self, ends: Sequence[int], views: _Views) -> None:
        for row, end in enumerate(ends):
            if views.present[row]:
                np.add(self._offsets_ns, end, out=self._targets_view[row])
            else:
                self._targets_view[row] = NEVER_NS  # before any sample: nothing is valid
        for resample in views.resample:
            resample()
        for written, scale in views.scales:
            np.copyto(written, scale)
        for row in self._row_numbers:
            if views.present[row]:
                self._count_invalid(row, views)
            else:
                self._leave_empty(row, views)

    def _cut_compiled(self, ends: Sequence[int], views: _Views) -> None:
        """The same in C, bit for bit."""
        for row, lines in enumerate(views.lines):
            present, all_valid = views.present[row], True
            for line in lines:
                all_valid &= line(ends[row] if present else None)
            if not present:
                self._leave_empty(row, views)
            elif all_valid:
                self.targets += self._steps
            else:
                self._count_invalid(row, views)

    def _leave_empty(self, row: int, views: _Views) -> None:
        if self._rows[row].session != 0:  # its other streams hold samples
            for values in views.values:
                values[row].zero_()

    def _count_invalid(self, row: int, views: _Views) -> None:
        """Of a robot that is there; usually every target is valid, and that is quickly seen."""
        self.targets += self._steps
        for names, valid in zip(self._group_streams, views.valid, strict=True):
            if not valid[row].all():
                for name, count in zip(names, (~valid[row]).sum(axis=0).tolist(), strict=True):
                    self.invalid[name] += count

    def _cut_cameras(self, views: _Views, ends: Sequence[int]) -> None:
        for (name, camera), view in zip(self._cameras.items(), views.cameras, strict=True):
            for row, served in enumerate(self._rows):
                camera.cut(
                    view, row, served.rings[name], ends[row] if self._is_there[row] else None
                )

    def _cut_instructions(self, out: Mapping[str, Tensor]) -> None:
        ids, epochs = (out[name].numpy() for name in INSTRUCTION_INPUTS)
        for row, served in enumerate(self._rows):
            ids[row], epochs[row] = served.instruction_id, served.conditioning_epoch

    def _view(self, out: Mapping[str, Tensor]) -> _Views:
        if len(self._views) >= VIEWS_MAX:
            self._views.clear()
        resample, written, validity = [], [], []
        for group in self._groups:
            values, valid, age_s = (out[name] for name in group.out)
            resample.append(group.plan.bind(self._targets_ns, (values, valid, age_s)))
            written.append(values)
            validity.append(valid.numpy())
        lines = [self._lines(out, row) for row in self._row_numbers] if self._is_compiled else ()
        scales = tuple(
            (out[scale.name].numpy(), scale.scale_BW.numpy())
            for *_, scale in self._groups
            if scale is not None
        )
        views = _Views(
            out,
            tuple(resample),
            tuple(lines),
            tuple(written),
            tuple(validity),
            scales,
            tuple(camera.views(out) for camera in self._cameras.values()),
            out["present"].numpy().data,
            out["rows"].numpy().data,
        )
        self._views[id(out)] = views
        return views

    def _lines(
        self, out: Mapping[str, Tensor], row: int
    ) -> tuple[Callable[[int | None], bool], ...]:
        """One call for each stream of a row, which cuts it into its columns for a window's end."""
        lines: list[Callable[[int | None], bool]] = []
        for group in self._groups:
            values, valid, age_s = (out[name][row].numpy() for name in group.out)
            left = 0
            for column, stream in enumerate(group.streams):
                part = slice(left, left := left + stream.dim)
                source = self._rows[row].rings[stream.name]
                lines.append(
                    partial(
                        source.cut,
                        self._steps,
                        self._dt_ns,
                        COMPILED_MODES.index(stream.interpolation),
                        round(stream.max_gap_ms * NS_PER_MS),
                        round(stream.max_age_ms * NS_PER_MS),
                        values[:, part].data,
                        valid[:, column].data,
                        age_s[:, column].data,
                    )
                )
        return tuple(lines)

    def _begin_row(self, row: int, end_ns: int | None, lease_ns: int, views: _Views) -> int:
        """Write whose row it is; returns its window's end, 0 when it is absent."""
        served = self._rows[row]
        reference = served.reference
        present = views.present[row] = self._is_there[row] = served.present_at(end_ns)
        end = expires = 0
        if present:
            end = reference.newest_ns if end_ns is None else end_ns
            expires = end + lease_ns
        fields = views.fields
        fields[row, 0], fields[row, 1] = served.session, served.session_epoch
        fields[row, 2], fields[row, 3] = end, expires
        return end

    def _newest_rx_ns(self) -> int:
        return max(
            (row.reference.newest_rx_ns for row in compress(self._rows, self._is_there)), default=0
        )

    def _account(self, ends: Sequence[int]) -> Ages:
        """Account for what the window used; returns the age of each input."""
        if len(ends) == 1:
            return {name: self._account_ring(0, name, ends[0]) for name in self._streams}
        return {
            name: [self._account_ring(row, name, end) for row, end in enumerate(ends)]
            for name in self._streams
        }

    def _account_ring(self, row: int, stream: str, end_ns: int) -> int | None:
        if not self._is_there[row]:
            return None
        newest_ns = self._rows[row].rings[stream].settle(end_ns - self._span_ns, end_ns)
        return None if newest_ns is None else end_ns - newest_ns


def group_names(group: str) -> tuple[str, str, str]:
    """Of a group's values, validity and age in an envelope."""
    return group + VALUES, group + VALID, group + AGE_S


def scale_name(group: str) -> str:
    """Of the scale of a group in 8 bits in an envelope."""
    return f"{group}.scale"


def group_scale(config: PipelineConfig, group: str) -> Tensor | None:
    """The scale ``[sum of D]`` float32 of a group in 8 bits, on the CPU; else None."""
    settings = config.group_settings(group)
    if not settings.is_scaled:
        return None
    return scale_for(*ranges_of(config, group), getattr(torch, settings.dtype))


def input_specs(config: PipelineConfig) -> tuple[TensorSpec, ...]:
    """Returns what a window writes into an envelope, in order, whatever device cuts it."""
    steps = config.window.steps
    specs = []
    for group, streams in config.groups.items():
        values, valid, age_s = group_names(group)
        settings, width = config.group_settings(group), sum(stream.dim for stream in streams)
        specs += [
            TensorSpec(values, (steps, width), settings.dtype),
            TensorSpec(valid, (steps, len(streams)), "bool"),
            TensorSpec(age_s, (steps, len(streams))),
        ]
        if settings.is_scaled:
            specs.append(TensorSpec(scale_name(group), (width,)))
    for camera in config.cameras:
        specs += camera_specs(camera)
    specs += prefix_specs(config.actions)
    if config.policy.instructions:
        specs += [TensorSpec(name, (), "int64") for name in INSTRUCTION_INPUTS]
    return (*specs, TensorSpec("present", (), "bool"), TensorSpec("rows", (4,), "int64"))


def stream_source(
    stream: StreamConfig, values: Tensor, stamps_ns: Tensor, count: Tensor, head: Tensor
) -> StreamSource:
    """A stream's rings, in this memory, as resampling reads them."""
    return StreamSource(
        values,
        stamps_ns,
        count,
        head,
        stream.interpolation,
        round(stream.max_gap_ms * NS_PER_MS),
        round(stream.max_age_ms * NS_PER_MS),
    )


def _is_compiled(stream: StreamConfig, targets: int) -> bool:
    """True for what the core resamples; of many elements linear is torch's, in float32."""
    is_small = targets * stream.dim <= FEW_ELEMENTS or stream.interpolation != "linear"
    return stream.interpolation in COMPILED_MODES and is_small


def _source(stream: StreamConfig, bank: RingBank) -> StreamSource:
    return stream_source(stream, bank.values, bank.stamps_ns, bank.count, bank.head)
