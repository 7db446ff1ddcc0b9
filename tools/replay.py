"""Stream a recording as a robot would: ``python tools/replay.py FILE``, as ``ppstream replay``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ppstream.launch.replay import main

if __name__ == "__main__":
    sys.exit(main())
