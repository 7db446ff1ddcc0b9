import socket
import threading

import pytest
from pipeline_in_process import small_config

from ppstream import ends, meeting
from ppstream.back import telling
from ppstream.config_problems import problems
from ppstream.control import Peer
from ppstream.ends import PeerLeftError, RankEnd
from ppstream.errors import ExitCode, PeerFrozenError, PeerLostError, PolicyError
from ppstream.messages import Goodbye
from ppstream.peer_process import PeerProcess
from ppstream.runs import Run
from ppstream.watchdog import Watchdog


class OtherProcess(PeerProcess):
    """A process that leaves, or does not."""

    def __init__(self, *, leaves):
        super().__init__(4242, -1)
        self.leaves, self.waited_s, self.ended = leaves, None, False

    def wait_gone(self, limit_s):
        self.waited_s = limit_s
        return self.leaves

    def state(self):
        return "T"

    def end(self):
        self.ended = True


@pytest.mark.parametrize(
    ("rank", "frozen", "leaves", "ended"),
    [
        (0, True, False, True),
        (0, False, False, True),
        (0, False, True, False),
        (1, True, False, True),
        (1, False, False, False),  # rank 0 may have a robot to end
    ],
)
def test_a_frozen_or_stuck_process_is_ended_and_a_leaving_one_is_not(rank, frozen, leaves, ended):
    end = RankEnd(rank)
    end.peer_process = other = OtherProcess(leaves=leaves)
    text = end.see_peer_out(frozen=frozen)
    assert other.ended is ended
    assert ("process 4242 (state T) was ended" in text) is ended
    if frozen:
        assert other.waited_s == 0


def failing(tmp_path, rank, capsys, **said):
    end = RankEnd(rank)
    end.run = Run(tmp_path)
    end.peer_said = said.get("peer_said")
    end.say_who_failed_first(said.get("code", ExitCode.PEER_LOST))
    return capsys.readouterr().err


def test_the_rank_that_failed_first_is_named(tmp_path, capsys):
    run = Run(tmp_path)
    run.record_exit(1, ExitCode.PEER_LOST, "rank 0 is gone")
    run.record_exit(0, ExitCode.WATCHDOG, "the decode thread")
    said = failing(tmp_path, 1, capsys)
    assert said == "ppstream: first to fail: rank 0: exit 21 WATCHDOG the decode thread\n"
    assert failing(tmp_path, 0, capsys, code=ExitCode.WATCHDOG) == ""  # its own line says it


def test_a_rank_that_said_nothing_is_named_and_one_that_did_is_quoted(tmp_path, capsys):
    assert "rank 1: it left no exit code" in failing(tmp_path, 0, capsys)
    said = failing(tmp_path, 0, capsys, peer_said="exit 26 POLICY_OUTPUT why")
    assert said == "ppstream: first to fail: rank 1: exit 26 POLICY_OUTPUT why\n"


def test_ends_of_an_earlier_generation_blame_nobody(tmp_path):
    run = Run(tmp_path)
    run.record_exit(1, ExitCode.WATCHDOG, "stuck", generation=0)
    assert run.first_to_fail(1) is None
    assert run.first_to_fail(0)[0] == 1


@pytest.fixture
def peers():
    ours, theirs = (Peer(end) for end in socket.socketpair())
    yield ours, theirs
    ours.close()
    theirs.close()


def test_the_last_words_of_a_lost_rank_are_the_reason(peers):
    ours, theirs = peers
    theirs.send(Goodbye(int(ExitCode.POLICY_OUTPUT), "NaN for ever"))
    theirs.close()
    with pytest.raises(PeerLeftError, match="26 POLICY_OUTPUT: NaN for ever"), telling(ours):
        raise PeerLostError("Broken pipe")
    assert meeting.last_words(ours) is not None  # it stays readable


def test_an_error_is_told_to_the_other_rank_and_survives_its_absence(peers):
    ours, theirs = peers
    with pytest.raises(PolicyError), telling(ours):
        raise PolicyError("five in a row")
    said = theirs.receive(10**9)
    assert (said.code, said.reason) == (26, "five in a row")
    theirs.close()
    with pytest.raises(ZeroDivisionError), telling(ours):
        raise ZeroDivisionError


def test_silence_is_frozen_and_a_sign_of_life_by_another_way_counts(peers):
    ours, _ = peers
    now_ns = ours.last_heard_ns + 3 * 10**9
    with pytest.raises(PeerFrozenError, match=r"silent for 3\.00 s, limit 2\.00 s"):
        ours.check_alive(now_ns, 2 * 10**9)
    ours.last_heard_ns = now_ns  # a result came over the link
    ours.check_alive(now_ns, 2 * 10**9)


def test_heartbeat_and_watchdog_are_one_pair():
    for setting in ("liveness.heartbeat_ms=500", "liveness.watchdog_s=1.5"):
        path = setting.partition("=")[0]
        with pytest.raises(Exception, match=path.replace(".", r"\.")):
            small_config(setting)
    assert problems(small_config("liveness.watchdog_s=1.6")) == []


def test_a_run_s_folder_is_private_on_every_host(tmp_path):
    for run in (Run.create(tmp_path, keep=3), Run.joined(tmp_path / "far" / "run")):
        assert run.directory.stat().st_mode & 0o777 == 0o750


def test_a_rank_with_a_stacks_file_keeps_it_private(tmp_path):
    run = Run.create(tmp_path, keep=3)
    path = run.stacks_path(0, 1)
    assert path.name == "rank0.gen1.stacks.txt"
    watchdog = Watchdog(list, lambda: 1, lambda text: None, path, held_ns=10**9)
    assert path.stat().st_mode & 0o777 == 0o640
    watchdog.stop()


def test_a_rank_that_has_decided_keeps_its_code_when_the_other_goes_first(monkeypatch):
    monkeypatch.setattr(ends, "LOST_GRACE_S", 0.01)
    monkeypatch.setattr(ends, "DECIDED_GRACE_S", 0.01)
    for decided, code in ((None, 20), ((ExitCode.POLICY_OUTPUT, "NaN"), 26)):
        end, left, done = RankEnd(0), [], threading.Event()
        end.decided = decided

        def leave(code, reason, left=left, done=done):
            left.append(int(code))
            done.set()

        monkeypatch.setattr(end, "leave", leave)
        end.leave_when_lost()
        assert done.wait(10)
        assert left == [code]
