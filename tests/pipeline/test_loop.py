import ctypes
import os
import socket
import threading
import time
from contextlib import suppress
from itertools import pairwise

import msgspec
import numpy as np
import pytest
import torch
from device_in_process import GPUS, DevicePipeline
from pipeline_in_process import NewestValues, PipelineInProcess, small_config
from robot_rig import wait_until

from ppstream.core.clock import NS_PER_S, now_ns
from ppstream.core.errors import PeerLostError, PolicyError, ProtocolError, WatchdogError
from ppstream.core.realtime import PR_GET_TIMERSLACK
from ppstream.core.specs import TensorSpec
from ppstream.ingest.sources import RecordedSource
from ppstream.ingest.synthetic import SyntheticSource
from ppstream.links.headers import ENVELOPE_HEADER, SEQ
from ppstream.links.slots import SlotLayout, new_slots
from ppstream.pipeline import host_executor
from ppstream.pipeline import rank0 as rank0_loop
from ppstream.pipeline.pacing import OnSample, OnTick, Saturated, Scheduled
from ppstream.pipeline.stage_a import FrontParts
from ppstream.pipeline.stage_b import StageB

THREADS = ["serial", "split"]
QUEUED = [*THREADS, "device"]
HOST = [*THREADS, "inline"]  # there a policy fails where it is called
FORMS = [*HOST, "device"]


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    """Two streams with jitter and a gap, 0.6 s long."""
    rng = np.random.default_rng(5)
    path = tmp_path_factory.mktemp("recording") / "recording.npz"
    arrays = {}
    for name, rate_hz, dim in (("joints", 1000, 3), ("imu", 200, 2)):
        n = int(rate_hz * 0.6)
        stamps = np.cumsum(rng.uniform(0.5, 1.5, n) / rate_hz * 1e9).astype(np.int64) + 10**18
        stamps[n // 2 :] += 30_000_000
        arrays[f"{name}.stamps_ns"] = stamps
        arrays[f"{name}.values"] = rng.normal(size=(n, dim)).astype(np.float32)
    np.savez(path, **arrays)
    return path


@pytest.fixture
def build(monkeypatch, tmp_path):
    """Makes a whole pipeline over one executor, in this process."""

    def make(form, policy, *overrides):
        directory = tmp_path / form
        directory.mkdir(exist_ok=True)
        if form == "device":
            config = small_config(*GPUS, *overrides)
            return DevicePipeline(config, policy, directory, monkeypatch)
        threads = "serial" if form == "inline" else form
        config = small_config(f"pipeline.threads={threads}", *overrides)
        return PipelineInProcess(config, policy, directory, inline=form == "inline")

    return make


@pytest.mark.parametrize("form", FORMS)
def test_envelopes_are_emitted_once_and_in_order(build, form):
    with build(form, NewestValues()) as pipeline:
        pipeline.saturate()
        pipeline.rank0.run(200)
        assert [(epoch, seq) for epoch, seq, _, _ in pipeline.collector.chunks] == [
            (0, seq) for seq in range(200)
        ]
        assert [line["seq"] for line in pipeline.envelopes()] == list(range(200))


@pytest.mark.parametrize("form", FORMS)
def test_timeouts_of_all_threads_end_on_time_while_a_loop_runs(build, form, monkeypatch):
    def slack_ns():
        return ctypes.CDLL(None).prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0)

    before_ns, seen = slack_ns(), {}
    with build(form, NewestValues(lambda _: seen.update(B=slack_ns()))) as pipeline:
        emit = pipeline.collector.emit
        monkeypatch.setattr(
            pipeline.collector, "emit", lambda *chunk: (seen.update(C=slack_ns()), emit(*chunk))
        )
        pipeline.saturate()
        pipeline.rank0.run(3)
    assert seen == {"C": 1, "B": before_ns if form == "device" else 1}  # there a GPU has the times
    assert slack_ns() == before_ns > 1


@pytest.fixture(scope="module")
def twin(recording, tmp_path_factory):
    """Chunks and windows of the unpipelined run."""

    def build(form, policy, *overrides):
        folder = tmp_path_factory.mktemp(form)
        return PipelineInProcess(small_config(*overrides), policy, folder, inline=True)

    return scheduled_run(build, "inline", recording)


def scheduled_run(build, form, recording):
    overrides = ("pipeline.windows=scheduled", f"service.recording={recording}")
    with build(form, NewestValues(), *overrides) as pipeline:
        source = RecordedSource(recording, pipeline.config, pipeline.intake.rows, None)
        pipeline.enter(source, Scheduled(source))
        pipeline.rank0.run()
        return pipeline.collector.chunks, source.windows


