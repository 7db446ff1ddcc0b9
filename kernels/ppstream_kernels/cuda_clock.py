"""Launches ``clock.cu``: asks the device for its time by a word in pinned memory.

A question and its answer take some 3 µs, so the device's time is known within that. The kernel
runs for a few questions, and ends by itself a few ms after the last.
"""

from __future__ import annotations

import struct
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import device as Device

from ppstream_kernels.cuda_compile import Plain
from ppstream_kernels.cuda_load import load_kernels
from ppstream_kernels.kernel_launch import KernelLaunch, index_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

CLOCK: Final = Path(__file__).with_name("clock.cu")
ARGUMENTS: Final = struct.Struct("=4Qq")  # asked, answered, ended, now, limit_ns

_LIMIT_NS: Final = 5_000_000  # without a question
_LINE: Final = 16  # words of 8 bytes that nobody else writes
_ASKED, _ANSWERED, _ENDED, _NOW, _WORDS = (_LINE * n for n in range(5))
_WARP_OF_ONE: Final = 1


class ClockAnswers:
    """Questions to one device: one thread at a time.

    Args:
        device: current.
        questions: that one launch answers.

    Raises:
        RuntimeError: cuda-core is missing, or the driver refuses the kernel.
    """

    def __init__(self, device: Device, questions: int) -> None:
        self._memory = torch.zeros(_WORDS, dtype=torch.int64, pin_memory=True)
        numbers: NDArray[Any] = self._memory.numpy()
        self._words: memoryview = numbers.data
        base = self._memory.data_ptr()
        asked, answered, ended, now = (base + 8 * at for at in (_ASKED, _ANSWERED, _ENDED, _NOW))
        arguments = ARGUMENTS.pack(asked, answered, ended, now, _LIMIT_NS)
        self._launch = KernelLaunch(_kernel(index_of(device)), (1, 1, 1), arguments, _WARP_OF_ONE)
        self._questions = questions
        self._last = 0  # question of the newest launch
        self._launches = 0

    def ask(self, stream: Any) -> None:
        """Ask for the time; on ``stream``, which is idle, whoever answers runs."""
        words = self._words
        question = words[_ASKED] + 1
        if question > self._last or self._is_over:
            self._begin(question, stream)
        words[_ASKED] = question

    def answer(self, stream: Any) -> int | None:
        """Returns the device's time in ns when the newest question came; None: not yet."""
        words = self._words
        if words[_ANSWERED] == words[_ASKED]:
            found: int = words[_ANSWERED + 1]
            return found
        if self._is_over and words[_ANSWERED] != words[_ASKED]:  # it came too late
            self._begin(words[_ASKED], stream)
        return None

    @property
    def _is_over(self) -> bool:
        over: bool = self._words[_ENDED] == self._launches
        return over

    def _begin(self, question: int, stream: Any) -> None:
        self._launches += 1
        self._last = question + self._questions - 1
        words = self._words
        words[_NOW], words[_NOW + 1], words[_NOW + 2] = question, self._last, self._launches
        self._launch.queue(stream)


@cache
def _kernel(index: int) -> int:
    """The driver's handle of the kernel."""
    return load_kernels(index, ("answer",), Plain(), CLOCK)["answer"]
