"""``ppstream.start`` with a policy that this process alone has: one rank in a thread of it."""

from __future__ import annotations

import functools
import gc
import hashlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from robot_rig import MS, wait_until

import ppstream
from ppstream import ConfigError, PpstreamError, RobotClient, TensorSpec
from ppstream.config import load
from ppstream.config.schema import LogConfig
from ppstream.core.errors import SpecError
from ppstream.observe.run_folder import EventLog

SMALL = Path(__file__).parents[1] / "support" / "small.toml"
OBSERVATION = {"imu": [1.0, 2.0], "joints": [0.25, 0.5, 4.0]}


class Newest:
    """Gives back the newest joints, ``gain`` times; ``act`` is called before."""

    inputs = (TensorSpec("state.values", (8, 5)),)
    outputs = (TensorSpec("actions", (4, 2)),)

    def __init__(self, gain: float = 1.0, act: Callable[[], object] = lambda: None) -> None:
        self.gain, self.act = gain, act

    def reset(self, rows: torch.Tensor) -> None:
        pass

    def __call__(self, window: Any, out: Any) -> None:
        self.act()
        out["actions"].copy_(window["state.values"][:, -4:, :2] * self.gain)


def only_here(gain: float = 1.0, act: Callable[[], object] = lambda: None) -> Callable[..., Any]:
    """A ``build`` that no other process can import."""

    def build(options: Any, device: torch.device) -> Newest:
        return Newest(gain, act)

    return build


@pytest.fixture
def settings(tmp_path: Path) -> list[str]:
    folder = tmp_path / "robots"
    folder.mkdir(mode=0o700)
    endpoint = f"service.endpoint=unix://{folder}/r"
    return [f"log.root={tmp_path}/logs", "service.duration_s=none", endpoint]


def handlers() -> tuple[object, ...]:
    """Handlers of signals as Python and as the kernel have them."""
    status = Path("/proc/self/status").read_text()
    masks = re.findall(r"Sig(?:Cgt|Ign):\s(\w+)", status)
    return (*masks, *map(signal.getsignal, signal.valid_signals()))


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    """Nothing that a process has once is another behind a run."""

    def once() -> tuple[object, ...]:
        with ThreadPoolExecutor() as new:  # a thread that exists keeps its number
            threads = new.submit(torch.get_num_threads).result()
        turns = sys.getswitchinterval()
        return turns, threads, torch.is_grad_enabled(), handlers(), sys.stdout

    gc.freeze()  # as conftest does; another test may have undone it
    usual = torch.get_num_threads()
    torch.set_num_threads(3)
    before = once()
    yield
    assert once() == before
    assert gc.get_freeze_count() > 0  # what was frozen is left alone
    torch.set_num_threads(usual)


