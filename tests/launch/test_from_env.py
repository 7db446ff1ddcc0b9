"""A pod of a LeaderWorkerSet: its environment, torchrun's arguments, and the manifest."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ranks import BRIEF, SERVED, free_port

from ppstream import serve
from ppstream.config import load
from ppstream.core.errors import ConfigError, ExitCode
from ppstream.launch.from_env import torchrun_arguments

MANIFEST = Path(__file__).parents[2] / "runbooks/kubernetes/leader-worker-set.yaml"
POD = {"LWS_LEADER_ADDRESS": "arm-0.arm.default", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1"}
REST = ("--config", "bench", "--set", "link.trusted_network=true")


def arguments(**environment: str) -> list[str]:
    return torchrun_arguments(POD | environment, load.read("bench"), REST)


def test_a_pod_is_the_node_of_its_number_and_the_leader_is_node_0() -> None:
    assert arguments() == [
        "--nnodes=2",
        "--node-rank=1",
        "--nproc-per-node=1",
        "--master-addr=arm-0.arm.default",
        "--master-port=29500",
        *("-m", "ppstream.serve", *REST),
    ]
    assert "--node-rank=0" in arguments(LWS_WORKER_INDEX="0")


def test_torchrun_takes_these_arguments() -> None:
    from torch.distributed.run import parse_args

    parsed = parse_args(arguments())
    assert (parsed.nnodes, parsed.node_rank, parsed.nproc_per_node) == ("2", 1, "1")
    assert (parsed.master_addr, parsed.master_port) == ("arm-0.arm.default", 29500)
    assert [parsed.training_script, *parsed.training_script_args] == ["ppstream.serve", *REST]


def test_a_chain_puts_several_ranks_into_a_pod() -> None:
    chain = load.read("bench", ('placement.policy=["cpu", "cpu", "cpu"]', *PARTS))
    found = torchrun_arguments(POD, chain, REST)
    assert found[:3] == ["--nnodes=2", "--node-rank=1", "--nproc-per-node=2"]


PARTS = ("placement.parts=[1, 2, 3]",)


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (
            dict.fromkeys(POD, ""),
            ["LWS_LEADER_ADDRESS is not set", "LWS_GROUP_SIZE is not set", "LWS_WORKER_INDEX is"],
        ),
        ({"LWS_GROUP_SIZE": "two"}, ["LWS_GROUP_SIZE: got 'two', want a whole number"]),
        ({"LWS_GROUP_SIZE": "3"}, ["got 3 pods for the 2 ranks", "want a divisor of 2"]),
        ({"LWS_GROUP_SIZE": "0"}, ["got 0 pods for the 2 ranks"]),
        ({"LWS_WORKER_INDEX": "2"}, ["LWS_WORKER_INDEX: got 2 of 2 pods"]),
    ],
)
def test_what_is_wrong_is_said_at_once(environment: dict[str, str], said: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        arguments(**environment)
    for text in said:
        assert text in str(refused.value)


def test_outside_a_pod_the_rank_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in POD:
        monkeypatch.delenv(name, raising=False)
    assert serve.main(["--config", "bench", "--from-env", "lws"]) == ExitCode.CONFIG
    assert "LWS_GROUP_SIZE is not set" in capsys.readouterr().err


@pytest.mark.multirank
def test_a_group_of_one_pod_serves(tmp_path: Path) -> None:
    """The pod's process is torchrun's, and ends as it does."""
    pod = POD | {"LWS_LEADER_ADDRESS": "127.0.0.1", "LWS_GROUP_SIZE": "1", "LWS_WORKER_INDEX": "0"}
    pod["MASTER_PORT"] = str(free_port())
    settings = (
        f"log.root={tmp_path}",
        *("service.endpoint=none", "service.duration_s=0.1", SERVED, *BRIEF),
    )
    command = [sys.executable, "-m", "ppstream.serve", "--from-env", "lws", "--config", "bench"]
    done = subprocess.run(
        [*command, *(part for pair in settings for part in ("--set", pair))],
        env=os.environ | pod,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "exit 0 DRAINED" in done.stdout + done.stderr


def documents() -> dict[str, dict[str, Any]]:
    return {one["kind"]: one for one in yaml.safe_load_all(MANIFEST.read_text())}


def test_the_manifest_says_that_nobody_has_run_it() -> None:
    assert "# NOT RUN on Kubernetes" in MANIFEST.read_text()


def test_the_manifest_s_commands_are_understood_and_its_settings_accepted() -> None:
    template = documents()["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    for part in ("leaderTemplate", "workerTemplate"):
        (container,) = template[part]["spec"]["containers"]
        name, *words = container["command"]
        assert name == "ppstream-serve"
        parser = argparse.ArgumentParser()
        load.add_arguments(parser)
        parser.add_argument("--from-env")
        args = parser.parse_args(words)
        assert args.from_env == "lws"
        config = load.read("bench", args.overrides)
        pods = str(template["size"])
        assert torchrun_arguments(POD | {"LWS_GROUP_SIZE": pods}, config, [])
        mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
        for path in (args.config, config.service.secret_key, config.service.allowed_keys):
            assert any(str(path).startswith(f"{mount}/") for mount in mounts)
        volumes = {volume["name"] for volume in template[part]["spec"]["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
        assert template[part]["spec"]["terminationGracePeriodSeconds"] > config.liveness.drain_s


def test_the_service_and_the_probe_reach_rank_0_alone() -> None:
    found = documents()
    group, service, policy = (
        found[kind] for kind in ("LeaderWorkerSet", "Service", "NetworkPolicy")
    )
    assert group["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
    template = group["spec"]["leaderWorkerTemplate"]
    assert template["restartPolicy"] == "RecreateGroupOnPodRestart"
    name = group["metadata"]["name"]
    label = "leaderworkerset.sigs.k8s.io"
    assert service["spec"]["selector"] == {f"{label}/name": name, f"{label}/worker-index": "0"}
    assert policy["spec"]["podSelector"]["matchLabels"] == {f"{label}/name": name}
    (leader,) = template["leaderTemplate"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in leader["ports"]}
    (robots,) = service["spec"]["ports"]
    settings = [word.removeprefix("--set=") for word in leader["command"]]
    config = load.read("bench", [word for word in settings if "=" in word and word[0] != "-"][1:])
    assert config.service.endpoint == f"tcp://0.0.0.0:{ports[robots['targetPort']]}"
    probe = " ".join(leader["readinessProbe"]["exec"]["command"])
    assert f"127.0.0.1:{config.metrics.port}/readyz" in probe
    assert "readinessProbe" not in template["workerTemplate"]["spec"]["containers"][0]
