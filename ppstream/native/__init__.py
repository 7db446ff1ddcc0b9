"""The compiled core: the calls of every envelope in C, each beside its Python twin.

Not here: the twins, which are the reference (``ingest``, ``pipeline/action_limits.py``,
``links/doorbell.py``, ``core/waiter.py``). They do everything without a compiler at installation or
with ``PPSTREAM_NATIVE=0``, and inherit bases without members then; ``run.json`` tells. Start
reading at ``core.pyi``, ``core.c`` and ``wait.c``.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Final

API: Final = 9  # core.c has the same number: an older build of it is refused
SWITCH: Final = "PPSTREAM_NATIVE"  # "0": the Python twins; "1": an ImportError where there is none


def _obstacle() -> str | None:
    """Returns why the core cannot be used, None when it can."""
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH} is 0"
    if sys.version_info < (3, 11):
        return "the stable ABI has buffers since Python 3.11"
    try:
        core = import_module("ppstream.native.core")
    except ModuleNotFoundError:
        return "there was no C compiler when ppstream was installed"
    except ImportError as error:
        return str(error)
    if core.API != API:
        return f"{core.__file__} has API {core.API}, want {API}: install again"
    return None


why_not: Final = _obstacle()
is_used: Final = why_not is None
if not is_used and os.environ.get(SWITCH) == "1":
    raise ImportError(f"{SWITCH} is 1, but there is no compiled core: {why_not}")

if TYPE_CHECKING or is_used:
    from ppstream.native import core

    Bell = core.Bell
    Clock = core.Clock
    Ledger = core.Ledger
    Ring = core.Ring
    Waiter = core.Waiter
    are_inside = core.are_inside
    receive = core.receive
else:

    class NoMembers:
        """Stands in for each type of the core; a class that inherits it gets nothing from it."""

    Bell = Clock = Ledger = Ring = Waiter = NoMembers
    are_inside = receive = None
