"""The report page's tables, and its key of colours. Pure; all text is escaped here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Final

from ppstream.analysis.audits import Audit
from ppstream.analysis.place_table import PlaceRow
from ppstream.analysis.records import RobotRequests, RunLog, Topology
from ppstream.analysis.replicas import replica_shares
from ppstream.analysis.robot_states import robot_accounts
from ppstream.analysis.run_report import RunReport, ServiceReport
from ppstream.analysis.run_statistics import FaultSeen
from ppstream.analysis.scores import resource_title
from ppstream.core.quantiles import quantiles
from ppstream.report.formatting import (
    error_text,
    imbalance_text,
    ms,
    percent,
    quantile_texts,
    robot_texts,
)
from ppstream.report.series import input_ages_ns

Cell = tuple[str, str] | tuple[str, str, str]  # text, class, and a note below
_ASKS: Final = {
    "conservation": "busy + waits = time of each thread",
    "order": "stamps never run backwards",
    "little": "queue counters = sojourns from stamps",
    "bounds": "nothing is busy longer than its window",
    "residence": "B lies within its stay on the policy rank",
    "outstanding": "B is busy only while something is outstanding",
    "credit": "nothing starts before its permission",
    "stamps": "rank 0's B = the policy rank's own stamps",
    "ledger": "as many lines as the ledger counts envelopes",
    "cpu": "CPU time within each stage's time and the CPUs",
}


def key(topology: Topology) -> str:
    """Renders the meaning of the timeline's colours."""
    names = {"a": "A: window, resample", "c": "C: decode, emit", "b": "B: policy", "link": "link"}
    names |= {"wait": "waiting"}
    marks = [
        f'<span><svg viewBox="0 0 26 13"><rect class="{kind}" width="26" height="13"/></svg>'
        f"{name}</span>"
        for kind, name in names.items()
        if topology.world_size > 1 or kind != "link"
    ]
    if topology.world_size > 1:
        for kind, name in (("step", "outstanding"), ("step2", "waiting for C")):
            path = f'<path class="{kind}" d="M0 7 L26 7"/>'
            marks.append(f'<span><svg viewBox="0 0 26 13">{path}</svg>{name}</span>')
    return f'<div class="key">{"".join(marks)}</div>'


def score_table(report: RunReport) -> str:
    rows: list[Sequence[str | Cell]] = []
    score, published = report.primary, report.compat
    if score is not None:
        low = "" if score.s_low is None else f" [{score.s_low:.2f}, {score.s_high:.2f}]"
        rows.append(("primary S", f"{_ratio(score.s)}{low}", "of the possible overlap"))
        rows.append(("S with links", _ratio(score.s_all), "0: a serial loop"))
    if published is not None:
        gate = ("passes", "good") if published.gate else ("refuses", "bad")
        rows.append(("published score", _ratio(published.score), gate))
        rows.append(("published period", ms(published.period_ns), "median"))
        stages = f"{ms(published.stage0_ns)} and {ms(published.stage1_ns)}"
        rows.append(("published stages", stages, "medians, waits within counted"))
    if report.model is not None:
        model = report.model
        rows.append(("model's period", ms(model.period_ns), f"limit {model.formula}"))
        rows.append(
            ("measured against it", percent(model.gap, 1, signed=True), f"W* {model.w_star}")
        )
    if score is not None and score.efficiency:
        rows.append(("period / slowest stage", f"{1 / score.efficiency:.2f}", "in the run"))
    alone = report.alone
    if alone is not None:
        rows.append(("period / slowest alone", f"{alone.strict:.2f}", "stages timed by themselves"))
        stretch = ", ".join(f"{stage} x {ratio:.2f}" for stage, ratio in alone.stretch.items())
        rows.append(("S alone", _ratio(alone.s), f"in the run {stretch} of alone"))
    least = f"{report.gate.overlap_min:.2f}"
    rows.append(("limit of both", least, f"accepted: {', '.join(report.gate.accept) or 'nothing'}"))
    return table((), rows)


