"""Judged runs as one page for a browser: verdict and statements first, then pictures. Pure.

The page is one file: no script, no font, no picture from elsewhere, and its own rules forbid the
browser to load any. All text of a log is escaped. It grows with the number of runs, never with
their length.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Final

from ppstream.analysis.records import RunLog
from ppstream.analysis.run_report import RunReport
from ppstream.report.formatting import ms, why_scores_differ
from ppstream.report.html import charts
from ppstream.report.html.device import device_note, device_table, memory_charts, memory_table
from ppstream.report.html.tables import (
    audit_table,
    depth_note,
    drop_table,
    fault_table,
    key,
    place_table,
    replica_table,
    request_table,
    score_table,
    service_table,
    stream_table,
)
from ppstream.report.html.timeline import stretch_note, timeline
from ppstream.report.series import stretch_of

_OURS: Final = files("ppstream.report.html")
#: Colours are Okabe and Ito's set ("Color Universal Design", 2008), told apart with any common
#: colour blindness and in grey; a stage also carries its letter, a wait its hatching, a verdict its
#: word. One sheet for screen (light and dark), print and small windows.
STYLE: Final = _OURS.joinpath("page.css").read_text("utf-8")
SKELETON: Final = Template(_OURS.joinpath("page.html").read_text("utf-8"))
WORDS: Final = {"PASS": "✓ PASS", "FAIL": "✗ FAIL", "INCONCLUSIVE": "? INCONCLUSIVE"}
MADE_UP: Final = {
    "synthetic": " Bring-up makes these samples: a robot's own may be older.",
    "recorded": " Bring-up plays these samples from a recording.",
}
Judged = tuple[RunLog, RunReport]


def render_page(judged: Sequence[Judged]) -> str:
    """The whole page of all runs, in their order."""
    title = "ppstream report" if len(judged) > 1 else f"ppstream: {judged[0][1].run_id}"
    body = [_index(judged)] if len(judged) > 1 else []
    body += [_article(number, *one) for number, one in enumerate(judged)]
    return SKELETON.substitute(title=escape(title), style=STYLE, body="".join(body))


def _index(judged: Sequence[Judged]) -> str:
    rows = "".join(
        f'<tr><td><a href="#run{number}">{escape(report.run_id)}</a></td>'
        f"<td>{WORDS[report.verdict.name]}</td><td>{escape(', '.join(report.reasons))}</td>"
        f"<td class=n>{ms(report.primary.period_ns) if report.primary else 'NA'}</td></tr>"
        for number, (_, report) in enumerate(judged)
    )
    head = "<tr><th>run<th>verdict<th>reasons<th class=n>period</tr>"
    return f"<nav><table>{head}{rows}</table></nav>"


def _article(number: int, run: RunLog, report: RunReport) -> str:
    sections = "".join(_sections(run, report))
    return (
        f'<article id="run{number}">{_head(report)}{_figures(report)}'
        f'<div class="cards">{sections}</div>{_foot(run, report)}</article>'
    )


def _head(report: RunReport) -> str:
    window = report.window
    phases = "/".join(sorted(phase or "all" for phase in window.phases)) or "-"
    origin = f"{report.run_id} · {phases} · {window.n} envelopes, {window.skipped} skipped"
    if report.limited_by:
        origin += f" · {report.limited_by}"
    name = report.verdict.name
    accepted = ", accepted" if report.accepted else ""
    why = ", ".join(report.reasons) + (" · SERVING" if accepted else "")
    reasons = f"<small>{escape(why)}</small>" if why else ""
    sentences = "".join(f"<li>{escape(sentence)}</li>" for sentence in report.statements)
    return (
        f'<header class="{name}"><h1>{WORDS[name]}{accepted}{reasons}</h1>'
        f'<p class="lead">{escape(report.sentence)}</p>'
        f"<p>{escape(origin)}</p><ul>{sentences}</ul></header>"
    )


def _figures(report: RunReport) -> str:
    """Seven tiles; the sheet gives the first one two places, so that no row has a hole."""
    shown = "".join(
        f'<div class="figure{" bad" if figure.is_bad else ""}"><span>{escape(figure.name)}</span>'
        f"<b>{escape(figure.value)}</b><span>{escape(figure.note)}</span></div>"
        for figure in report.figures
    )
    return f'<div class="figures">{shown}</div>'


def _sections(run: RunLog, report: RunReport) -> Iterator[str]:
    stretch = stretch_of(report.window)
    if stretch is not None and report.primary is not None:
        yield _section(
            "A typical stretch",
            "Typical periods. Bold: the path of one envelope. Hatched: waiting.",
            _scrolling(timeline(run, stretch), "drawn") + key(run.topology),
            wide=True,
            after=stretch_note(run, stretch),
        )
    yield from _time_sections(report)
    yield from _age_sections(run, report)
    yield from _cause_sections(report)
    yield from _machine_sections(run, report)
    yield _section(
        "Two scores",
        "The primary score decides. Other tools use the published score.",
        score_table(report),
        after=why_scores_differ(report),
    )
    yield _section(
        "Audits of the log",
        "Audits by independent witnesses: one that fails makes the verdict INCONCLUSIVE.",
        audit_table(report.audits),
    )
    yield _section("Drops", "Every drop has a reason.", drop_table(report.drops))
    if report.faults:
        yield _section(
            "What failed",
            "Errors of policies and decoders, unwritten outputs, and chunks that broke a rule.",
            fault_table(report.faults),
        )
    if report.service is not None:
        yield _section(
            "Service",
            "No overlap is asked; failures, slower stages, holds and drops count against the run.",
            service_table(report.service),
        )
    yield _section(
        "Requests",
        "Of the gateway's clients: times are from receipt to answer.",
        _scrolling(request_table(report.requests)),
        wide=True,
    )


def _time_sections(report: RunReport) -> Iterator[str]:
    yield _section(
        "Busy shares",
        "Work only, never waiting. The busiest resource sets the shortest possible period.",
        charts.resources(report),
    )
    if report.window.topology.has_replicas:
        yield _section(
            "Replicas",
            "Stage B of an envelope on each of them; envelopes go out in turn.",
            _scrolling(replica_table(report)),
        )
    if report.window.topology.is_chain:
        yield _section(
            "Places and hops",
            "Means of an envelope on every rank, and of the hop that leaves it.",
            _scrolling(place_table(report.places)),
            wide=True,
        )
    yield _section(
        "Parts of the latency",
        "Mean of each part from the start of A to emit; hatched parts are waiting.",
        charts.waterfall(report),
    )
    yield _section(
        "Period",
        "Between two emits; an even pipeline has one narrow peak at the model's line.",
        charts.period_histogram(report),
    )
    yield _section(
        "Period over time",
        "Middle and 10 to 90 % of each stretch; circles: single long ones.",
        charts.period_drift(report),
    )


def _age_sections(run: RunLog, report: RunReport) -> Iterator[str]:
    yield _section(
        "Age of the input" + (f" ({report.input_source})" if report.input_source else ""),
        "Age of each stream's newest sample at the end of its window."
        + MADE_UP.get(report.input_source, ""),
        stream_table(run, report),
    )
    yield _section(
        "Age of executed actions",
        "From the observation to the action, measured by the robots in their own clocks.",
        charts.age_histogram([age_ns / 1e6 for age_ns in run.ages_ns]),
        after="" if report.oldest is None else str(report.oldest),
    )


def _cause_sections(report: RunReport) -> Iterator[str]:
    yield _section(
        "Waits before each start",
        "The last event that each start of a stage waited for names the bottleneck.",
        charts.critical_path_chart(report.critical_path),
    )
    yield _section(
        "Queues",
        "Mean of each stretch, weighted by time. Solid: outstanding; dashed: waiting for C; "
        "dotted: the most.",
        charts.queues_over_time(report),
    )
    yield _section(
        "Queue depth",
        "The model's expectation for this run's stage times. Solid: period; dashed: latency.",
        charts.depths(report),
        after=depth_note(report),
    )


def _machine_sections(run: RunLog, report: RunReport) -> Iterator[str]:
    yield _section(
        "On the device",
        "Time between events on the GPU, in isolation in bring-up, and as the host measured it.",
        _scrolling(device_table(report.on_device)),
        after=device_note(report.on_device, report.clocks),
    )
    yield _section(
        "Memory",
        "One log line a second from every rank. After warm-up no value should rise.",
        memory_charts(run) + memory_table(report.memory),
    )


def _section(title: str, lead: str, body: str, *, wide: bool = False, after: str = "") -> str:
    if not body:
        return ""
    tail = f'<p class="after">{escape(after)}</p>' if after else ""
    kind = ' class="wide"' if wide else ""
    return f"<section{kind}><h2>{escape(title)}</h2><p>{escape(lead)}</p>{body}{tail}</section>"


def _scrolling(body: str, kind: str = "") -> str:
    """A box for what is wider than a narrow window; there the sheet says that it scrolls."""
    classes = f"scroll {kind}".rstrip()
    return f'<div class="{classes}">{body}</div>' if body else ""


def _foot(run: RunLog, report: RunReport) -> str:
    """Renders what the numbers belong to."""
    topology = run.topology
    parts = [
        f"threads {topology.threads}, {topology.order.replace('_', ' ')}, credit "
        f"{topology.credit.replace('_', ' ')}, D_in {topology.d_in}, D_out {topology.d_out}"
    ]
    for name in ("hardware", "versions"):
        table = run.manifest.get(name)
        if isinstance(table, Mapping):
            parts.append(", ".join(f"{k} {v}" for k, v in table.items()))
    digest = run.manifest.get("config_sha256")
    if digest:
        parts.append(f"configuration {str(digest)[:12]}")
    if report.policy is not None:
        parts.append(f"policy {' · '.join(report.origin)}")
    created = run.manifest.get("created_utc")
    if created:
        parts.append(f"begun {created}")
    return f"<footer>{escape(' · '.join(parts))}</footer>"