@pytest.mark.parametrize("form", QUEUED)
def test_pipelined_output_equals_its_unpipelined_twin_bit_for_bit(build, form, recording, twin):
    expected, windows = twin
    found, _ = scheduled_run(build, form, recording)
    assert len(expected) == windows > 200
    for one, other in zip(expected, found, strict=True):
        assert one[:3] == other[:3]
        assert one[3].tobytes() == other[3].tobytes()
    assert any(chunk[3].any() for chunk in expected)


class ReadsEightBits(NewestValues):
    """The newest input values, from 8 bits and their scale."""

    def __init__(self, dtype):
        super().__init__()
        self.inputs = (TensorSpec("state.values", (8, 5), dtype), TensorSpec("state.scale", (5,)))

    def __call__(self, window, out):
        assert str(window["state.values"].dtype) == f"torch.{self.inputs[0].dtype}"
        wide = window["state.values"].float() * window["state.scale"][:, None]
        super().__call__({"state.values": wide}, out)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_a_policy_reads_windows_in_8_bits_across_the_link(build, recording, twin, dtype):
    overrides = (
        "pipeline.windows=scheduled",
        f"service.recording={recording}",
        f"window.groups.state.dtype={dtype}",
        *(f"streams.{name}.low={[-4] * dim}" for name, dim in (("joints", 3), ("imu", 2))),
        *(f"streams.{name}.high={[4] * dim}" for name, dim in (("joints", 3), ("imu", 2))),
    )
    with build("serial", ReadsEightBits(dtype), *overrides) as pipeline:
        source = RecordedSource(recording, pipeline.config, pipeline.intake.rows, None)
        pipeline.enter(source, Scheduled(source))
        pipeline.rank0.run()
        found = [chunk[3] for chunk in pipeline.collector.chunks]
    expected = [chunk[3] for chunk in twin[0]]
    assert len(found) == len(expected)
    for narrow, wide in zip(found, expected, strict=True):  # clipped to the actions' limits
        assert np.abs(narrow - wide).max() <= (4 / 127 / 2 if dtype == "int8" else 1 / 16) + 1e-6
    assert any((narrow != wide).any() for narrow, wide in zip(found, expected, strict=True))


@pytest.mark.parametrize("form", QUEUED)
@pytest.mark.parametrize(("d_in", "d_out"), [(1, 1), (2, 2), (4, 1)])
def test_queue_bounds_hold_at_every_transition(build, form, d_in, d_out):
    overrides = (f"pipeline.d_in={d_in}", f"pipeline.d_out={d_out}", "simulate.c_ms=0.5")
    with build(form, NewestValues(), *overrides) as pipeline:
        pipeline.saturate()
        pipeline.rank0.run(150)
        lines = pipeline.envelopes()
    assert max(line["outstanding_max"] for line in lines) <= d_in
    assert max(line["q_decode_max"] for line in lines) <= d_out
    if form == "split":  # one thread holds two envelopes at most, however deep the queue
        assert max(line["outstanding_max"] for line in lines) == d_in


@pytest.mark.parametrize("form", QUEUED)
def test_credit_is_taken_before_the_window(build, form):
    with build(form, NewestValues(), "pipeline.d_in=2") as pipeline:
        pipeline.saturate()
        pipeline.rank0.run(100)
        lines = pipeline.envelopes()
    for earlier, later in zip(lines, lines[2:], strict=False):
        assert later["tA0"] >= earlier["tRecv"]


def test_one_thread_sends_the_next_envelope_before_it_decodes(build):
    overrides = ("simulate.a_ms=1", "simulate.c_ms=2", "pipeline.d_in=1")
    policy = NewestValues(lambda _: time.sleep(0.001))
    with build("serial", policy, *overrides) as pipeline:
        pipeline.saturate()
        pipeline.rank0.run(30)
        lines = pipeline.envelopes()
    for this, following in pairwise(lines):
        assert following["tSend"] <= this["tDecode"]


@pytest.mark.parametrize("form", FORMS)
def test_cut_at_any_moment_emits_nothing_of_the_older_epoch(build, form):
    policy = NewestValues(lambda _: time.sleep(0.002))
    with build(form, policy, "pipeline.d_in=3", "simulate.c_ms=1") as pipeline:
        pipeline.saturate()
        rank0 = pipeline.rank0
        done = threading.Event()

        def cut_often():
            while not done.wait(0.013):
                rank0.request_cut("test")

        cutter = threading.Thread(target=cut_often)
        cutter.start()
        rank0.run(200)
        done.set()
        cutter.join()
        lines = pipeline.lines()
        chunks = pipeline.collector.chunks
    cuts = [line for line in lines if line.get("name") == "epoch_cut"]
    assert len(cuts) > 5
    envelopes = [line for line in lines if line["kind"] == "envelope"]
    assert len(envelopes) == 200
    for line in envelopes:
        newer = [cut["t"] for cut in cuts if cut["epoch"] == line["epoch"] + 1]
        if line.get("drop") is None and newer:
            assert line["tEmit"] <= newer[0]
    stale = sum(line.get("drop") == "stale" for line in envelopes)
    assert stale + len(chunks) == 200
    if form != "inline":
        assert stale > 0
    if form != "device":  # the stand-in for its stage B resets nothing
        assert policy.resets == [[True]] * len({line["epoch"] for line in envelopes})
    firsts = [line for line in lines if line.get("name") == "first_action"]
    reached = sorted({chunk[0] for chunk in chunks if chunk[0] > 0})  # by the first emit of each
    assert [line["epoch"] for line in firsts] == reached
    assert all(0 < line["since_cut_ns"] < 10 * 10**9 for line in firsts)


