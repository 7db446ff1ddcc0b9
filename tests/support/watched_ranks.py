"""Ranks of one process with their health servers, and scrapes of them."""

import json
import urllib.error
import urllib.request
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

from pipeline_in_process import NewestValues, PipelineInProcess, small_config
from prometheus_client.parser import text_string_to_metric_families
from robot_rig import wait_until

from ppstream.launch.monitoring import Monitoring
from ppstream.sessions.session import SessionCounts

#: The policy rank answers first, and accounts later.
CALLS = "ppstream_stage_duration_seconds_count", ("B",)


class Watched:
    """Both ranks of a live pipeline in this process, each with its own door."""

    def __init__(
        self, folder: Any, stack: ExitStack, *settings: str, policy: NewestValues | None = None
    ) -> None:
        config = small_config("metrics.port=0", *settings)
        policy = policy or NewestValues()
        self.pipeline = stack.enter_context(PipelineInProcess(config, policy, folder))
        manifest = {"topology": {"world_size": 2, "d_in": 2, "d_out": 2, "threads": "serial"}}
        (folder / "run.json").write_text(json.dumps({"schema": "ppstream.log/1", **manifest}))
        run = SimpleNamespace(run_id="r", directory=folder)
        logs = (self.pipeline.rank0.log, self.pipeline.policy_log)
        ledgers = (self.pipeline.rank0.credits, None)
        counts = SessionCounts(opened=2, chunks_sent=7)
        counts.chunks_dropped["episode"] = 3
        robots = SimpleNamespace(statistics=lambda: counts.statistics(1))
        for rank, (log, ledger) in enumerate(zip(logs, ledgers, strict=True)):
            watching = Monitoring(
                config, run, log, stack, rank=rank, generation=0, credit_ledger=ledger
            )
            watching.show_robots(robots)
            log.flush()
        self.ports = [port_in(folder / f"rank{rank}.gen0.jsonl") for rank in (0, 1)]

    def run(self, envelopes: int) -> None:
        self.pipeline.saturate()
        self.pipeline.rank0.run(envelopes)
        self.pipeline.rank0.write_ledger()
        self.pipeline.rank0.log.flush()
        wait_until(lambda: self.samples(1).get(CALLS, 0) == self.pipeline.rank0.started)
        self.pipeline.policy_log.flush()

    def get(self, rank: int, path: str) -> tuple[int, str]:
        return get(self.ports[rank], path)

    def samples(self, rank: int) -> dict[tuple[str, tuple[str, ...]], float]:
        """By name and label values, in the order of the labels' names."""
        families = text_string_to_metric_families(self.get(rank, "/metrics")[1])
        return {
            (sample.name, tuple(sample.labels.values())): sample.value
            for family in families
            for sample in family.samples
        }


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def port_in(log: Any) -> int:
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return next(line["port"] for line in lines if line.get("name") == "metrics")
