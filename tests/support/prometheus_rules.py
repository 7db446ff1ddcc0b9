"""The shipped alerts and dashboard, and Prometheus's own tools to judge them."""

import json
import os
import shutil
import subprocess
import urllib.parse
from pathlib import Path
from typing import Any

import pytest
from watched_ranks import get

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "runbooks/prometheus/alerts.yml"
BOARD = ROOT / "runbooks/grafana/ppstream.json"
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not there: apt-get install prometheus"
)


def promtool(*arguments: str) -> None:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


class Prometheus:
    """The server from the distribution, with our rules, scraping ``targets`` each second."""

    def __init__(self, folder: Path, targets: list[int], listen: int) -> None:
        jobs = [
            {"targets": [f"127.0.0.1:{port}"], "labels": {"rank": str(rank)}}
            for rank, port in enumerate(targets)
        ]
        configuration = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(RULES)],
            "scrape_configs": [{"job_name": "ppstream", "static_configs": jobs}],
        }
        (folder / "prometheus.yml").write_text(json.dumps(configuration))
        command = ["prometheus", f"--config.file={folder}/prometheus.yml"]
        command += [f"--storage.tsdb.path={folder}/data"]
        command += [f"--web.listen-address=127.0.0.1:{listen}", "--log.level=warn"]
        self.port = listen
        with (folder / "prometheus.log").open("w") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env=os.environ | {"GOMAXPROCS": "1"}
            )

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(20)

    def ask(self, path: str) -> Any:
        try:
            code, text = get(self.port, f"/api/v1/{path}")
        except OSError:
            return None
        return json.loads(text)["data"] if code == 200 else None  # 503: not yet ready

    def query(self, expression: str) -> list[Any]:
        found = self.ask("query?" + urllib.parse.urlencode({"query": expression}))
        return [] if found is None else found["result"]
