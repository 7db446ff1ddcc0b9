"""``--check``: what a configuration would run, as text, with every problem found. Starts nothing.

The policy and the decoder are built once, as each rank would, because only they know what they
need; no process is started, no socket opened and no robot told.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Final

from ppstream import native
from ppstream.analysis.period_model import PipelineForm, StageTimes, latency, limiting_term, period
from ppstream.config.doubts import warnings
from ppstream.config.rules import rank_problems
from ppstream.config.schema import ImageConfig, PipelineConfig, StreamConfig
from ppstream.core.errors import ConfigError, counted
from ppstream.cuda import startup
from ppstream.ingest.intake import build_intake, needs_of, rings_bytes
from ppstream.ingest.sources import served_recording
from ppstream.launch.auto_cut import AUTO
from ppstream.launch.placement import Placement, RankPlan, place
from ppstream.launch.requirements import collecting, file_problems
from ppstream.links.device_link import AHEAD, slot_count
from ppstream.links.headers import link_shape
from ppstream.links.slots import LinkShape, SlotLayout
from ppstream.pipeline.stage_a import LONG_FRONT_MS
from ppstream.policy.compatibility import build_decoder, build_parts, check_parts, places_of
from ppstream.policy.parts import Place, blind_reads, name_of, specs_of
from ppstream.policy.protocol import Policy
from ppstream.report.formatting import size_text

NAME_WIDTH: Final = 16


def describe(config: PipelineConfig, world_size: int, local_world_size: int | None = None) -> str:
    """The placement of ``world_size`` ranks and what they need, for people.

    Args:
        config: checked, as ``config_file.load`` returns it.
        world_size: ranks in all.
        local_world_size: ranks on this host, which is rank 0's; None: all of them, but their ports
            may be on others.

    Raises:
        ConfigError: holds every problem found.
    """
    inputs = build_intake(config).cutter.inputs
    found = rank_problems(config, world_size, local_world_size)
    with collecting(found):
        placement = place(
            config,
            world_size,
            local_world_size or world_size,
            has_peer_access=startup.peer_access(config),
        )
        found += startup.missing(config, is_inline=world_size == 1)
    places: tuple[Place, ...] = ()  # none: the cut is chosen at the start
    with collecting(found):
        parts = build_parts(config, startup.device_to_build_on(config))
        if world_size > 1 and config.placement.parts == AUTO:
            check_parts(config, specs_of(parts), inputs)
        else:
            places = places_of(config, specs_of(parts), inputs, inline=world_size == 1)
        needs_of(config, blind_reads(specs_of(parts)))
    found += file_problems(config)
    with collecting(found):
        build_decoder(config)
    with collecting(found):
        served_recording(config)
    if found:
        raise ConfigError(found)
    hops = list(_hops(config, placement, places))
    copies = 1 if placement.is_inline else config.placement.replicas
    slot_bytes = copies * sum(layout.slot_bytes * count for _, layout, count in hops)
    lines = [
        f"ppstream {config.name}: nothing started, no problem found",
        *(f"warning: {line}" for line in warnings(config)),
        *_placement_lines(config, placement, places),
        *_port_lines(config, world_size),
        *_part_lines(config, placement, places, parts),
        *_device_lines(config, placement),
        *_stream_lines(config),
        *(line for hop in hops for line in _slot_lines(*hop, placement)),
        *_memory_lines(config, placement, slot_bytes),
        *_period_lines(config, placement),
    ]
    return "\n".join(lines)


def _most(placement: Placement) -> str:
    """On GPUs slots follow from the policy's kernels, which are counted when it is recorded."""
    return "up to " if placement.is_device_ordered else ""


def _hops(
    config: PipelineConfig, placement: Placement, places: Sequence[Place]
) -> Iterator[tuple[str, SlotLayout, int]]:
    """Yields each hop's name, the layout of its slots, and how many there are, if known."""
    if not places:
        return
    carried = places[0].outputs, places[-1].outputs
    shape = link_shape(config, *carried, 0, ahead=AHEAD)  # the most that a GPU takes
    envelopes, results = _slot_counts(placement, shape)
    yield "envelope", shape.envelope, envelopes
    for k, at in enumerate(places[1:-1], 1):
        between = link_shape(config, (), at.outputs, 0, place=k)
        yield f"output of place {k}", between.result, between.result_slots
    yield "result", shape.result, results


def _slot_counts(placement: Placement, shape: LinkShape) -> tuple[int, int]:
    if placement.is_inline:
        return 1, 1
    if placement.is_device_ordered:
        return slot_count(shape), slot_count(shape)
    return shape.envelope_slots, shape.result_slots


