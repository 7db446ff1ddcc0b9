"""The run becomes ready, and the robot moves."""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_the_arm_moves(tmp_path: Path) -> None:
    endpoint, file = f"unix://{tmp_path}/robots", tmp_path / "run.toml"
    (run,) = HERE.glob("*.toml")
    file.write_text(run.read_text().replace("unix:///tmp/ppstream-{uid}/robots", endpoint))
    (robot,) = HERE.glob("*robot.py")
    settings = "--set", f"service.endpoint={endpoint}", "--set", f"log.root={tmp_path}/logs"
    served = subprocess.Popen(["ppstream", "run", str(run), *settings])
    try:
        moved = subprocess.run(
            [sys.executable, str(robot), str(file), "2"], capture_output=True, text=True, timeout=90
        )
    finally:
        served.terminate()
    assert served.wait(30) == 0
    assert moved.returncode == 0, moved.stderr
    assert ", 0 executed" not in moved.stdout
