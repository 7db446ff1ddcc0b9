from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from memory_rig import Wire
from stream_cases import MS, Input, at_ms, config, ramp, stream

from ppstream.config.schema import GroupConfig, ImageConfig
from ppstream.core.clock import now_ns
from ppstream.core.errors import ProtocolError
from ppstream.ingest.device import sender_memory
from ppstream.ingest.device.sample_blocks import COMMITMENT_WORDS
from ppstream.ingest.device.window import DeviceWindow
from ppstream.ingest.rows import NOTHING_NEEDED, Commitment, Need
from ppstream.links.slots import SlotLayout
from ppstream.wire.message_memory import MARK, PAGE_BYTES

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
pytestmark = pytest.mark.gpu

LEASE = 100 * MS
POISON = 0xCD
STREAMS = (
    stream("q", dim=7, reference=True, max_gap_ms=30.0, max_age_ms=20.0),
    stream("tip", dim=4, rate_hz=100, interpolation="slerp", max_age_ms=40.0),
    stream("grip", dim=1, rate_hz=30, interpolation="previous", group="hand", max_age_ms=60.0),
)
PLAIN = ImageConfig(height=20, width=32, frames=2, dtype="float32")
SMALL = ImageConfig(
    height=24,
    width=31,
    frames=3,
    resize=(10, 14),
    mean=(0.485, 0.456, 0.406),
    std=(0.229, 0.224, 0.225),
)
CAMERAS = (
    stream("front", dim=0, rate_hz=30, image=PLAIN, max_age_ms=50.0),
    stream("wrist", dim=0, rate_hz=30, image=SMALL),
)


class Rig:
    """The same rings behind the CPU's cutter and the GPU's."""

    def __init__(
        self,
        *streams: Any,
        rows: int = 1,
        capacity: int | None = None,
        instructions: bool = False,
        prefix_steps: int = 0,
        groups: dict[str, GroupConfig] | None = None,
        is_limited: bool = False,
        needs: Mapping[str, Need] = NOTHING_NEEDED,
        **pipeline: Any,
    ) -> None:
        settings = config(*(streams or STREAMS), rows=rows, steps=9, **pipeline)
        window = msgspec.structs.replace(settings.window, groups=groups or {})
        settings = msgspec.structs.replace(settings, window=window)
        policy = msgspec.structs.replace(settings.policy, instructions=instructions)
        actions = msgspec.structs.replace(
            settings.actions,
            prefix_steps=prefix_steps,
            names=("turn", "grip"),
            low=(-1.0, -1.0),
            high=(1.0, 1.0),
            discrete={"grip": (-1.0, 1.0)},
        )
        settings = msgspec.structs.replace(settings, policy=policy, actions=actions)
        self.case = Input(settings, capacity, needs)
        for row, place in enumerate(self.case.rows):
            place.open(row + 3)
        self.device = torch.device("cuda", 0)
        case = self.case
        self.window = DeviceWindow(
            case.config, case.rows, case.banks, self.device, is_limited=is_limited
        )
        self.stream = torch.cuda.Stream(self.device)
        self.random = np.random.default_rng(1)

    def slot(self) -> Any:
        """Poisoned: whatever is not written shows."""
        layout = SlotLayout(("index",), self.window.inputs, len(self.case.rows))
        return layout.views(torch.full((layout.slot_bytes,), POISON, dtype=torch.uint8).cuda())

    def push(self, name: str, *times: float, row: int = 0) -> None:
        stamps = at_ms(*times)
        ring = self.case.rows[row].rings[name]
        if ring.stream.image is None:
            values = self.random.normal(size=(len(stamps), ring.stream.dim)).astype(np.float32)
        else:
            values = self.random.integers(0, 256, (len(stamps), ring.stream.dim), np.uint8)
        ring.append(stamps, values, row + 1)

    def cut(self, slot: Any, *ends_ns: int | None) -> None:
        assert self.window.ingest(now_ns(), ends_ns or None)
        self.window.enqueue(slot, self.stream)

    def cut_on_cpu(self, *ends_ns: int | None) -> Any:
        """Beside the GPU's: the ledgers are settled once, by whom is asked first."""
        out = self.case.slot()
        info = self.case.cutter.cut(out, ends_ns or [None] * len(self.case.rows), LEASE)
        return out, info

    def compare(self, slot: Any, *ends_ns: int | None) -> None:
        """The slot's tensors, and what the window was made of, against the CPU's."""
        self.stream.synchronize()
        taken = self.window.pop()
        expected, info = self.cut_on_cpu(*ends_ns)
        for name, wanted in expected.items():
            got = slot[name].cpu()
            if wanted.is_floating_point():
                near = 2**-7 if wanted.dtype is torch.bfloat16 else 2e-6
                torch.testing.assert_close(
                    got, wanted, rtol=near, atol=near, msg=lambda text, at=name: f"{at}: {text}"
                )
            else:
                assert torch.equal(got, wanted), name
        assert taken.info == info
        assert taken.present == expected["present"].tolist()
        assert taken.episodes == [(row[0], row[1]) for row in expected["rows"].tolist()]