def place_table(places: Sequence[PlaceRow]) -> str:
    """Every rank of a chain: its parts, and means of an envelope."""
    rows: list[Sequence[str | Cell]] = []
    for place in places:
        times = (place.alone_ns, place.busy_ns, place.wait_input_ns, place.wait_output_ns)
        cells = ["" if ns is None else ms(ns) for ns in (*times, place.queue_ns, place.hop_ns)]
        name = "rank 0" if place.rank == 0 else f"place {place.rank}"
        who = (name, ", ".join(place.parts), place.device)
        rows.append((*who, *((text, "n") for text in cells)))
    head = ("", "parts", "device", "alone", "busy", "waits for work", "for room", "queue", "hop")
    return table(head, rows)


def replica_table(report: RunReport) -> str:
    """Every replica: its device, B of an envelope, and its busy share by itself."""
    topology, shares = report.window.topology, replica_shares(report.window)
    rows: list[Sequence[str | Cell]] = []
    for place in report.places:
        for rank, b_ns in zip(place.ranks, place.replicas_ns, strict=False):
            b = "" if b_ns is None else ms(b_ns)
            busy = percent(shares[rank]) if rank in shares else ""
            rows.append((f"replica {rank}", topology.device_of(rank), (b, "n"), (busy, "n")))
    return table(("", "device", "B", "busy"), rows)


def audit_table(audits: Mapping[str, Audit]) -> str:
    rows: list[Sequence[str | Cell]] = []
    for name, audit in audits.items():
        word = {True: ("ok", "good"), False: ("BROKEN", "bad"), None: ("not run", "")}[audit.ok]
        counts = name == "order"
        off, limit = (
            "" if value is None else f"{value:g}" if counts else percent(value, 1)
            for value in (audit.value, audit.limit)
        )
        asks = " ".join(filter(None, (_ASKS.get(name), _bracket(resource_title(audit.note)))))
        rows.append(((name, "", asks), word, (off, "n"), (limit, "n")))
    return table(("audit", "", "off by", "limit"), rows)


def stream_table(run: RunLog, report: RunReport) -> str:
    """Ages by stream, beside what the stream declares as fresh."""
    ages = input_ages_ns(report.window.emitted)
    limits = _limits_ms(run)
    rows: list[Sequence[str | Cell]] = []
    for stream, values in ages.items():
        found = quantiles(values)
        if found is None:
            continue
        limit = limits.get(stream)
        late = limit is not None and found.max_ns / 1e6 > limit
        *usual, most = quantile_texts(found).values()
        cells: list[str | Cell] = [stream, *((text, "n") for text in usual)]
        cells.append((most, "n bad" if late else "n"))
        cells.append(("" if limit is None else f"{limit:g} ms", "n"))
        rows.append(cells)
    return table(("stream", "p50", "p95", "p99", "max", "fresh up to"), rows, numbers=True)


def drop_table(found: Mapping[str, object]) -> str:
    rows: list[Sequence[str | Cell]] = [("envelopes emitted", (f"{found['emitted']}", "n"))]
    by_stream = found["samples_by_stream"]
    streams = by_stream.items() if isinstance(by_stream, Mapping) else ()
    for what in ("envelopes", "samples"):
        reasons = found[what]
        if isinstance(reasons, Mapping):
            for why, n in reasons.items():
                of = (f"{lost[why]} of {stream}" for stream, lost in streams if why in lost)
                notes = ", ".join(of) if what == "samples" else ""
                rows.append(((f"{what} dropped: {why}", "", notes), (f"{n}", "n")))
            if not reasons:
                rows.append((f"{what} dropped", ("none", "n")))
    wasted = found["wasted_b_share"]
    if isinstance(wasted, float) and wasted > 0:
        rows.append(("time of B spent on dropped envelopes", (f"{wasted:.1%}", "n")))
    if found["imbalance"] is not None:
        word = ("ledger off", "n bad") if found["imbalance"] else ("balances", "n good")
        rows.append(("received = used + dropped + in flight", word))
    return table((), rows)


