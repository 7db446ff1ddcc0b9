"""Alert rules and dashboard, against promtool and a real Prometheus that scrapes both ranks."""

import json
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_rules import BOARD, ROOT, RULES, Prometheus, needs_promtool, promtool
from robot_rig import wait_until
from watched_ranks import Watched

from ppstream.observe import memory as gpu_memory
from ppstream.observe.metrics import memory_families

SCRAPES = ROOT / "runbooks/prometheus/prometheus.yml"
METRIC = re.compile(r"\bppstream_[a-z0-9_]+")
START_LIMIT_S = 30


def rules() -> dict[str, dict[str, str]]:
    """Alerts by name with their page, read without a YAML parser."""
    found: dict[str, dict[str, str]] = {}
    for line in RULES.read_text().splitlines():
        key, _, value = line.strip().removeprefix("- ").partition(": ")
        if key == "alert":
            found[value] = rule = {}
        elif key in ("runbook", "severity", "for") and found:
            rule[key] = value
    return found


def test_every_alert_names_a_page_that_is_there() -> None:
    assert len(rules()) >= 20
    missing = {n: r["runbook"] for n, r in rules().items() if not (ROOT / r["runbook"]).is_file()}
    assert missing == {}


@needs_promtool
def test_promtool_accepts_rules_and_scrape_configuration() -> None:
    promtool("check", "rules", "--lint=all", "--lint-fatal", str(RULES))
    promtool("check", "config", str(SCRAPES))


R0 = 'instance="h:9464", job="ppstream", rank="0"'
R1 = 'instance="h:9465", job="ppstream", rank="1"'
READY = {f'ppstream_phase{{{R0}, phase="ready"}}': "1x40"}
STEADY = {
    f"ppstream_envelopes_total{{{R0}}}": "0+1500x40",
    f"ppstream_dropped_total{{{R0}, where='envelope', reason='stale'}}": "0+1x40",
    f"ppstream_deadline_missed_total{{{R0}}}": "0x40",
    f"ppstream_run_class{{{R0}, class='stage1-limited'}}": "1x40",
    f"ppstream_robots{{{R0}}}": "1x40",
    f"ppstream_chunks_sent_total{{{R0}}}": "0+1500x40",
    f"ppstream_samples_received_total{{{R0}, stream='imu'}}": "0+3000x40",
    f"ppstream_action_age_seconds_bucket{{{R0}, le='0.05'}}": "0+1500x40",
    f"ppstream_action_age_seconds_bucket{{{R0}, le='0.2'}}": "0+1500x40",
    f"ppstream_action_age_seconds_bucket{{{R0}, le='+Inf'}}": "0+1500x40",
    f"ppstream_lease_seconds{{{R0}}}": "0.2x40",
    f"ppstream_queue_wait_seconds_sum{{{R0}, queue='d_in'}}": "0+20x40",
    f"ppstream_queue_wait_seconds_count{{{R0}, queue='d_in'}}": "0+1500x40",
    f"ppstream_period_seconds_sum{{{R0}}}": "0+60x40",
    f"ppstream_period_seconds_count{{{R0}}}": "0+1500x40",
    f"ppstream_ledger_imbalance{{{R0}, ledger='imu'}}": "0x40",
    f"ppstream_log_lost_total{{{R0}}}": "0x40",
    f"ppstream_faults_total{{{R0}, kind='exception'}}": "0x40",
    f"ppstream_recompiles_total{{{R1}}}": "0x40",
    f"ppstream_phase{{{R1}, phase='ready'}}": "1x40",
    f"ppstream_gpu_segments_total{{{R1}}}": "9x40",
    f"ppstream_gpu_alloc_retries_total{{{R1}}}": "0x40",
    f"ppstream_gpu_ooms_total{{{R1}}}": "0x40",
    f"ppstream_gpu_memory_bytes{{{R1}, kind='non_torch'}}": "1.5e9x40",
    f"ppstream_gpu_memory_bytes{{{R1}, kind='free'}}": "50x40",
    f"ppstream_gpu_memory_bytes{{{R1}, kind='total'}}": "100x40",
    f"up{{{R0}}}": "1x40",
    f"up{{{R1}}}": "1x40",
    f"process_start_time_seconds{{{R0}}}": "1000x40",
    **READY,
}

