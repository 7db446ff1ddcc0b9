"""Shares of time in a profiler's trace, nothing installed: ``tools/kernel_report.py TRACE``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ppstream.report.kernels.cli import main

if __name__ == "__main__":
    sys.exit(main())
