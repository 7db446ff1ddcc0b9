import fcntl
import json
import os
import socket
import sys
import termios
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from types import SimpleNamespace

import msgspec
import pytest
from robot_rig import wait_until

from ppstream.config.schema import (
    ActionConfig,
    PipelineConfig,
    PipelineShape,
    PolicyConfig,
    RecordConfig,
    ServiceConfig,
    StreamConfig,
    ViewConfig,
    WindowConfig,
)
from ppstream.control.generation import BUSY
from ppstream.control.peer import Peer
from ppstream.core.errors import ConfigError, HandshakeError, ProtocolError
from ppstream.launch import handshake
from ppstream.launch.course import Course
from ppstream.launch.handshake import compare_facts, configuration_facts
from ppstream.observe.run_folder import Run
from ppstream.policy.fingerprint import file_digest
from ppstream.wire.fields import WIRE_MAJOR
from ppstream.wire.rank_messages import (
    Drain,
    Heartbeat,
    RankHeart,
    RankHello,
    RankRefused,
    RankWelcome,
)

CONFIG = PipelineConfig(
    name="x",
    streams=(StreamConfig(name="q", dim=2, rate_hz=100),),
    window=WindowConfig(steps=4, dt_ms=10),
    actions=ActionConfig(names=("a",), horizon=4, dt_ms=10, low=(-1.0,), high=(1.0,), lease_ms=100),
    policy=PolicyConfig(target="p:build"),
)


def test_equal_configurations_agree():
    compare_facts(configuration_facts(CONFIG), configuration_facts(CONFIG), 1)


def test_difference_names_key_and_both_values():
    deeper = msgspec.structs.replace(CONFIG, pipeline=PipelineShape(d_in=3))
    with pytest.raises(HandshakeError, match=r"config\.pipeline\.d_in: rank 0 has 2, rank 1 has 3"):
        compare_facts(configuration_facts(CONFIG), configuration_facts(deeper), 1)


@pytest.mark.parametrize(
    "table",
    [
        {"service": ServiceConfig(endpoint="tcp://[::1]:1")},
        {"record": RecordConfig(file="/mnt/run.mcap")},
        {"view": ViewConfig(port=8765)},
    ],
)
def test_what_only_rank_0_reads_is_not_compared(table):
    elsewhere = msgspec.structs.replace(CONFIG, **table)
    compare_facts(configuration_facts(CONFIG), configuration_facts(elsewhere), 1)


def test_test_hook_set_on_one_rank_is_a_difference(monkeypatch):
    mine = configuration_facts(CONFIG)
    monkeypatch.setenv("PPSTREAM_TEST_DELAY", "1")
    with pytest.raises(HandshakeError, match="PPSTREAM_TEST_DELAY=1"):
        compare_facts(mine, configuration_facts(CONFIG), 1)