#: What has to be different from a steady run for each alert, minute by minute.
FIRES: dict[str, dict[str, str]] = {
    "PpstreamRankDown": {f"up{{{R1}}}": "0x40"},
    "PpstreamRestartLoop": {f"process_start_time_seconds{{{R0}}}": "1000+60x40"},
    "PpstreamNotReady": {f'ppstream_phase{{{R0}, phase="ready"}}': "0x40"},
    "PpstreamDegraded": {f"ppstream_phase{{{R0}, phase='degraded'}}": "1x40"},
    "PpstreamSerialized": {f"ppstream_run_class{{{R0}, class='serialized'}}": "1x40"},
    "PpstreamOverheadLimited": {f"ppstream_run_class{{{R0}, class='overhead-limited'}}": "1x40"},
    "PpstreamStageBoundAndLate": {f"ppstream_deadline_missed_total{{{R0}}}": "0+2x40"},
    "PpstreamStarving": {f"ppstream_chunks_sent_total{{{R0}}}": "7x40"},
    "PpstreamStreamSilent": {f"ppstream_samples_received_total{{{R0}, stream='imu'}}": "7x40"},
    "PpstreamStaleActions": {f"ppstream_action_age_seconds_bucket{{{R0}, le='0.05'}}": "0x40"},
    "PpstreamDeadlineMisses": {f"ppstream_deadline_missed_total{{{R0}}}": "0+20x40"},
    "PpstreamDropStorm": {
        f"ppstream_dropped_total{{{R0}, where='envelope', reason='stale'}}": "0+100x40"
    },
    "PpstreamFramesDropped": {
        f"ppstream_dropped_total{{{R0}, where='frame', reason='rate'}}": "0+100x40"
    },
    "PpstreamLedgerImbalance": {f"ppstream_ledger_imbalance{{{R0}, ledger='imu'}}": "-1x40"},
    "PpstreamLogLosing": {f"ppstream_log_lost_total{{{R0}}}": "0+1x40"},
    "PpstreamQueueTooDeep": {f"ppstream_queue_wait_seconds_sum{{{R0}, queue='d_in'}}": "0+100x40"},
    "PpstreamFaults": {f"ppstream_faults_total{{{R0}, kind='exception'}}": "0+1x40"},
    "PpstreamRecompiles": {f"ppstream_recompiles_total{{{R1}}}": "0+1x40"},
    "PpstreamAllocatingWhileReady": {f"ppstream_gpu_segments_total{{{R1}}}": "9+1x40"},
    "PpstreamGpuMemoryShort": {f"ppstream_gpu_memory_bytes{{{R1}, kind='free'}}": "1x40"},
    "PpstreamGpuMemoryGrows": {
        f"ppstream_gpu_memory_bytes{{{R1}, kind='non_torch'}}": "1.5e9+1e8x40"
    },
}


def rule_test(alerts: Iterable[str], changes: dict[str, str], firing: float) -> dict[str, Any]:
    """A group in promtool's own form: with these changes, so many of each of ``alerts`` fire."""
    series = {name.replace("'", '"'): values for name, values in {**STEADY, **changes}.items()}
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": f'count(ALERTS{{alertname="{alert}", alertstate="firing"}}) > bool 0'
                " or vector(0)",
                "eval_time": "16m",
                "exp_samples": [{"labels": "{}", "value": firing}],
            }
            for alert in alerts
        ],
    }


def test_every_alert_has_its_case() -> None:
    assert set(FIRES) == set(rules())


#: Other ways to an alert that has its case already.
ALSO: list[tuple[str, dict[str, str]]] = [
    ("PpstreamGpuMemoryShort", {f"ppstream_gpu_alloc_retries_total{{{R1}}}": "0+1x40"}),
    ("PpstreamGpuMemoryShort", {f"ppstream_gpu_ooms_total{{{R1}}}": "0+1x40"}),
    (
        "PpstreamGpuMemoryGrows",
        {f"ppstream_gpu_memory_bytes{{{R1}, kind='allocated'}}": "1e8+1e8x40"},
    ),
]