@pytest.mark.parametrize("form", ["serial", "device"])
def test_a_stale_result_is_not_decoded(build, form):
    decoded = []
    policy = NewestValues(lambda call: pipeline.rank0.request_cut("test") if call == 20 else None)
    with build(form, policy, "pipeline.d_in=3") as pipeline:
        stage_c = pipeline.rank0.stage_c
        decode = stage_c.decode
        stage_c.decode = lambda flight, arrays: (decoded.append(flight), decode(flight, arrays))[1]
        pipeline.saturate()
        pipeline.rank0.run(40)
        stale = [line for line in pipeline.envelopes() if line.get("drop") == "stale"]
    assert stale
    assert len(decoded) == 40 - len(stale) == len(pipeline.collector.chunks)


@pytest.mark.parametrize("form", HOST)
def test_policy_that_raises_still_gives_one_result_per_envelope(build, form):
    def fail_sometimes(call):
        if call % 3 == 1:
            raise ValueError("no idea")

    with build(form, NewestValues(fail_sometimes)) as pipeline:
        pipeline.saturate()
        pipeline.rank0.run(60)
        lines = pipeline.lines()
    envelopes = [line for line in lines if line["kind"] == "envelope"]
    assert [line.get("drop") for line in envelopes] == [None, "policy_error", None] * 20
    faults = [line for line in lines if line.get("name") == "fault"]
    assert len(faults) == 20
    assert "ValueError: no idea" in faults[0]["text"]


@pytest.mark.parametrize("form", HOST)
def test_policy_that_keeps_raising_ends_the_run(build, form):
    def fail(call):
        if call >= 10:
            raise ValueError("broken")

    with build(form, NewestValues(fail)) as pipeline:
        pipeline.saturate()
        with pytest.raises(PolicyError, match="5 results in a row could not be used"):
            pipeline.rank0.run(60)


@pytest.mark.parametrize("form", FORMS)
def test_actions_that_are_not_finite_are_dropped_and_counted(build, form):
    policy = NewestValues()
    original = NewestValues.__call__

    class Broken(NewestValues):
        def __call__(self, window, out):
            original(self, window, out)
            if self.calls % 4 == 0:
                out["actions"][0, 1, 1] = float("nan")

    policy = Broken()
    with build(form, policy) as pipeline:
        pipeline.saturate()
        pipeline.rank0.run(40)
        assert pipeline.rank0.stage_c.dropped == {"non_finite": 10}
        assert all(np.isfinite(chunk[3]).all() for chunk in pipeline.collector.chunks)


def rebind(out, wanted, policy):
    out["actions"] = wanted


def write_nothing(out, wanted, policy):
    """An early return."""


def write_half(out, wanted, policy):
    out["actions"][:, :2].copy_(wanted[:, :2])


def write_later(out, wanted, policy):
    """From a thread, when the call has returned, and beside many later ones."""
    array, returned = out["actions"].numpy(), policy.returned

    def write():
        returned.wait(1)
        until_s = time.monotonic() + 0.2
        while time.monotonic() < until_s and not policy.over:
            array.fill(7.0)
            time.sleep(0)

    threading.Thread(target=write, daemon=True).start()


def write_again_later(out, wanted, policy):
    """The call itself is fine; what its thread writes belongs to no call."""
    out["actions"].copy_(wanted)
    write_later(out, wanted, policy)


class Careless(NewestValues):
    """Leaves outputs out in its own way, in the calls of ``when``."""

    def __init__(self, fail, when):
        super().__init__()
        self.fail, self.when = fail, when
        self.returned = threading.Event()  # the call before
        self.over = False  # the run

    def __call__(self, window, out):
        self.calls += 1
        self.returned.set()
        self.returned = threading.Event()
        wanted = window["state.values"][:, -4:, :2]
        if self.calls - 1 in self.when:
            self.fail(out, wanted, self)
        else:
            out["actions"].copy_(wanted)


WAYS = [rebind, write_nothing, write_half, write_later]


