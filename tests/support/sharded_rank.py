"""One rank of a mesh that computes a policy alone, without a run: ``sharded_rank OPTIONS FOLDER``.

Rank 0 also computes the policy unsharded. Each rank saves the outputs of all parts in ``FOLDER``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh

CPU = torch.device("cpu")


def outputs(parts: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Outputs of all parts for inputs that a seed draws, two rows."""
    known: dict[str, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(7)
    for part in parts:
        part.load()
        for spec in part.inputs:
            if spec.name not in known:
                drawn = torch.randn(2, *spec.shape, generator=generator)
                known[spec.name] = drawn.to(getattr(torch, spec.dtype))
        out = {
            s.name: torch.zeros(2, *s.shape, dtype=getattr(torch, s.dtype)) for s in part.outputs
        }
        part(known, out)
        known |= out
    made = {spec.name for part in parts for spec in part.outputs}
    return {name: tensor.contiguous() for name, tensor in known.items() if name in made}


def elements(parts: Sequence[Any]) -> int:
    """Numbers of weights that lie on this rank."""
    state = [tensor for part in parts for tensor in part.state_dict().values()]
    return sum(getattr(tensor, "to_local", lambda t=tensor: t)().numel() for tensor in state)


def main(arguments: Sequence[str]) -> int:
    options, folder = json.loads(arguments[0]), Path(arguments[1])
    module, built = options.pop("module"), {}
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_grad_enabled(False)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    build: Any = import_module(module).build
    mesh = init_device_mesh("cpu", (size,))
    built["sharded"] = build(options, CPU, mesh=mesh)
    if rank == 0:
        built["whole"] = build(options, CPU)
    for name, parts in built.items():
        save_file(outputs(parts), folder / f"{name}{rank}.safetensors")
        (folder / f"{name}{rank}.json").write_text(str(elements(parts)))
    dist.barrier()
    return 0
