import msgspec
import pytest

from ppstream.config import (
    ActionConfig,
    PipelineConfig,
    PipelineShape,
    PolicyConfig,
    ServiceConfig,
    StreamConfig,
    WindowConfig,
)
from ppstream.errors import HandshakeError
from ppstream.handshake import compare, facts

CONFIG = PipelineConfig(
    name="x",
    streams=(StreamConfig(name="q", dim=2, rate_hz=100),),
    window=WindowConfig(steps=4, dt_ms=10),
    actions=ActionConfig(names=("a",), horizon=4, dt_ms=10, low=(-1.0,), high=(1.0,), lease_ms=100),
    policy=PolicyConfig(target="p:build"),
)


def test_equal_configurations_agree():
    compare(facts(CONFIG), facts(CONFIG), 1)


def test_difference_names_key_and_both_values():
    deeper = msgspec.structs.replace(CONFIG, pipeline=PipelineShape(d_in=3))
    with pytest.raises(HandshakeError, match=r"config\.pipeline\.d_in: rank 0 has 2, rank 1 has 3"):
        compare(facts(CONFIG), facts(deeper), 1)


def test_what_only_rank_0_reads_is_not_compared():
    elsewhere = msgspec.structs.replace(CONFIG, service=ServiceConfig(endpoint="tcp://[::1]:1"))
    compare(facts(CONFIG), facts(elsewhere), 1)


def test_test_hook_set_on_one_rank_is_a_difference(monkeypatch):
    mine = facts(CONFIG)
    monkeypatch.setenv("PPSTREAM_TEST_DELAY", "1")
    with pytest.raises(HandshakeError, match="PPSTREAM_TEST_DELAY=1"):
        compare(mine, facts(CONFIG), 1)
