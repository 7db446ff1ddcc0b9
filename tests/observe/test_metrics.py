import json
import re
import shutil
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pipeline_in_process import NewestValues, small_config
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.parser import text_string_to_metric_families
from watched_ranks import Watched, get, port_in

from ppstream.analysis.judge import judge
from ppstream.analysis.log_reader import read_run
from ppstream.core.durations import Histograms
from ppstream.core.errors import ConfigError
from ppstream.core.interpreter import InterpreterPauses
from ppstream.launch.monitoring import Monitoring
from ppstream.observe import memory as gpu_memory
from ppstream.observe import metric_families as show
from ppstream.observe.health_server import HealthServer
from ppstream.observe.log_writer import PolicyRecord, TimestampLog
from ppstream.observe.metrics import memory_families
from ppstream.report.text import render

ENVELOPES = 60


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    with ExitStack() as stack:
        watched = Watched(tmp_path_factory.mktemp("watched"), stack)
        watched.run(ENVELOPES)
        yield watched


def test_rank_0_shows_what_its_loop_did(watched: Watched) -> None:
    seen = watched.samples(0)
    assert seen["ppstream_envelopes_total", ()] == ENVELOPES
    for stage in "ABC":
        assert seen["ppstream_stage_duration_seconds_count", (stage,)] == ENVELOPES
    assert 0 < seen["ppstream_stage_duration_recent_seconds", ("0.99", "B")] < 1
    assert seen["ppstream_period_seconds_count", ()] == ENVELOPES - 1
    assert seen["ppstream_phase", ("ready",)] == 1
    assert seen["ppstream_phase", ("bring-up",)] == 0
    assert seen["ppstream_queue_bound", ("d_in",)] == 2
    assert seen["ppstream_queue_depth", ("d_in",)] == 0
    assert seen["ppstream_ledger_imbalance", ("envelopes",)] == 0
    assert seen["ppstream_samples_received_total", ("imu",)] > 0
    assert seen["ppstream_stream_on_request", ("imu",)] == 0
    assert seen["ppstream_lease_seconds", ()] == 60
    assert len(_classes(seen)) == 7


def _classes(seen: dict[tuple[str, tuple[str, ...]], float]) -> list[str]:
    return [labels[0] for name, labels in seen if name == "ppstream_run_class"]


@pytest.mark.parametrize("leave", [shutil.rmtree, lambda folder: zero(folder / "run.json")])
def test_a_run_whose_folder_is_gone_is_scraped_all_the_same(
    tmp_path: Path, leave: Callable[[Path], None]
) -> None:
    with ExitStack() as stack:
        watched = Watched(tmp_path, stack)
        watched.run(12)
        leave(tmp_path)
        seen = watched.samples(0)
    assert seen["ppstream_envelopes_total", ()] == 12
    assert [seen["ppstream_run_class", (name,)] for name in _classes(seen)] == [0] * 7


def zero(file: Path) -> None:
    """As a power cut may leave it."""
    file.write_bytes(bytes(file.stat().st_size))


def test_policy_rank_shows_its_stage(watched: Watched) -> None:
    seen = watched.samples(1)
    assert seen["ppstream_stage_duration_seconds_count", ("B",)] == ENVELOPES
    assert seen["ppstream_residence_seconds_count", ()] == ENVELOPES
    assert ("ppstream_wait_seconds_total", ("input",)) in seen
    assert not [name for name, _ in seen if name.startswith("ppstream_queue")]


def test_robots_are_shown_on_rank_0(watched: Watched) -> None:
    seen = watched.samples(0)
    assert seen["ppstream_robots", ()] == 1
    assert seen["ppstream_chunks_sent_total", ()] == 7
    assert seen["ppstream_dropped_total", ("episode", "chunk")] == 3


class Constant(NewestValues):
    """A policy that asks for one value, whatever it sees; each call may have its own."""

    def __init__(self, value_of: Callable[[int], float]) -> None:
        super().__init__()
        self.value_of = value_of

    def __call__(self, window: Any, out: Any) -> None:
        out["actions"].fill_(self.value_of(self.calls))
        self.calls += 1


@pytest.mark.parametrize(
    ("settings", "value_of", "counts", "refused"),
    [
        ((), lambda call: 0.5, (12, 0, 0), {}),
        ((), lambda call: 1.5 if call % 3 == 0 else 0.5, (12, 4, 32), {}),
        (("actions.on_limit=drop",), lambda call: call % 3, (12, 0, 0), {"limit": 4}),
    ],
)
def test_what_the_action_rules_did_is_the_same_in_log_scrape_and_report(
    tmp_path: Any,
    settings: tuple[str, ...],
    value_of: Callable[[int], float],
    counts: tuple[int, int, int],
    refused: dict[str, int],
) -> None:
    with ExitStack() as stack:
        watched = Watched(tmp_path, stack, *settings, policy=Constant(value_of))
        watched.run(12)
        seen = watched.samples(0)
        lines = watched.pipeline.lines()
    logged = next(line["actions"] for line in reversed(lines) if line["kind"] == "ledger")
    report = judge(read_run(tmp_path))
    said = report.as_dict()["service"]["actions"]
    keys = ("chunks", "clipped_chunks", "clipped_values")
    assert logged == said == dict(zip(keys, counts, strict=True)) | {"refused": refused}
    names = ("chunks_checked", "chunks_clipped", "values_clipped")
    assert tuple(seen[f"ppstream_{name}_total", ()] for name in names) == counts
    rules = {k: n for (name, k), n in seen.items() if name == "ppstream_chunks_refused_total"}
    assert rules == {(rule,): n for rule, n in refused.items()}
    assert any(line.startswith("  actions ") for line in render(report).splitlines())
    told = [text for text in report.statements if "the rules of [actions]" in text]
    assert len(told) == (counts[1:] != (0, 0) or bool(refused))


