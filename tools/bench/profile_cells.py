"""Cells of ``profile_sweep.py``: a plain transformer or a shipped policy, timed and traced.

Run as a program it is the sweep's worker: each line of its standard input is a cell's settings in
JSON, and each line of its output what was found.
"""

from __future__ import annotations

import json
import os
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, silu
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from ppstream.config import load as configuration
from ppstream.core.errors import ConfigError
from ppstream.ingest.window import input_specs
from ppstream.policy.compatibility import build_parts
from ppstream.policy.host_staged import zeros
from ppstream.policy.parts import load
from ppstream.report.kernels.findings import TraceFindings, bottleneck, findings
from ppstream.report.kernels.kineto import read_kineto
from ppstream_stages.building import NetworkPart

# B=batch T=token F=feature H=head D=feature of a head

VOCABULARY: Final = 10_000
WARM_UP: Final = "warm-up"  # a range that findings leave out
STEP: Final = "step"
KERNELS_KEPT: Final = 8
PEAK_SIDE: Final = 8192  # of the matrices whose product is the roof
PEAK_BYTES: Final = 1 << 30
PEAK_TURNS: Final = 10
ROTATION: Final = 10_000.0  # base of the angles of positions

DTYPES: Final = ("float32", "bfloat16")

Step = Callable[[], object]


class Size(NamedTuple):
    """A family member: a decoder without biases, with gated feed-forward layers."""

    width: int
    feed_forward: int
    layers: int
    heads: int


SIZES: Final = {
    "tiny": Size(64, 256, 2, 2),
    "small": Size(768, 3072, 12, 12),
    "medium": Size(1024, 4096, 24, 16),
    "large": Size(1280, 5120, 36, 20),
    "xl": Size(1600, 6400, 48, 25),
    "2.7B": Size(2560, 10240, 32, 32),
}
KINDS: Final = ("forward", "forward_backward", "training")
POLICY: Final = "chunk"  # the kind of a shipped policy: one row's window to its actions


class WrittenAttention(nn.Module):
    """Causal self-attention written out: scores, softmax and values are operations of their own."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.offer = nn.Linear(size.width, 3 * size.width, bias=False)
        self.join = nn.Linear(size.width, size.width, bias=False)

    def forward(self, x: Tensor, angles: Tensor, hidden: Tensor) -> Tensor:
        rows, tokens, width = x.shape
        split = self.offer(x).view(rows, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = _turned(split[0], angles), _turned(split[1], angles), split[2]
        with record_function("scores"):
            scores = q @ k.transpose(-2, -1) / (width / self.heads) ** 0.5
            scores = scores.masked_fill(hidden, -torch.inf)
        with record_function("softmax"):
            powers = (scores - scores.amax(dim=-1, keepdim=True)).exp()
            shares = powers / powers.sum(dim=-1, keepdim=True)
        with record_function("values"):
            seen = shares @ v
        joined: Tensor = self.join(seen.transpose(1, 2).reshape(rows, tokens, width))
        return joined


def _turned(x: Tensor, angles: Tensor) -> Tensor:
    """Rotates pairs of features by their position: ``[B, H, T, D]``, angles ``[T, D / 2]``."""
    even, odd = x[..., ::2], x[..., 1::2]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


class Block(nn.Module):
    """Attention and a gated feed-forward layer, each behind a norm."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm_attend, self.norm_feed = nn.RMSNorm(size.width), nn.RMSNorm(size.width)
        self.attend = WrittenAttention(size)
        self.gate = nn.Linear(size.width, size.feed_forward, bias=False)
        self.widen = nn.Linear(size.width, size.feed_forward, bias=False)
        self.narrow = nn.Linear(size.feed_forward, size.width, bias=False)

    def forward(self, x: Tensor, angles: Tensor, hidden: Tensor) -> Tensor:
        with record_function("attention"):
            x = x + self.attend(self.norm_attend(x), angles, hidden)
        with record_function("feed_forward"):
            normed = self.norm_feed(x)
            fed: Tensor = self.narrow(silu(self.gate(normed)) * self.widen(normed))
            return x + fed


class TokenDecoder(nn.Module):
    """Tokens ``[B, T]`` to logits ``[B, T, VOCABULARY]``."""

    def __init__(self, size: Size, context: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)
        half = size.width // size.heads // 2
        rates = ROTATION ** (-torch.arange(half) / half)
        self.register_buffer("angles", torch.arange(context)[:, None] * rates, persistent=False)
        later = torch.ones(context, context, dtype=torch.bool).triu(1)
        self.register_buffer("hidden", later, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.angles, self.hidden)
        logits: Tensor = self.head(self.norm(x))
        return logits


