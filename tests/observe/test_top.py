"""What a person sees of a run that goes on: two readings of its metrics, and its log's events."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ppstream.core.clock import NS_PER_S
from ppstream.core.errors import ConfigError
from ppstream.launch import commands
from ppstream.observe import top
from ppstream.observe.top import RankMetrics, endpoints, picture

STAGE = "ppstream_stage_duration_seconds_sum"
METRICS = """
ppstream_run_info{name="arm",run_id="r"} 1.0
ppstream_phase{phase="warming"} 0.0
ppstream_phase{phase="ready"} 1.0
ppstream_robots 1.0
"""


def reading(at_s: float, *values: tuple[str, dict[str, str], float]) -> RankMetrics:
    found = {(name, tuple(sorted(labels.items()))): value for name, labels, value in values}
    return RankMetrics(round(at_s * NS_PER_S), found)


def seen(*frame: Any) -> str:
    page = StringIO()
    Console(width=120, file=page).print(picture(*frame))
    return page.getvalue()


def event(name: str, **fields: Any) -> str:
    return json.dumps(
        {"kind": "event", "run_id": "r", "generation": 0, "t": 1, "name": name} | fields
    )


def test_busy_shares_and_rates_are_of_the_time_between_two_readings() -> None:
    def zero(at_s: float, factor: float) -> RankMetrics:
        return reading(
            at_s,
            ("ppstream_run_info", {"name": "arm"}, 1),
            ("ppstream_phase", {"phase": "warming"}, 0),
            ("ppstream_phase", {"phase": "ready"}, 1),
            (STAGE, {"stage": "A"}, 10 + 0.2 * factor),
            (STAGE, {"stage": "C"}, 20 + 0.4 * factor),
            (STAGE, {"stage": "B"}, 70 + 3 * factor),  # as rank 0 sees it: not its own time
            ("ppstream_envelopes_total", {}, 1000 + 50 * factor),
            ("ppstream_latency_seconds_sum", {}, 7 + 1.5 * factor),
            ("ppstream_latency_seconds_count", {}, 1000 + 50 * factor),
            ("ppstream_queue_depth", {"queue": "d_in"}, 1),
            ("ppstream_queue_bound", {"queue": "d_in"}, 2),
            ("ppstream_dropped_total", {"where": "sample", "reason": "passed_over"}, 3),
            ("ppstream_dropped_total", {"where": "sample", "reason": "future"}, 0),
        )

    one = [reading(t, (STAGE, {"stage": "B"}, 70 + b)) for t, b in ((0, 0), (2, 1.8))]
    text = seen({0: zero(0, 0), 1: one[0]}, {0: zero(2, 1), 1: one[1]}, ["phase: ready"])
    assert text.startswith("arm · ready\n")
    assert "rank 0   ██████··············  30%" in text  # (0.2 + 0.4) / 2 s
    assert "rank 1   ██████████████████··  90%" in text
    assert "25.0 envelopes/s, 0.0 chunks/s" in text
    assert "latency  30.0 ms" in text
    assert "d_in 1 of 2" in text
    assert "dropped  sample passed_over 3 " in text
    assert "phase: ready" in text


@pytest.mark.parametrize(
    ("phase", "verdict", "says"),
    [
        ("ready", "FAIL", "ready · bring-up FAIL, accepted\n"),
        ("ready", "PASS", "ready · bring-up PASS\n"),
        ("draining", "FAIL", "draining · bring-up FAIL\n"),
    ],
)
def test_a_run_that_serves_though_it_was_refused_says_so(
    phase: str, verdict: str, says: str
) -> None:
    states = (
        ("ppstream_run_info", {"name": "arm"}, 1),
        ("ppstream_phase", {"phase": phase}, 1),
        ("ppstream_bringup_verdict", {"verdict": verdict}, 1),
    )
    assert seen({0: reading(0, *states)}, {0: reading(2, *states)}, []).startswith(f"arm · {says}")


def test_a_rank_that_does_not_answer_is_said() -> None:
    nothing = {0: RankMetrics(0), 1: RankMetrics(0)}
    text = seen(nothing, {0: RankMetrics(NS_PER_S), 1: RankMetrics(NS_PER_S)}, [])
    assert text.startswith("rank 0 does not answer\n")
    assert "rank 1   does not answer" in text


def test_the_newest_generation_names_the_endpoints(tmp_path: Path) -> None:
    for name, port in (("rank0.gen0", 5), ("rank0.gen1", 7), ("rank1.gen1", 8)):
        (tmp_path / f"{name}.jsonl").write_text(event("metrics", port=port) + '\n{"kind": "eve')
    assert endpoints(tmp_path) == {0: (7, "r"), 1: (8, "r")}


@contextmanager
def serving(text: str) -> Iterator[int]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode("latin-1"))

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def test_one_picture_of_endpoints_and_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(top, "PERIOD_S", 0.01)
    log = tmp_path / "rank0.gen0.jsonl"
    events = [event("phase", phase="ready"), event("warm"), event("fault", kind_of="policy")]
    with serving(METRICS) as port:
        log.write_text("\n".join([event("metrics", port=port), *events, '{"kind": "event", "na']))
        assert commands.main(["top", str(tmp_path), "--once"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("arm · ready\n")
    assert "phase: ready\nfault: kind_of policy\n" in said
    assert "warm" not in said
    assert commands.main(["top", str(tmp_path), "--once"]) == 1  # nobody answers any more


def log_of_a_rank(folder: Path, port: int) -> Path:
    log = folder / "rank0.gen0.jsonl"
    log.write_text(event("metrics", port=port) + "\n")
    return log


OTHER = METRICS.replace('run_id="r"', 'run_id="other"')


@pytest.mark.parametrize(
    "text", [OTHER, "<p>hello { }", "\xff\xfe", "ppstream_robots 3\n", 'a{="1"} 2']
)
def test_what_is_not_this_runs_metrics_is_no_answer(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(top, "PERIOD_S", 0.01)
    with serving(text) as port:
        log_of_a_rank(tmp_path, port)
        assert commands.main(["top", str(tmp_path), "--once"]) == 1
    whose = f" (port {port} belongs to run other)" if text == OTHER else ""
    assert capsys.readouterr().out.startswith(f"rank 0 does not answer{whose}\n")


def test_a_run_that_is_deleted_meanwhile_is_said(tmp_path: Path) -> None:
    log = log_of_a_rank(tmp_path, 1)
    events = top.Events(tmp_path)
    log.unlink()
    with pytest.raises(ConfigError, match="its logs cannot be read: No such file"):
        events.read()


def test_a_terminal_without_the_letters_of_a_bar_gets_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(top, "PERIOD_S", 0.01)
    page = BytesIO()
    with TextIOWrapper(page, encoding="ascii") as out, serving(METRICS) as port:
        monkeypatch.setattr("sys.stdout", out)
        log_of_a_rank(tmp_path, port)
        assert commands.main(["top", str(tmp_path), "--once"]) == 0
        out.flush()
        assert page.getvalue().startswith(b"arm - ready\n")
        assert b"rank 0   --------------------   0%" in page.getvalue()


@pytest.mark.parametrize("term", ["dumb", "unknown"])
def test_a_terminal_that_moves_no_cursor_gets_one_picture(
    term: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(top, "PERIOD_S", 0.01)
    monkeypatch.setenv("TERM", term)
    ours, theirs = os.openpty()
    with os.fdopen(theirs, "w") as out, serving(METRICS) as port:
        monkeypatch.setattr("sys.stdout", out)
        log_of_a_rank(tmp_path, port)
        assert commands.main(["top", str(tmp_path)]) == 0
        out.flush()
        assert os.read(ours, 4096).startswith("arm · ready".encode())
    os.close(ours)


POLICY_METRICS = """
ppstream_run_info{name="arm",run_id="r"} 1.0
ppstream_phase{phase="ready"} 1.0
ppstream_stage_duration_seconds_sum{stage="B"} 1.0
"""


def test_on_a_host_without_rank_0_the_ranks_that_are_there_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(top, "PERIOD_S", 0.01)
    events = [event("fault", kind_of="policy")]
    with serving(POLICY_METRICS) as port:
        for rank in (2, 10):
            log = tmp_path / f"rank{rank}.gen0.jsonl"
            log.write_text("\n".join([event("metrics", port=port), *events, ""]))
        assert commands.main(["top", str(tmp_path), "--once"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("arm · ready · no endpoint of rank 0 here\n")
    assert [line.split("  ")[0] for line in said.splitlines()[2:]] == [
        "rank 2",
        "rank 10",
        "",
        "fault: kind_of policy",
    ]
    assert commands.main(["top", str(tmp_path), "--once"]) == 1
    assert capsys.readouterr().out.startswith("rank 2 does not answer · no endpoint of rank 0 ")


def test_events_are_those_of_the_newest_generation_whatever_the_files_times_say(
    tmp_path: Path,
) -> None:
    for generation in (9, 10, 2):
        log = tmp_path / f"rank0.gen{generation}.jsonl"
        log.write_text(event("phase", phase=f"of {generation}") + "\n")
    os.utime(tmp_path / "rank0.gen10.jsonl", (1, 1))
    assert top.Events(tmp_path).read() == ["phase: of 10"]


def test_events_are_read_once_and_the_newest_stay(tmp_path: Path) -> None:
    log = tmp_path / "rank0.gen0.jsonl"
    log.write_text("".join(f"{event('phase', phase=f'p{k}')}\n" for k in range(9)))
    events = top.Events(tmp_path)
    assert events.read() == [f"phase: p{k}" for k in range(3, 9)]
    with log.open("a") as file:
        file.write(event("phase", phase="new")[:20])
        file.flush()
        assert events.read()[-1] == "phase: p8"
        file.write(event("phase", phase="new")[20:] + "\n")
    assert events.read()[-2:] == ["phase: p8", "phase: new"]


def test_numbers_and_lists_of_an_event_are_for_people(tmp_path: Path) -> None:
    verdict = {"verdict": "FAIL", "overlap": 0.8533884846674752, "reasons": ["A", "B"]}
    (tmp_path / "rank0.gen0.jsonl").write_text(event("verdict", **verdict) + "\n")
    assert top.Events(tmp_path).read() == ["verdict: FAIL, overlap 0.85, reasons A and B"]


def test_a_folder_that_is_not_there_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.main(["top", "--once", str(tmp_path / "latest")]) == 11
    assert f"{tmp_path}/latest: no run here; start one" in capsys.readouterr().err


def test_a_run_that_starts_is_told_so_and_its_ranks_are_asked_once_they_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 serves later, rank 1 later still, and rank 0 anew at another port."""
    manifest = {"config": {"metrics": {"port": 0}}, "finished_utc": None}
    (tmp_path / "run.json").write_text(json.dumps(manifest))
    assert commands.main(["top", "--once", str(tmp_path)]) == 1
    assert capsys.readouterr().out == "the run starts; no rank serves metrics yet\n"
    monkeypatch.setattr(top, "PERIOD_S", 0.01)
    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = os.openpty()
    with os.fdopen(theirs, "w") as out, serving(METRICS) as port, ThreadPoolExecutor() as threads:
        monkeypatch.setattr("sys.stdout", out)
        ended = threads.submit(commands.main, ["top", str(tmp_path)])
        wait_for_text(ours, "no rank serves metrics yet")
        for rank in (0, 1):
            log = event("metrics", port=port) + "\n"
            (tmp_path / f"rank{rank}.gen0.jsonl").write_text(log)
            wait_for_text(ours, f"rank {rank}")
        for path in tmp_path.iterdir():
            path.unlink()
        assert ended.result(60) == 11
    os.close(ours)


def wait_for_text(terminal: int, text: str) -> None:
    shown = b""
    while text.encode() not in shown:
        shown += os.read(terminal, 65536)


def test_a_run_without_metrics_is_told_how(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rank0.gen0.jsonl").write_text(event("phase", phase="ready"))
    assert commands.main(["top", str(tmp_path)]) == 11
    assert "start the run with --set metrics.port=0" in capsys.readouterr().err
