"""Where the time of a profiler's trace goes, nothing installed: ``report/kernels/cli.py TRACE``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ppstream.report.kernels.cli import main

if __name__ == "__main__":
    sys.exit(main())
