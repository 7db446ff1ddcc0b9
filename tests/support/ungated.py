"""``ppstream.serve`` whose gate lets every verdict pass, soon, and which prints no report.

For tests that do not ask for a verdict, on a busy machine too, and for ranks that share a GPU:
their periods and stamps are those of its time slices.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ppstream import serve
from ppstream.pipeline import bringup

#: In bring-up, of those that the configuration asks for, at least 100: nobody judges them.
FEWER_ENVELOPES = 80


def main(argv: Sequence[str]) -> int:
    """As ``ppstream.serve``."""
    bringup.pass_or_raise = lambda report: None
    bringup.SPARE = -FEWER_ENVELOPES
    serve.print_report = lambda *_, **__: None
    return serve.main(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
