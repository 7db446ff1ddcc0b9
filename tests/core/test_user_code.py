"""Whatever user code raises is short text in the end, one failed envelope, and told once."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pipeline_in_process import NewestValues, PipelineInProcess, small_config

from ppstream.core.errors import ConfigError, ExitCode, PolicyError
from ppstream.core.specs import TensorSpec
from ppstream.core.user_code import (
    SHOWN_MAX,
    WHAT_MAX,
    Fault,
    FirstFaults,
    UserExitError,
    fault_of,
    how_it_ends,
    location_of,
    message_of,
)
from ppstream.pipeline.decode import CopyDecoder
from ppstream.policy.protocol import Decoder, call_target, instruct, load_target
from ppstream.wire.fields import MAX_PLACE, MAX_TEXT, encoder
from ppstream.wire.rank_messages import PolicyFault

FORMS = ["inline", "serial", "split"]


class MuteError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class ExitingError(Exception):
    def __str__(self) -> str:
        sys.exit(7)


class PosingError(Exception):
    """Says that it is of another type."""

    @property
    def __class__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("who asks?")


def deep() -> None:
    deep()


def chained() -> None:
    try:
        raise MuteError
    except MuteError as error:
        raise ValueError("behind it") from error


def raising(kind: type[BaseException], *arguments: object) -> Callable[[], None]:
    def act() -> None:
        raise kind(*arguments)

    return act


#: How a call fails, and what must be said of it.
ODD = {
    "plain": (raising(RuntimeError, "breaker says no"), "RuntimeError: breaker says no"),
    "mute": (raising(MuteError), "MuteError: <its text cannot be shown: ValueError>"),
    "text-exits": (raising(ExitingError), "ExitingError: <its text cannot be shown: SystemExit>"),
    "posing": (raising(PosingError, "x"), "PosingError: x"),
    "surrogate": (raising(OSError, "\udcff.bin"), r"OSError: \udcff.bin"),
    "8 MB": (raising(ValueError, "begin" + "x" * (8 << 20) + "end"), "begin"),
    "control": (raising(ValueError, "\x1b[2J\x00"), r"ValueError: \x1b[2J\x00"),
    "evil-argument": (raising(TypeError, MuteError()), "TypeError: <its text cannot be shown"),
    "interrupt": (raising(KeyboardInterrupt), "KeyboardInterrupt"),
    "cancelled": (raising(asyncio.CancelledError), "CancelledError"),
    "generator-exit": (raising(GeneratorExit), "GeneratorExit"),
    "stop-iteration": (raising(StopIteration, 3), "StopIteration: 3"),
    "long-name": (raising(type("E" * 5000, (Exception,), {})), "E" * 64),
    "recursion": (deep, "RecursionError: maximum recursion"),
    "chain": (chained, "ValueError: behind it"),
}


def caught(act: Callable[[], None]) -> BaseException:
    try:
        act()
    except BaseException as error:  # noqa: BLE001 - that is what is looked at
        return error
    raise AssertionError("it did not raise")


@pytest.mark.parametrize("kind", ODD)
def test_every_exception_fits_a_frame_and_says_what_and_where(kind: str) -> None:
    act, says = ODD[kind]
    fault = fault_of(caught(act), "the policy")
    assert says in fault.what
    assert len(fault.what) <= WHAT_MAX
    assert "\n" not in fault.what
    assert fault.kind == "exception"
    assert fault.location.startswith(f"{__file__}:")
    assert len(fault.location) <= MAX_PLACE
    assert len(fault.text) <= MAX_TEXT
    frame = PolicyFault(1, fault.kind, fault.text, fault.what, fault.location)
    assert msgspec.msgpack.decode(encoder.encode(frame), type=PolicyFault) == frame


def test_a_long_message_hides_no_traceback_and_a_long_traceback_no_message() -> None:
    long = fault_of(caught(ODD["8 MB"][0]), "the policy").text
    assert "test_user_code.py" in long
    assert long.rstrip().endswith("end")
    assert "RecursionError" in fault_of(caught(deep), "the policy").text


def test_the_place_is_the_user_s_line_and_not_the_library_s() -> None:
    import torch

    def act() -> None:
        torch.zeros(3).copy_(torch.zeros(2, 5))

    assert location_of(caught(act)).endswith(" in act")
    ours = location_of(caught(lambda: small_config("actions.horizon=0")))
    assert ours.endswith(" in small_config")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MemoryError(), "memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 8 bytes"), "memory"),
        (type("OutOfMemoryError", (RuntimeError,), {})("CUDA"), "memory"),
        (RuntimeError("memory"), "exception"),
    ],
)
def test_memory_that_ran_out_is_a_kind_of_its_own(error: BaseException, kind: str) -> None:
    assert fault_of(error, "the policy").kind == kind


@pytest.mark.parametrize("code", [0, 3, None, "bye", MuteError()])
def test_exit_in_user_code_is_an_end_that_says_who_with_what_and_where(code: Any) -> None:
    with pytest.raises(UserExitError) as found:
        fault_of(caught(lambda: sys.exit(code)), "the decoder")
    ends, text = how_it_ends(found.value)
    assert ends is ExitCode.POLICY_OUTPUT
    assert f"the decoder called sys.exit({code!r}) at {__file__}:" in text


def test_the_first_of_each_kind_is_printed_once_and_kinds_are_bounded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    faults = FirstFaults(1)
    fault = fault_of(caught(ODD["plain"][0]), "the policy")
    assert [faults.report("B", fault) for _ in range(3)] == [True, False, False]
    assert faults.report("C", fault)
    (first, second) = caplog.messages
    assert first.startswith("rank 1, stage B: the first exception: RuntimeError: breaker says no ")
    assert f" at {fault.location}\nTraceback (most recent call last)" in first
    assert "stage C" in second
    kinds = [faults.report("B", Fault("exception", f"E{n}", f"E{n}")) for n in range(100)]
    assert sum(kinds) == SHOWN_MAX - 2


def test_reasons_of_ends_can_be_written_and_sent() -> None:
    code, text = how_it_ends(OSError("\udcff"))
    assert (code, text) == (ExitCode.INTERNAL, r"OSError: \udcff")
    assert len(message_of(ValueError("x" * (8 << 20)))) <= MAX_TEXT
    assert len(how_it_ends(ConfigError(["x" * 100] * 300))[1]) == 300 * 101 - 1


# ---- in the loops -----------------------------------------------------------------------------


class OddDecoder:
    """Copies; fails in the calls of ``when``."""

    def __init__(self, act: Callable[[], None], when: range) -> None:
        self.act, self.when = act, when
        self.calls = 0
        self.resets = 0

    def reset(self, row: int) -> None:
        self.resets += 1

    def __call__(self, row: int, result: Any, actions: Any) -> None:
        self.calls += 1
        if self.calls - 1 in self.when:
            actions[:] = 7  # half a chunk
            self.act()
        actions[:] = result["actions"]


def build(
    form: str, policy: NewestValues, folder: Path, decoder: Decoder | None = None
) -> PipelineInProcess:
    threads = "serial" if form == "inline" else form
    config = small_config(f"pipeline.threads={threads}")
    return PipelineInProcess(config, policy, folder, inline=form == "inline", decoder=decoder)


def failing(act: Callable[[], None], when: range) -> NewestValues:
    return NewestValues(lambda call: act() if call in when else None)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ODD)
def test_a_policy_s_exception_is_one_failed_envelope_told_once(
    form: str, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    act, says = ODD[kind]
    with build(form, failing(act, range(5, 9, 2)), tmp_path) as pipeline:
        pipeline.saturate()
        pipeline.rank0.run(30)
        lines, chunks = pipeline.lines(), pipeline.collector.chunks
    drops = {e["seq"]: e["drop"] for e in lines if e["kind"] == "envelope" and "drop" in e}
    assert drops == {5: "policy_error", 7: "policy_error"}
    assert len(chunks) == 28
    first, second = [line for line in lines if line.get("name") == "fault"]
    assert says in first["what"] == second["what"]
    assert first["place"].startswith(f"{__file__}:")
    assert (first["stage"], first["rank"]) == ("B", 0 if form == "inline" else 1)
    assert first["text"]
    assert not second["text"]
    printed = [text for text in caplog.messages if "stage B: the first" in text]
    assert len(printed) == 1
    assert says in printed[0]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["plain", "mute", "interrupt"])
def test_a_decoder_s_exception_is_one_failed_envelope_told_once(
    form: str, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    act, says = ODD[kind]
    decoder = OddDecoder(act, range(5, 9, 2))
    with build(form, NewestValues(), tmp_path, decoder) as pipeline:
        pipeline.saturate()
        pipeline.rank0.run(30)
        lines, chunks = pipeline.lines(), pipeline.collector.chunks
    drops = {e["seq"]: e["drop"] for e in lines if e["kind"] == "envelope" and "drop" in e}
    assert drops == {5: "decoder_error", 7: "decoder_error"}
    assert len(chunks) == 28
    assert not any((chunk[3] == 7).any() for chunk in chunks)
    first, second = [line for line in lines if line.get("name") == "fault"]
    assert (first["stage"], first["rank"], first["seq"], second["seq"]) == ("C", 0, 5, 7)
    assert says in first["what"]
    assert len([text for text in caplog.messages if "stage C: the first" in text]) == 1


class ForgetfulDecoder(CopyDecoder):
    """Leaves out the last row of a chunk, and every fourth chunk."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, row: int, result: Any, actions: Any) -> None:
        self.calls += 1
        if self.calls % 4 == 0:
            return
        actions[:-1] = result["actions"][:-1]
        if self.calls % 4 != 2:
            actions[-1] = result["actions"][-1]