@pytest.mark.parametrize(
    ("form", "fail"),
    [
        *((form, fail) for form in HOST for fail in (*WAYS, write_again_later)),
        *(("device", fail) for fail in (write_nothing, write_half)),
    ],
)
def test_what_one_call_left_out_is_never_emitted(build, form, fail, recording, twin):
    """Neither its own envelope nor a later one carries anything but the answer to its window."""
    expected, _ = twin
    overrides = ("pipeline.windows=scheduled", f"service.recording={recording}")
    policy = Careless(fail, {40})
    with build(form, policy, *overrides) as pipeline:
        source = RecordedSource(recording, pipeline.config, pipeline.intake.rows, None)
        pipeline.enter(source, Scheduled(source))
        pipeline.rank0.run()
        policy.over = True
        lines, chunks = pipeline.envelopes(), pipeline.collector.chunks
    drops = {line["seq"]: line["drop"] for line in lines if "drop" in line}
    assert drops == ({40: "unwritten"} if fail in WAYS else {})
    wanted = [chunk for chunk in expected if chunk[1] not in drops]
    assert len(chunks) == len(wanted) > 200
    for one, other in zip(wanted, chunks, strict=True):
        assert one[:3] == other[:3]
        assert one[3].tobytes() == other[3].tobytes()


@pytest.mark.parametrize("form", HOST)
@pytest.mark.parametrize("fail", WAYS)
def test_a_policy_that_leaves_outputs_out_is_found_while_warming(build, form, fail):
    policy = Careless(fail, range(1000))
    with build(form, policy) as pipeline:
        pipeline.saturate()
        with pytest.raises(PolicyError, match=r"unwritten.*out\['actions'\]\.copy_\(x\)"):
            pipeline.rank0.run(60)
        policy.over = True
        faults = [line for line in pipeline.lines() if line.get("name") == "fault"]
    assert pipeline.collector.chunks == []
    assert {fault["fault"] for fault in faults} == {"unwritten"}
    says = "out is read-only" if fail is rebind else "output 'actions': "
    last = faults[0]["text"].strip().splitlines()[-1]
    assert says in last
    assert "write out['actions'].copy_(x)" in last


def test_wrong_identity_in_a_result_is_a_protocol_error(build):
    with build("serial", NewestValues()) as pipeline:
        pipeline.saturate()
        original = pipeline.executor.into.slot

        def confused(index):
            slot = original(index)
            slot.header[SEQ] += 1
            return slot

        pipeline.executor.into.slot = confused
        with pytest.raises(ProtocolError, match="answers epoch and seq"):
            pipeline.rank0.run(10)


@pytest.mark.parametrize("form", THREADS)
def test_policy_rank_that_vanishes_ends_the_run_though_a_stop_was_asked_for(build, form):
    release = threading.Event()

    def vanish(call):
        if call == 20:
            pipeline.rank0.request_stop("SIGTERM")
            release.set()
            pipeline.back_socket.shutdown(socket.SHUT_RDWR)
            raise SystemExit

    with build(form, NewestValues(vanish)) as pipeline:
        pipeline.saturate()
        with pytest.raises(PeerLostError):
            pipeline.rank0.run()
        assert release.is_set()


@pytest.mark.parametrize("form", FORMS)
def test_stop_finishes_what_is_in_flight_and_starts_nothing(build, form):
    begun = threading.Event()
    policy = NewestValues(lambda call: begun.set() if call == 40 else None)
    with build(form, policy) as pipeline:
        pipeline.saturate()
        stop = pipeline.rank0.request_stop
        threading.Thread(target=lambda: begun.wait(10) and stop("enough")).start()
        pipeline.rank0.run()
        assert pipeline.rank0.credits.in_system == 0
        assert pipeline.rank0.started == pipeline.rank0.finished == len(pipeline.collector.chunks)


@pytest.mark.parametrize("form", THREADS)
def test_a_stopped_loop_looks_at_no_tick_while_its_last_result_is_on_its_way(build, form):
    turns = []

    def act(call):
        if call == 3:
            pipeline.rank0.request_stop("enough")
            turns.append(pipeline.rank0.mark.turns)
            time.sleep(0.3)  # ticks fall due meanwhile
            turns.append(pipeline.rank0.mark.turns)

    with build(form, NewestValues(act)) as pipeline:
        rows = pipeline.intake.rows
        source = SyntheticSource(pipeline.config, rows[0], seed=1, start_ns=now_ns())
        pipeline.enter(source, OnTick(rows, 200.0, now_ns()))
        pipeline.rank0.run()
    assert turns[1] - turns[0] < 50


