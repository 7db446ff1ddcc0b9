"""The gate in front of ready: what it accepts, and what nobody can have it accept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from faulty_runs import robot, served
from golden_runs import GoldenRun, ms, simulate, stages
from judging import judged
from pipeline_in_process import small_config

from ppstream.analysis.judge import judge
from ppstream.analysis.log_reader import read_run
from ppstream.analysis.period_model import PipelineForm
from ppstream.analysis.run_report import RunReport
from ppstream.core.errors import ExitCode, GateFailedError, GateInconclusiveError
from ppstream.pipeline.bringup import AllLate, Beside, check_lease, gate, pass_or_raise

SERIAL = PipelineForm("serial", "decode_first")


def contended() -> GoldenRun:
    """Every stage takes twice its time, and by their stamps they run beside each other."""
    golden = simulate(stages(a=4, b=12, c=6))
    golden.manifest["standalone"] = {"A_ns": ms(2), "B_ns": ms(6), "C_ns": ms(3)}
    return golden


def too_few() -> GoldenRun:
    return simulate(stages(a=0.05, c=0.05), n=60)


def unsafe() -> GoldenRun:
    golden = simulate(form=SERIAL)
    golden.lines[30]["outstanding_max"] = 3
    return golden


def report(golden: GoldenRun, *accept: str) -> RunReport:
    golden.manifest["config"] = {"bringup": {"accept": list(accept)}}
    busy = {"usable_cpus": 2, "busy_threads": 3, "load_1min": 8.6, "steal_share": 0.12}
    golden.extra.append({"kind": "event", "name": "machine"} | busy)
    return judged(golden)


def test_pass_is_ready() -> None:
    pass_or_raise(report(simulate()))


@pytest.mark.parametrize(
    ("golden", "reason", "error", "code"),
    [
        (lambda: simulate(form=SERIAL), "LOW_OVERLAP", GateFailedError, ExitCode.GATE_FAIL),
        (contended, "CONTENDED", GateFailedError, ExitCode.GATE_FAIL),
        (
            lambda: simulate(stages(a=0.05, c=0.05)),
            "NOTHING_TO_HIDE",
            GateInconclusiveError,
            ExitCode.GATE_INCONCLUSIVE,
        ),
    ],
)
def test_speed_is_refused_unless_it_is_accepted_and_stays_what_it_is(
    golden: Any, reason: str, error: type[Exception], code: ExitCode
) -> None:
    others = {"LOW_OVERLAP", "CONTENDED", "NOTHING_TO_HIDE"} - {reason}
    refused = report(golden(), *others)
    assert refused.reasons == [reason]
    assert refused.accepted == []
    with pytest.raises(error, match=reason) as caught:
        pass_or_raise(refused)
    assert caught.value.exit_code is code
    assert "load 8.6 on 2 usable CPUs, 12% stolen: 3 threads" in str(caught.value)
    serving = report(golden(), reason)
    pass_or_raise(serving)
    assert serving.accepted == [reason]
    assert serving.verdict is refused.verdict
    assert serving.exit_code == 0
    assert refused.exit_code == int(refused.verdict)
    assert serving.statements[0].startswith(f"SERVING, overlap refused: {reason} accepted; one ")


@pytest.mark.parametrize(
    ("golden", "further"), [(unsafe, "QUEUE_BOUND"), (too_few, "TOO_FEW")], ids=["safety", "doubt"]
)
def test_further_reasons_are_never_accepted(golden: Any, further: str) -> None:
    found = report(golden(), "LOW_OVERLAP", "CONTENDED", "NOTHING_TO_HIDE", further)
    assert further in found.reasons
    assert found.accepted == []
    with pytest.raises((GateFailedError, GateInconclusiveError), match=further):
        pass_or_raise(found)


class Log:
    generation = 1

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def flush(self) -> None:
        pass

    def event(self, name: str, **fields: Any) -> None:
        self.events.append({"name": name} | fields)


def gate_of_a_new_start(folder: Path) -> dict[str, Any]:
    """The verdict that generation 1 logs, which went well by itself."""
    restarted = simulate(generation=1)
    restarted.generation = 1
    restarted.write(folder)
    rank0: Any = SimpleNamespace(log=Log())
    gate(rank0, SimpleNamespace(directory=folder))  # type: ignore[arg-type]
    (verdict,) = rank0.log.events
    return {"verdict": verdict["verdict"], "reasons": verdict["reasons"]}


@pytest.mark.parametrize(
    ("before", "reason"),
    [
        (
            lambda: served(stages()).tell(robot(held_ns=ms(60_000), faults=1, fault="lease")),
            "SERVICE_HELD",
        ),
        (lambda: served(stages()).put(at=slice(400, 401), outstanding_max=3), "QUEUE_BOUND"),
    ],
    ids=["robots", "safety"],
)
def test_what_came_before_a_restart_does_not_refuse_the_new_start(
    before: Callable[[], GoldenRun], reason: str, tmp_path: Path
) -> None:
    before().write(tmp_path)
    assert gate_of_a_new_start(tmp_path) == {"verdict": "PASS", "reasons": []}
    assert reason in judge(read_run(tmp_path)).reasons  # the report still says it


def test_a_new_start_does_not_wait_until_all_that_was_logged_before_is_read(tmp_path: Path) -> None:
    """A day of service is some 10 GB, which would be read while robots hold."""
    served(stages()).write(tmp_path)
    for log in ("rank0.gen0.jsonl", "rank1.gen0.jsonl", "gateway.gen0.jsonl", "gateway.gen1.jsonl"):
        (tmp_path / log).write_text("no log: whoever reads it refuses the run")
    assert gate_of_a_new_start(tmp_path) == {"verdict": "PASS", "reasons": []}


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


@pytest.mark.parametrize(
    ("lease_ms", "more", "says"),
    [
        (78, "", "40.0 ms later (p50): robots need 80.0 ms, and actions.lease_ms is 78"),
        (78, "", "; set actions.lease_ms to 88, a tenth to spare"),
        (82, "", ""),
        (82, "actions.max_age_ms=60", "and actions.max_age_ms is 60"),
        (
            125,
            "streams.joints.rate_hz=10",
            "with the next sample, 100 ms later: robots need 140 ms",
        ),
        (78, "streams.joints.rate_hz=none streams.joints.max_request_hz=50", ""),
        (78, "service.endpoint=none", ""),
    ],
)
def test_one_rank_is_refused_a_lease_that_ends_between_two_chunks(
    lease_ms: int, more: str, says: str
) -> None:
    config = small_config(f"actions.lease_ms={lease_ms}", *more.split())
    stages_ns = {"A": [ms(3)] * 30, "B": [ms(36)] * 30, "C": [ms(1)] * 30}
    if not says:
        check_lease(config, stages_ns)
        return
    with pytest.raises(GateFailedError, match="SHORT_LEASE") as caught:
        check_lease(config, stages_ns)
    assert says in str(caught.value)


def test_one_rank_warns_of_a_gateway_whose_time_out_ends_before_a_robot_has_its_turn(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = small_config(
        "actions.lease_ms=1000",
        "batch.rows=8",
        "streams.joints.rate_hz=none",
        "streams.joints.max_request_hz=50",
        "gateway=[{wire='openpi', timeout_ms=79, map={joints='j', imu='i'}}]",
    )
    check_lease(config, {"A": [ms(3)] * 30, "B": [ms(36)] * 30, "C": [ms(1)] * 30})
    assert (
        "gateway[0].timeout_ms is 79 and actions.horizon x dt_ms is 40: raise each" in caplog.text
    )


SKIPPED = 5
AGE = 60  # ms of each chunk; all steps are past at 50


def chunks_until_the_end(
    *settings: str, drop: str | None = "expired", period: float = 60, young: int | None = None
) -> int | None:
    """Chunks of a bring-up that have ended when it is ended, of 400; None: it never is.

    Args:
        settings: beside those of small.toml.
        drop: of the chunks; None: they are emitted.
        period: ms from one to the next.
        young: which one alone is in time.
    """
    ended: list[int] = []
    as_in_run_json = msgspec.json.decode(msgspec.json.encode(small_config(*settings)))
    late = AllLate(as_in_run_json, SKIPPED, lambda: ended.append(number))
    for number in range(400):
        a = ms(round(number * period)) + 1
        is_young = number == young
        record = {"phase": "bring-up", "tA0": a, "tPick": None, "tEmit": a + ms(AGE), "drop": drop}
        if is_young:
            record |= {"tEmit": a + ms(1), "drop": None}
        late.record(SimpleNamespace(**record))
    return ended[0] if len(ended) == 1 else None


def test_a_bring_up_ends_once_no_chunk_in_time_can_save_it() -> None:
    judged_min = 100
    end = chunks_until_the_end()
    assert end is not None
    assert SKIPPED + judged_min < end < SKIPPED + judged_min + 10
    assert chunks_until_the_end(young=SKIPPED - 1) == end
    assert chunks_until_the_end(young=SKIPPED) is None
    assert chunks_until_the_end(young=end - 1) is None
    assert chunks_until_the_end(drop="policy_error") is None


def test_a_stall_of_the_machine_does_not_end_it() -> None:
    end = chunks_until_the_end(period=20)
    assert end is not None
    assert end >= SKIPPED + 250, "5 s"


@pytest.mark.parametrize(
    ("more", "ends"),
    [
        ("", True),
        ("actions.horizon=6", False),  # a step is still to come
        ("streams.joints.rate_hz=10", False),  # sensors set the pace: chunks wait for no other
        ("streams.joints.rate_hz=none streams.joints.max_request_hz=50", False),
        ("service.endpoint=none", False),  # no robot
    ],
)
def test_chunks_whose_steps_are_all_past_end_it_as_their_lease_does(more: str, ends: bool) -> None:
    assert (chunks_until_the_end(*more.split(), drop=None) is not None) is ends


def test_samples_that_set_the_pace_save_no_chunk_past_its_lease() -> None:
    assert chunks_until_the_end("streams.joints.rate_hz=10") is not None