class MovedBytes(TorchDispatchMode):
    """Counts what each operation reads and writes; views move nothing, and no cache is known."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if not getattr(func, "is_view", False):
            self.total += sum(map(_bytes_of, (*args, *(kwargs or {}).values(), made)))
        return made


def _bytes_of(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(_bytes_of, value)) if isinstance(value, list | tuple) else 0


class Stepped(NamedTuple):
    """One step of a cell, the parameters behind it, and the dtype of most of them."""

    step: Step
    parameters: int
    dtype: str


def step_of(settings: Mapping[str, Any], device: torch.device) -> Stepped:
    """A cell's step on ``device``."""
    if settings["kind"] == POLICY:
        return _policy_step(settings["size"], device)
    size, context = SIZES[settings["size"]], settings["context"]
    dtype = getattr(torch, settings["dtype"])
    torch.manual_seed(0)
    with device:
        model = TokenDecoder(size, context).to(dtype)
        given = torch.randint(VOCABULARY, (settings["batch"], context))
        wanted = torch.randint(VOCABULARY, (settings["batch"], context))
    parameters = sum(weight.numel() for weight in model.parameters())
    if settings["kind"] == "forward":
        return Stepped(torch.no_grad()(partial(model, given)), parameters, settings["dtype"])
    adam = torch.optim.AdamW(model.parameters()) if settings["kind"] == "training" else None

    def step() -> None:
        model.zero_grad(set_to_none=True)
        with record_function("forward"):
            loss = cross_entropy(model(given).flatten(0, 1).float(), wanted.flatten())
        with record_function("backward"):
            loss.backward()
        if adam is not None:
            with record_function("optimizer"):
                adam.step()

    return Stepped(step, parameters, settings["dtype"])


def _policy_step(name: str, device: torch.device) -> Stepped:
    config = configuration.load(Namespace(config=name, overrides=[]))
    parts = build_parts(config, device)
    load(parts, config.policy.target)
    specs = {spec.name: spec for part in parts for spec in part.outputs}
    tensors = zeros([*input_specs(config), *specs.values()], 1, device)

    def step() -> None:
        for part in parts:
            with record_function(getattr(part, "name", "policy")):
                part(tensors, tensors)

    networks = [part.network for part in parts if isinstance(part, NetworkPart)]
    sizes = Counter({DTYPES[0]: 0})
    for weight in (weight for network in networks for weight in network.parameters()):
        sizes[str(weight.dtype).removeprefix("torch.")] += weight.numel()
    return Stepped(step, sizes.total(), sizes.most_common(1)[0][0])


def measure(settings: Mapping[str, Any], trace: Path, device: torch.device) -> dict[str, Any]:
    """Times, counts and shares of one cell; its trace stays in ``trace``."""
    wait = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step, parameters, dtype = step_of(settings, device)
    with FlopCounterMode(display=False) as flops, MovedBytes() as moved:
        step()
    for _ in range(settings["warm"]):
        step()
    wait()
    began = time.perf_counter()
    for _ in range(settings["steps"]):
        step()
    wait()
    ms = (time.perf_counter() - began) / settings["steps"] * 1e3
    with profile(activities=_activities(device)) as seen:
        with record_function(WARM_UP):
            step()
            wait()
        for _ in range(settings["traced"]):
            with record_function(STEP):
                step()
                wait()
    seen.export_chrome_trace(str(trace))
    found = findings(read_kineto(trace), pass_name=STEP)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    counts = {
        "parameters": parameters,
        "dtype": dtype,
        "flops": flops.get_total_flops(),
        "bytes": moved.total,
    }
    return {"ms": ms, "peak_bytes": peak} | counts | _shares(found)


def _activities(device: torch.device) -> list[ProfilerActivity]:
    on_gpu = [ProfilerActivity.CUDA] if device.type == "cuda" else []
    return [ProfilerActivity.CPU, *on_gpu]


def _shares(found: TraceFindings) -> dict[str, Any]:
    kind, why = bottleneck(found)
    work_ms = found.work_ns / 1e6 / max(1, found.passes)
    return {
        "work_ms": work_ms,
        "busy_share": found.busy_share,
        "limits": kind,
        "why": why,
        "categories": {one.name: one.share for one in found.categories},
        "ranges": {one.name: one.share for one in found.stages if one.name != STEP},
        "kernels": [(one.name, one.calls, one.share) for one in found.kernels[:KERNELS_KEPT]],
    }


def peaks(device: torch.device) -> dict[str, float]:
    """The roof here: FLOP/s of a square product by dtype, bytes/s of a copy (read and write)."""
    side = PEAK_SIDE if device.type == "cuda" else PEAK_SIDE // 16
    count = PEAK_BYTES if device.type == "cuda" else PEAK_BYTES // 16
    found = {}
    for dtype in DTYPES:
        a = torch.randn(side, side, dtype=getattr(torch, dtype), device=device)
        found[dtype] = 2 * side**3 / _seconds(partial(torch.matmul, a, a), device)
    source = torch.zeros(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return found | {"bytes": 2 * count / _seconds(partial(target.copy_, source), device)}


def _seconds(step: Step, device: torch.device) -> float:
    wait = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    for _ in range(PEAK_TURNS):
        step()
    wait()
    began = time.perf_counter()
    for _ in range(PEAK_TURNS):
        step()
    wait()
    return (time.perf_counter() - began) / PEAK_TURNS


def environment(device: torch.device) -> dict[str, str]:
    """The library and the device that a result belongs to."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {"torch": str(torch.__version__), "device": name}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0))))
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)


def answer(order: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the finding for one line of standard input; ``status`` tells how the order ended."""
    device = torch.device(order["device"])
    try:
        if "settings" in order:
            found = measure(order["settings"], Path(order["trace"]), device)
        else:
            found = {"peaks": peaks(device), "environment": environment(device)}
    except torch.OutOfMemoryError as error:
        return {"status": "out of memory", "why": str(error).splitlines()[0]}
    except ConfigError as error:
        return {"status": "refused", "why": "; ".join(error.problems)}
    return found | {"status": "done"}


if __name__ == "__main__":
    main()
