"""Forks of this process and of those before it: who asks often makes no system call for it."""

from __future__ import annotations

import os
from typing import Final


class Forks:
    """Attributes: ``count``, which is another one in a process that was forked."""

    def __init__(self) -> None:
        self.count = 0
        os.register_at_fork(after_in_child=self._note)

    def _note(self) -> None:
        self.count += 1


forks: Final = Forks()
