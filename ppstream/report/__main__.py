"""``python -m ppstream.report``: as ``ppstream report``."""

import sys

from ppstream.report.cli import main

if __name__ == "__main__":
    sys.exit(main())
