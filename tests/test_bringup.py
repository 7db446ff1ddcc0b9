import pytest

from ppstream.bringup import Beside, pass_or_raise
from ppstream.errors import ExitCode, GateFailedError, GateInconclusiveError
from ppstream.verdict import Verdict


def test_pass_is_ready():
    pass_or_raise(Verdict.PASS, [], ())


def test_fail_ends_with_30_whatever_is_accepted():
    with pytest.raises(GateFailedError, match="LOW_OVERLAP") as caught:
        pass_or_raise(Verdict.FAIL, ["LOW_OVERLAP"], ("NOTHING_TO_HIDE",))
    assert caught.value.exit_code is ExitCode.GATE_FAIL


def test_inconclusive_ends_with_31_unless_every_reason_is_accepted():
    with pytest.raises(GateInconclusiveError) as caught:
        pass_or_raise(Verdict.INCONCLUSIVE, ["NOTHING_TO_HIDE"], ())
    assert caught.value.exit_code is ExitCode.GATE_INCONCLUSIVE
    pass_or_raise(Verdict.INCONCLUSIVE, ["NOTHING_TO_HIDE", "LOW_OVERLAP"], ("NOTHING_TO_HIDE",))
    with pytest.raises(GateInconclusiveError, match="TOO_FEW"):
        pass_or_raise(Verdict.INCONCLUSIVE, ["TOO_FEW", "NOTHING_TO_HIDE"], ("NOTHING_TO_HIDE",))


class Counting:
    fds = (3,)
    exhausted = False

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.drained = 0

    def drain(self, now_ns: int) -> int:
        self.drained += 1
        return self.samples

    def next_due_ns(self) -> int | None:
        return 42


def test_robots_are_drained_beside_bring_up_but_their_samples_do_not_count():
    made_up, robots = Counting(5), Counting(7)
    source = Beside(made_up, robots)
    assert source.drain(0) == 5
    assert robots.drained == 1
    assert source.fds == (3, 3)
