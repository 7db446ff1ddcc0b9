"""Requirements of a run on this host: addresses that nothing else has, files that can be read."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from ppstream.config import load
from ppstream.launch.requirements import addresses_taken
from ppstream.wire.transports import bind_server

READ = """
import os, sys
from ppstream.config import load
from ppstream.core.errors import ConfigError
load.read("bench")
os.setgid(65534), os.setuid(65534)
try:
    load.read("bench", [f"policy.weights={sys.argv[1]}", f"bringup.recording={sys.argv[1]}"])
except ConfigError as error:
    print(error)
"""


def taken(*settings: str, ranks: int = 2) -> list[str]:
    return addresses_taken(load.read("bench", settings), ranks)


def test_each_address_that_another_program_has_is_told(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        line = (
            f"metrics.port: cannot listen on 127.0.0.1:{port}: Address already in use; give "
            "another, or 0 for any free port"
        )
        assert taken(f"metrics.port={port}", ranks=1) == [line]
        assert line in taken(f"metrics.port={port - 1}", ranks=2)  # as rank 1's
        assert line not in taken(f"metrics.port={port - 1}", ranks=1)
        assert taken(f"view.port={port}")[0].startswith("view.port: cannot listen on")
        (found,) = taken(f"service.endpoint=tcp://127.0.0.1:{port}")
        assert found.startswith(f"service.endpoint: cannot listen on 127.0.0.1:{port}: ")
    assert taken(f"metrics.port={port}", f"view.port={port}", ranks=1) == []


def test_a_socket_s_file_is_taken_while_its_server_listens(tmp_path: Path) -> None:
    endpoint = f"unix://{tmp_path}/robots"
    setting = f"service.endpoint={endpoint}"
    server = bind_server(endpoint)
    (found,) = taken(setting)
    assert found.startswith(f"service.endpoint: cannot listen on {endpoint!r}: in use by a running")
    server.close()
    assert taken(setting) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone can become a user who may not read it")
@pytest.mark.parametrize(
    ("mode", "why"),
    [
        (0o711, "which this user cannot read; want a file that it can"),
        (0o700, "in a folder that this user cannot enter; want one that it can"),
    ],
)
def test_files_that_this_user_cannot_read_are_told_with_all_other_problems(
    mode: int, why: str
) -> None:
    with TemporaryDirectory() as folder:  # that of a test nobody else enters
        file = Path(folder) / "w.safetensors"
        file.touch(mode=0o600)
        Path(folder).chmod(mode)
        done = subprocess.run([sys.executable, "-c", READ, file], capture_output=True, text=True)
    assert done.stderr == ""
    for name in ("policy.weights", "bringup.recording"):
        assert f"{name}: got '{file}', {why}" in done.stdout.splitlines()