ON_REQUEST = {f"ppstream_stream_on_request{{{R0}, stream='imu'}}": "1x40"}
#: Nobody asks: a pause is no fault of robots that send on request.
PAUSED = ON_REQUEST | FIRES["PpstreamStreamSilent"] | FIRES["PpstreamStarving"]


@needs_promtool
def test_every_alert_fires_on_its_case_and_is_silent_on_a_steady_run(tmp_path: Path) -> None:
    groups = [rule_test(FIRES, {}, 0)]
    groups += [rule_test([alert], changes, 1) for alert, changes in [*FIRES.items(), *ALSO]]
    groups.append(rule_test(["PpstreamStreamSilent", "PpstreamStarving"], PAUSED, 0))
    groups.append(rule_test(["PpstreamStarving"], ON_REQUEST | FIRES["PpstreamStarving"], 1))
    file = tmp_path / "cases.yml"
    file.write_text(json.dumps({"rule_files": [str(RULES)], "tests": groups}))  # JSON is YAML, too
    promtool("test", "rules", str(file))


# ---- a real server ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Watched, Prometheus]]:
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not there: apt-get install prometheus")
    from ranks import free_port

    with ExitStack() as stack:
        watched = Watched(tmp_path_factory.mktemp("watched"), stack)
        server = Prometheus(tmp_path_factory.mktemp("server"), watched.ports, free_port())
        stack.callback(server.close)
        watched.run(30)
        both = partial(server.query, "ppstream_envelopes_total > 0")
        wait_until(lambda: len(both()) == 2, seconds=START_LIMIT_S)
        yield watched, server


def test_real_server_scrapes_both_ranks(scraped: tuple[Watched, Prometheus]) -> None:
    _, server = scraped
    assert {s["metric"]["rank"]: s["value"][1] for s in server.query("up")} == {"0": "1", "1": "1"}
    seen = server.query("ppstream_envelopes_total")
    assert {s["metric"]["rank"]: s["value"][1] for s in seen} == {"0": "30", "1": "30"}
    p99 = server.query(
        "histogram_quantile(0.99, sum by (le) (ppstream_stage_duration_seconds_bucket))"
    )
    assert 0 < float(p99[0]["value"][1]) <= 1


def test_real_server_evaluates_every_rule(scraped: tuple[Watched, Prometheus]) -> None:
    _, server = scraped

    def evaluated() -> list[Any]:
        return [rule for group in server.ask("rules")["groups"] for rule in group["rules"]]

    wait_until(lambda: all(rule["health"] == "ok" for rule in evaluated()), seconds=START_LIMIT_S)
    said = evaluated()
    assert {rule["name"] for rule in said} == set(rules())
    assert "PpstreamLedgerImbalance" not in {
        rule["name"] for rule in said if rule["state"] == "firing"
    }


# ---- what rules and dashboard ask for ----------------------------------------------------------


def expressions() -> list[str]:
    """Of all panels of the dashboard."""
    panels = json.loads(BOARD.read_text())["panels"]
    return [t["expr"] for panel in panels for t in panel.get("targets", ())]


def test_rules_and_dashboard_ask_for_nothing_that_no_rank_shows(tmp_path: Path) -> None:
    with ExitStack() as stack:
        watched = Watched(tmp_path, stack)
        watched.run(10)
        text = watched.get(0, "/metrics")[1] + watched.get(1, "/metrics")[1]
    shown = set(METRIC.findall(text)) | {"ppstream_overlap_score"}  # known once bring-up has judged
    on_gpu = memory_families(gpu_memory.memory({}, 1, 2))
    shown |= {sample.name for family in on_gpu for sample in family.samples}
    asked = set(METRIC.findall(RULES.read_text() + " ".join(expressions())))
    assert len(asked) > 25
    assert asked - shown == set()
