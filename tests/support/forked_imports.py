"""Imports of our forked programs, done once and taken out of the garbage collector's sight.

A rank collects garbage before it serves; that would copy every page with an object in it.
"""

import gc
import importlib
from pathlib import Path

from ppstream.config import load

NEEDED = [
    "numpy.random",
    "ppstream.launch.commands",
    "ppstream.launch.dry_run",
    "ppstream.launch.launcher",
    "ppstream.launch.run_policy_rank",
    "ppstream.launch.run_rank0",
    "ppstream.pipeline.decode",
    "ppstream.serve",
    "ppstream.wire.zmq_auth",
    "ppstream.wire.zmq_socket",
    "ppstream_stages.simulated",
    "safetensors",
    "torch._dynamo",
    "torch.distributed.run",
    "torch.distributed.tensor.parallel",
    "torch.utils.flop_counter",
    "ungated",
]

gc.disable()
for name in NEEDED:
    importlib.import_module(name)
load.read(str(Path(__file__).with_name("small.toml")))  # msgspec looks through its types once
gc.collect()
gc.freeze()
gc.enable()
