"""The cut of a policy with ``placement.parts = "auto"``, found while a run starts.

Once all ranks have met, rank 1 times every part alone while the others wait. Rank 0 takes the best
contiguous cut, shows it beside the next best ones, and tells every rank. Whatever runs behind that
knows places alone. It is decided behind the handshake, so that a difference between ranks is found
before a checkpoint is loaded, and a rank that dies or stands meanwhile is noticed as in a build.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
import torch

from ppstream.analysis.period_model import PipelineForm
from ppstream.analysis.policy_cut import Costs, Prediction, cut_table
from ppstream.core.clock import NS_PER_MS, now_ns
from ppstream.core.interpreter import collect_garbage
from ppstream.cuda import startup
from ppstream.ingest.window import input_specs
from ppstream.launch import handshake
from ppstream.policy.batch_sizes import PRESENT
from ppstream.policy.compatibility import build_parts, check_parts
from ppstream.policy.graphed import WARM_UP_CALLS, GraphedPolicy, device_ns, prepared_policy
from ppstream.policy.host_staged import zeros
from ppstream.policy.parts import PartSpecs, cut, load, name_of, specs_of
from ppstream.policy.protocol import refused
from ppstream.report.formatting import ms, size_text
from ppstream.wire.rank_messages import Ready

if TYPE_CHECKING:
    from ppstream.config.schema import PipelineConfig
    from ppstream.control.peer import Peer
    from ppstream.launch.course import Course
    from ppstream.observe.run_folder import Run
    from ppstream.policy.protocol import Policy

logger = logging.getLogger("ppstream")

AUTO: Final = "auto"
TIMED_CALLS: Final = 9  # of each part; their median counts
CUTS_SHOWN: Final = 5


class MeasuredParts(msgspec.Struct, frozen=True):
    """Parts of a policy in order, and the time that a call of each takes alone."""

    parts: tuple[PartSpecs, ...]
    parts_ns: tuple[int, ...]


# ---- rank 0 -----------------------------------------------------------------------------------


def choose_cut(
    config: PipelineConfig, peers: Sequence[Peer], course: Course, run: Run
) -> PipelineConfig:
    """Returns ``config`` with a place for each part; ``"auto"`` becomes the best cut.

    The cuts stand in the log and in run.json (``cut``), and every policy rank is told.

    Raises:
        PeerLeftError: a part cannot be timed, or there are too few.
        WatchdogError: they were not timed within ``liveness.start_s``.
    """
    if config.placement.parts != AUTO:
        return config
    logger.info("placement.parts: rank 1 times each part of the policy alone")
    with course.step("the call to time parts"):
        for peer in peers:
            peer.send(Ready({}))
    found = handshake.wait_ready(config, peers[0], "the times of the policy's parts")
    times = msgspec.convert(found, MeasuredParts)
    costs = costs_of(config, times)
    table = cut_table(costs, 1 + len(peers), _form(config), CUTS_SHOWN)
    for line in table_lines(config, times, table):
        logger.info("%s", line)
    run.describe(cut=facts_of(times, table))
    where = table[0].cut.placement
    for peer in peers:
        peer.send(Ready({"parts": where}))
    return _placed(config, where)


def costs_of(config: PipelineConfig, times: MeasuredParts) -> Costs:
    """Returns what a cut puts somewhere: parts and simulated stages in ns, hops in bytes.

    How long a hop takes is not known before a link is open: it counts as free.
    """
    parts, window, count = times.parts, input_specs(config), len(times.parts)
    crossing = [cut(parts, [0] * j + [1] * (count - j), window)[0].outputs for j in range(count)]
    rows = config.batch.rows
    return Costs(
        parts=times.parts_ns,
        hops=(0,) * (count + 1),
        a=config.simulate.a_ms * NS_PER_MS,
        c=config.simulate.c_ms * NS_PER_MS,
        hop_bytes=tuple(
            sum(spec.bytes_for(rows) for spec in hop) for hop in (*crossing, parts[-1].outputs)
        ),
        is_front_open=_is_front_open(config),
    )


def _is_front_open(config: PipelineConfig) -> bool:
    """True where rank 0's device is of the kind that parts are timed on."""
    devices = config.placement
    return (devices.rank0 == "cpu") == (devices.policy[0] == "cpu")


def _form(config: PipelineConfig) -> PipelineForm:
    shape = config.pipeline
    is_serial = shape.threads == "serial" and config.placement.rank0 == "cpu"
    threads: Literal["serial", "split"] = "serial" if is_serial else "split"
    return PipelineForm(threads, credit=shape.credit, d_in=shape.d_in, d_out=shape.d_out)


