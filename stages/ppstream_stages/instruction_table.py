"""The numbers that stand for each instruction of a run, where the policy computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor, nn

TEXTS_MAX: Final = 1024  # instructions of one run


class InstructionTable(nn.Module):
    """A row of numbers for each text; row 0 is for a robot that sent none.

    Args:
        width: numbers of a row.
    """

    rows: Tensor  # [texts, width]

    def __init__(self, width: int) -> None:
        super().__init__()
        shape = (TEXTS_MAX + 1, width)
        self.register_buffer("rows", torch.empty(shape, dtype=torch.int64), persistent=False)
        self.kept = torch.empty(0)

    def start(self, none: Sequence[int] = ()) -> None:
        """Fills row 0 with ``none``, or zeros; others are zeros until they are kept."""
        is_gpu = self.rows.is_cuda
        shape = self.rows.shape
        self.kept = torch.zeros(shape, dtype=torch.int64, device="cpu", pin_memory=is_gpu)
        if none:
            self.kept[0].copy_(torch.tensor(none))
        self.rows.copy_(self.kept)

    def of(self, numbers: Tensor) -> Tensor:
        """``[B]``, int64, to ``[B, width]``."""
        return self.rows.index_select(0, numbers)

    def check(self, number: int) -> None:
        """Refuses a number that has no row.

        Raises:
            ValueError: the number of the text is 0 or too large.
        """
        if not 0 < number <= TEXTS_MAX:
            raise ValueError(f"text {number}: {TEXTS_MAX} texts are the limit of one run")

    def keep(self, number: int, row: Sequence[int]) -> None:
        """Keeps the numbers of a text; launches no kernel and does not wait for the GPU."""
        self.kept[number].copy_(torch.tensor(row))
        self.rows[number].copy_(self.kept[number], non_blocking=True)
