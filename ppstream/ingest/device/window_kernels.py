"""The kernels of a window on a GPU, with the addresses of one slot: what its graph is made of.

Everything between the rings and a slot stands here too: the targets, what each ring may give, where
each row's window ends. Windows use that memory in turn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from ppstream.core.clock import NS_PER_MS
from ppstream.ingest.camera_frames import affine, camera_names
from ppstream.ingest.executed_prefix import DELAY, VALUES
from ppstream.ingest.window import (
    INSTRUCTION_INPUTS,
    ROW_FIELDS,
    group_names,
    group_scale,
    scale_name,
    stream_source,
)
from ppstream_kernels import ResamplePlan, StreamSource, cuda_rings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from ppstream.config.schema import PipelineConfig, StreamConfig
    from ppstream.ingest.device.rings import DeviceRings
    from ppstream_kernels.kernel_launch import KernelLaunch

RECORDS: Final = 128  # windows queued and not yet taken at most: more than a link has slots


class WindowKernels:
    """From ``rings`` to slots, for one run of windows.

    ``records`` is pinned: window k writes what it was made of into row ``k % RECORDS``. So is
    ``limits``, where window k reads how many rows may be present; None: nobody limits them.

    Args:
        config: streams, window, groups and actions.
        rings: on the device of the slots.
        rows: B places of robots.
        device: of the rings.
        is_limited: there are ``limits``.
    """

    def __init__(
        self,
        config: PipelineConfig,
        rings: DeviceRings,
        rows: int,
        device: torch.device,
        *,
        is_limited: bool = False,
    ) -> None:
        self._config, self._rings, self._rows, self._device = config, rings, rows, device
        self._streams = config.streams
        self._cameras = [s for s, stream in enumerate(config.streams) if stream.image is not None]
        steps = config.window.steps
        self._targets_ns = self._int64(rows, steps)
        self._counts, self._heads = (self._int64(len(config.streams), rows) for _ in range(2))
        self._ends_ns, self._begun, self._chosen = map(self._int64, (rows, 1, 1))
        discrete = [name in config.actions.discrete for name in config.actions.names]
        self._discrete = torch.tensor(discrete, device=device)
        slots = [ring.stamps_ns.shape[1] for ring in rings.rings.values()]
        self._slots = torch.tensor(slots, device=device)
        words = cuda_rings.RECORD_WORDS + rings.writer.told_words
        self._records = torch.full((RECORDS, words), -1, dtype=torch.int64, pin_memory=True)
        self.records: NDArray[np.int64] = self._records.numpy()
        self.limits: NDArray[np.int64] | None = None
        if is_limited:
            limits = torch.full((RECORDS,), rows, dtype=torch.int64, pin_memory=True)
            self.limits = limits.numpy()
        scales = {group: group_scale(config, group) for group in config.groups}
        self._scales = {
            scale_name(group): scale.to(device).repeat(rows, 1)
            for group, scale in scales.items()
            if scale is not None
        }
        self._groups = [
            (self._plan(streams, scales[group]), group_names(group))
            for group, streams in config.groups.items()
        ]
        self._warm_up()

    def record(self, tensors: Mapping[str, Tensor]) -> cuda_rings.Recorded:
        """The graph that writes these tensors of a slot; waits for the GPU."""
        plans = [(plan, tuple(tensors[name] for name in names)) for plan, names in self._groups]
        scales = [(tensors[name], scale) for name, scale in self._scales.items()]
        begin = self._begin(tensors)
        others = [self._camera(s, tensors) for s in self._cameras]
        if self._config.actions.prefix_steps:
            others.append(self._prefix(tensors))

        def resample(stream: int) -> None:
            for plan, (values, valid, age_s) in plans:
                plan(self._targets_ns, (values, valid, age_s))
            for written, scale in scales:
                written.copy_(scale)
            for other in others:
                other.queue(stream)

        def everything(stream: int) -> None:
            begin.queue(stream)
            resample(stream)

        resample(torch.cuda.current_stream(self._device).cuda_stream)  # loads the kernels
        torch.cuda.synchronize(self._device)
        return cuda_rings.Recorded(everything, self._device)

    def _warm_up(self) -> None:
        """Run the kernel that begins a window once: nothing is loaded while a graph is recorded."""
        present = torch.zeros(self._rows, dtype=torch.bool, device=self._device)
        begin = self._begin({"present": present, "rows": self._int64(self._rows, len(ROW_FIELDS))})
        begin.queue(torch.cuda.current_stream(self._device).cuda_stream)
        torch.cuda.synchronize(self._device)
        self._begun.zero_()
        self._records.fill_(-1)
        torch.cuda.synchronize(self._device)

    def _begin(self, tensors: Mapping[str, Tensor]) -> KernelLaunch:
        writer = self._rings.writer
        present, rows = tensors["present"], tensors["rows"]
        asked = [tensors[n].data_ptr() if n in tensors else 0 for n in INSTRUCTION_INPUTS]
        call = cuda_rings.BeginCall(
            tables=self._rings.tables.data_ptr(),
            current=self._rings.current.data_ptr(),
            slots=self._slots.data_ptr(),
            targets_ns=self._targets_ns.data_ptr(),
            counts=self._counts.data_ptr(),
            heads=self._heads.data_ptr(),
            ends_ns=self._ends_ns.data_ptr(),
            present=present.data_ptr(),
            rows=rows.data_ptr(),
            instructions=asked[0],
            conditionings=asked[1],
            records=self._records.data_ptr(),
            begun=self._begun.data_ptr(),
            chosen=self._chosen.data_ptr(),
            limits=0 if self.limits is None else self.limits.ctypes.data,
            table_words=writer.table_words,
            told_words=writer.told_words,
            depth=RECORDS,
            dt_ns=round(self._config.window.dt_ms * NS_PER_MS),
            lease_ns=round(self._config.actions.lease_ms * NS_PER_MS),
            batch=self._rows,
            streams=len(self._streams),
            steps=self._config.window.steps,
            reference=writer.reference,
        )
        return cuda_rings.begin(self._device, call)

    def _prefix(self, tensors: Mapping[str, Tensor]) -> KernelLaunch:
        writer, actions = self._rings.writer, self._config.actions
        call = cuda_rings.PrefixCall(
            tables=self._rings.tables.data_ptr(),
            chosen=self._chosen.data_ptr(),
            ends_ns=self._ends_ns.data_ptr(),
            discrete=self._discrete.data_ptr(),
            out=tensors[VALUES].data_ptr(),
            delay_steps=tensors[DELAY].data_ptr(),
            table_words=writer.table_words,
            dt_ns=round(actions.dt_ms * NS_PER_MS),
            at=writer.told_words,
            words=writer.commitment_words,
            steps=actions.prefix_steps,
            dim=len(actions.names),
        )
        return cuda_rings.prefix(self._device, call, batch=self._rows)

    def _plan(self, streams: Sequence[StreamConfig], scale: Tensor | None) -> ResamplePlan:
        on_device = None if scale is None else scale.to(self._device)
        return ResamplePlan(
            [*map(self._source, streams)], self._config.window.steps, scale=on_device
        )

    def _source(self, stream: StreamConfig) -> StreamSource:
        s = self._streams.index(stream)
        ring = self._rings.rings[stream.name]
        return stream_source(stream, *ring, self._counts[s], self._heads[s])

    def _camera(self, s: int, tensors: Mapping[str, Tensor]) -> KernelLaunch:
        stream = self._streams[s]
        image, ring = stream.image, self._rings.rings[stream.name]
        assert image is not None
        scale, shift = affine(image)
        out, valid, age_s = (tensors[name] for name in camera_names(stream))
        call = cuda_rings.FramesCall(
            frames=ring.values.data_ptr(),
            stamps_ns=ring.stamps_ns.data_ptr(),
            counts=self._counts[s].data_ptr(),
            heads=self._heads[s].data_ptr(),
            ends_ns=self._ends_ns.data_ptr(),
            out=out.data_ptr(),
            valid=valid.data_ptr(),
            age_s=age_s.data_ptr(),
            max_age_ns=round(stream.max_age_ms * NS_PER_MS),
            scale=scale,
            shift=shift,
            slots=ring.stamps_ns.shape[1],
            from_height=image.height,
            from_width=image.width,
            height=image.size[0],
            width=image.size[1],
            is_half=out.dtype is torch.bfloat16,
        )
        return cuda_rings.frames(self._device, call, batch=self._rows, newest=image.frames)

    def _int64(self, *shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=torch.int64, device=self._device)