def test_a_window_equals_the_cpus() -> None:
    rig = Rig()
    slot = rig.slot()
    rig.push("tip", 3, 13, 33, 43, 63, 90)
    rig.push("grip", 1, 34, 67)
    rig.push("q", *range(0, 60, 2), *range(75, 101))
    rig.cut(slot)
    rig.compare(slot)
    rig.case.check()


def test_windows_follow_the_rings_through_wraps_rows_and_episodes() -> None:
    rig = Rig(rows=3, capacity=20)
    slots = [rig.slot() for _ in range(2)]
    for turn in range(30):
        now = turn * 20
        for row in range(3):
            if rig.case.rows[row].session == 0:
                continue
            rig.push("q", *range(now, now + 20, 1 + row), row=row)
            rig.push("tip", *range(now + row, now + 20, 10), row=row)
            if turn % 2:
                rig.push("grip", now + 3, row=row)
        if turn == 11:
            rig.case.rows[1].new_episode()
        if turn == 17:
            rig.case.rows[2].close()
        if turn == 21:
            rig.case.rows[2].open(99)
        rig.cut(slots[turn % 2])
        rig.compare(slots[turn % 2])
    rig.case.check()


def test_a_cubic_stream_equals_the_cpus_while_its_ring_wraps() -> None:
    smooth = stream("q", dim=7, interpolation="cubic", max_gap_ms=30.0, max_age_ms=20.0)
    rig = Rig(smooth, rows=2, capacity=20)
    slot = rig.slot()
    for turn in range(10):
        for row in range(2):
            rig.push("q", *np.unique(rig.random.integers(0, 40, 9)) + 40 * turn, row=row)
        rig.cut(slot)
        rig.compare(slot)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_a_group_in_8_bits_equals_the_cpus_but_for_ties(dtype: str) -> None:
    q = stream("q", dim=7, low=(-1.5,) * 7, high=(2.0,) * 7, max_gap_ms=30.0)
    tip = stream("tip", dim=4, rate_hz=100, interpolation="slerp", low=(-1.0,) * 4, high=(1.0,) * 4)
    rig = Rig(q, tip, rows=2, groups={"state": GroupConfig(dtype=dtype)})
    slot = rig.slot()
    for row in range(2):
        rig.push("q", *range(0, 100, 3), row=row)
        rig.push("tip", *range(0, 100, 11), row=row)
    rig.cut(slot)
    rig.stream.synchronize()
    rig.window.pop()
    expected, _ = rig.cut_on_cpu()
    assert torch.equal(slot["state.scale"].cpu(), expected["state.scale"])
    assert torch.equal(slot["state.valid"].cpu(), expected["state.valid"])
    got, wanted = (one["state.values"].cpu().float() for one in (slot, expected))
    next_number = torch.ones_like(wanted) if dtype == "int8" else wanted.abs() / 7 + 2**-8
    assert ((got - wanted).abs() <= next_number).all()
    assert (got != wanted).float().mean() < 0.05


def test_a_row_without_its_reference_stream_is_zeros() -> None:
    rig = Rig(rows=2)
    slot = rig.slot()
    rig.push("tip", 1, 2, 3)
    rig.push("q", 1, 2, 3, row=1)
    rig.cut(slot)
    rig.compare(slot)
    assert not slot["state.values"][0].any()


def test_a_given_end_is_kept_though_newer_samples_come_before_the_window_runs() -> None:
    rig = Rig()
    slot = rig.slot()
    rig.window.prepare(slot)
    rig.push("q", *range(100))
    with torch.cuda.stream(rig.stream):
        torch.cuda._sleep(20_000_000)  # the window stands queued for 10 ms
    rig.cut(slot, 60 * MS)
    assert rig.window.ingest(0)  # nothing new: only "newest" again, which waits for the window
    rig.compare(slot, 60 * MS)