@pytest.mark.parametrize("form", FORMS)
def test_paced_run_starts_one_envelope_per_new_reference_sample_at_most(build, form):
    with build(form, NewestValues()) as pipeline:
        rows = pipeline.intake.rows
        source = SyntheticSource(pipeline.config, rows[0], seed=1, start_ns=time.monotonic_ns())
        reference = pipeline.config.reference.name
        pipeline.enter(source, OnSample(rows, reference))
        threading.Timer(0.5, pipeline.rank0.request_stop, ("enough",)).start()
        pipeline.rank0.run()
        ends = [chunk[2] for chunk in pipeline.collector.chunks]
        assert 20 < len(ends) <= rows[0].rings[reference].accepted
        assert ends == sorted(set(ends))


@pytest.mark.parametrize("form", HOST)
def test_new_episode_resets_the_policy_and_drops_what_belongs_to_the_old_one(build, form):
    policy = NewestValues()
    with build(form, policy, "pipeline.d_in=2") as pipeline:
        pipeline.saturate()
        pipeline.rank0.run(20)
        pipeline.intake.rows[0].new_episode()
        pipeline.rank0.run(20)
        dropped = pipeline.rank0.stage_c.dropped
    assert policy.resets == [[True], [True]]
    assert sum(dropped.values()) == 0


def hurried(config):
    """A watchdog far below what stage B takes."""
    liveness = msgspec.structs.replace(config.liveness, watchdog_s=1e-9)
    return msgspec.structs.replace(config, liveness=liveness)


def test_a_slow_policy_is_given_its_time_in_one_process_too(build, monkeypatch):
    monkeypatch.setattr("pipeline_in_process.patient", hurried)
    policy = NewestValues(lambda call: time.sleep(0.02))
    with build("inline", policy) as pipeline:
        rank0 = pipeline.rank0
        pipeline.saturate()
        rank0.run(30)
        assert rank0.standstill_ns > 5 * 15_000_000


class TimedPolicy(NewestValues):
    """Each call takes so long by the executor's clock, and begins once rank 0 is far ahead.

    From its ``stuck`` call it returns when the run is over.
    """

    def __init__(self, monkeypatch, envelopes, d_in, takes_s, stuck=None):
        super().__init__(self.pass_time)
        self.pipeline, self.envelopes, self.d_in = None, envelopes, d_in
        self.takes_ns, self.stuck, self.passed_ns = round(takes_s * 1e9), stuck, 0
        self.is_over = threading.Event()
        monkeypatch.setattr(host_executor, "now_ns", lambda: now_ns() + self.passed_ns)
        monkeypatch.setattr("pipeline_in_process.patient", beatless)

    def pass_time(self, call):
        rank0 = self.pipeline.rank0
        ahead = min(self.envelopes, call + self.d_in)
        wait_until(
            lambda: self.is_over.is_set() or (rank0.finished, rank0.started) == (call, ahead)
        )
        self.passed_ns += self.takes_ns
        if call == self.stuck:
            self.passed_ns += 10 * self.takes_ns
            assert self.is_over.wait(60)

    def run(self, pipeline):
        self.pipeline = pipeline
        pipeline.saturate()
        try:
            pipeline.rank0.run(self.envelopes)
        finally:
            self.is_over.set()


def beatless(config):
    liveness = msgspec.structs.replace(config.liveness, frozen_ms=1e9, watchdog_s=200)
    return msgspec.structs.replace(config, liveness=liveness)


@pytest.mark.parametrize(("form", "d_in"), [("split", 16), ("serial", 2)])
def test_time_that_an_envelope_waits_for_its_turn_is_none_of_its_result_s(
    build, form, d_in, monkeypatch
):
    policy = TimedPolicy(monkeypatch, 40, d_in, takes_s=150)
    with build(form, policy, f"pipeline.d_in={d_in}") as pipeline:
        policy.run(pipeline)
        assert len(pipeline.collector.chunks) == 40


@pytest.mark.parametrize(("form", "d_in"), [("split", 16), ("serial", 2)])
def test_a_result_that_does_not_come_in_its_turn_is_overdue(build, form, d_in, monkeypatch):
    policy = TimedPolicy(monkeypatch, 40, d_in, takes_s=20, stuck=20)  # 220 s, limit 202 s
    overdue = pytest.raises(WatchdogError, match=r"no result of envelope 20 for 202\.0 s")
    with build(form, policy, f"pipeline.d_in={d_in}") as pipeline, overdue:
        policy.run(pipeline)


def test_whoever_looks_while_an_envelope_leaves_does_not_take_it_for_overdue(build, monkeypatch):
    """The thread that receives may look at the very moment that the sending one stamps it."""
    with build("split", NewestValues()) as pipeline:
        sender, looks = threading.current_thread(), []

        def stamp():
            if threading.current_thread() is sender:
                with monkeypatch.context() as plainly:
                    plainly.setattr(host_executor, "now_ns", now_ns)
                    pipeline.executor.check_policy_ranks()
                    looks.append(1)
            return now_ns()

        pipeline.saturate()
        monkeypatch.setattr(host_executor, "now_ns", stamp)
        pipeline.rank0.run(3)
    assert looks


