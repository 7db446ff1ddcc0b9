from __future__ import annotations

import os
from pathlib import Path

import pytest

from ppstream.wire.endpoints import (
    OWN_MODE,
    UNIX_PATH_MAX_BYTES,
    endpoint_problem,
    folder_problem,
    is_local,
)


@pytest.mark.parametrize(
    ("endpoint", "local"),
    [
        ("tcp://127.0.0.1:5870", True),
        ("tcp://127.8.9.10:1", True),
        ("tcp://[::1]:5870", True),
        ("tcp://localhost:5870", True),
        ("tcp://lo:*", True),
        ("unix:///run/robots", True),
        ("tcp://0.0.0.0:5870", False),
        ("tcp://*:5870", False),
        ("tcp://[::]:5870", False),
        ("tcp://192.168.1.4:5870", False),
        ("tcp://128.0.0.1:5870", False),
        ("tcp://eth0:5870", False),
        ("tcp://localhost.example.org:5870", False),
        ("tcp://127.0.0.1.example.org:5870", False),
        ("tcp://[::ffff:192.168.1.4]:5870", False),
        ("nonsense", False),
    ],
)
def test_only_loopback_and_unix_sockets_are_local(endpoint: str, local: bool) -> None:
    assert is_local(endpoint) is local


@pytest.mark.parametrize(
    ("endpoint", "fits"),
    [
        ("tcp://127.0.0.1:65535", True),
        ("tcp://127.0.0.1:65536", False),
        ("tcp://127.0.0.1", False),
        ("tcp://:5870", False),
        ("udp://127.0.0.1:5870", False),
        ("ipc:///run/robots", False),
        ("unix://", False),
        ("unix://relative", False),
        ("unix:///folder/", False),
        ("unix:///nul\0", False),
        ("unix:///" + "a" * (UNIX_PATH_MAX_BYTES - 1), True),
        ("unix:///" + "a" * UNIX_PATH_MAX_BYTES, False),
    ],
)
def test_what_cannot_be_an_endpoint_is_said(endpoint: str, fits: bool) -> None:
    assert (endpoint_problem(endpoint) is None) is fits


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone may give a link to another user")
def test_a_link_of_another_user_to_a_folder_of_one_s_own_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir(OWN_MODE)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "folder")
    assert folder_problem(link / "robot", is_shared=False) is None
    os.lchown(link, 1234, -1)
    problem = folder_problem(link / "robot", is_shared=False)
    assert problem is not None
    assert f"{link} belongs to user 1234; want a folder of your own" in problem
