"""Policies that only benchmarks need, and what it costs to prove that a policy wrote its outputs.

Named in settings as ``bench.policies:build_reading``, which reads heavy envelopes,
``bench.policies:build_echo``, which does no work, ``bench.policies:build_pausing``, which takes as
long for any number of rows, ``bench.policies:build_peer``, which works as the servers of
``peers.py`` do, and ``bench.policies:build_on_gpu``, of the size of ACT or pi0. Run as a tool it
times what each call of a policy pays for the fill before it and the look behind it
(``ppstream/policy/unwritten.py``): on the host around calls that write everything, on a GPU as the
difference that the fill makes to the replay of graphs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tools/


from itertools import pairwise

import msgspec
import torch
from bench import gpu_timing, peers_work
from bench.peers_work import Array
from real_runs import Target, print_environment, print_targets, spread

from ppstream.config.load import read
from ppstream.core.simulated_delay import Delay
from ppstream.core.specs import TensorSpec
from ppstream.links.slots import Slot, SlotLayout, new_slots
from ppstream.policy.unwritten import INTEGERS, FilledPolicy, Outputs, Results
from ppstream_stages import act, vla

if TYPE_CHECKING:
    from torch import Tensor

    from ppstream_stages.building import NetworkPart


#: The session in ``rows`` of an envelope that no robot asked for.
NOBODY: Final = -1
BRING_UP_MS: Final = 20.0  # so long that the runtime around it is no part worth hiding
#: Outputs, and the most µs that their proof may take: on the host, on a GPU.
PROVEN: Final = (
    (TensorSpec("actions", (50, 32)), 5.0, 1.0),
    (TensorSpec("kv", (15 << 20 >> 1,), "bfloat16"), 20.0, 3.0),
)
CALLS: Final = 3000
HERE: Final = (True,)  # the only row


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[policy.options]``: what is read, and the shape of the actions."""

    group: str
    steps: int
    dim: int
    b_ms: float = 0.0
    horizon: int
    action_dim: int
    weights: None = None