def test_a_window_that_stands_queued_uses_what_came_meanwhile() -> None:
    rig = Rig()
    slot = rig.slot()
    rig.window.prepare(slot)
    rig.push("q", *range(50))
    with torch.cuda.stream(rig.stream):
        torch.cuda._sleep(100_000_000)  # about 50 ms
    rig.cut(slot)
    rig.push("q", *range(50, 80))
    assert rig.window.ingest(0)
    rig.stream.synchronize()
    assert rig.window.pop().info.window_end_ns == [79 * MS]
    assert slot["rows"].tolist() == [[3, 0, 79 * MS, 79 * MS + LEASE]]


def test_who_comes_behind_a_window_s_rows_before_it_runs_is_in_the_next_one() -> None:
    rig = Rig(stream("q", dim=1), rows=3, is_limited=True)
    slots = [rig.slot() for _ in range(3)]
    for slot in slots:
        rig.window.prepare(slot)
    rig.push("q", 1, 2)
    with torch.cuda.stream(rig.stream):
        torch.cuda._sleep(100_000_000)  # about 50 ms
    assert rig.window.ingest(0)
    rig.window.enqueue(slots[0], rig.stream, rows=1)
    rig.push("q", 3)
    rig.push("q", 2, 3, row=2)
    assert rig.window.ingest(0)
    rig.window.enqueue(slots[1], rig.stream, rows=3)
    rig.window.enqueue(slots[2], rig.stream)
    rig.stream.synchronize()
    few, whole, same = (rig.window.pop() for _ in slots)
    assert few.info.window_end_ns == [3 * MS, 0, 0]  # of the first row it uses what came meanwhile
    assert few.present == slots[0]["present"].tolist() == [True, False, False]
    assert not slots[0]["state.valid"][1:].any()
    assert not slots[0]["state.values"][1:].any()
    assert slots[0]["rows"].tolist()[1:] == [[4, 0, 0, 0], [5, 0, 0, 0]]
    assert whole.present == slots[1]["present"].tolist() == [True, False, True]
    assert whole.info.window_end_ns == [3 * MS, 0, 3 * MS]
    assert slots[1]["state.valid"][2].any()
    assert same is whole
    rig.case.check()


def test_frames_equal_the_cpus() -> None:
    rig = Rig(*STREAMS, *CAMERAS, rows=2)
    slot = rig.slot()
    for turn in range(12):
        now = 100 * turn
        for row in range(2):
            rig.push("q", *range(now, now + 100, 4), row=row)
            rig.push("front", now + 11, now + 44, now + 78, row=row)
        rig.push("wrist", now + 30, now + 96.5)  # the last is newer than the end
        rig.cut(slot)
        rig.compare(slot)
    assert slot["wrist.valid"].tolist() == [[True, True, True], [False, False, False]]
    assert slot["front.frames"].dtype == torch.float32
    assert slot["wrist.frames"].shape == (2, 3, 3, 10, 14)


class Unlocking:
    """Notes what is unlocked, and does it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._unlock = sender_memory.unregister_host
        self.addresses: list[int] = []
        monkeypatch.setattr(sender_memory, "unregister_host", self)

    def __call__(self, address: int) -> None:
        self.addresses.append(address)
        self._unlock(address)


@pytest.mark.parametrize("locked_bytes", [sender_memory.LOCKED_BYTES, PAGE_BYTES + 2000, 0])
def test_frames_in_their_senders_memory_equal_those_of_the_host(
    monkeypatch: pytest.MonkeyPatch, locked_bytes: int
) -> None:
    """Of a memory that is locked in part, or not at all, the CPU reads the rest."""
    monkeypatch.setattr(sender_memory, "LOCKED_BYTES", locked_bytes)
    unlocking = Unlocking(monkeypatch)
    rigs = [Rig(*STREAMS, *CAMERAS, rows=2) for _ in range(2)]
    slots = [rig.slot() for rig in rigs]
    wires = [Wire(), Wire()]
    for turn in range(12):
        now = 100 * turn
        for row in range(2):
            for rig in rigs:
                rig.push("q", *range(now, now + 100, 4), row=row)
            for name, time in (("front", 11), ("wrist", 40), ("front", 44), ("front", 78)):
                mine, other = (rig.case.rows[row].rings[name] for rig in rigs)
                pixels = rigs[0].random.integers(0, 256, (1, mine.stream.dim), np.uint8)
                stamps = at_ms(now + time)
                sent = wires[row].message(pixels.tobytes(), head=b"head")
                assert mine.append_frame(stamps.tobytes(), sent, 4, row + 1) == 1
                assert other.append(stamps, pixels, row + 1) == 1
                del sent
        for rig, slot in zip(rigs, slots, strict=True):
            rig.cut(slot)
            rig.stream.synchronize()
            rig.window.pop()
            rig.window.ingest(0)
        for name, mine in slots[0].items():
            if "front" in name or "wrist" in name:
                assert torch.equal(mine, slots[1][name]), name
        for wire in wires:
            read, again = MARK.unpack(wire.read_mark())
            assert read == again >= (turn + 1) * 4 * (20 * 32 * 3)  # all that was sent
    is_copied = rigs[0].case.banks["front"].values.any().item()
    assert is_copied == (locked_bytes < 1 << 20)
    assert unlocking.addresses == []
    del wire
    while wires:
        wires.pop().close()
        rigs[0].window.ingest(0)
    assert len(unlocking.addresses) == (2 if locked_bytes else 0)
    rigs[0].case.check()


def test_a_ring_that_another_gpu_s_rings_read_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames that stayed with their sender are nowhere to be sent from again."""
    rig = Rig(*STREAMS, *CAMERAS)
    ring = rig.case.rows[0].rings["front"]
    with Wire() as wire:
        sent = wire.message(bytes([9] * ring.stream.dim), head=b"head")
        assert ring.append_frame(at_ms(1).tobytes(), sent, 4, 1) == 1
        del sent
        rig.window.close()
        again = DeviceWindow(rig.case.config, rig.case.rows, rig.case.banks, rig.device)
        assert ring.count == 0
        slot = rig.slot()
        rig.push("q", *range(0, 100, 4))
        rig.push("front", 90)
        rig.window = again
        rig.cut(slot)
        rig.compare(slot)


