"""A judged run as text: the verdict's sentence and seven figures first. Pure.

``terminal.py`` colours it; the text is the same in a pipe.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from ppstream.analysis.age_advice import SAME
from ppstream.analysis.audits import Audit
from ppstream.analysis.compiler_counts import CompiledPartSeen
from ppstream.analysis.device_times import StageOnDevice
from ppstream.analysis.memory_use import MemoryUse
from ppstream.analysis.records import Ledger, RobotRequests, Topology
from ppstream.analysis.replicas import replica_shares
from ppstream.analysis.robot_states import robot_accounts
from ppstream.analysis.run_report import RunReport, ServiceReport
from ppstream.analysis.run_statistics import FaultSeen
from ppstream.analysis.scores import Compat, Primary, resource_title
from ppstream.core.quantiles import Quantiles, quantiles
from ppstream.report.formatting import (
    RARE,
    error_text,
    gib,
    imbalance_text,
    ms,
    percent,
    quantile_texts,
    robot_texts,
    why_scores_differ,
)
from ppstream.report.series import input_ages_ns, latency_parts, periods_ns

WIDTH: Final = 100  # columns, unless a terminal has fewer
LABEL: Final = 13  # columns of a row's name, and the gap behind it
LABEL_MAX: Final = 33  # for the sake of a long name; one that is longer has a line of its own
NAME: Final = 26  # columns of a robot's name
BAR: Final = 30  # columns of a full bar
GAP: Final = "   "
SHOWN_NS: Final = 10_000  # a shorter part of the latency is left out


class Line(NamedTuple):
    """A line of the text, and the styles of its parts on a terminal."""

    text: str
    styles: tuple[tuple[int, int, str], ...] = ()  # from, to, style


class Row(NamedTuple):
    """A name, and what stands beside it."""

    label: str
    parts: Sequence[str]  # each stays whole; a string is running text


def render(report: RunReport) -> str:
    """The whole report of one run."""
    return "\n".join(line.text for line in lines_of(report))


def lines_of(report: RunReport, columns: int = WIDTH) -> list[Line]:
    """The same with styles; of a row it is the name that has one."""
    rows: list[str | Row] = [
        *_score_lines(report),
        *_resource_lines(report.primary, report.window.topology),
        *_place_lines(report),
        *_replica_lines(report),
        *_mesh_lines(report),
        *_thread_lines(report),
        *_audit_lines(report.audits),
        *_queue_lines(report),
        *_time_lines(report),
        *_path_lines(report.critical_path),
        *_drop_lines(report.drops),
        *_fault_lines(report.faults),
        *_service_lines(report.service),
        *_request_lines(report.requests, columns),
        *_device_lines(report.on_device),
        *_memory_lines(report.memory),
        *_compiled_lines(report.compiled),
    ]
    lengths = [len(row.label) + 1 for row in rows if isinstance(row, Row)]
    width = max([LABEL, *(length for length in lengths if length <= LABEL_MAX)])
    laid = (_laid(row, width, columns) if isinstance(row, Row) else [Line(row)] for row in rows)
    return [*_top_lines(report, columns), *(line for lines in laid for line in lines)]


def _top_lines(report: RunReport, columns: int) -> Iterator[Line]:
    """The sentence, the figures, where they are from, and the statements."""
    name = report.verdict.name
    yield Line("─" * columns, ((0, columns, "faint"),))
    for number, text in enumerate(_wrap(report.headline, columns)):
        verdict = () if number else ((0, len(name), name),)
        yield Line(text, ((0, len(text), "bold"), *verdict))
    yield Line("")
    yield from _figure_lines(report, columns)
    yield Line("")
    yield from map(Line, _wrap(_origin(report), columns))
    if report.reasons:
        accepted = "   accepted: SERVING" if report.accepted else ""
        for text in _wrap(f"{name}   {', '.join(report.reasons)}{accepted}", columns):
            yield Line(text, ((0, len(name), name),) if text.startswith(name) else ())
    yield Line("")
    for sentence in report.statements:
        yield from map(Line, _wrap(f"· {sentence}", columns, 2))
    yield Line("")


def _figure_lines(report: RunReport, columns: int) -> Iterator[Line]:
    """A mark, name, value and note for each of the seven."""
    names = 4 + max(len(figure.name) for figure in report.figures)
    values = 2 + max(len(figure.value) for figure in report.figures)
    for name, value, note, is_bad in report.figures:
        mark = "!" if is_bad else " "
        begin = f"{mark} {name}".ljust(names) + value.ljust(values)
        first, *others = textwrap.wrap(note, columns - len(begin), break_on_hyphens=False)
        value_end = names + len(value)
        marked = ((0, value_end, "FAIL"),) if is_bad else ()
        yield Line(begin + first, ((0, names, "name"), (names, value_end, "bold"), *marked))
        yield from (Line(" " * len(begin) + text) for text in others)


def _origin(report: RunReport) -> str:
    window = report.window
    phases = "/".join(sorted(phase or "all" for phase in window.phases)) or "-"
    origin = f"{report.run_id} · {phases} · {window.n} envelopes, {window.skipped} skipped"
    origin += "" if report.limited_by is None else f" · {report.limited_by}"
    return " · ".join([origin, *report.origin])


def _score_lines(report: RunReport) -> Iterator[Row]:
    score = report.primary
    if score is not None:
        interval = ""
        if score.s_low is not None and score.s_high is not None:
            interval = f" [{score.s_low:.2f}, {score.s_high:.2f}]"
        parts = [
            f"P {ms(score.period_ns)}",
            f"S {_ratio(score.s)}{interval}",
            f"S_all {_ratio(score.s_all)}",
            f"E {score.efficiency:.2f}",
            f"G {score.gain:.2f} of {score.ceiling:.2f}",
            f"overhead {score.overhead:.1%}",
        ]
        in_run = 1 / score.efficiency if score.efficiency else 0.0
        strict = f"period / slowest {in_run:.2f}"
        if report.alone is not None:
            strict += f", alone {report.alone.strict:.2f}"
        parts.insert(4, strict)
        yield Row("primary", parts)
    yield from _alone_lines(report)
    yield from _published_lines(report.compat)
    why = why_scores_differ(report)
    if why:
        yield Row("", why)
    model = report.model
    if model is not None:
        parts = [
            f"P {ms(model.period_ns)}",
            f"gap {percent(model.gap, 1, signed=True)}",
            f"W* {model.w_star}",
        ]
        yield Row("model", [*parts, f"limit {model.formula}"])


def _alone_lines(report: RunReport) -> Iterator[Row]:
    """The stages by themselves: what they take with nothing beside them, and in the run."""
    alone = report.alone
    if alone is not None:
        parts = [f"S {_ratio(alone.s)}"]
        for stage, ns in alone.times.stages.items():
            stretch = alone.stretch.get(stage)
            parts.append(f"{stage} {ms(ns)}" + (f" x {stretch:.2f}" if stretch else ""))
        in_turn = f"in turn {ms(alone.in_turn_ns)}"
        if alone.in_turn_ns < (1 - SAME) * sum(alone.times.stages.values()):
            in_turn += " without waits for a CPU, and no longer than in the run"
        yield Row("alone", [*parts, in_turn])
    least = f"{report.gate.overlap_min:.2f}"
    accept = ", ".join(report.gate.accept) or "nothing"
    parts = [f"S and S alone from {least}", f"accepts {accept}"]
    if report.window.topology.world_size > 1:
        yield Row("limits", parts)


def _published_lines(score: Compat | None) -> Iterator[Row]:
    if score is not None:
        yield Row(
            "published",
            [
                f"score {_ratio(score.score)} {'pass' if score.gate else 'fail'}",
                f"period {ms(score.period_ns)}",
                f"stage0 {ms(score.stage0_ns)}",
                f"stage1 {ms(score.stage1_ns)}",
                f"hidden {ms(score.hidden_ns)}",
            ],
        )


def _resource_lines(score: Primary | None, topology: Topology) -> Iterator[Row]:
    if score is None:
        return
    alone = not score.places
    stages = {"r0": " A+B+C" if alone else " A+C"}
    for name, busy_ns in score.busy_ns.items():
        share = score.utilisation[name]
        bar = "█" * round(BAR * min(1.0, share))
        busy = ms(busy_ns / score.n)
        title = resource_title(name) + stages.get(name, "")
        title = f"B of {title}" if title.startswith("place") else title
        if name == "mesh" and topology.has_replicas:
            title = f"B of {topology.replicas} replicas"
        yield Row(title, [f"{bar:·<{BAR}} {share:4.0%}  {busy} an envelope"])


def _place_lines(report: RunReport) -> Iterator[Row]:
    """Of a chain: what each rank holds and waits for, and the hop that leaves it."""
    for place in report.places if report.window.topology.is_chain else ():
        what = ", ".join(place.parts) or ("no parts" if place.rank == 0 else "")
        parts = [" on ".join(text for text in (what, place.device) if text) or "parts not logged"]
        numbers = {
            "alone": place.alone_ns,
            "waits for work": place.wait_input_ns,
            "waits for room": place.wait_output_ns,
            "queue": place.queue_ns,
            "hop": place.hop_ns,
        }
        parts += [f"{name} {ms(ns)}" for name, ns in numbers.items() if ns is not None]
        yield Row(f"place {place.rank}", parts)


def _replica_lines(report: RunReport) -> Iterator[Row]:
    """B of each replica, and its busy share by itself."""
    shares = replica_shares(report.window)
    for place in report.places if report.window.topology.has_replicas else ():
        for rank, b_ns in zip(place.ranks, place.replicas_ns, strict=False):
            took = "its lines are not there" if b_ns is None else f"B {ms(b_ns)}"
            parts = [took, *([f"busy {percent(shares[rank])}"] if rank in shares else [])]
            yield Row(f"replica {rank}", parts)


def _mesh_lines(report: RunReport) -> Iterator[Row]:
    """The ranks that compute a place together, by stage B, in which they wait for each other."""
    for place in report.places:
        for rank in sorted({member.leader for member in place.members}):
            own = dict(zip(place.ranks, place.replicas_ns, strict=False)).get(rank, place.busy_ns)
            members = ((f"rank {m.rank}", m.busy_ns) for m in place.members if m.leader == rank)
            both = ((f"rank {rank} leads", own), *members)
            yield Row("mesh", [who if ns is None else f"{who}, B {ms(ns)}" for who, ns in both])


def _thread_lines(report: RunReport) -> Iterator[Row]:
    """Time that no stage and no wait explains, and CPU time of the stages."""
    parts = []
    for name, found in report.unnamed.items():
        delay = "unknown" if found.delay is None else f"{found.delay:.0%}"
        parts.append(f"{resource_title(name)} {found.share:.0%} (waits for a CPU: {delay})")
    if parts:
        yield Row("unnamed", parts)
    parts = [
        f"{stage} {times.cpu_ns / times.stage_ns:.0%} of its time"
        for stage, times in report.cpu.items()
        if times.stage_ns > 0
    ]
    if parts:
        yield Row("CPU", parts)


def _audit_lines(audits: Mapping[str, Audit]) -> Iterator[Row]:
    marks = {True: "ok", False: "BROKEN", None: "not run"}
    parts = []
    for name, audit in audits.items():
        shown = f"{name} {marks[audit.ok]}"
        if audit.ok is False and audit.value is not None:
            shown += f" {audit.value:+.3g}, limit {audit.limit:.3g}"
        parts.append(shown)
    yield Row("audits", parts)


def _queue_lines(report: RunReport) -> Iterator[Row]:
    topology, seen = report.window.topology, report.queues
    if topology.world_size > 1:
        form = [topology.threads, topology.order.replace("_", " ")]
        yield Row(
            "queues",
            [
                f"outstanding {seen.outstanding} of {topology.d_in}",
                f"q_decode {seen.q_decode} of {topology.d_out}",
                *form,
                f"credit {topology.credit.replace('_', ' ')}",
            ],
        )


def _time_lines(report: RunReport) -> Iterator[Row]:
    yield Row("period", _quantile_parts(quantiles(periods_ns(report.window))))
    yield Row("latency", _quantile_parts(report.latency))
    parts = latency_parts(report.window)
    if parts:
        shown = [f"{name} {ms(ns)}" for name, ns in parts.items() if ns >= SHOWN_NS]
        yield Row("  mean of it", shown)
    if report.pick_up is not None:
        behind = "of it after the end of C on the device"
        yield Row("  pick-up", [*_quantile_parts(report.pick_up), behind])
    if report.age is not None:
        yield Row("age", [*_quantile_parts(report.age), "measured by the robots"])
    if report.oldest is not None:
        yield Row("", [str(report.oldest)])
    source = f"input ({report.input_source})" if report.input_source else "input"
    for stream, ages in input_ages_ns(report.window.emitted).items():
        yield Row(f"  {stream}", [*_quantile_parts(quantiles(ages)), source])


def _path_lines(path: Mapping[str, Mapping[str, float]]) -> Iterator[Row]:
    parts = [
        f"{stage}: "
        + ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= RARE)
        for stage, shares in path.items()
    ]
    if parts:
        yield Row("starts after", parts)


def _drop_lines(found: Mapping[str, object]) -> Iterator[Row]:
    parts, shown = [f"{found['emitted']} emitted"], ""
    for what in ("envelopes", "samples"):
        reasons = found[what]
        if isinstance(reasons, Mapping):
            shown = ", ".join(f"{n} {reason}" for reason, n in reasons.items()) or "none"
            parts.append(f"{what} dropped: {shown}")
    by_stream = found["samples_by_stream"]
    for stream, lost in by_stream.items() if isinstance(by_stream, Mapping) else ():
        its = ", ".join(f"{n} {reason}" for reason, n in lost.items())
        if its == shown:
            parts[-1] += f", all of {stream}"
        else:
            parts.append(f"of {stream}: {its}")
    if found["imbalance"] is not None:
        parts.append("ledger off" if found["imbalance"] else "ledger balances")
    yield Row("items", parts)


def _fault_lines(faults: Sequence[FaultSeen]) -> Iterator[Row]:
    for number, fault in enumerate(faults):
        yield Row("" if number else "first faults", str(fault))


def _service_lines(service: ServiceReport | None) -> Iterator[Row]:
    if service is None:
        return
    parts = [service.limited_by or "no class"]
    if service.utilisation is not None:
        busy = {k: v for k, v in service.utilisation.items() if k != "link"}
        parts.append(
            "busy "
            + ", ".join(f"{resource_title(name)} {share:.0%}" for name, share in busy.items())
        )
    if service.latency is not None:
        parts += ["latency " + " ".join(_quantile_parts(service.latency))]
    if service.deadline is not None:
        missed, n = service.deadline["misses"], service.deadline["n"]
        parts.append(f"{missed} of {n} past their lease")
    if service.gaps is not None:
        gaps = service.gaps
        parts.append(f"longest without a new chunk {ms(gaps.longest_ns)}")
        parts.append(gaps.above_text)
    yield Row("service", parts)
    yield from _batch_lines(service.calls_by_rows)
    if service.rule_counts is not None:
        yield Row("  actions", [service.rule_counts.text])
    for robot in robot_accounts(service.robots):
        yield Row("  robot", [robot.name, *robot_texts(robot)])
    for stream in service.streams:
        yield Row(f"  {stream.stream}", [*_hole_parts(stream)])


def _batch_lines(calls: Mapping[int, int] | None) -> Iterator[Row]:
    """Sizes of the policy's batches in service, where not all were whole."""
    if calls is not None:
        total = sum(calls.values())
        shares = ", ".join(f"{rows} {n / total:.0%}" for rows, n in calls.items())
        yield Row(
            "  batch",
            [f"calls of the policy by rows: {shares}", "bring-up was gated with the whole batch"],
        )