def test_buckets_add_up_and_are_seconds(watched: Watched) -> None:
    text = watched.get(0, "/metrics")[1]
    families = {family.name: family for family in text_string_to_metric_families(text)}
    buckets = [s for s in families["ppstream_latency_seconds"].samples if "le" in s.labels]
    values = [sample.value for sample in buckets]
    assert values == sorted(values)
    assert (values[-1], buckets[-1].labels["le"]) == (ENVELOPES, "+Inf")
    assert all(f.documentation for f in families.values())


def test_series_are_few(watched: Watched) -> None:
    assert len(watched.samples(0)) < 600
    assert len(watched.samples(1)) < 200


def test_a_scrape_leaves_the_loops_their_turns(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[InterpreterPauses] = []
    monkeypatch.setattr(InterpreterPauses, "pause", lambda pieces: pauses.append(pieces))
    assert len(watched.samples(0)) < len(pauses) + 60  # those of the process and of its garbage
    pauses.clear()
    accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
    url = f"http://127.0.0.1:{watched.ports[0]}/metrics"
    with urllib.request.urlopen(urllib.request.Request(url, headers=accept), timeout=10) as page:
        assert page.headers["Content-Type"].startswith("application/openmetrics-text")
        assert page.read().endswith(b"# EOF\n")
    assert len(pauses) > 300


def test_samples_of_a_histogram_are_those_of_the_library() -> None:
    found = Histograms()
    found.add(found.rows("link").repeat(3), np.array([1e3, 2e6, 1e12]))
    one = found.one("link")
    totals = [float(total) for total in one.counts.cumsum()]
    theirs = HistogramMetricFamily("name", "Text.", labels=["label"])
    buckets = list(zip(show.EDGES, totals, strict=True))
    theirs.add_metric(["value"], buckets, one.sum_ns * show.S)
    assert show.histograms("name", "Text.", "label", {"value": one}) == theirs
    assert totals[-1] == 3


def test_health_is_json_and_readiness_follows_the_phase(watched: Watched) -> None:
    for rank in (0, 1):
        status, body = watched.get(rank, "/healthz")
        said = json.loads(body)
        assert (status, said["rank"], said["run_id"]) == (200, str(rank), "r")
    assert watched.get(0, "/readyz")[0] == 200
    assert watched.get(1, "/readyz")[0] == 503  # its phase comes from frames: none was sent here
    assert watched.get(0, "/elsewhere")[0] == 404


def test_health_counts_what_nobody_scraped(tmp_path: Any) -> None:
    run = SimpleNamespace(run_id="r", directory=tmp_path)
    path = tmp_path / "rank1.gen0.jsonl"
    with ExitStack() as stack:
        log = TimestampLog(path, PolicyRecord, 8, run_id="r", generation=0)
        stack.callback(log.close)
        Monitoring(small_config("metrics.port=0"), run, log, stack, rank=1, generation=0)
        for _ in range(3):
            log.commit(log.acquire())
        assert log.flush()
        assert json.loads(get(port_in(path), "/healthz")[1])["envelopes"] == 3


class Nothing:
    def collect(self) -> Iterator[Any]:
        return iter(())


@pytest.fixture
def server() -> Iterator[HealthServer]:
    server = HealthServer(0, Nothing(), lambda: {"phase": "warming"})
    yield server
    server.close()


def test_port_that_is_taken_is_a_configuration_error(server: HealthServer) -> None:
    with pytest.raises(ConfigError, match=r"metrics\.port.*set metrics\.port elsewhere"):
        HealthServer(server.port, Nothing(), dict)


def test_not_ready_is_503(server: HealthServer) -> None:
    assert get(server.port, "/readyz")[0] == 503
    assert get(server.port, "/healthz")[0] == 200


def test_a_browser_s_first_page_links_to_all_that_is_served(server: HealthServer) -> None:
    status, page = get(server.port, "/")
    linked = re.findall(r'href="([^"]+)"', page)
    assert (status, linked) == (200, ["/healthz", "/readyz", "/metrics"])
    assert [get(server.port, path)[0] for path in linked] == [200, 503, 200]  # it is warming


def test_client_that_says_nothing_holds_others_up_for_a_bounded_time(
    server: HealthServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    import socket

    from ppstream.observe import http_server

    assert http_server.REQUEST_LIMIT_S <= 2
    monkeypatch.setattr(http_server, "REQUEST_LIMIT_S", 0.2)
    with socket.create_connection(("127.0.0.1", server.port)):
        done = threading.Event()

        def ask() -> None:
            assert get(server.port, "/healthz")[0] == 200
            done.set()

        threading.Thread(target=ask, daemon=True).start()
        assert done.wait(60)


def test_nothing_can_be_changed_through_the_door(server: HealthServer) -> None:
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}/metrics", data=b"x")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=10)
    assert refused.value.code == 501
    refused.value.close()


def test_gpu_memory_that_is_neither_free_nor_torchs_is_told_apart() -> None:
    said = {
        "reserved_bytes": {"all": {"current": 30}},
        "allocated_bytes": {"all": {"current": 20}},
        "num_alloc_retries": 2,
        "segment": {"all": {"allocated": 5}},
    }
    families = {f.name: f for f in memory_families(gpu_memory.memory(said, 60, 100))}
    memory = {s.labels["kind"]: s.value for s in families["ppstream_gpu_memory_bytes"].samples}
    assert memory["non_torch"] == 10
    assert memory["allocated"] == 20
    assert families["ppstream_gpu_alloc_retries"].samples[0].value == 2
