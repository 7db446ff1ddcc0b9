"""The guard of a replica that may be lost: who has one, and how it ends."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from ranks import CONFIG

from ppstream.config import load
from ppstream.launch import guard

SPARE = ("placement.replicas=3", "placement.replicas_min=2")


@pytest.mark.parametrize(
    ("rank", "settings", "wanted"),
    [
        (1, SPARE, True),
        (3, SPARE, True),
        (0, SPARE, False),
        (1, SPARE[:1], False),
        (1, (), False),
    ],
)
def test_replicas_that_may_be_lost_have_one(
    rank: int, settings: tuple[str, ...], wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load.read(str(CONFIG), settings)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert not guard.is_wanted(config, rank), "no launcher has started it"
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert guard.is_wanted(config, rank) == wanted
    monkeypatch.setenv(guard.LINKED_FD, "9")
    assert not guard.is_wanted(config, rank), "it has one"


def test_a_rank_that_ends_before_rank_0_can_see_it_ends_its_guard_so() -> None:
    command = [sys.executable, "-m", guard.__name__, "--config", str(CONFIG)]
    ranks = {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    environment = os.environ | ranks | {guard.RANK: "1"}
    refused = [*command, "--set", "placement.replicas=0"]
    assert subprocess.run(refused, env=environment, timeout=60).returncode == 11