@pytest.mark.parametrize("form", THREADS)
def test_a_window_is_accounted_for_behind_its_send_where_one_thread_does_both(
    build, form, monkeypatch
):
    with build(form, NewestValues()) as pipeline:
        did = []

        def noting(owner, method):
            call = getattr(owner, method)

            def noted(*given):
                did.append(method)
                return call(*given)

            monkeypatch.setattr(owner, method, noted)

        noting(pipeline.executor.out, "commit")
        pipeline.saturate()
        noting(pipeline.intake.cutter, "account")
        pipeline.rank0.run(5)
    order = ["commit", "account"] if form == "serial" else ["account", "commit"]
    assert did == order * 5


@pytest.mark.parametrize("form", THREADS)
def test_behind_a_wait_results_are_looked_at_before_samples_are_taken_in(build, form, monkeypatch):
    policy = NewestValues(lambda _: time.sleep(0.002))
    with build(form, policy, "pipeline.d_in=1") as pipeline:
        rank0, did = pipeline.rank0, []
        wait = rank0.waiter.wait

        def wait_for_both(limit_ns):
            did.append("wait")
            ready = wait(limit_ns)
            return ready and [-1, *ready]  # a robot's samples have come, too

        def noting(owner, method, name):
            call = getattr(owner, method)

            def noted():
                if threading.current_thread() is threading.main_thread():
                    did.append(name)
                call()

            monkeypatch.setattr(owner, method, noted)

        monkeypatch.setattr(rank0.waiter, "wait", wait_for_both)
        noting(pipeline.executor, "observe", "results")
        noting(rank0, "drain_inputs", "samples")
        pipeline.saturate()
        rank0.run(20)
    waits = [at for at, what in enumerate(did) if what == "wait" and did[at + 1] != "wait"]
    behind = [did[at + 1 : at + 3] for at in waits]  # what is expected soon may cut a wait in two
    assert len(behind) >= 20
    if form == "serial":
        assert all(found == ["results", "samples"] for found in behind)
    else:  # results are another thread's
        assert all(found[0] == "samples" for found in behind)


@pytest.mark.parametrize("form", [*THREADS, "device"])
def test_no_envelope_waits_for_what_is_due_each_second(build, form, monkeypatch):
    with build(form, NewestValues(lambda _: time.sleep(0.002))) as pipeline:
        rank0, did = pipeline.rank0, []
        wait, begin = rank0.waiter.wait, pipeline.executor.begin

        def noted_wait(limit_ns):
            ready = wait(limit_ns)
            did.append("wait")
            return ready

        def noted_begin(*given):
            did.append("begin")
            begin(*given)

        def second(_):
            did.append("second")
            assert rank0.started == rank0.finished

        rows = pipeline.intake.rows
        source = SyntheticSource(pipeline.config, rows[0], seed=1, start_ns=now_ns())
        pipeline.enter(source, OnTick(rows, 100.0, now_ns()))
        rank0.run(2)  # the next second ends within one
        monkeypatch.setattr(rank0_loop, "SECOND_NS", 15_000_000)
        monkeypatch.setattr(rank0_loop, "OVERDUE_NS", 10 * NS_PER_S)
        monkeypatch.setattr(rank0.waiter, "wait", noted_wait)
        monkeypatch.setattr(pipeline.executor, "begin", noted_begin)
        rank0.on_second.append(second)
        rank0.run(130)
    behind = [after for now, after in pairwise(did) if now == "second"]
    assert len(behind) >= 5
    assert "begin" not in behind


@pytest.mark.parametrize("form", THREADS)
def test_what_is_due_each_second_is_done_though_the_loop_never_rests(build, form, monkeypatch):
    monkeypatch.setattr(rank0_loop, "SECOND_NS", 10_000_000)
    monkeypatch.setattr(rank0_loop, "OVERDUE_NS", 5_000_000)
    with build(form, NewestValues(lambda _: time.sleep(0.002))) as pipeline:
        rank0, under_way = pipeline.rank0, []
        rank0.on_second.append(lambda _: under_way.append(rank0.started - rank0.finished))
        pipeline.saturate()
        rank0.run(50)
    assert len(under_way) >= 3
    assert any(under_way)


class FrontPart:
    """Carries the window through; ``act`` is called first, with the number of the call."""

    def __init__(self, pipeline, act):
        self.inputs = self.outputs = pipeline.intake.cutter.inputs
        self.texts, self.act, self.calls = [], act, 0

    def reset(self, rows):
        pass

    def instruct(self, number, text):
        self.texts.append((self.calls, number, text))

    def __call__(self, window, out):
        self.calls += 1
        self.act(self.calls - 1)
        for name, tensor in out.items():
            tensor.copy_(window[name])


