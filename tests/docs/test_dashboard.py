"""The dashboard: what Grafana will read is there, well formed, and shows data of a live run.

No Grafana takes part. The shape below is that of its schema, without a key that it does not know;
every expression is asked of a real Prometheus, and every legend's label must be in the answer.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from contextlib import ExitStack
from typing import Any, Literal

import msgspec
import pytest
from prometheus_rules import BOARD, ROOT, Prometheus, needs_promtool, promtool
from ranks import free_port
from watched_ranks import Watched

RATE_INTERVAL = "5s"  # of scrapes each second
DATA_LIMIT_S = 40
#: Answers that a healthy run without a GPU and without robots' reports does not have.
SILENT = (
    "ppstream_gpu_",
    "ppstream_overlap_score",
    "ppstream_bringup_verdict",
    "ppstream_faults_total",
    "ppstream_chunks_refused_total",
)
LABEL = re.compile(r"\{\{(\w+)\}\}|\$\{__field\.labels\.(\w+)\}")


class Strict(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    """Of a key that Grafana does not know it says nothing: here that is an error."""


class Source(Strict):
    type: Literal["prometheus"]
    uid: Literal["${datasource}"]


class Place(Strict):
    x: int
    y: int
    w: int
    h: int


class Target(Strict):
    ref_id: str
    datasource: Source
    expr: str
    legend_format: str
    instant: bool = False
    range: bool = True
    format: Literal["time_series", "heatmap", "table"] = "time_series"


class Mapping(Strict):
    type: Literal["value", "range", "regex", "special"]
    options: dict[str, dict[str, Any]]


class Defaults(Strict):
    unit: Literal["short", "s", "percentunit", "ops", "bytes"]  # ids of Grafana's own formats
    display_name: str = ""
    decimals: int | None = None
    min: float | None = None
    max: float | None = None
    mappings: list[Mapping] = []


class Fields(Strict):
    defaults: Defaults
    overrides: list[Any]


class Reduce(Strict):
    calcs: list[Literal["lastNotNull", "mean", "max"]]
    fields: str
    values: bool


class Stat(Strict):
    text_mode: Literal["auto", "value", "value_and_name", "name", "none"]
    color_mode: Literal["value", "background", "background_solid", "none"]
    graph_mode: Literal["none", "line", "area"]
    justify_mode: Literal["auto", "center"]
    orientation: Literal["auto", "vertical", "horizontal"]
    reduce_options: Reduce


class StateTimeline(Strict):
    merge_values: bool
    show_value: Literal["auto", "never", "always"]
    align_value: Literal["center", "left", "right"]
    row_height: float


class Heatmap(Strict):
    calculate: bool
    y_axis: dict[str, str]
    color: dict[str, Any]


class Panel(Strict):
    id: int
    type: Literal["row", "stat", "state-timeline", "timeseries", "heatmap"]
    title: str
    grid_pos: Place
    description: str = ""
    datasource: Source | None = None
    targets: list[Target] = []
    field_config: Fields | None = None
    options: dict[str, Any] | None = None
    collapsed: bool = False
    panels: list[Any] = []


class Variable(Strict):
    name: str
    type: Literal["datasource"]
    query: Literal["prometheus"]
    label: str
    hide: int


class Annotation(Strict):
    name: str
    datasource: Source
    enable: bool
    icon_color: str
    expr: str
    title_format: str


class Listed(Strict):
    listed: list[Any] = msgspec.field(name="list")


class Board(Strict):
    uid: Literal["ppstream"]
    title: str
    description: str
    schema_version: int
    version: int
    editable: bool
    timezone: Literal["browser", "utc"]
    refresh: str
    time: dict[str, str]
    tags: list[str]
    templating: Listed
    annotations: Listed
    links: list[Any]
    panels: list[Panel]


#: Panels whose look is set; the others keep Grafana's defaults.
OPTIONS: dict[str, type[Strict]] = {
    "stat": Stat,
    "state-timeline": StateTimeline,
    "heatmap": Heatmap,
}


def board() -> Board:
    return msgspec.json.decode(BOARD.read_bytes(), type=Board)


def panels() -> list[Panel]:
    return [panel for panel in board().panels if panel.type != "row"]


def test_dashboard_has_the_shape_that_grafana_reads() -> None:
    found = board()
    (variable,) = msgspec.convert(found.templating.listed, list[Variable])
    assert variable.name == "datasource"  # what every panel's uid names
    msgspec.convert(found.annotations.listed, list[Annotation])
    assert len({panel.id for panel in found.panels}) == len(found.panels)
    for panel in panels():
        assert panel.datasource, panel.title
        assert panel.field_config, panel.title
        references = [target.ref_id for target in panel.targets]
        assert references == sorted(set(references)), panel.title
        if panel.type in OPTIONS:
            msgspec.convert(panel.options, OPTIONS[panel.type])
        else:
            assert panel.options is None, panel.title


def test_states_are_asked_for_now_and_buckets_as_buckets() -> None:
    """Over a range a phase that is over would stay; buckets as plain series would be cumulative."""
    for panel in panels():
        if panel.type == "stat":
            assert all(t.instant and not t.range for t in panel.targets), panel.title
        if panel.type == "heatmap":
            assert [t.format for t in panel.targets] == ["heatmap"], panel.title


def test_panels_do_not_overlap_and_name_pages_that_are_there() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in board().panels:
        at = panel.grid_pos
        cells = {(x, y) for x in range(at.x, at.x + at.w) for y in range(at.y, at.y + at.h)}
        assert not cells & taken, panel.title
        assert at.x + at.w <= 24, panel.title
        taken |= cells
        assert panel.type == "row" or panel.description, panel.title
    named = re.findall(r"runbooks/[\w./-]+\.md", BOARD.read_text())
    assert named
    assert [page for page in named if not (ROOT / page).is_file()] == []


@needs_promtool
def test_promtool_parses_every_expression(tmp_path: Any) -> None:
    asked = [target.expr for panel in panels() for target in panel.targets]
    records = [
        {"record": f"panel:{number}", "expr": text.replace("$__rate_interval", "1m")}
        for number, text in enumerate(asked)
    ]
    file = tmp_path / "panels.yml"
    file.write_text(json.dumps({"groups": [{"name": "panels", "rules": records}]}))
    promtool("check", "rules", str(file))


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="apt-get install prometheus")
def test_every_panel_shows_data_of_a_live_run(tmp_path_factory: pytest.TempPathFactory) -> None:
    with ExitStack() as stack:
        watched = Watched(tmp_path_factory.mktemp("watched"), stack)
        server = Prometheus(tmp_path_factory.mktemp("server"), watched.ports, free_port())
        stack.callback(server.close)
        watched.run(30)
        deadline = time.monotonic() + DATA_LIMIT_S
        while empty := {p.title for p in panels() if not all(answers(server, p))}:
            assert time.monotonic() < deadline, empty
            for _ in range(5):  # rates need samples that differ; and no rank may fall silent
                watched.pipeline.rank0.run(4)
                time.sleep(0.1)
            watched.pipeline.rank0.write_ledger()
        for panel in panels():
            shown = panel.field_config.defaults.display_name if panel.field_config else ""
            for target, found in zip(panel.targets, answers(server, panel), strict=True):
                wanted = {a or b for a, b in LABEL.findall(target.legend_format + shown)}
                for series in found if isinstance(found, list) else []:
                    assert not wanted - set(series["metric"]), (panel.title, target.expr)


def answers(server: Prometheus, panel: Panel) -> list[Any]:
    """For each target its series, or why it may have none; [] is what must not be."""
    found: list[Any] = []
    for target in panel.targets:
        series = server.query(target.expr.replace("$__rate_interval", RATE_INTERVAL))
        silent = any(name in target.expr for name in SILENT)
        found.append(series or ("nothing expected" if silent else []))
    return found