def fault_table(faults: Sequence[FaultSeen]) -> str:
    rows: list[Sequence[str | Cell]] = []
    for found in faults:
        count = ("", "n") if found.n is None else (f"{found.n}", "n")
        rows.append((f"{found.stage}: {found.kind}", count, found.what, found.place))
    return table(("stage and kind", "in all", "the first one", "at"), rows)


def service_table(service: ServiceReport) -> str:
    rows: list[Sequence[str | Cell]] = [("limited by", service.limited_by or "no class")]
    for name, share in (service.utilisation or {}).items():
        rows.append((f"{resource_title(name)} busy", f"{share:.0%}"))
    if service.latency is not None:
        found = quantile_texts(service.latency).items()
        rows.append(("latency", ", ".join(f"{name} {text}" for name, text in found)))
    if service.deadline is not None:
        n = service.deadline["n"]
        rows.append(("past their lease", f"{service.deadline['misses']} of {n}"))
    if service.gaps is not None:
        gaps = service.gaps
        text = f"{ms(gaps.longest_ns)}, {gaps.above_text}"
        rows.append(("longest without a new chunk", text))
    if service.rule_counts is not None:
        rows.append(("rules of [actions]", service.rule_counts.text))
    robots = robot_accounts(service.robots)
    rows += [(f"robot {robot.name}", ", ".join(robot_texts(robot))) for robot in robots]
    for stream in service.streams:
        invalid_share = stream.invalid_share
        invalid = "not counted" if invalid_share is None else f"{invalid_share:.1%}"
        holes = "on request" if stream.is_on_request else f"{stream.holes} holes above max_gap_ms"
        text = f"{holes}, {invalid} of targets invalid"
        rows.append((stream.stream, text))
    return table((), rows)


def request_table(requests: Sequence[RobotRequests]) -> str:
    """The gateway's clients; a row whose counts do not add up says so."""
    rows: list[Sequence[str | Cell]] = []
    for row in requests:
        times = {} if row.latency is None else quantile_texts(row.latency)
        numbers = [str(row.requests), str(row.answered)]
        numbers += [times.get(name, "NA") for name in ("p50", "p99", "max")]
        off = (f"ledger off: {imbalance_text(row)}", "bad") if row.imbalance else ""
        rows.append((row.wire, row.robot, *((n, "n") for n in numbers), error_text(row), off))
    head = ("wire", "robot", "requests", "answered", "p50", "p99", "max", "errors", "")
    return table(head, rows)


def depth_note(report: RunReport) -> str:
    """The statement on depth, where one was made."""
    texts = (s for s in report.statements if s.startswith(("raise D_in", "D_in ", "depth does")))
    return next(texts, "")


def _limits_ms(run: RunLog) -> dict[str, float]:
    streams = run.config.get("streams")
    return {
        str(stream.get("name")): float(stream["max_age_ms"])
        for stream in (streams if isinstance(streams, list) else [])
        if isinstance(stream, Mapping) and isinstance(stream.get("max_age_ms"), int | float)
    }


def table(
    head: Sequence[str], rows: Iterable[Sequence[str | Cell]], *, numbers: bool = False
) -> str:
    """Cells are text, or text with a class; a row of no cells is no row, no rows no table."""
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows if row)
    if not body:
        return ""
    kinds = ["" if i == 0 or not numbers else ' class="n"' for i in range(len(head))]
    top = "".join(f"<th{k}>{escape(name)}</th>" for k, name in zip(kinds, head, strict=True))
    return f"<table>{f'<tr>{top}</tr>' if head else ''}{body}</table>"


def _cell(cell: str | Cell) -> str:
    text, kind, *notes = cell if isinstance(cell, tuple) else (cell, "")
    below = "".join(f"<small>{escape(note)}</small>" for note in notes if note)
    attribute = f' class="{kind}"' if kind else ""
    return f"<td{attribute}>{escape(text)}{below}</td>"


def _ratio(value: float | None) -> str:
    return "NA" if value is None else f"{value:.2f}"


def _bracket(note: str) -> str:
    return f"({note})" if note else ""