def with_front(pipeline, act):
    part = FrontPart(pipeline, act)
    (window,) = new_slots(SlotLayout(ENVELOPE_HEADER, part.inputs, 1), 1)
    front = FrontParts(StageB(part, 1), window, lambda _: {})
    front.on_fault = pipeline.rank0.report_policy_fault
    pipeline.rank0.stage_a.front = front
    return part


class ToldSource(SyntheticSource):
    """Has a socket; ``taken`` is set when what came there was taken in."""

    def __init__(self, pipeline):
        super().__init__(pipeline.config, pipeline.intake.rows[0], seed=1, start_ns=now_ns())
        self.near, self.far = socket.socketpair()
        self.taken = threading.Event()

    @property
    def fds(self):
        return (self.near.fileno(),)

    def drain(self, now):
        with suppress(BlockingIOError):
            if self.near.recv(64, socket.MSG_DONTWAIT):
                self.taken.set()
        return super().drain(now)


class SampledSource:
    """A sample of each stream for each ``b"sample"`` on its socket; other words are taken in."""

    exhausted = False

    def __init__(self, pipeline):
        self._row = pipeline.intake.rows[0]
        self._row.open(1)
        self._near, self._far = socket.socketpair()
        self.fds = (self._near.fileno(),)
        self.taken = 0

    def say(self, word):
        taken = self.taken
        self._far.send(word)
        wait_until(lambda: self.taken > taken)

    def drain(self, now):
        with suppress(BlockingIOError):
            word = self._near.recv(64, socket.MSG_DONTWAIT)
            for ring in self._row.rings.values() if word == b"sample" else ():
                ring.append(np.array((now,)), np.zeros((1, ring.stream.dim), np.float32), now)
            self.taken += 1

    def next_due_ns(self):
        return None

    def close(self):
        self._near.close()
        self._far.close()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="it needs two CPUs")
def test_input_that_leads_to_envelopes_as_a_rule_rouses_the_policy_rank(build):
    def feed():
        for sample in range(6):
            source.say(b"sample")
            wait_until(lambda sample=sample: len(pipeline.collector.chunks) > sample)
        roused.append(pipeline.roused)
        for _ in range(6):
            source.say(b"nothing")
        roused.append(pipeline.roused)
        source.say(b"sample")

    roused = []
    with build("serial", NewestValues()) as pipeline:
        source = SampledSource(pipeline)
        pipeline.enter(source, OnSample(pipeline.intake.rows, None))
        feeder = threading.Thread(target=feed)
        feeder.start()
        pipeline.rank0.run(7)
        feeder.join()
        pipeline.rank0.follow(())
        source.close()
    often, behind = roused
    assert often >= 5
    assert behind <= often + 2


def test_intake_decode_and_emit_do_not_wait_for_front_parts_on_split_threads(build):
    met = []

    def act(call):
        source.far.send(b"a sample")
        arrived = source.taken.wait(5)
        source.taken.clear()
        wait_until(lambda: len(pipeline.collector.chunks) >= call - 1)
        met.append(arrived)
        named.update(mark.name for mark in pipeline.rank0.marks if mark.is_running)

    named = set()
    with build("split", NewestValues(), "pipeline.d_in=2") as pipeline:
        part = with_front(pipeline, act)
        source = ToldSource(pipeline)
        pipeline.enter(source, Saturated(pipeline.intake.rows))
        pipeline.rank0.run(10)
        drops = [line.get("drop") for line in pipeline.envelopes()]
        pipeline.rank0.follow(())
        source.near.close()
        source.far.close()
    assert met == [True] * part.calls == [True] * 10
    assert drops == [None] * 10
    assert "the front thread" in named  # the watchdog sees it


def test_what_goes_wrong_beside_front_parts_is_no_fault_of_theirs(build):
    went_wrong = threading.Event()

    def act(call):
        if call == 3:
            source.broken = True
            assert went_wrong.wait(60)

    class BrokenSource(SyntheticSource):
        broken = False

        def drain(self, now):
            if self.broken:
                went_wrong.set()
                raise OSError("the sockets are gone")
            return super().drain(now)

    with build("split", NewestValues()) as pipeline:
        with_front(pipeline, act)
        source = BrokenSource(pipeline.config, pipeline.intake.rows[0], seed=1, start_ns=now_ns())
        pipeline.enter(source, Saturated(pipeline.intake.rows))
        with pytest.raises(OSError, match="the sockets are gone"):
            pipeline.rank0.run(10)
        assert not [line for line in pipeline.lines() if line.get("name") == "fault"]