def _request_lines(rows: Sequence[RobotRequests], columns: int) -> Iterator[str | Row]:
    """A table of the gateway's clients, and the rows whose counts do not add up."""
    cells: list[tuple[str, ...]] = [("wire", "robot", "requests", "answered", "p50", "p99", "max")]
    for row in rows:
        times = {} if row.latency is None else quantile_texts(row.latency)
        robot = row.robot if len(row.robot) <= NAME else row.robot[: NAME - 3] + "..."
        shown = (times.get(name, "NA") for name in ("p50", "p99", "max"))
        cells.append((row.wire, robot, str(row.requests), str(row.answered), *shown))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    errors = ["errors", *map(error_text, rows)]
    if rows:
        yield "Requests"
    for row_cells, reason in zip(cells if rows else (), errors, strict=False):
        names = [text.ljust(width) for text, width in zip(row_cells[:2], widths[:2], strict=True)]
        numbers = [text.rjust(width) for text, width in zip(row_cells[2:], widths[2:], strict=True)]
        line = f"  {'  '.join([*names, *numbers])}"
        if len(line) + len(reason) + 2 <= columns:
            yield f"{line}  {reason}"
        else:
            yield line
            yield Row("", reason)
    for row in rows:
        if row.imbalance:
            reason = f"{row.wire} {row.robot}: {row.requests} requests, and {imbalance_text(row)}"
            yield Row("  ledger off", reason)


