"""A Ray cluster of two nodes on this host, for tests; told on stdin, answers a JSON line each.

It runs in an environment that has Ray: ``kill ACTOR``, ``kill_node ACTOR``.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from ppstream.control.peer_process import descendants
from ppstream.core.clock import now_ns

NAMESPACE = "ppstream"


def main() -> None:
    # the head has no CPUs: it keeps the directory, and a pipeline's node may go
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
    )
    nodes = [cluster.add_node(num_cpus=2) for _ in range(2)]
    cluster.wait_for_nodes()
    say({"address": cluster.address})
    ray.init(cluster.address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
    say({"nodes": len(ray.nodes())})
    for line in sys.stdin:
        word, *names = line.split()
        say(HANDLERS[word](cluster, nodes, *names))


def kill(_cluster: Cluster, _nodes: list[Any], actor: str) -> dict[str, Any]:
    """SIGKILL to what the actor runs, all its processes: a pipeline, or the directory itself."""
    return {"at_ns": kill_all(where(actor).pid)}


def kill_node(cluster: Cluster, nodes: list[Any], actor: str) -> dict[str, Any]:
    """SIGKILL to everything on the actor's node: the actor's worker with all it started, Ray."""
    found = where(actor)
    (node,) = [node for node in nodes if node.node_id == found.node]
    at_ns = kill_all(worker_of(found.pid))
    cluster.remove_node(node, allow_graceful=False)
    return {"at_ns": at_ns}


def worker_of(launcher: int) -> int:
    """The process that started a pipeline's launcher."""
    return int(Path(f"/proc/{launcher}/stat").read_text().rpartition(")")[2].split()[1])


def kill_all(pid: int) -> int:
    """Ranks first: nobody is left to ask them to drain. Returns when it was done."""
    for process in reversed((pid, *descendants(pid))):
        os.kill(process, signal.SIGKILL)
    return now_ns()


def where(actor: str) -> Any:
    return ray.get(ray.get_actor(actor, NAMESPACE).where.remote(), timeout=60)


def say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


HANDLERS = {"kill": kill, "kill_node": kill_node}

if __name__ == "__main__":
    main()
