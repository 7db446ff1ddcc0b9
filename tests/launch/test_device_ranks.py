"""Ports of the ranks on a host, and the log of a link between GPUs, itself a stand-in."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ppstream import ConfigError
from ppstream.config.load import read
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


@pytest.mark.parametrize(
    ("rank", "local_rank", "local_world_size", "is_refused"),
    [(0, 0, 1, False), (0, 0, 2, True), (1, 1, 2, True), (2, 0, 2, False)],
)
def test_the_ports_of_ranks_are_taken_on_their_own_host_alone(
    monkeypatch: pytest.MonkeyPatch,
    rank: int,
    local_rank: int,
    local_world_size: int,
    is_refused: bool,
) -> None:
    for key, value in (("", rank), ("LOCAL_", local_rank)):
        monkeypatch.setenv(f"{key}RANK", str(value))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local_world_size))
    said = ""
    try:
        device_ranks.place_here(read("two_cameras", ("metrics.port=7999", "view.port=8000")), 4)
    except ConfigError as error:  # which two hosts without gloo is, too
        said = str(error)
    assert ("view.port: got port 8000, which metrics of rank 1 has" in said) == is_refused
