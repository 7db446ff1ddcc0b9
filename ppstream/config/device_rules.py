"""Rules of devices: what GPUs alone can do or cannot, and what meshes and replicas cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ppstream.config.schema import PipelineConfig


def device_problems(config: PipelineConfig) -> Iterator[str]:
    """Every disagreement about devices and the ranks on them, each ``path: got ..., want ...``."""
    simulate, is_gpu = config.simulate, config.placement.rank0 != "cpu"
    if simulate.kind == "gpu" and not is_gpu:
        yield "simulate.kind: got 'gpu', want a CUDA device as placement.rank0 or 'sleep' or 'spin'"
    if simulate.kind != "gpu" and is_gpu and simulate.a_ms:
        yield (
            f"simulate.kind: got {simulate.kind!r} with simulate.a_ms above 0 on "
            f"{config.placement.rank0}, want 'gpu': no thread waits in stage A there"
        )
    yield from _mesh_problems(config)
    kinds = {device.partition(":")[0] for device in config.placement.policy}
    if config.placement.parts == "auto" and len(kinds) > 1:
        yield (
            f"placement.parts: got 'auto' with policy ranks on {' and '.join(sorted(kinds))}, want "
            "a list: parts are timed on the first of them alone"
        )
    if (
        config.mode == "attribution"
        and "cpu" not in config.placement.policy
        and config.policy.graph
    ):
        yield (
            "policy.graph: got true with mode = 'attribution', want false: blocks inside a "
            "recorded graph are not run"
        )
    if config.mode == "attribution" and config.policy.compile:
        yield (
            "policy.compile: got true with mode = 'attribution', want false: blocks inside "
            "compiled code are not seen"
        )
    if config.pipeline.credit == "after_window" and not is_gpu:
        yield (
            "pipeline.credit: got 'after_window' with rank 0 on the CPU, want 'before_window': "
            "there a window cut before its credit only grows old"
        )
    yield from _replica_problems(config)


def _mesh_problems(config: PipelineConfig) -> Iterator[str]:
    """Yields what does not go together with ranks that compute the policy together."""
    placement, mesh = config.placement, config.placement.mesh
    if mesh == 1:
        return
    path = f"placement.mesh: got {mesh} with"
    devices, ranks = placement.policy, placement.replicas * mesh
    kinds = {device.partition(":")[0] for device in devices}
    is_gpu = "cuda" in kinds
    if max(placement.cut, default=0) > 1 or (not is_gpu and len(devices) != placement.replicas):
        yield (
            f"{path} {len(devices)} devices in placement.policy, want one, which all parts run "
            "on, or placement.mesh = 1: the places of a chain are one rank each"
        )
    elif len(kinds) > 1:
        yield f"{path} placement.policy on cpu and cuda, want 'cpu' or CUDA devices for all of it"
    elif is_gpu and len(devices) != ranks:
        yield (
            f"{path} {', '.join(devices)} in placement.policy, want {ranks} CUDA devices: one for "
            "each policy rank, those of leaders first"
        )
    if placement.parts == "auto":
        yield f"{path} placement.parts = 'auto', want a list or none: a rank times parts alone"
    if config.mode == "attribution":
        yield f"{path} mode = 'attribution', want 'throughput' or a mesh of 1"


def _replica_problems(config: PipelineConfig) -> Iterator[str]:
    """Yields what replicas of a policy rank cannot be."""
    placement = config.placement
    replicas, devices = placement.replicas, len(placement.policy)
    if not 1 <= placement.fewest <= replicas:
        yield (
            f"placement.replicas_min: got {placement.fewest}, want {replicas} at most: that many "
            "replicas there are"
        )
    if replicas == 1:
        return
    if devices != replicas and placement.mesh == 1:
        yield (
            f"placement.replicas: got {replicas} with {devices} devices in placement.policy, want "
            f"one device for all replicas, {replicas} of them, or placement.replicas = 1: the "
            "places of a chain have no replicas"
        )
    if placement.parts == "auto":
        yield (
            f"placement.parts: got 'auto' with placement.replicas = {replicas}, want a list of "
            "places 0 and 1, or none: the best cut is sought for one rank a place"
        )
    if placement.rank0 == "cpu":
        return
    if "cpu" in placement.policy:
        yield (
            f"placement.replicas: got {replicas} with placement.rank0 = {placement.rank0!r} and a "
            "replica on the CPU, want CUDA devices for all of placement.policy, or "
            "placement.rank0 = 'cpu'"
        )
    if config.link.kind == "nccl":
        yield (
            f"placement.replicas: got {replicas} with link.kind = 'nccl', want 'auto', 'peer' or "
            "'pinned': envelopes go to replicas in turn through memory that both GPUs reach"
        )