def _hole_parts(stream: Ledger) -> Iterator[str]:
    longest = f", longest {ms(stream.longest_hole_ns or 0)}" if stream.holes else ""
    holes = f"holes above max_gap_ms: {stream.holes}{longest}"
    yield "on request" if stream.is_on_request else holes
    share = stream.invalid_share
    yield "invalid targets not counted" if share is None else f"{share:.1%} of targets invalid"


def _device_lines(stages: Sequence[StageOnDevice]) -> Iterator[Row]:
    """The device's medians, and the host's beside those that it sees differently."""
    parts = []
    for found in stages:
        host = f" (host {ms(found.host.p50_ns)})" if found.host and found.disagrees else ""
        parts.append(f"{found.stage} {ms(found.device.p50_ns)}{host}")
    if parts:
        yield Row("device", parts)


def _compiled_lines(parts: Sequence[CompiledPartSeen]) -> Iterator[Row]:
    """Counts of the compiler, a row for each part."""
    for seen in parts:
        counts = {
            "graphs": seen.graphs,
            "graph breaks": seen.breaks,
            "recompiles": seen.recompiles,
            "kernels": seen.kernels,
        }
        texts = [f"{count} {what}" for what, count in counts.items() if count or what != "kernels"]
        yield Row("compiled", [f"{seen.part} on rank {seen.rank}", *texts])


