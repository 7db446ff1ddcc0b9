"""Whose rows a complete window had is known per row, and read once for all windows of a table."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pipeline_in_process import small_config

from ppstream.ingest.device.window_records import TakenWindow
from ppstream.ingest.window import WindowInfo
from ppstream.observe.log_writer import EnvelopeRecord
from ppstream.pipeline.device import stage_a
from ppstream.pipeline.device.stage_a import RingWindows
from ppstream.pipeline.flight import Flight, Owner

LEASE = 60_000_000_000


class Windows:
    """Complete ones, one after the other."""

    def __init__(self, *taken: TakenWindow) -> None:
        self._taken = list(taken)

    def pop(self) -> TakenWindow:
        return self._taken.pop(0)


def taken(end: int, received: tuple[int, int]) -> TakenWindow:
    info = WindowInfo([end, 0], max(received), {"joints": [3, None]})
    return TakenWindow(info, [True, False], [(7, 1), (0, 0)], list(received))


@pytest.fixture
def settle(monkeypatch: pytest.MonkeyPatch) -> Any:
    def settle(*windows: TakenWindow) -> list[Flight]:
        config = small_config("batch.rows=2")
        stage: Any = RingWindows(config, (), torch.device("cpu"), None)  # type: ignore[arg-type]
        monkeypatch.setattr(stage_a, "DeviceWindow", lambda *_: Windows(*windows))
        stage.intake = SimpleNamespace(rows=(), banks={})
        flights = [Flight(n, 0, n, EnvelopeRecord()) for n in range(len(windows))]
        for flight in flights:
            stage.settle(flight)
        return flights

    return settle


def test_a_row_has_the_arrival_of_its_own_newest_sample(settle: Any) -> None:
    (flight,) = settle(taken(100, (50, 80)))
    assert flight.owners == [
        Owner(True, (7, 1), 100, 100 + LEASE, 50),
        Owner(False, (0, 0), 0, LEASE, 80),
    ]
    assert flight.received_ns == flight.record.tRx == 80
    assert flight.record.input_age_ns == {"joints": [3, None]}
    record = flight.record
    assert (record.session, record.session_epoch) == ([7, 0], [1, 0])
    assert (record.window_end_ns, record.expires_ns) == ([100, 0], [100 + LEASE, LEASE])


def test_windows_of_one_table_share_what_is_known_and_others_do_not(settle: Any) -> None:
    same, other = taken(100, (50, 80)), taken(120, (60, 80))
    first, second, third = settle(same, same, other)
    assert first.owners is second.owners
    assert second.record.window_end_ns == [100, 0]
    assert third.owners[0] == Owner(True, (7, 1), 120, 120 + LEASE, 60)
    assert third.record.window_end_ns == [120, 0]