def test_a_backlog_of_several_blocks_arrives_whole() -> None:
    rig = Rig(stream("wide", dim=4096), capacity=150)
    slot = rig.slot()
    rig.push("wide", *range(140))
    while not rig.window.ingest(0):
        torch.cuda.synchronize()
    rig.cut(slot)
    rig.compare(slot)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_ingest_and_windows_neither_synchronise_nor_allocate() -> None:
    rig = Rig(*STREAMS, *CAMERAS)
    slots = [rig.slot() for _ in range(3)]
    for slot in slots:
        rig.window.prepare(slot)
    done = [torch.cuda.Event() for _ in slots]
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    pinned = torch.cuda.host_memory_stats()["num_host_alloc"]
    ingested = 0
    try:
        torch.cuda.set_sync_debug_mode("error")
        for turn in range(60):
            rig.push("q", 2 * turn, 2 * turn + 1)
            rig.push("front", 2 * turn)
            ingested += rig.window.ingest(0)
            rig.window.enqueue(slots[turn % 3], rig.stream)
            done[turn % 3].record(rig.stream)
            while not done[turn % 3].query():
                pass
            rig.window.pop()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert ingested == 60
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert torch.cuda.host_memory_stats()["num_host_alloc"] == pinned
    assert rig.window.statistics().windows == 60


def test_scheduled_windows_run_ahead_and_each_finds_its_own_samples() -> None:
    """The host queues all of them at once; a recording's end is each one's own."""
    rig = Rig(stream("q", dim=1), windows="scheduled")
    slots = [rig.slot() for _ in range(4)]
    for slot in slots:
        rig.window.prepare(slot)
    with torch.cuda.stream(rig.stream):
        torch.cuda._sleep(20_000_000)
    for turn, slot in enumerate(slots):
        stamps = at_ms(*range(turn * 50, turn * 50 + 50))
        rig.case.rows[0].rings["q"].append(stamps, ramp(stamps, 1), 0)
        assert rig.window.ingest(now_ns(), [(turn * 50 + 40) * MS])
        rig.window.enqueue(slot, rig.stream)
        assert rig.window.ingest(now_ns())
    rig.stream.synchronize()
    for turn, slot in enumerate(slots):
        assert rig.window.pop().info.window_end_ns == [(turn * 50 + 40) * MS]
        assert slot["state.values"][0, -1].tolist() == [turn * 50 + 40]


def test_a_window_names_the_instruction_of_its_row() -> None:
    rig = Rig(stream("q", dim=1), rows=2, instructions=True)
    slot = rig.slot()
    rig.case.rows[1].instruction_id, rig.case.rows[1].conditioning_epoch = 5, 2
    rig.push("q", 1, 2, row=1)
    rig.cut(slot)
    rig.compare(slot)
    assert slot["instruction_id"].tolist() == [0, 5]