def test_what_a_decoder_leaves_out_is_never_an_older_chunk(tmp_path: Path) -> None:
    with build("inline", NewestValues(), tmp_path, ForgetfulDecoder()) as pipeline:
        pipeline.saturate()
        pipeline.rank0.run(8)
        drops = {e["seq"]: e.get("drop") for e in pipeline.lines() if e["kind"] == "envelope"}
    assert [seq for seq, drop in drops.items() if drop == "non_finite"] == [1, 3, 5, 7]
    assert [seq for seq, drop in drops.items() if drop is None] == [0, 2, 4, 6]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["plain", "mute"])
def test_one_that_keeps_raising_ends_the_run_with_what_and_where(
    form: str, kind: str, tmp_path: Path
) -> None:
    act, says = ODD[kind]
    with build(form, failing(act, range(5, 1000)), tmp_path) as pipeline:
        pipeline.saturate()
        with pytest.raises(PolicyError) as found:
            pipeline.rank0.run(60)
    assert f"the last: policy_error: {says}" in str(found.value)
    assert f" at {__file__}:" in str(found.value)
    assert "5 results in a row could not be used" in str(found.value)


@pytest.mark.parametrize("form", FORMS)
def test_exit_in_a_decoder_ends_the_run(form: str, tmp_path: Path) -> None:
    decoder = OddDecoder(lambda: sys.exit(0), range(5, 6))
    with build(form, NewestValues(), tmp_path, decoder) as pipeline:
        pipeline.saturate()
        with pytest.raises(UserExitError, match=r"the decoder called sys\.exit\(0\) at .*py:"):
            pipeline.rank0.run(30)