def _memory_lines(uses: Sequence[MemoryUse]) -> Iterator[Row]:
    """Of ranks with a GPU, and of those whose memory grew while they served."""
    for use in uses:
        if use.gpu is not None:
            sizes = {
                "allocated": use.gpu.allocated_max_bytes,
                "reserved": use.gpu.reserved_max_bytes,
                "not torch's": use.gpu.non_torch_max_bytes,
            }
            parts = [f"{gib(size)} {what}" for what, size in sizes.items()]
            parts.append(f"{use.gpu.segments_grown} segments while ready")
            parts.append(f"{use.gpu.alloc_retries} retries")
            others = [f"other programs {use.gpu.others_text()}"] * use.gpu.is_shared
            yield Row(f"GPU rank {use.rank}", [*parts, *others])
        if use.leaks:
            grown = f"grew by {gib(use.resident_grown_bytes)} while ready"
            yield Row(f"RAM rank {use.rank}", [f"{grown} to {gib(use.resident_max_bytes)}"])


def _quantile_parts(found: Quantiles | None) -> list[str]:
    if found is None:
        return ["NA"]
    return [f"{name} {text}" for name, text in quantile_texts(found).items()]


def _laid(row: Row, width: int, columns: int) -> list[Line]:
    """Lines of a row, its name in ``width`` columns; parts continue under each other."""
    label, parts = row
    if isinstance(parts, str):
        texts = textwrap.wrap(parts, columns - width)
    else:
        texts = [""]
        for part in parts:
            more = (GAP if texts[-1] else "") + part
            if texts[-1] and width + len(texts[-1]) + len(more) > columns:
                texts.append(part)
            else:
                texts[-1] += more
    if len(label) >= width:  # a name too long for its column stands above
        texts.insert(0, "")
    first, *others = texts or [""]
    styles = ((0, len(label), "name"),)
    under = [Line(" " * width + text) for text in others]
    return [Line(f"{label:<{width}}{first}", styles), *under]


def _wrap(text: str, columns: int, indent: int = 0) -> list[str]:
    return textwrap.wrap(text, columns, subsequent_indent=" " * indent)


def _ratio(value: float | None) -> str:
    return "NA" if value is None else f"{value:.2f}"
