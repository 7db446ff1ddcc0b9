"""Traces of torch.profiler: Kineto's JSON to ``kernel_trace.Trace``. Standard library only.

Kernels are linked to the host call that launched them by their correlation id. Of calls that the
profiler does not record (graphs and copies asked of the driver) the range is known all the same, as
it draws every range on the device's streams, too. A trace without kernels (a CPU) shows operators
instead, each with the time that no operator inside it took.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from ppstream.core.errors import LogError
from ppstream.report.kernels.trace import Copy, Trace, TraceRange, Work

NS_PER_US: Final = 1000
RANGES: Final = ("user_annotation",)
ON_STREAM: Final = "gpu_user_annotation"  # a range, from its first work on a stream to its last
RUNTIME: Final = ("cuda_runtime", "cuda_driver")
COPIES: Final = ("gpu_memcpy", "gpu_memset")
STEP: Final = "ProfilerStep#"


def read_kineto(path: Path) -> Trace:
    """The trace in ``path``, plain or gzipped.

    Raises:
        LogError: no JSON, or no trace of a profiler in it.
    """
    raw = path.read_bytes()
    try:
        content = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
    except (ValueError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise LogError(
            f"{path}: incomplete JSON ({error}): the profiled process ended while it was written"
        ) from error
    events = content.get("traceEvents") if isinstance(content, dict) else content
    if not isinstance(events, list):
        raise LogError(f"{path}: JSON without traceEvents: not a trace of torch.profiler")
    try:
        return _trace(path, events)
    except KeyError as error:
        raise LogError(f"{path}: an event lacks {error}: not as torch.profiler wrote it") from error


def _trace(path: Path, events: Sequence[Any]) -> Trace:
    timed = [e for e in events if isinstance(e, dict) and e.get("ph") == "X"]
    kernels = [e for e in timed if e.get("cat") == "kernel"]
    hosts = _Hosts(timed)
    work = [_kernel(e, hosts) for e in kernels] if kernels else list(_operators(timed))
    ranges = [_range(e) for e in timed if e.get("cat") in RANGES and not _is_step(e)]
    if not work and not ranges:
        raise LogError(
            f"{path}: neither kernels, operators nor ranges: nothing ran while the profiler did"
        )
    return Trace(
        source=f"{path.name}, torch.profiler",
        is_gpu=bool(kernels),
        work=work,
        copies=[_copy(e, hosts) for e in timed if e.get("cat") in COPIES],
        ranges=ranges,
        launch_ns=sum(_ns(e["dur"]) for e in hosts.calls.values() if "Launch" in e["name"]),
    )


def _is_step(event: dict[str, Any]) -> bool:
    return str(event["name"]).startswith(STEP)


class _Hosts:
    """Host calls that asked for a device's work."""

    def __init__(self, timed: Sequence[dict[str, Any]]) -> None:
        self.calls = {
            e["args"]["correlation"]: e
            for e in timed
            if e.get("cat") in RUNTIME and "correlation" in e.get("args", {})
        }
        ranges = {
            e["args"]["External id"]: e
            for e in timed
            if e.get("cat") in RANGES and "External id" in e.get("args", {})
        }
        self._streams: dict[tuple[Any, Any], list[tuple[int, int, dict[str, Any]]]] = {}
        for event in timed:
            known = ranges.get(event.get("args", {}).get("External id"))
            if event.get("cat") == ON_STREAM and known is not None and not _is_step(event):
                self._streams.setdefault(_stream(event), []).append((*_span(event), known))

    def launch_of(self, event: dict[str, Any]) -> tuple[int, int] | tuple[None, None]:
        """When, and on which thread; a graph's parts share its launch.

        Without a record of the call it is the beginning of the range that asked.
        """
        source = self.calls.get(event.get("args", {}).get("correlation", -1))
        source = self._range(event) if source is None else source
        return (None, None) if source is None else (_ns(source["ts"]), _thread(source))

    def _range(self, event: dict[str, Any]) -> dict[str, Any] | None:
        """The innermost range around it on its stream: work there is done in the order asked."""
        middle = sum(_span(event)) // 2  # begins and ends are a rounding apart
        around = [s for s in self._streams.get(_stream(event), ()) if s[0] <= middle <= s[1]]
        return min(around, key=lambda s: s[1] - s[0])[2] if around else None


def _stream(event: dict[str, Any]) -> tuple[Any, Any]:
    return event.get("pid"), event.get("tid")


def _kernel(event: dict[str, Any], hosts: _Hosts) -> Work:
    args = event.get("args", {})
    shape = tuple(args.get("grid") or ()) + tuple(args.get("block") or ())
    start_ns, end_ns = _span(event)
    launched_ns, thread = hosts.launch_of(event)
    return Work(
        name=event["name"],
        start_ns=start_ns,
        end_ns=end_ns,
        busy_ns=end_ns - start_ns,
        lane=f"device {args.get('device', 0)} stream {args.get('stream', '?')}",
        shape=shape or None,
        launched_ns=launched_ns,
        thread=thread,
    )


def _operators(timed: Iterable[dict[str, Any]]) -> Iterable[Work]:
    """CPU operators with their own time; those of a thread are nested like brackets."""
    threads: dict[int, list[dict[str, Any]]] = {}
    for event in timed:
        if event.get("cat") == "cpu_op":
            threads.setdefault(_thread(event), []).append(event)
    for thread, events in threads.items():
        yield from _own_times(thread, events)


def _own_times(thread: int, events: list[dict[str, Any]]) -> Iterable[Work]:
    spans = sorted((*_span(e), str(e["name"])) for e in events)
    spans.sort(key=lambda s: (s[0], -s[1]))
    inside_ns = [0] * len(spans)
    outer: list[int] = []
    for index, (start_ns, end_ns, _) in enumerate(spans):
        while outer and spans[outer[-1]][1] <= start_ns:
            outer.pop()
        if outer:
            inside_ns[outer[-1]] += end_ns - start_ns
        outer.append(index)
    for (start_ns, end_ns, name), within_ns in zip(spans, inside_ns, strict=True):
        busy_ns = max(0, end_ns - start_ns - within_ns)
        yield Work(name, start_ns, end_ns, busy_ns, f"thread {thread}", None, start_ns, thread)


def _copy(event: dict[str, Any], hosts: _Hosts) -> Copy:
    args = event.get("args", {})
    kind = str(event["name"]).partition("(")[0].strip()
    return Copy(kind, int(args.get("bytes", 0)), *_span(event), *hosts.launch_of(event))


def _range(event: dict[str, Any]) -> TraceRange:
    return TraceRange(str(event["name"]), *_span(event), _thread(event))


def _span(event: dict[str, Any]) -> tuple[int, int]:
    return _ns(event["ts"]), _ns(event["ts"] + event["dur"])


def _ns(us: float) -> int:
    return round(us * NS_PER_US)


def _thread(event: dict[str, Any]) -> int:
    return int(event.get("tid", 0))
