"""One rank of a mesh that computes a policy alone, without a run: ``sharded_rank OPTIONS FOLDER``.

Rank 0 also computes the policy unsharded. Each rank saves the outputs of all parts in ``FOLDER``;
on GPUs once more as they are replayed from CUDA graphs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forked_process import ForkedProcess
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh

from ppstream.cuda import startup
from ppstream.links import nccl
from ppstream.policy.graphed import GraphedPolicy

LIMIT_S = 100
Tensors = dict[str, torch.Tensor]
Call = Callable[[Any, Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]], None]


def sharded(
    options: dict[str, Any], size: int, folder: Path, kind: str = "cpu", **variables: str
) -> list[Tensors]:
    """Outputs of one rank alone, then of each rank of the mesh, on devices of this ``kind``."""
    ranks = [
        ForkedProcess(
            ["sharded_rank", json.dumps(options | {"device": kind}), str(folder)],
            os.environ
            | {"RANK": str(rank), "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
            | variables,
            folder / f"output{rank}",
        )
        for rank in range(size)
    ]
    try:
        codes = [rank.wait(LIMIT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    told = "\n".join((folder / f"output{rank}").read_text() for rank in range(size))
    assert codes == [0] * size, told
    names = ["whole0", *(f"sharded{rank}" for rank in range(size))]
    return [load_file(folder / f"{name}.safetensors") for name in names]


def called(part: Any, given: Mapping[str, torch.Tensor], out: Mapping[str, torch.Tensor]) -> None:
    part(given, out)


def replayed(part: Any, given: Mapping[str, torch.Tensor], out: Mapping[str, torch.Tensor]) -> None:
    """What is left in ``out`` is the replay's alone."""
    graphed = GraphedPolicy(part)
    graphed.prepare(given, out)
    for tensor in out.values():
        tensor.zero_()
    graphed(given, out)


def outputs(parts: Sequence[Any], device: torch.device, call: Call) -> Tensors:
    """Outputs of all parts for inputs that a seed draws, two rows."""
    known: Tensors = {}
    generator = torch.Generator().manual_seed(7)
    for part in parts:
        part.load()
        for spec in part.inputs:
            if spec.name not in known:
                drawn = torch.randn(2, *spec.shape, generator=generator)
                known[spec.name] = drawn.to(device, getattr(torch, spec.dtype))
        out = {
            s.name: torch.zeros(2, *s.shape, dtype=getattr(torch, s.dtype), device=device)
            for s in part.outputs
        }
        call(part, known, out)
        known |= out
    made = {spec.name for part in parts for spec in part.outputs}
    return {name: tensor.cpu().contiguous() for name, tensor in known.items() if name in made}


def elements(parts: Sequence[Any]) -> int:
    """Numbers of weights that lie on this rank."""
    state = [tensor for part in parts for tensor in part.state_dict().values()]
    return sum(getattr(tensor, "to_local", lambda t=tensor: t)().numel() for tensor in state)


def main(arguments: Sequence[str]) -> int:
    options, folder = json.loads(arguments[0]), Path(arguments[1])
    module, kind, built = options.pop("module"), options.pop("device"), {}
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_grad_enabled(False)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(str(folder / "store"), size)
    device, group = torch.device("cpu"), {"backend": "gloo"}
    if kind == "cuda":
        device = torch.device("cuda", rank)
        startup.start(device)
        nccl.settle()
        group = {"backend": "nccl", "device_id": device}
    dist.init_process_group(store=store, rank=rank, world_size=size, **group)
    build: Any = import_module(module).build
    mesh = init_device_mesh(kind, (size,))
    built["sharded"] = build(options, device, mesh=mesh)
    if rank == 0:
        built["whole"] = build(options, device)
    for name, parts in built.items():
        save_file(outputs(parts, device, called), folder / f"{name}{rank}.safetensors")
        (folder / f"{name}{rank}.json").write_text(str(elements(parts)))
        if kind == "cuda":
            again = outputs(parts, device, replayed)
            save_file(again, folder / f"{name}{rank}.graph.safetensors")
    dist.barrier()
    if kind == "cuda":
        os._exit(0)  # as ranks leave, with graphs and communicators as they are
    return 0