def _placement_lines(
    config: PipelineConfig, placement: Placement, places: Sequence[Place]
) -> Iterator[str]:
    yield ""
    for plan in placement.ranks:
        is_whole = not places or placement.is_inline
        names = () if is_whole else places[config.placement.place_of(plan.rank)].names
        what = f"{_stages_text(config, plan)} on {plan.device}"
        is_cut = names and config.placement.cut
        yield _row(f"rank {plan.rank}", f"{what}: {', '.join(names)}" if is_cut else what)
    for plan in placement.members:
        leader = config.placement.leader_of(plan.rank)
        what = f"stage B on {plan.device}, in the mesh that rank {leader} leads"
        yield _row(f"rank {plan.rank}", what)
    shape = config.pipeline
    yield _row("link", f"{placement.link or 'none'}: {placement.why}")
    if not places:
        yield _row("cut", "best of the parts' times, which rank 1 measures at the start")
    if not placement.is_inline:
        yield _row("bounds", f"D_in {shape.d_in}, D_out {shape.d_out}")
    gathers = "" if shape.gather_ms is None else f" within {shape.gather_ms:g} ms"
    yield _row("pacing", f"{shape.pacing}{gathers}, {shape.windows} windows")
    yield _row("core", _core_text())
    yield _row("robots", _service_text(config))


def _port_lines(config: PipelineConfig, world_size: int) -> Iterator[str]:
    """Yields ports that ranks of one host would share: where each is, the start alone knows."""
    for problem in rank_problems(config, world_size, world_size):
        yield _row("ports", f"a run on one host is refused: {problem}")


def _part_lines(
    config: PipelineConfig,
    placement: Placement,
    places: Sequence[Place],
    parts: Sequence[Policy],
) -> Iterator[str]:
    """Yields what each part says of its size, and all of them; nothing of a policy in one part."""
    if len(parts) < 2:
        return
    yield "\nparts"
    replicas = config.placement.replicas
    titles = ["rank 0", f"ranks 1 to {replicas}"] if replicas > 1 else []
    titles = titles or [f"rank {k}" for k in range(len(places))]
    ranks = [title for title, at in zip(titles, places, strict=False) for _ in at.names]
    if placement.is_inline or not ranks:
        ranks = ["rank 0" if placement.is_inline else "any rank"] * len(parts)
    for where, part in zip(ranks, parts, strict=True):
        written = sum(spec.bytes_for(config.batch.rows) for spec in part.outputs)
        texts = [where, f"writes {size_text(written)}"]
        sizes = getattr(part, "parameters", None), getattr(part, "flops", None)
        yield _row(name_of(part), ", ".join([*texts, *_size_texts(*sizes)]))
    flops: list[float | None] = [getattr(part, "flops", None) for part in parts]
    known = [each for each in flops if each is not None]
    whole = _parameters(parts), sum(known) if len(known) == len(parts) else None
    if texts := [*_size_texts(*whole)]:
        yield _row("all", ", ".join(texts))


def _size_texts(parameters: int | None, flops: float | None) -> Iterator[str]:
    if parameters is not None:
        yield f"{parameters / 1e6:,.4g} M parameters"
    if flops is not None:
        yield f"{flops / 1e9:,.4g} GFLOP a row"


def _parameters(parts: Sequence[Policy]) -> int | None:
    """Counts those of all parts, a tensor that several have (``weights``) once; None: not known."""
    shared: dict[str, tuple[int, ...]] = {}
    own = 0
    for part in parts:
        if isinstance(weights := getattr(part, "weights", None), Mapping):
            shared |= weights
        elif (parameters := getattr(part, "parameters", None)) is not None:
            own += parameters
        else:
            return None
    return own + sum(map(prod, shared.values()))


def _device_lines(config: PipelineConfig, placement: Placement) -> Iterator[str]:
    """Yields the GPUs of the placement and what drives them; nothing without one."""
    plans = [plan for plan in (*placement.ranks, *placement.members) if plan.is_gpu]
    if not plans:
        return
    yield "\ndevices"
    for plan in plans:
        about = startup.device_facts(plan.device)
        if about is not None:
            memory = f"{size_text(about.memory_bytes)}, {about.capability}"
            yield _row(plan.device, f"{about.name}, {memory}, for rank {plan.rank}")
    if len(plans) > 1 and not placement.members:
        reached = "yes, both ways" if startup.peer_access(config) else "no"
        yield _row("peer access", reached)
    for name, text in startup.versions():
        yield _row(name, text)


def _stages_text(config: PipelineConfig, plan: RankPlan) -> str:
    how: str = "streams of their own" if plan.is_gpu else config.threads
    if config.pipeline.threads == "auto" and not plan.is_gpu and 0 in config.placement.cut:
        how = f"split if front parts take more than {LONG_FRONT_MS:g} ms, else serial"
    threads = f" ({how})" if plan.stages == ("A", "C") else ""
    policy = f" ({config.policy.target})" if "B" in plan.stages else ""
    return f"stage {' + '.join(plan.stages)}{threads}{policy}"


