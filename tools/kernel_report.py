"""Where the time of a profiler's trace goes, nothing installed: ``kernel_report.py TRACE``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ppstream.kernel_report import main

if __name__ == "__main__":
    sys.exit(main())
