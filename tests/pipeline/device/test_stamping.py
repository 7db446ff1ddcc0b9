"""Who takes the times of a rank's stages, and what is said of it."""

from __future__ import annotations

from typing import Any

import pytest
from device_in_process import GPUS
from pipeline_in_process import small_config

from ppstream.links.peer_memory import INLINE_BYTES
from ppstream.links.slots import BACK, FRONT, Position
from ppstream.pipeline.device.stamping import Stamping, choose_stamps

SMALL = 4096


@pytest.mark.parametrize("position", [FRONT, BACK, Position(0, 3)])
@pytest.mark.parametrize("slot_bytes", [SMALL, INLINE_BYTES])
def test_kernels_of_the_peer_link_do(position: Position, slot_bytes: int) -> None:
    assert choose_stamps(small_config(*GPUS), "peer", position, slot_bytes).stamps == "device"


@pytest.mark.parametrize(
    ("settings", "given", "why"),
    [
        ("link.stamps=events", {}, "link.stamps = events"),
        ("", {"kind": "nccl"}, "no kernels wait or send on nccl"),
        ("", {"kind": "pinned"}, "no kernels wait or send on pinned"),
        ("link.wait=driver", {}, "link.wait = driver"),
        ("", {"position": Position(1, 2)}, "a relayed slot is sent by copies"),
        ("", {"slot_bytes": INLINE_BYTES + 64}, "slots of 1048640 bytes are sent by copies"),
        ("pipeline.credit=after_window", {}, "pipeline.credit = after_window"),
        ("", {"works_in_c": True}, "stage C works on the device"),
    ],
)
def test_events_do_where_a_kernel_cannot_and_the_reason_is_told(
    settings: str, given: dict[str, Any], why: str
) -> None:
    config = small_config(*GPUS, *filter(None, [settings]))
    where = {"kind": "peer", "position": FRONT, "slot_bytes": SMALL} | given
    assert choose_stamps(config, **where) == Stamping("events", why)


def test_a_lone_envelope_of_any_size_is_sent_by_a_kernel() -> None:
    config = small_config(*GPUS, "pipeline.d_in=1")
    assert choose_stamps(config, "peer", FRONT, 64 * INLINE_BYTES).stamps == "device"


def test_what_only_rank_0_does_leaves_the_policy_rank_its_stamps() -> None:
    config = small_config(*GPUS, "pipeline.credit=after_window")
    assert choose_stamps(config, "peer", BACK, SMALL, works_in_c=True).stamps == "device"