def with_weights(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    policy = PolicyConfig(target="p:build", weights=str(path))
    return configuration_facts(msgspec.structs.replace(CONFIG, policy=policy))


def test_weights_are_compared_by_what_they_hold_wherever_they_lie(tmp_path):
    mine = with_weights(tmp_path, "mine.safetensors", b"abc")
    compare_facts(mine, with_weights(tmp_path, "theirs.safetensors", b"abc"), 1)
    with pytest.raises(HandshakeError, match=r"config\.policy\.weights: rank 0 has .*, rank 1 has"):
        compare_facts(mine, with_weights(tmp_path, "other.safetensors", b"abd"), 1)


def test_weights_that_cannot_be_read_are_said_by_name(tmp_path):
    weights = tmp_path / "w.safetensors"
    weights.symlink_to("/proc/self/clear_refs")  # written alone, whoever asks
    with pytest.raises(ConfigError, match=r"policy\.weights: .*/w\.safetensors cannot be read: "):
        file_digest(str(weights))


def test_a_rank_that_hashes_its_weights_says_so_to_those_that_wait_for_it(tmp_path):
    weights, content = tmp_path / "w.safetensors", b"abc" * 1000
    os.mkfifo(weights)  # a slow disk
    config = msgspec.structs.replace(
        CONFIG, policy=PolicyConfig(target="p:build", weights=str(weights))
    )
    course, words = Course(config), []
    store = SimpleNamespace(rank=1, set=lambda key, word: words.append((key, word)))
    with ThreadPoolExecutor() as threads:
        hashing = threads.submit(handshake.hash_weights, config, course, store)
        with weights.open("wb", buffering=0) as disk:
            count = 0
            while len(words) < 4 and not hashing.done():
                count += disk.write(content)
                wait_until(lambda: hashing.done() or unread(disk) == 0)
            assert course.step_name == "the hash of policy.weights"
        assert hashing.result(60) == sha256(content * (count // len(content))).hexdigest()
    assert [key for key, _ in words[:4]] == [f"{BUSY}/1", BUSY] * 2
    assert words[0][1] == words[1][1] != words[2][1]


def unread(pipe):
    """Bytes that a pipe holds."""
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


def test_why_a_rank_was_refused_is_read_though_the_other_one_has_left(monkeypatch):
    (control, theirs), (heart, gone) = ([Peer(end) for end in socket.socketpair()] for _ in "ab")
    gone.close()
    theirs.send(RankRefused(("config.pipeline.d_in: rank 0 has 2, rank 1 has 3",)))
    ends = iter((control, heart))
    monkeypatch.setattr(handshake, "connect", lambda *_, **__: next(ends))
    store = SimpleNamespace(get=lambda key, limit_s: "token", rank=1, generation=0)
    with pytest.raises(HandshakeError, match="rank 0 has 2, rank 1 has 3"):
        handshake.introduce(CONFIG, store)
    for end in (control, heart, theirs):
        end.close()


def test_where_the_policy_rank_runs_and_on_what_is_kept(tmp_path):
    (near, far), hearts = ([Peer(end) for end in socket.socketpair()] for _ in range(2))
    store = SimpleNamespace(
        generation=0, world_size=2, get=lambda key, limit_s: "token", set=lambda *_: None
    )
    who = {"rank": 1, "generation": 0, "host": "b", "boot_id": "b", "pid": 7}
    far.send(RankHello(major=WIRE_MAJOR, token="token", facts=configuration_facts(CONFIG), **who))
    hearts[1].send(RankHeart("token"))
    coming = iter((near, hearts[0]))
    listener = SimpleNamespace(accept=lambda limit_s, name="": next(coming))
    assert handshake.admit(CONFIG, store, listener, Run(tmp_path)) is near
    kept = json.loads((tmp_path / "run.json").read_text())["policy_rank"]
    assert kept == configuration_facts(CONFIG)["informational"]
    assert {"host", "boot_id", "pid", "python", "torch"} <= kept.keys()
    assert isinstance(far.receive(10**9), RankWelcome)
    assert near.heart is hearts[0]
    for peer in (near, far, hearts[1]):
        peer.close()


@pytest.mark.parametrize("frame", [RankHeart("guessed"), Heartbeat(1)])
def test_a_stranger_s_heart_is_refused(tmp_path, frame):
    (near, far), hearts = ([Peer(end) for end in socket.socketpair()] for _ in range(2))
    store = SimpleNamespace(
        generation=0, world_size=2, get=lambda key, limit_s: "token", set=lambda *_: None
    )
    who = {"rank": 1, "generation": 0, "host": "b", "boot_id": "b", "pid": 7}
    far.send(RankHello(major=WIRE_MAJOR, token="token", facts=configuration_facts(CONFIG), **who))
    hearts[1].send(frame)
    hearts[1].send(Drain("the next frame"))
    coming = iter((near, hearts[0]))
    with pytest.raises(ProtocolError, match="without this run's token"):
        handshake.admit(
            CONFIG,
            store,
            SimpleNamespace(accept=lambda limit_s, name="": next(coming)),
            Run(tmp_path),
        )
    for peer in (near, far, hearts[1]):
        peer.close()
