"""``ppstream-serve --from-env lws``: one pod of a LeaderWorkerSet becomes torchrun's node.

The pods of a group get each their number and the leader's address; torchrun gets them as arguments.
The leader is node 0, so rank 0, which robots reach, is where the group's Service points.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, NoReturn

from ppstream.core.errors import ConfigError
from ppstream.launch.placement import ranks_wanted

if TYPE_CHECKING:
    from ppstream.config.schema import PipelineConfig

LAUNCHERS: Final = ("lws",)
LEADER, SIZE, INDEX = "LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX"
MASTER_PORT: Final = "29500"  # torchrun's own, unless the pod's environment names another


def torchrun_arguments(
    environment: Mapping[str, str], config: PipelineConfig, serve: Sequence[str]
) -> list[str]:
    """Arguments of torchrun in this pod; the ranks are spread evenly over the group.

    No restarts: a rank that ends ends its pod, and LeaderWorkerSet recreates the group, since one
    rank dead is all dead.

    Args:
        environment: of the pod.
        config: of the run.
        serve: arguments of ``ppstream.serve``.

    Raises:
        ConfigError: a variable is missing or no number, or the ranks do not divide by the pods.
    """
    problems = [
        f"--from-env lws: {name} is not set; it is in each pod of a LeaderWorkerSet"
        for name in (LEADER, SIZE, INDEX)
        if not environment.get(name)
    ]
    problems += [
        f"--from-env lws: {name}: got {value!r}, want a whole number"
        for name in (SIZE, INDEX)
        if (value := environment.get(name)) and not value.isdecimal()
    ]
    if problems:
        raise ConfigError(problems)
    size, index, ranks = int(environment[SIZE]), int(environment[INDEX]), ranks_wanted(config)
    if size < 1 or ranks % size:
        problems.append(
            f"--from-env lws: {SIZE}: got {size} pods for the {ranks} ranks that the placement "
            f"wants, want a divisor of {ranks} as leaderWorkerTemplate.size"
        )
    if index >= max(size, 1):
        problems.append(f"--from-env lws: {INDEX}: got {index} of {size} pods")
    if problems:
        raise ConfigError(problems)
    return [
        f"--nnodes={size}",
        f"--node-rank={index}",
        f"--nproc-per-node={ranks // size}",
        f"--master-addr={environment[LEADER]}",
        f"--master-port={environment.get('MASTER_PORT', MASTER_PORT)}",
        *("-m", "ppstream.serve", *serve),
    ]


def become_torchrun(
    environment: Mapping[str, str], config: PipelineConfig, serve: Sequence[str]
) -> NoReturn:
    """Replace this process by torchrun, so that it has the pod's signals.

    Raises:
        ConfigError: as ``torchrun_arguments``.
    """
    arguments = torchrun_arguments(environment, config, serve)
    os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *arguments])
