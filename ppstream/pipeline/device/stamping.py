"""Choice of what takes the times of a rank's stages on its GPU: the link's kernels, or CUDA events.

A kernel that waits for a slot, and one that sends it, stand around a stage anyway: each leaves the
device's time in pinned memory, where the host reads it without a call of the driver. A timing event
takes 3 µs of its stream, and some µs of the host to record and to ask. The order of streams, which
events give, then follows from the streams themselves: a stage waits and sends in its own.

Here alone it is decided which of the two a rank does; the log's ``link`` line says it, and why.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from ppstream.cuda.device_clock import TRIES, DeviceClock
from ppstream.cuda.device_stamps import StampProbe
from ppstream.cuda.driver import DeviceProbe
from ppstream.cuda.streams import stream
from ppstream.links.device_counters import CountedLink
from ppstream.links.peer_memory import put_limit
from ppstream_kernels.cuda_clock import ClockAnswers

if TYPE_CHECKING:
    import torch

    from ppstream.config.schema import PipelineConfig
    from ppstream.links.device_link import DeviceLink
    from ppstream.links.slots import Position


class Stamping(NamedTuple):
    """One rank's choice, and the reason; for the log."""

    stamps: Literal["device", "events"]
    why: str

    def by(self, link: DeviceLink) -> CountedLink | None:
        """Returns ``link`` if its kernels stamp."""
        if self.stamps == "events":
            return None
        assert isinstance(link, CountedLink), "no kernels of this link stamp"
        return link


EVENTS: Final = Stamping("events", "nobody asked for stamps")


def choose_stamps(
    config: PipelineConfig,
    kind: str | None,
    position: Position,
    slot_bytes: int,
    *,
    works_in_c: bool = False,
) -> Stamping:
    """Returns what takes the times of this rank's stages.

    Args:
        config: of the run.
        kind: of the link.
        position: of this rank.
        slot_bytes: of the slots that this rank sends.
        works_in_c: stage C takes time on rank 0's device, so a receipt must not stand behind it.
    """
    pipeline, link = config.pipeline, config.link
    reasons = (
        (link.stamps == "events", "link.stamps = events"),
        (kind != "peer", f"no kernels wait or send on {kind}"),
        (link.wait != "kernel", f"link.wait = {link.wait}"),
        (position.relays, "a relayed slot is sent by copies"),
        (
            slot_bytes > put_limit(pipeline.d_in, slot_bytes, stamps=True),
            f"slots of {slot_bytes} bytes are sent by copies",
        ),
        (
            position.is_front and pipeline.credit != "before_window",
            f"pipeline.credit = {pipeline.credit}",
        ),
        (
            position.is_front and config.placement.replicas > 1,
            "envelopes go to replicas in turn",
        ),
        (position.is_front and works_in_c, "stage C works on the device"),
    )
    for holds, why in reasons:
        if holds:
            return Stamping("events", why)
    return Stamping("device", "kernels of the link wait and send in the stages' streams")


def device_clock(device: torch.device, stamping: Stamping) -> DeviceClock[Any]:
    """The clock of ``device``, current, for the marks of ``stamping``."""
    asked = stream("clock")
    if stamping.stamps == "events":
        return DeviceClock(DeviceProbe(asked))
    return DeviceClock(StampProbe(ClockAnswers(device, TRIES), asked))
