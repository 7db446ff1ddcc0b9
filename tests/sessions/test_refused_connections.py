"""Robots whose keys rank 0 turns away: both sides say so."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest
from robot_rig import make_client, make_config, serving, wait_until

from ppstream.config.schema import ServiceConfig
from ppstream.core.errors import PeerLostError
from ppstream.sessions.refused_connections import SAID_NS, RefusedConnections
from ppstream.wire.keys import allow, client_keys, make_pair


def service(folder: Path) -> ServiceConfig:
    """A server's keys, one robot that it serves, and a stranger."""
    for name in ("server", "other", "arm", "stranger"):
        key = make_pair(name, folder)
        if name == "arm":
            allow(folder / "allowed", name, key)
    return ServiceConfig(
        endpoint="tcp://127.0.0.1:*",
        secret_key=str(folder / "server.secret"),
        allowed_keys=str(folder / "allowed"),
    )


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        pytest.param(("stranger", "server"), "so far: the key is not in {}/allowed", id="key"),
        pytest.param(
            ("arm", "other"), "'ppstream keys public {}/server.secret'", id="server's key"
        ),
        pytest.param(None, "so far: a connection without keys", id="no keys"),
    ],
)
def test_rank_0_and_the_robot_say_that_keys_may_differ(
    keys: tuple[str, str] | None, says: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = msgspec.structs.replace(make_config(), service=service(tmp_path))
    own = None
    if keys is not None:
        own = client_keys(tmp_path / f"{keys[0]}.secret", tmp_path / f"{keys[1]}.public")
    told: list[str] = []
    with serving(config) as server, make_client(server.sessions.endpoint, keys=own) as client:
        with pytest.raises(PeerLostError, match=r"no answer within 3 s: .*, or it refuses .* keys"):
            client.connect(3, say=told.append)
        wait_until(lambda: says.format(tmp_path) in caplog.text)
    assert "its ranks may still start, or it refuses this robot's keys: 'ppstream keys" in told[0]


def test_a_reason_is_said_once_and_again_minutes_later_if_more_came(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    news = RefusedConnections(service(tmp_path))
    for now_ns, refused in enumerate(({}, {"key": 1}, {"key": 2}, {"key": 2, "closed": 9})):
        news.note(refused, now_ns)
    assert len(caplog.records) == 1
    news.note({"key": 2, "handshake": 1}, 2)
    news.note({"key": 2, "handshake": 1}, 2 * SAID_NS)
    assert len(caplog.records) == 3
    news.note({"key": 2, "handshake": 1}, 9 * SAID_NS)
    told = [record.getMessage() for record in caplog.records]
    wanted = ["(key): 1 so far", "(handshake): 1 so far", "(key): 2 so far"]
    assert [want in line for want, line in zip(wanted, told, strict=True)] == [True] * 3
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
