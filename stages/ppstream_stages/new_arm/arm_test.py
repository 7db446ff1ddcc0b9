"""The run becomes ready, and the robot moves."""

import subprocess
import sys
import time
from pathlib import Path

from msgspec import toml

HERE = Path(__file__).parent
NAME = Path(__file__).stem.removesuffix("_test")  # of the run, its policy and its robot
PPSTREAM = [sys.executable, "-m", "ppstream.launch.commands"]  # wherever it is installed


def test_the_arm_moves(tmp_path: Path) -> None:
    endpoint, file = f"unix://{tmp_path}/robots", tmp_path / "run.toml"
    (run,) = (one for one in HERE.glob("*.toml") if one.stem.replace("-", "_") == NAME)
    text = run.read_text()
    named = toml.decode(text)["service"]["endpoint"]
    assert named in text, f"{run}: write service.endpoint as it is read, {named}"
    file.write_text(text.replace(named, endpoint))
    robot = HERE / f"{NAME}_robot.py"
    settings = "--set", f"service.endpoint={endpoint}", "--set", f"log.root={tmp_path}/logs"
    served = subprocess.Popen([*PPSTREAM, "run", str(run), *settings])
    command = [sys.executable, str(robot), str(file), "2"]
    moved = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        while moved.poll() is None and served.poll() is None:
            time.sleep(0.1)  # the robot waits for the run, which may load a policy for minutes
        assert served.poll() is None, "the run ended first; it says why above"
        said, _ = moved.communicate()
    finally:
        moved.terminate()
        served.terminate()
    assert served.wait(30) == 0
    assert moved.returncode == 0
    assert ", 0 executed" not in said