def test_a_text_that_comes_while_front_parts_run_waits_for_them(build):
    def act(call):
        if call == 3:
            rank0.instruct(7, "stop", lambda number, fault: heard.append((number, fault)))
            early.extend(part.texts)
            rank0.request_stop("test")

    heard, early = [], []
    with build("split", NewestValues()) as pipeline:
        rank0 = pipeline.rank0
        part = with_front(pipeline, act)
        pipeline.saturate()
        rank0.run()
        assert part.texts == [(part.calls, 7, "stop")]
        assert not early


class Listener(NewestValues):
    """Takes in what it is told, if it is a word."""

    def instruct(self, number, text):
        if text == "?":
            raise KeyError("no such word")


@pytest.mark.parametrize("form", FORMS)
def test_texts_that_come_together_are_answered_each_for_itself(build, form):
    heard = {}
    with build(form, Listener(), "policy.instructions=true") as pipeline:
        pipeline.saturate()
        pipeline.rank0.run(5)
        for number, text in ((1, "pick"), (2, "?"), (3, "place")):
            pipeline.rank0.instruct(number, text, heard.__setitem__)
        pipeline.rank0.run(60)
    assert sorted(heard) == [1, 2, 3]
    assert heard[1] == heard[3] == ""
    assert "no such word" in heard[2]


@pytest.mark.parametrize("form", QUEUED)
def test_a_text_may_be_answered_before_the_times_that_bring_up_asks_for(build, form):
    heard = {}
    with build(form, Listener(), "policy.instructions=true") as pipeline:
        pipeline.saturate()
        pipeline.rank0.run(5)
        (policy_rank,) = pipeline.executor.policy_ranks
        pipeline.rank0.instruct(1, "pick", heard.__setitem__)
        assert len(policy_rank.newest_b(3)) >= 3
        pipeline.rank0.instruct(2, "?", heard.__setitem__)
        assert policy_rank.compiler_counts() == {}
    assert heard[1] == ""
    assert "no such word" in heard[2]


@pytest.mark.parametrize("form", THREADS)
def test_cpu_time_of_the_sending_is_none_of_stage_a_s(build, form, monkeypatch):
    spent_ns = 3_000_000
    with build(form, NewestValues()) as pipeline:
        commit = pipeline.executor.out.commit

        def commit_and_spend(index):
            commit(index)
            until = time.thread_time_ns() + spent_ns
            while time.thread_time_ns() < until:
                pass

        monkeypatch.setattr(pipeline.executor.out, "commit", commit_and_spend)
        pipeline.saturate()
        pipeline.rank0.run(5)
        lines = pipeline.envelopes()
    told = [line["cpu_a_ns"] for line in lines if "cpu_a_ns" in line]
    assert told
    assert max(told) < spent_ns


@pytest.mark.parametrize("form", THREADS)
def test_front_parts_time_is_stage_a_s_and_what_they_raise_costs_one_envelope(build, form):
    spent_ns = 3_000_000

    def act(call):
        threads.add(threading.current_thread().name)
        grads.add(torch.is_grad_enabled())
        until = time.thread_time_ns() + spent_ns
        while time.thread_time_ns() < until:
            pass
        if call == 2:
            raise ValueError("no idea")

    threads, grads = set(), set()
    with torch.no_grad(), build(form, NewestValues()) as pipeline:
        with_front(pipeline, act)
        pipeline.saturate()
        pipeline.rank0.run(5)
        lines = pipeline.envelopes()
        faults = [line for line in pipeline.lines() if line.get("name") == "fault"]
    assert [line.get("drop") for line in lines] == [None, None, "policy_error", None, None]
    assert [fault["what"] for fault in faults] == ["ValueError: no idea"]
    assert all(line["tA1"] - line["tA0"] >= spent_ns for line in lines)
    assert all(line["cpu_a_ns"] >= spent_ns for line in lines)
    assert len(threads) == 1 if form == "serial" else all("front" in name for name in threads)
    assert grads == {False}


def test_where_stage_a_ends_while_b_is_queued_their_times_add_up(build, monkeypatch):
    """As on one GPU: the end of A is known once it is accounted for."""
    late_ns = 2_000_000

    def ends_late(flight):
        settle(flight)
        flight.record.tA1 += late_ns

    with build("inline", NewestValues(lambda _: time.sleep(2 * late_ns / 1e9))) as pipeline:
        settle = pipeline.rank0.stage_a.settle
        monkeypatch.setattr(pipeline.rank0.stage_a, "settle", ends_late)
        pipeline.saturate()
        pipeline.rank0.run(5)
        lines = pipeline.envelopes()
    for line in lines:
        assert line["tSend"] == line["tA1"] >= line["tA0"] + late_ns
        assert line["B_ns"] == line["residence_ns"] == line["tRecv"] - line["tSend"] >= late_ns