class ReadingPolicy:
    """Copies ``<group>.values`` to its own memory, then sleeps; its actions are zeros."""

    def __init__(self, options: Options) -> None:
        self.inputs = (TensorSpec(f"{options.group}.values", (options.steps, options.dim)),)
        self.outputs = (TensorSpec("actions", (options.horizon, options.action_dim)),)
        self._own = torch.zeros((1, options.steps, options.dim))
        self._delay = Delay(options.b_ms)

    def reset(self, rows: Tensor) -> None:
        """Nothing to forget."""

    def __call__(self, window: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        self._own.copy_(window[self.inputs[0].name])
        self._delay.spend()
        out["actions"].zero_()


class SlowStartEcho:
    """Its actions are the newest input values, at once; but bring-up's envelopes take 20 ms.

    Without any work there is nothing to overlap, and a gate that measures overlap among the
    runtime's own microseconds says so. Robots' envelopes never wait here.
    """

    stateless = True  # what it remembers is which phase it is in
    any_rows = True

    def __init__(self, options: Options) -> None:
        self._values = f"{options.group}.values"
        values = TensorSpec(self._values, (options.steps, options.dim))
        self.inputs = (values, TensorSpec("rows", (4,), "int64"))
        self.outputs = (TensorSpec("actions", (options.horizon, options.action_dim)),)
        self._delay = Delay(BRING_UP_MS)
        self._width = options.action_dim
        self._is_serving = False

    def reset(self, rows: Tensor) -> None:
        """Nothing to forget."""

    def __call__(self, window: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        if not self._is_serving:  # looked at until the first robot's: then it costs nothing
            self._is_serving = int(window["rows"][0, 0]) != NOBODY
            if not self._is_serving:
                self._delay.spend()
        # numpy, as behind the other servers: behind a pause each call of torch takes 20 us
        self.act(window[self._values].numpy()[:, -1:], out["actions"].numpy())

    def act(self, newest: Array, actions: Array) -> None:
        actions[...] = newest[..., : self._width]


def build_reading(config: Mapping[str, Any], device: torch.device) -> ReadingPolicy:
    """A policy for one row, on the CPU whatever ``device`` says."""
    return ReadingPolicy(msgspec.convert(config, Options))


def build_echo(config: Mapping[str, Any], device: torch.device) -> SlowStartEcho:
    """As ``build_reading``; ``action_dim`` must not exceed ``dim``."""
    return SlowStartEcho(msgspec.convert(config, Options))


class PeerOptions(Options, frozen=True):
    """As ``Options``, with the work that the peers do, too (``peers_work.py``)."""

    work: str = "none"


class PausingPolicy(SlowStartEcho):
    """As long as the peers' work, a pause, once for all rows of an envelope."""

    def __init__(self, options: PeerOptions) -> None:
        super().__init__(options)
        self._seconds = peers_work.PAUSES_MS[options.work] / 1e3

    def act(self, newest: Array, actions: Array) -> None:
        time.sleep(self._seconds)
        super().act(newest, actions)


def build_pausing(config: Mapping[str, Any], device: torch.device) -> PausingPolicy:
    """As ``build_echo``."""
    return PausingPolicy(msgspec.convert(config, PeerOptions))


class PeerPolicy(SlowStartEcho):
    """Does for robots' envelopes what the policies behind other servers do; reads all frames."""

    def __init__(self, options: PeerOptions) -> None:
        super().__init__(options)
        frames = (1, 3, peers_work.SIDE, peers_work.SIDE)
        cameras = peers_work.CAMERAS if options.work == "cameras" else ()
        self.inputs += tuple(TensorSpec(f"{name}.frames", frames) for name in cameras)
        self._infer = peers_work.policy(options.work)

    def act(self, newest: Array, actions: Array) -> None:
        actions[0, 0] = self._infer(newest[0, 0])


def build_peer(config: Mapping[str, Any], device: torch.device) -> PeerPolicy:
    """As ``build_echo``."""
    return PeerPolicy(msgspec.convert(config, PeerOptions))


#: Of the policies on a GPU, whose windows are one observation.
SHAPE: Final = {
    "group": "state",
    "steps": 1,
    "dim": peers_work.STATE_DIM,
    "streams": 1,
    "horizon": peers_work.HORIZON,
    "action_dim": peers_work.ACTION_DIM,
}


class MarkedPart:
    """The last part of a policy, whose first actions are the newest state: answers tell whose."""

    stateless = any_rows = True

    def __init__(self, part: NetworkPart) -> None:
        self.name, self.inputs, self.outputs = part.name, part.inputs, part.outputs
        self.load, self.reset = part.load, part.reset
        self._part = part
        if "state.values" not in {spec.name for spec in part.inputs}:  # the last of a chain
            state = TensorSpec("state.values", (1, peers_work.STATE_DIM))
            self.inputs = (*part.inputs, state)

    def __call__(self, window: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        self._part(window, out)
        out["actions"][:, 0].copy_(window["state.values"][:, -1, : peers_work.ACTION_DIM])


def build_on_gpu(config: Mapping[str, Any], device: torch.device) -> list[NetworkPart | MarkedPart]:
    """The parts of ACT with two cameras or of the pi0-shaped policy with three: ``work`` says.

    The pi0-shaped one also in miniature, for CPUs. ``cut`` makes as many parts as ``vla_2`` has.
    """
    work = config["work"]
    cameras = peers_work.CAMERAS_OF[work]
    if work == "tiny":
        shipped = read("vla_tiny").policy.options
        of_it = SHAPE | {"horizon": shipped["horizon"], "cameras": list(cameras)}
        parts = vla.build({k: v for k, v in shipped.items() if k != "group"} | of_it, device)
    elif work == "act":
        side = {"height": peers_work.SIDE, "width": peers_work.SIDE}
        parts = act.build(SHAPE | {"cameras": [{"name": n} | side for n in cameras]}, device)
    else:
        fine = {"language_layers_per_part": 2, "denoising_steps_per_part": 1}
        more = fine if config.get("cut") else {}
        parts = vla.build(SHAPE | {"cameras": list(cameras)} | more, device)
    return [*parts[:-1], MarkedPart(parts[-1])]


class Unserved:
    """The policy of ``build_on_gpu`` for one observation at a time, in one graph with its input.

    Args:
        work: as there.
    """

    def __init__(self, work: str) -> None:
        device = torch.device("cuda", 0)
        self._parts = build_on_gpu({"work": work}, device)
        for part in self._parts:
            part.load()
        self._host = {
            name: torch.from_numpy(values).pin_memory()
            for name, values in peers_work.observation(work).items()
        }
        self._given = {name: values.to(device) for name, values in self._host.items()}
        self._mean, self._std = (
            torch.tensor(values, device=device)[:, None, None]
            for values in (peers_work.MEAN, peers_work.STD)
        )
        self._actions = torch.zeros(peers_work.HORIZON, peers_work.ACTION_DIM).pin_memory()
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._infer()
        torch.cuda.synchronize(device)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream):
            made = self._infer()
        self._made = made

    def _infer(self) -> Tensor:
        tensors = {
            "state.values": self._given["state"][None, None],
            "state.valid": torch.ones(1, 1, 1, dtype=torch.bool, device=self._mean.device),
        }
        for name, frame in self._given.items():
            if name != "state":
                image = (frame.permute(2, 0, 1) / 255 - self._mean) / self._std
                tensors[f"{name}.frames"] = image.bfloat16()[None, None]
        for part in self._parts:
            for spec in part.outputs:
                dtype = getattr(torch, spec.dtype)
                shape = (1, *spec.shape)
                tensors[spec.name] = torch.zeros(shape, dtype=dtype, device=self._mean.device)
            part(tensors, tensors)
        return tensors["actions"][0]

    def __call__(self, observation: Mapping[str, Array]) -> Array:
        """Actions ``[HORIZON, ACTION_DIM]`` in float32."""
        for name, values in observation.items():
            self._host[name].copy_(torch.from_numpy(values.copy()))
            self._given[name].copy_(self._host[name], non_blocking=True)
        self._graph.replay()
        self._actions.copy_(self._made, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        return self._actions.numpy().copy()

    def alone_ms(self, calls: int = 50) -> float:
        """p50 of a replay by the device's clock: the policy without anything around it."""
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
        marks[0].record()
        for mark in marks[1:]:
            self._graph.replay()
            mark.record()
        torch.cuda.synchronize()
        return spread([a.elapsed_time(b) for a, b in pairwise(marks)]).p50


class WritingPolicy:
    """Copies ``source`` into its output."""

    inputs: tuple[TensorSpec, ...] = ()

    def __init__(self, output: TensorSpec, device: torch.device) -> None:
        self.outputs = (output,)
        self._name = output.name
        dtype = getattr(torch, output.dtype)
        self._source = torch.ones(1, *output.shape, dtype=dtype, device=device)

    def reset(self, rows: Tensor) -> None:
        """Nothing to forget."""

    def __call__(self, window: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        out[self._name].copy_(self._source)


def main(argv: Sequence[str] | None = None) -> int:
    """Print what the proof costs here; 1 when a limit is missed."""
    argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0]).parse_args(argv)
    torch.set_num_threads(1)
    mode = f"{CALLS} calls on the host, p50"
    mode += "; graphs on a GPU, outputs rotated out of L2" if torch.cuda.is_available() else ""
    print_environment(mode)
    rows = []
    targets = []
    for spec, host_us, gpu_us in PROVEN:
        what = f"{spec.name}, {spec.bytes_for(1):,} bytes"
        host = _host(spec)
        rows.append({"output": what} | host)
        added_us = host["added on the host us"]
        targets.append(Target(f"{what}: fill and look on the host, us", host_us, added_us))
        if torch.cuda.is_available():
            found = _gpu(spec)
            rows[-1] |= found
            added_us = found["with the fill us"] - found["policy us"]
            targets.append(Target(f"{what}: the fill on the GPU, us", gpu_us, added_us))
    for row in rows:
        print("  ".join(f"{name}: {value}" for name, value in row.items()))
    print_targets(targets)
    return 0 if all(target.met for target in targets) else 1


class Unproven:
    """Outputs that nobody fills or looks at: what the clock and cold caches take all the same."""

    def __init__(self, slot: Slot) -> None:
        self.given = slot.tensors

    def fill(self) -> None: ...

    def hand_over(self, present: Sequence[bool]) -> None: ...

    def settle(self) -> None: ...


def _host(spec: TensorSpec) -> dict[str, float]:
    """Medians of what is done around each call, with the proof and without, in turn."""
    policy, slot = WritingPolicy(spec, torch.device("cpu")), _slot(spec)
    results = Results(INTEGERS)
    ways: dict[str, Any] = {"without us": Unproven(slot), "with us": Outputs(slot, INTEGERS)}
    found: dict[str, list[float]] = {name: [] for name in (*ways, "rank 0's look behind a GPU us")}
    for _ in range(CALLS if spec.bytes_for(1) < 1 << 20 else CALLS // 10):
        for name, outputs in ways.items():
            began = time.perf_counter_ns()
            outputs.fill()
            filled = time.perf_counter_ns()
            policy({}, outputs.given)
            written = time.perf_counter_ns()
            outputs.hand_over(HERE)
            outputs.settle()
            found[name].append((time.perf_counter_ns() - written + filled - began) / 1e3)
        policy({}, slot.tensors)
        written = time.perf_counter_ns()
        results.unwritten(slot, HERE)
        found["rank 0's look behind a GPU us"].append((time.perf_counter_ns() - written) / 1e3)
    medians = {name: round(spread(values).p50, 2) for name, values in found.items()}
    return medians | {"added on the host us": medians["with us"] - medians["without us"]}


def _gpu(spec: TensorSpec) -> dict[str, float]:
    """µs of a replayed call without the fill, and with it."""
    device = torch.device("cuda", torch.cuda.current_device())
    policy = WritingPolicy(spec, device)
    filled = FilledPolicy(policy, INTEGERS)
    outs = [
        {spec.name: torch.zeros_like(policy._source)}
        for _ in range(gpu_timing.sets_for(spec.bytes_for(1)))
    ]

    def calls(run: Any) -> list[Callable[[], object]]:
        return [lambda out=out: run({}, out) for out in outs]  # type: ignore[misc]

    found = gpu_timing.graphed_us({"policy us": calls(policy), "with the fill us": calls(filled)})
    return {name: round(us, 3) for name, us in found.items()}


def _slot(spec: TensorSpec) -> Slot:
    return new_slots(SlotLayout(("index",), (spec,), 1), 1)[0]


if __name__ == "__main__":
    sys.exit(main())
