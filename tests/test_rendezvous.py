from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest

from ppstream.clock import NS_PER_S
from ppstream.errors import ConfigError, PeerLostError
from ppstream.messages import Drain
from ppstream.rendezvous import ADDRESS_KEY, Listener, connect


class Strings:
    """A store of one process."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str, timeout_s: float) -> str:
        return self.values[key]


@pytest.mark.parametrize("host", [None, "127.0.0.1", "localhost"])
def test_ranks_meet_at_the_published_address(host: str | None) -> None:
    store = Strings()
    before = len(os.listdir("/proc/self/fd"))
    listener = Listener(store, host=host)
    first, second = connect(store, 5.0), connect(store, 5.0)
    for number, peer in enumerate((first, second)):
        accepted = listener.accept(5.0)
        assert (accepted.local_host is None) == (host is None)
        peer.send(Drain(str(number)))
        assert accepted.receive(5 * NS_PER_S) == Drain(str(number))
        accepted.send(Drain("answer"))
        assert peer.receive(5 * NS_PER_S) == Drain("answer")
        accepted.close()
        peer.close()
    listener.close()
    listener.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_unix_socket_is_private_and_leaves_nothing_behind() -> None:
    store = Strings()
    listener = Listener(store)
    path = Path(store.values[ADDRESS_KEY].removeprefix("unix:"))
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    listener.close()
    assert not path.parent.exists()
    with pytest.raises(PeerLostError, match="does not answer"):
        connect(store, 1.0)


def test_a_long_temporary_folder_still_gives_a_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    store = Strings()
    listener = Listener(store)
    connect(store, 1.0).close()
    listener.close()
    assert list(deep.iterdir()) == []


def test_an_absent_rank_is_an_error_within_the_limit() -> None:
    listener = Listener(Strings())
    with pytest.raises(PeerLostError, match="no policy rank connected within"):
        listener.accept(0.02)
    listener.close()


def test_an_address_of_another_host_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="cannot be listened on"):
        Listener(Strings(), host="192.0.2.1")