def test_a_closure_runs_in_a_thread_and_says_so_once(
    settings: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    before = handlers()
    with ppstream.start(SMALL, policy=only_here(0.5), settings=settings) as run:
        assert (run.phase, run.verdict, run.output) == ("ready", None, "")
        assert handlers() == before
        assert run.config.policy.target == "test_in_thread:build"
        with RobotClient(str(run.endpoint)) as client:
            client.connect(30)
            assert client.wait_ready(30)
            answer = client.ask(OBSERVATION, 30)
            assert answer.actions[-1].tolist() == [0.125, 0.25]
            assert run.report().run_id == (run.directory or Path()).name
            assert run.stop() == 0
            wait_until(lambda: client.phase == "stopped")
        assert run.phase == "stopped"
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    (line,) = (text for text in said if "known to this process alone" in text)
    assert line.startswith("test_in_thread:build is known to this process alone: one rank runs")


def test_a_stop_without_a_limit_waits_for_the_end_and_one_of_nan_asks_nothing(
    settings: list[str],
) -> None:
    with ppstream.start(SMALL, policy=only_here(), settings=settings) as run:
        with pytest.raises(SpecError, match="timeout_s: got nan"):
            run.stop(math.nan)
        assert run.phase == "ready"
        assert run.stop(math.inf) == 0


def test_a_run_is_asked_to_stop_whatever_its_log_takes_to_read(
    settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind hours that is seconds, in which the robot would move on; the verdict is read later."""
    with ppstream.start(SMALL, policy=only_here(), settings=settings) as run:
        assert run.phase == "ready"
        with monkeypatch.context() as patched:
            patched.delattr(EventLog, "read")
            assert run.stop() == 0
        assert (run.phase, run.verdict) == ("stopped", None)


def test_a_configuration_in_memory_logs_where_the_program_runs(
    settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = msgspec.structs.replace(
        load.read(str(SMALL), settings), name="cell/arm", log=LogConfig()
    )
    assert config.log.root == "logs"
    with ppstream.start(config, policy=only_here()) as run:
        assert run.config.log.root == str(tmp_path / "logs")
    assert run.directory is not None
    assert run.directory.parent == tmp_path / "logs"
    assert run.report().run_id == run.directory.name


def test_one_rank_keeps_limits_leases_and_the_ledger(settings: list[str]) -> None:
    with ppstream.start(SMALL, policy=only_here(100.0), settings=settings) as run:
        with RobotClient(str(run.endpoint)) as client:
            client.connect(30)
            assert client.wait_ready(30)
            chunk, actions, _ = client.ask(OBSERVATION, 30)
            assert actions.max() == 1.0  # clipped
            assert chunk.expires_ns - chunk.window_end_ns == 200 * MS
        assert run.stop() == 0
        assert run.directory is not None
    lines = [*map(json.loads, (run.directory / "rank0.gen0.jsonl").read_text().splitlines())]
    ledger = [line for line in lines if line["kind"] == "ledger"][-1]
    assert ledger["actions"]["clipped_chunks"] >= 1
    envelopes = ledger["envelopes"]
    assert envelopes["received"] == envelopes["used"] + sum(envelopes["dropped"].values())
    end = json.loads((run.directory / "exit.json").read_text())["0"]
    assert (end["code"], end["reason"]) == (0, "stop()")
    assert json.loads((run.directory / "run.json").read_text())["exit_code"] == 0


def test_run_json_names_the_weights_by_what_they_hold(settings: list[str], tmp_path: Path) -> None:
    seen = set()
    for content in (b"old", b"new"):
        (tmp_path / "w.safetensors").write_bytes(content)
        mine = [*settings, f"policy.weights={tmp_path}/w.safetensors"]
        with ppstream.start(SMALL, policy=only_here(), settings=mine) as run:
            assert run.stop() == 0
            assert run.directory is not None
            about = json.loads((run.directory / "run.json").read_text())
        assert about["weights_sha256"] == hashlib.sha256(content).hexdigest()
        seen.add(about["weights_sha256"])
    assert len(seen) == 2


def test_another_run_works_once_the_first_has_ended_and_nothing_stays(settings: list[str]) -> None:
    def held() -> tuple[int, set[str]]:
        return len(os.listdir("/proc/self/fd")), {thread.name for thread in threading.enumerate()}

    seen = []
    for _ in range(3):
        with ppstream.start(SMALL, policy=only_here(), settings=settings) as run:
            assert run.phase == "ready"
            with pytest.raises(PpstreamError, match="another run goes on in a thread"):
                ppstream.start(SMALL, policy=only_here(), settings=settings)
            assert run.phase == "ready"
        seen.append(held())
    assert seen[1] == seen[2]


def test_a_run_that_has_ended_may_be_deleted_by_a_later_one(settings: list[str]) -> None:
    folders = []
    for _ in range(3):  # beside a new one so many are kept
        with ppstream.start(SMALL, policy=only_here(), settings=[*settings, "log.keep=1"]) as run:
            folders.append(run.directory or Path())
    assert [folder.exists() for folder in folders].count(True) == 2


def test_what_counts_as_known_to_this_process_alone(settings: list[str]) -> None:
    policies: tuple[Any, ...] = (
        lambda options, device: Newest(),
        functools.partial(lambda gain, options, device: Newest(gain), 1.0),
    )
    for policy, name in zip(policies, ("_lambda_", "partial"), strict=True):
        with ppstream.start(SMALL, policy=policy, settings=settings) as run:
            assert run.config.policy.target.rpartition(":")[2] == name


def test_a_configuration_object_and_modules_beside_a_file_are_taken_as_by_ranks(
    tmp_path: Path, settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "decoder_of_this_test.py").write_text(
        "from ppstream.pipeline.decode import build as made\n"
        "def build(options, actions):\n    return made(options, actions)\n"
    )
    (tmp_path / "mine.toml").write_text(SMALL.read_text())
    decode = "decode.target=decoder_of_this_test:build"
    with ppstream.start(
        tmp_path / "mine.toml", policy=only_here(), settings=[*settings, decode]
    ) as run:
        assert run.phase == "ready"
    config = msgspec.structs.replace(load.read(str(SMALL), settings), name="object")
    with ppstream.start(config, policy=only_here()) as run:
        assert (run.phase, run.config.name) == ("ready", "object")


def test_an_error_of_build_reaches_the_caller_with_its_text(settings: list[str]) -> None:
    def build(options: Any, device: torch.device) -> Newest:
        raise ValueError("no weights in this cell")

    with pytest.raises(
        PpstreamError, match=r"(?s)ended with 11 before.*no weights in this"
    ) as told:
        ppstream.start(SMALL, policy=build, settings=settings)
    assert isinstance(told.value.__cause__, ConfigError)
    with ppstream.start(SMALL, policy=only_here(), settings=settings) as run:  # nothing is held
        assert run.phase == "ready"


def test_a_policy_that_does_not_fit_is_told_as_by_ranks(settings: list[str]) -> None:
    wider = [*settings, "streams.imu.dim=7"]
    with pytest.raises(PpstreamError, match=r"reads state.values \[8, 5\] float32, but"):
        ppstream.start(SMALL, policy=only_here(), settings=wider)
    with pytest.raises(ConfigError, match=r"pipeline.d_in: got 0"):
        ppstream.start(SMALL, policy=only_here(), settings=["pipeline.d_in=0"])


def push_until_stopped(client: RobotClient, run: ppstream.StartedRun) -> None:
    def is_stopped() -> bool:
        for stream, values in OBSERVATION.items():
            client.push(stream, client.clock(), values)
        return run.phase == "stopped"

    wait_until(is_stopped, seconds=30)


def fail() -> None:
    raise ValueError("the gripper is upside down")


@pytest.mark.parametrize(
    ("act", "text"),
    [(fail, "the gripper is upside down"), (lambda: sys.exit(3), r"sys\.exit\(3\)")],
    ids=["raises", "exits"],
)
def test_a_policy_that_fails_while_it_serves_ends_the_run_and_not_the_process(
    settings: list[str], act: Callable[[], None], text: str
) -> None:
    acts = [lambda: None]
    run = ppstream.start(SMALL, policy=only_here(act=lambda: acts[-1]()), settings=settings)

    def serve() -> None:
        with run, RobotClient(str(run.endpoint)) as client:
            client.connect(30)
            assert client.wait_ready(30)
            acts.append(act)
            push_until_stopped(client, run)

    with pytest.raises(PpstreamError, match=rf"(?s)ended with 26; its report: .*{text}"):
        serve()
    assert run.stop() == 26


def test_a_stop_while_the_policy_is_built_is_heeded(settings: list[str]) -> None:
    building, go_on = threading.Event(), threading.Event()

    def build(options: Any, device: torch.device) -> Newest:
        building.set()
        go_on.wait(60)
        return Newest()

    threading.Thread(target=lambda: building.wait(60) and go_on.set()).start()
    with pytest.raises(TimeoutError, match=r"phase is 'starting' after 0 s, not ready") as told:
        ppstream.start(SMALL, policy=build, settings=settings, timeout_s=0.0)
    assert not hasattr(told.value, "__notes__")  # it has ended
    with ppstream.start(SMALL, policy=only_here(), settings=settings) as run:
        assert run.phase == "ready"


def test_a_policy_that_stands_is_told_and_ends_no_process(settings: list[str]) -> None:
    go_on, acts = threading.Event(), [lambda: None]
    run = ppstream.start(SMALL, policy=only_here(act=lambda: acts[-1]()), settings=settings)
    with RobotClient(str(run.endpoint)) as client:
        client.connect(30)
        assert client.wait_ready(30)
        acts.append(lambda: go_on.wait(60) and None)
        push_until_stopped(client, run)
        with pytest.raises(TimeoutError, match=r"its thread is in .*test_in_thread\.py.* wait"):
            run.stop(0.1)
        with pytest.raises(PpstreamError, match="another run goes on"):
            ppstream.start(SMALL, policy=only_here(), settings=settings)
        go_on.set()
        assert run.stop() == 21
    assert run.directory is not None
    end = json.loads((run.directory / "exit.json").read_text())["0"]
    assert end["name"] == "WATCHDOG"
    assert "no progress" in end["reason"]


LEAVES = """
import sys
from ppstream import TensorSpec, start

class Zeros:
    inputs = ()
    outputs = (TensorSpec("actions", (4, 2)),)
    def reset(self, rows): pass
    def __call__(self, window, out): out["actions"].zero_()

def build(options, device): return Zeros()

run = start(sys.argv[1], policy=build, settings=sys.argv[2:])
assert run.config.policy.target == "__main__:build"
print(run.directory, flush=True)
raise ValueError("the script ends here")
"""


def test_the_interpreters_exit_drains_the_run(settings: list[str]) -> None:
    command = [sys.executable, "-c", LEAVES, str(SMALL), *settings]
    left = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert left.returncode == 1, left.stderr
    assert "the script ends here" in left.stderr
    assert left.stderr.count("known to this process alone") == 1  # without any logging set up
    end = json.loads((Path(left.stdout.strip()) / "exit.json").read_text())["0"]
    assert (end["code"], end["reason"]) == (0, "stop()")


def test_a_policy_that_does_not_ask_what_is_valid_never_acts_without_a_stream(
    settings: list[str],
) -> None:
    """It would read zeros where a sensor has not spoken, and old values of one that fell silent."""
    with (
        ppstream.start(SMALL, policy=only_here(0.5), settings=settings) as run,
        RobotClient(str(run.endpoint)) as client,
    ):
        client.connect(30)
        assert client.wait_ready(30)
        alone = {"joints": OBSERVATION["joints"]}
        with pytest.raises(TimeoutError):
            client.ask(alone, 0.5)
        answer = client.ask(OBSERVATION, 30)
        assert answer.actions[-1].tolist() == [0.125, 0.25]
        time.sleep(0.5)  # more than the stream's max_age_ms
        with pytest.raises(TimeoutError):
            client.ask(alone, 0.5)