def test_a_row_that_awaits_its_text_is_absent_until_it_has_it() -> None:
    rig = Rig(stream("q", dim=1), stream("tip", dim=2), rows=2, instructions=True)
    slot = rig.slot()
    for row in (0, 1):
        rig.push("q", 1, 2, row=row)
        rig.push("tip", 1, 2, row=row)
    rig.case.rows[1].awaits_text = True
    rig.cut(slot)
    rig.compare(slot)
    assert slot["present"].tolist() == [True, False]
    rig.case.rows[1].awaits_text = False
    rig.cut(slot)
    rig.compare(slot)
    assert slot["present"].tolist() == [True, True]


def test_a_row_that_lacks_what_the_policy_needs_is_absent_until_it_has_it() -> None:
    rig = Rig(stream("q", dim=1), stream("tip", dim=2), rows=2, needs={"tip": Need(50 * MS)})
    slot = rig.slot()
    for row in (0, 1):
        rig.push("q", 1, 2, row=row)
    rig.push("tip", 1, 2)
    rig.push("tip", 3, row=1)  # behind the window's end
    rig.cut(slot)
    rig.compare(slot)
    assert slot["present"].tolist() == [True, False]
    rig.push("q", 3, row=1)
    rig.cut(slot)
    rig.compare(slot)
    assert slot["present"].tolist() == [True, True]


def commit(rig: Rig, row: int, start: float, *, points: int, delay: float, lease: float) -> None:
    actions = rig.random.normal(size=(points, 2)).astype(np.float32)
    rig.case.rows[row].commitment = Commitment(
        round(start * MS), 7 * MS, round(lease * MS), round(delay * MS), actions
    )


def test_the_executed_prefix_equals_the_cpus() -> None:
    rig = Rig(stream("q", dim=1), rows=4, prefix_steps=5)
    slot = rig.slot()
    for row in range(4):
        rig.push("q", *range(50), row=row)
    commit(rig, 0, 40, points=9, delay=23, lease=500)
    commit(rig, 1, 90, points=2, delay=0, lease=500)  # begins later, and is short
    commit(rig, 2, 40, points=9, delay=23, lease=55)  # expired at the first step
    rig.cut(slot)
    rig.compare(slot)
    assert slot["delay_steps"].tolist() == [2, 0, 0, 0]
    assert slot["executed_prefix"].abs().amax(dim=(1, 2)).gt(0).tolist() == [
        True,
        True,
        False,
        False,
    ]
    commit(rig, 3, -1000, points=60, delay=999, lease=500)  # all over: its last point is held
    rig.case.rows[0].commitment = None
    rig.cut(slot)
    rig.stream.synchronize()
    rig.window.pop()
    assert slot["delay_steps"].tolist() == [0, 0, 0, 5]
    held = rig.case.rows[3].commitment
    assert held is not None
    most = rig.window.rings.writer.commitment_words - COMMITMENT_WORDS  # two actions a word
    wanted = held.actions[min(60, most) - 1].tolist()
    assert slot["executed_prefix"][3, -1].tolist() == wanted


def test_a_window_taken_too_early_is_refused() -> None:
    rig = Rig()
    slot = rig.slot()
    rig.window.prepare(slot)
    with pytest.raises(ProtocolError, match="0 are queued"):
        rig.window.pop()
    with torch.cuda.stream(rig.stream):
        torch.cuda._sleep(20_000_000)
    rig.push("q", 1)
    rig.cut(slot)
    with pytest.raises(ProtocolError, match="not complete"):
        rig.window.pop()
    rig.stream.synchronize()
    assert rig.window.pop().present == [True]


def test_windows_between_which_nothing_came_are_made_of_the_same() -> None:
    rig = Rig()
    slot = rig.slot()
    rig.push("q", 1, 2)
    rig.cut(slot)
    rig.cut(slot)
    rig.push("q", 3)
    rig.cut(slot)
    rig.stream.synchronize()
    first, second, third = (rig.window.pop() for _ in range(3))
    assert first is second
    assert first.info.window_end_ns == [2 * MS]
    assert third.info.window_end_ns == [3 * MS]
    assert first.received_ns == [1]
    rig.case.check()


def test_ramps_come_out_as_ramps() -> None:
    """Against numbers known beforehand, not only against the twin."""
    rig = Rig(stream("q", dim=2))
    slot = rig.slot()
    stamps = at_ms(*range(0, 101, 3))
    rig.case.rows[0].rings["q"].append(stamps, ramp(stamps), 0)
    rig.cut(slot)
    torch.cuda.synchronize()
    wanted = 99 - 10.0 * np.arange(9)[::-1]
    np.testing.assert_allclose(slot["state.values"][0, :, 0].cpu(), wanted, rtol=1e-6)
