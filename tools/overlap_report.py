"""Judge run logs from a checkout, nothing installed: ``python tools/overlap_report.py logs/``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ppstream.report.cli import main

if __name__ == "__main__":
    sys.exit(main())