def test_exit_in_a_policy_ends_the_one_rank_twin(tmp_path: Path) -> None:
    with build("inline", failing(lambda: sys.exit(3), range(5, 6)), tmp_path) as pipeline:
        pipeline.saturate()
        with pytest.raises(UserExitError, match=r"the policy called sys\.exit\(3\) at .*test_user"):
            pipeline.rank0.run(30)


@pytest.mark.parametrize("form", FORMS)
def test_envelopes_that_fail_are_not_timed(form: str, tmp_path: Path) -> None:
    with build(form, failing(ODD["mute"][0], range(30, 40, 2)), tmp_path) as pipeline:
        pipeline.saturate()
        pipeline.rank0.run(30)
        assert [len(times) for times in pipeline.rank0.measure(15).values()] == [10, 10, 10]
        assert [len(times) for times in pipeline.rank0.measure(3).values()] == [3, 3, 3]


@pytest.mark.parametrize(
    ("setting", "rule", "says"),
    [
        ("actions.low=[2,2]", "limit", "action '.' is .* at step ., limits 2 to 3; .*'clip'"),
        ("actions.velocity=[1e-6,1e-6]", "velocity", r"action '.' is .* units/s at .*limit 1e-06"),
        ("actions.acceleration=[1e-6,1e-6]", "acceleration", ".* units/s2 at .*limit 1e-06"),
    ],
)
def test_the_first_chunk_that_breaks_a_rule_is_told_with_what_was_measured(
    setting: str, rule: str, says: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    more = ("actions.high=[3,3]", "actions.on_limit=drop") if rule == "limit" else ()
    config = small_config(setting, *more)
    with PipelineInProcess(config, NewestValues(), tmp_path, inline=True) as pipeline:
        pipeline.saturate()
        with pytest.raises(PolicyError, match=f"the last: {rule}, the first time: {says}"):
            pipeline.rank0.run(60)
        (refused,) = [line for line in pipeline.lines() if line.get("name") == "refused"]
    assert refused["rule"] == rule
    assert len([text for text in caplog.messages if f"the first {rule}: action" in text]) == 1


def test_the_first_action_that_is_not_finite_is_named(tmp_path: Path) -> None:
    class Nan(NewestValues):
        def __call__(self, window: Any, out: Any) -> None:
            super().__call__(window, out)
            out["actions"][0, 2, 1] = float("nan")

    config = small_config()
    with PipelineInProcess(config, Nan(), tmp_path, inline=True) as pipeline:
        pipeline.saturate()
        with pytest.raises(PolicyError, match="non_finite, the first time: action 'b' is nan"):
            pipeline.rank0.run(60)


# ---- before a run -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import sys\nsys.exit(0)", r"the import of 'odd_policy' called sys.exit\(0\) at .*py:2"),
        ("def build(:", "the import of 'odd_policy' raised SyntaxError: invalid syntax.*py:1"),
        ("raise KeyError(3)", "the import of 'odd_policy' raised KeyError: 3 at .*py:1"),
        ("import nowhere_at_all", "raised ModuleNotFoundError: No module named 'nowhere_at_all'"),
    ],
)
def test_a_module_that_cannot_be_imported_is_a_problem_of_the_configuration(
    source: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "odd_policy.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "odd_policy", raising=False)
    with pytest.raises(ConfigError, match=says):
        load_target("odd_policy:build")


@pytest.mark.parametrize("kind", sorted(set(ODD) - {"interrupt"}))
def test_what_a_build_raises_is_a_problem_of_the_configuration(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    act, says = ODD[kind]
    monkeypatch.setattr(logging, "oddly", lambda: act(), raising=False)
    with pytest.raises(ConfigError) as found:
        call_target("policy.target", "logging:oddly", "build(options, device)", lambda f: f())
    (problem,) = found.value.problems
    assert problem.startswith("policy.target: logging:oddly raised ")
    assert says in problem
    assert f'File "{__file__}", line ' in caplog.text


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError(), ConfigError(["own"])])
def test_a_person_s_interrupt_memory_and_errors_of_ours_pass_through(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def act() -> None:
        raise error

    monkeypatch.setattr(logging, "oddly", act, raising=False)
    with pytest.raises(type(error)) as found:
        call_target("policy.target", "logging:oddly", "build(options, device)", lambda f: f())
    assert found.value is error


def test_a_tensor_that_a_build_declares_wrongly_is_a_problem_of_the_configuration() -> None:
    def build() -> None:
        TensorSpec("actions", (16, 6), "f64")

    with pytest.raises(ConfigError, match=r"target: arm:build: tensor 'actions': dtype 'f64' "):
        call_target("policy.target", "arm:build", "", lambda made: made(), found=build)


def test_a_target_that_cannot_be_called_is_named() -> None:
    with pytest.raises(ConfigError, match=r"decode.target: os:path is a module, which cannot be"):
        call_target("decode.target", "os:path", "build(options, actions)", lambda f: f())


def test_an_instruction_that_raises_oddly_comes_back_as_text() -> None:
    class Odd:
        def instruct(self, number: int, text: str) -> None:
            ODD[text][0]()

    policy: Any = Odd()
    for kind in ODD:
        text = instruct(policy, 1, kind)
        assert ODD[kind][1].partition(":")[0] in text
        assert len(text) <= MAX_TEXT