def table_lines(
    config: PipelineConfig, times: MeasuredParts, table: Sequence[Prediction]
) -> Iterator[str]:
    """Yields the parts' times, and a row for each cut; the first is the one that is taken."""
    device = config.placement.policy[0]
    alone = zip((part.name for part in times.parts), times.parts_ns, strict=True)
    yield f"parts alone on {device}: {', '.join(f'{name} {ms(ns)}' for name, ns in alone)}"
    if not _is_front_open(config):
        yield (
            f"rank 0 on {config.placement.rank0} gets no part: their times there are not known; "
            "list places in placement.parts to give it some"
        )
    rows = [("placement.parts", "by place", "bytes by hop", "period", "age", "")]
    for row in table:
        loads, hops = map(ms, row.cut.loads), map(size_text, row.cut.hop_bytes)
        figures = ms(row.period), ms(_age_ns(row)), "" if len(rows) > 1 else "taken"
        rows.append((str(list(row.cut.placement)), " | ".join(loads), " | ".join(hops), *figures))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for cells in rows:
        yield "  ".join(map(str.ljust, cells, widths)).rstrip()
    yield (
        "predicted without hops and the real stages A and C; age: of the oldest action, latency "
        f"{ms(table[0].cut.times.through)} and period, if inputs come no faster than the period"
    )


def _age_ns(row: Prediction) -> float:
    """A robot executes a chunk until the next one comes: latency and period."""
    return row.cut.times.through + row.period


def facts_of(times: MeasuredParts, table: Sequence[Prediction]) -> dict[str, Any]:
    """Returns the same for run.json; the first of ``cuts`` is the one that is taken."""
    return {
        "parts": [part.name for part in times.parts],
        "parts_ns": times.parts_ns,
        "chosen": table[0].cut.placement,
        "cuts": [
            {
                "parts": row.cut.placement,
                "places_ns": [round(load) for load in row.cut.loads],
                "hop_bytes": row.cut.hop_bytes,
                "period_ns": round(row.period),
                "latency_ns": round(row.cut.times.through),
                "age_ns": round(_age_ns(row)),
            }
            for row in table
        ],
    }


# ---- policy ranks -------------------------------------------------------------------------------


def follow_cut(
    config: PipelineConfig, rank: int, device: torch.device, rank0: Peer, course: Course
) -> PipelineConfig:
    """Returns ``config`` with a place for each part, as rank 0 chooses; rank 1 times the parts.

    Raises:
        ConfigError: a part cannot be timed, or there are too few.
        PeerLeftError, WatchdogError: there is no cut, or not within ``liveness.start_s``.
    """
    if config.placement.parts != AUTO:
        return config
    handshake.wait_ready(config, rank0, "the call to time parts")
    with course.step("the timing of the policy's parts, each alone"):
        times = time_parts(config, device) if rank == 1 else None
    if times is not None:
        rank0.send(Ready(msgspec.to_builtins(times)))
    found = handshake.wait_ready(config, rank0, "the cut of the policy")
    return _placed(config, msgspec.convert(found["parts"], tuple[int, ...]))


def _placed(config: PipelineConfig, where: tuple[int, ...]) -> PipelineConfig:
    placement = msgspec.structs.replace(config.placement, parts=where)
    return msgspec.structs.replace(config, placement=placement)


def time_parts(config: PipelineConfig, device: torch.device) -> MeasuredParts:
    """Loads, calls and lets go each part of the policy, one at a time, on ``device``.

    Parts may share what they load, so each one comes from a ``build`` of its own.

    Raises:
        ConfigError: the policy does not fit, has fewer parts than there are policy ranks, a part
            raised, or cannot be recorded. Memory that ran out passes through.
    """
    if device.type == "cuda":
        startup.start(device)
    specs = specs_of(build_parts(config, device))
    check_parts(config, specs, input_specs(config))
    found = []
    for index in range(len(specs)):
        found.append(_time_part(build_parts(config, device)[index], config, device))
        collect_garbage()
        if device.type == "cuda":
            torch._C._cuda_clearCublasWorkspaces()  # of each stream that recorded a part
            torch.cuda.empty_cache()
    return MeasuredParts(specs, tuple(found))


def _time_part(part: Policy, config: PipelineConfig, device: torch.device) -> int:
    """Time of a call on zeros with every row present, in ns."""
    try:
        load((part,), config.policy.target)
        rows = config.batch.rows
        everyone = torch.ones(rows, dtype=torch.bool, device=device)
        window, out = (zeros(specs, rows, device) for specs in (part.inputs, part.outputs))
        if PRESENT in window:
            window[PRESENT].copy_(everyone)
        part.reset(everyone)
        prepared = prepared_policy(part, config.policy, device)
        if isinstance(prepared, GraphedPolicy):
            return prepared.rehearse(window, out, None).duration_ns
        for _ in range(WARM_UP_CALLS):
            prepared(window, out)
        timed = _host_ns if device.type == "cpu" else device_ns
        return round(median(timed(lambda: prepared(window, out)) for _ in range(TIMED_CALLS)))
    except BaseException as error:  # noqa: BLE001 - user code
        who = f"policy.target: part {name_of(part)!r} of {config.policy.target}"
        raise refused(error, who) from None


def _host_ns(call: Callable[[], object]) -> int:
    begun_ns = now_ns()
    call()
    return now_ns() - begun_ns
