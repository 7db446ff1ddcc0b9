import signal
import socket
import subprocess
import sys

import pytest

from ppstream.control.peer_process import HeldProcess

CONNECT = """
import socket, sys, time
connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[1])
time.sleep(60)
"""


@pytest.fixture
def connected(tmp_path):
    """A process that connected to us, and our end of the socket."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        child = subprocess.Popen([sys.executable, "-c", CONNECT, str(tmp_path / "socket")])
        connection, _ = listener.accept()
        yield child, connection
        connection.close()
        child.kill()
        child.wait()


def test_a_stopped_process_is_known_and_ended(connected):
    child, connection = connected
    process = HeldProcess.at_end_of(connection.fileno())
    assert process.pid == child.pid
    child.send_signal(signal.SIGSTOP)
    assert not process.wait_gone(0.1)
    assert process.state() == "T"
    process.end()
    assert process.wait_gone(5)
    assert child.wait(5) == -signal.SIGKILL
    process.end()  # it is gone: nobody else is hit
    assert process.state() == "gone"
    process.close()
    process.close()


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("import os; os._exit(5)", "exit status 5"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "signal 11 SIGSEGV"),
    ],
)
def test_how_a_process_ended_is_known_until_its_parent_has_asked(code, told):
    child = subprocess.Popen([sys.executable, "-c", code])
    seen, late = HeldProcess.of(child.pid), HeldProcess.of(child.pid)
    assert seen.ended_with is None
    assert seen.wait_gone(30)
    child.wait()
    assert late.wait_gone(0)
    assert (seen.ended_with, late.ended_with) == (told, "")
    seen.close()
    late.close()


def test_one_that_this_process_has_killed_ended_with_nothing_of_its_own(connected):
    child, _ = connected
    process = HeldProcess.of(child.pid)
    process.end()
    assert process.wait_gone(5)
    assert process.ended_with == ""
    process.close()


def test_nobody_is_held_behind_tcp_or_an_own_socket():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert HeldProcess.at_end_of(ours.fileno()) is None
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connection = socket.create_connection(listener.getsockname())
        with connection:
            assert HeldProcess.at_end_of(connection.fileno()) is None