def _core_text() -> str:
    return "compiled" if native.is_used else f"in Python: {native.why_not}"


def _service_text(config: PipelineConfig) -> str:
    service, rows = config.service, config.batch.rows
    if service.recording is not None:
        return f"none: serves the recording {service.recording}"
    if service.endpoint is None:
        return "none: no endpoint"
    known = "" if service.secret_key is None else ", encrypted, for allowed keys alone"
    lease_ms = config.actions.lease_ms
    return f"up to {rows} at {service.endpoint}{known}, action lease {lease_ms:g} ms"


def _stream_lines(config: PipelineConfig) -> Iterator[str]:
    steps, dt_ms = config.window.steps, config.window.dt_ms
    all_ms = f"{config.window_span_ms:g} ms in all"
    yield f"\nwindow: {counted(steps, 'step')} of {dt_ms:g} ms, {all_ms}"
    for stream in config.streams:
        mark = ", ends the window" if stream == config.reference else ""
        if stream.image is None:
            form = counted(stream.dim, "value")
            settings = config.group_settings(stream.group)
            as_dtype = f" as {settings.dtype}" if settings.is_scaled else ""
            use = f"{stream.interpolation}, group {stream.group}{as_dtype}"
        else:
            form, use = (
                f"{stream.image.height} x {stream.image.width} RGB",
                _frames_text(stream.image),
            )
        ring = f"ring of {counted(config.ring_samples(stream), 'sample')}"
        yield _row(stream.name, f"{form} {_rate_text(stream)}, {use}, {ring}{mark}")


def _frames_text(image: ImageConfig) -> str:
    """Words what a policy reads of a camera: ``newest frame at 96 x 96, float32 0..1``."""
    newest = "newest frame" if image.frames == 1 else f"newest {image.frames} frames"
    height, width = image.size
    values = "0..1" if image.is_plain else "less mean, over std"
    return f"{newest} as 3 x {height} x {width} {image.dtype} {values}"


def _rate_text(stream: StreamConfig) -> str:
    return (
        f"on request, {stream.most_hz:g} Hz at most"
        if stream.is_on_request
        else (f"at {stream.most_hz:g} Hz")
    )


def _slot_lines(what: str, layout: SlotLayout, slots: int, placement: Placement) -> Iterator[str]:
    size = size_text(layout.slot_bytes)
    yield f"\n{what}: {_most(placement)}{counted(slots, 'slot')} of {size}"
    yield _row("header", f"[{len(layout.header)}] int64, {size_text(8 * len(layout.header))}")
    for spec in layout.tensors:
        size = size_text(spec.bytes_for(layout.rows))
        yield _row(spec.name, f"{[layout.rows, *spec.shape]} {spec.dtype}, {size}")


def _memory_lines(config: PipelineConfig, placement: Placement, slot_bytes: int) -> Iterator[str]:
    """Yields what is allocated at start; only ``host`` slots are shared memory."""
    owners = {
        "host": "shared by both ranks" if len(placement.ranks) == 2 else "shared by neighbours",
        "peer": "on each GPU, half of them written by the other",
        "pinned": "on each GPU, and in pinned memory",
    }
    owner = owners.get(placement.link or "", "" if placement.is_inline else "on each rank")
    yield "\nmemory, besides what torch and the policy take"
    yield _row("rings", f"{size_text(rings_bytes(config))} on rank 0")
    slots = f"{_most(placement)}{size_text(slot_bytes)} {owner}".rstrip()
    yield _row("slots", slots if slot_bytes else "as the cut needs them")


def _period_lines(config: PipelineConfig, placement: Placement) -> Iterator[str]:
    """The model's period and latency when all stages are simulated with stated means."""
    b_ms = config.policy.options.get("b_ms")
    if isinstance(b_ms, bool) or not isinstance(b_ms, int | float):
        return
    shape, simulate = config.pipeline, config.simulate
    times = StageTimes(a=simulate.a_ms, b=float(b_ms), c=simulate.c_ms)
    form = PipelineForm(
        threads="serial" if placement.is_inline else config.threads,
        order="decode_first" if placement.is_inline else "send_first",
        d_in=shape.d_in,
        d_out=shape.d_out,
        replicas=1 if placement.is_inline else config.placement.replicas,
    )
    yield "\nmodel of the simulated stages, saturated, transfers and overhead not counted"
    yield _row("period", f"{period(times, form):g} ms = {limiting_term(times, form)}")
    if (through := latency(times, form)) is not None:
        yield _row("latency", f"{through:g} ms from the start of A to the end of C")


def _row(name: str, text: str) -> str:
    return f"  {name:<{NAME_WIDTH}} {text}"
