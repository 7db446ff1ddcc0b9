"""What opening a link between GPUs leaves in the log; the link itself is a stand-in."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ppstream.launch import device_ranks
from ppstream.links.latency_probe import LinkLatency
from ppstream.links.slots import BACK, FRONT


@pytest.mark.parametrize("side", [FRONT, BACK])
@pytest.mark.parametrize("waits", ["kernel", "driver"])
def test_a_link_opens_within_the_limit_of_the_start_and_the_log_says_which_and_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, side: str, waits: str
) -> None:
    link = SimpleNamespace(name="pinned")
    asked: list[Any] = []
    events: list[Any] = []
    monkeypatch.setattr(
        device_ranks,
        "open_device",
        lambda kind, side, *_, timeout_s, spins, stamps: (
            asked.append((kind, side, timeout_s, spins)) or link
        ),
    )
    monkeypatch.setattr(
        device_ranks, "measure", lambda *given: asked.append(given) or LinkLatency(3456, 64)
    )
    placement: Any = SimpleNamespace(link="pinned", why="no peer access")
    log: Any = SimpleNamespace(event=lambda name, **fields: events.append((name, fields)))
    store: Any = None
    config: Any = SimpleNamespace(
        link=SimpleNamespace(wait=waits), liveness=SimpleNamespace(start_s=500.0)
    )
    with caplog.at_level(logging.INFO, logger="ppstream"):
        opened = device_ranks.open_link(
            config, placement, side, store, store, torch.device("cpu"), log
        )
    assert opened is link
    assert asked == [("pinned", side, 500.0, waits == "kernel"), (link, side, 500.0)]
    fields = {"link": "pinned", "why": "no peer access", "one_way_ns": 3456, "note_bytes": 64}
    fields |= {"stamps": "events", "stamps_why": "nobody asked for stamps"}
    assert events == [("link", fields)]
    said = "link pinned: no peer access; 3.5 µs one way for 64 bytes, queued ahead"
    assert caplog.messages == ([said] if side == FRONT else [])
