"""What the host asks the clock kernel, and when it launches one again; the kernel is a stand-in."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from ppstream_kernels import cuda_clock, kernel_launch
from ppstream_kernels.cuda_clock import ARGUMENTS, ClockAnswers

DEVICE = torch.device("cuda", 99)


class Word:
    def __init__(self, address: int) -> None:
        self.address = address
        self._word = ctypes.c_int64.from_address(address)

    @property
    def value(self) -> int:
        return self._word.value

    @value.setter
    def value(self, value: int) -> None:
        self._word.value = value


class Kernel:
    """A driver whose kernel answers when the test says so, as ``clock.cu`` does."""

    def __init__(self) -> None:
        self.launches: list[list[int]] = []

    def CUfunction(self, handle: int) -> int:
        return handle

    def cuLaunchKernel(self, kernel: int, *rest: Any) -> tuple[int]:
        (arguments,) = (ctypes.c_void_p * 1).from_address(rest[8])
        found = ARGUMENTS.unpack(ctypes.string_at(arguments or 0, ARGUMENTS.size))
        self.asked, self.answered, self.ended = map(Word, found[:3])
        self.now = found[3]
        self.launches.append([Word(self.now + 8 * at).value for at in range(3)])
        return (0,)

    def answer(self, ns: int) -> None:
        Word(self.answered.address + 8).value = ns
        self.answered.value = self.asked.value
        if self.asked.value == self.launches[-1][1]:
            self.end()

    def end(self) -> None:
        self.ended.value = self.launches[-1][2]


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    kernel = Kernel()
    monkeypatch.setattr(kernel_launch, "import_cuda", lambda name: kernel)
    monkeypatch.setattr(cuda_clock, "load_kernels", lambda *_: {"answer": 5})
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *sizes, pin_memory, **more: zeros(*sizes, **more))
    return kernel


def test_one_launch_answers_several_questions(kernel: Kernel) -> None:
    answers = ClockAnswers(DEVICE, 3)
    for ns in (10, 20, 30):
        answers.ask("stream")
        assert answers.answer("stream") is None
        kernel.answer(ns)
        assert answers.answer("stream") == ns
    assert kernel.launches == [[1, 3, 1]]
    answers.ask("stream")
    assert kernel.launches == [[1, 3, 1], [4, 6, 2]]


def test_a_kernel_that_ended_before_the_question_is_launched_again(kernel: Kernel) -> None:
    answers = ClockAnswers(DEVICE, 3)
    answers.ask("stream")
    kernel.answer(10)
    kernel.end()
    answers.ask("stream")
    assert kernel.launches == [[1, 3, 1], [2, 4, 2]]


def test_a_kernel_that_ended_while_it_was_asked_is_launched_again(kernel: Kernel) -> None:
    answers = ClockAnswers(DEVICE, 3)
    answers.ask("stream")
    kernel.end()
    assert answers.answer("stream") is None
    assert kernel.launches == [[1, 3, 1], [1, 3, 2]]
    kernel.answer(50)
    assert answers.answer("stream") == 50
