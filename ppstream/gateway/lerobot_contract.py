"""Contract of a client of LeRobot: what it must send and may ask for, checked and described.

Its own features and wishes come in its first message but one; it never sends its fps, nor the order
of its actions.
"""

from __future__ import annotations

from typing import Final

from ppstream.config.gateway_rules import listen_address, listen_of
from ppstream.config.schema import GatewayConfig, PipelineConfig
from ppstream.core.clock import NS_PER_MS, NS_PER_S
from ppstream.gateway.key_map import KeyMap
from ppstream.wire.endpoints import bracketed
from ppstream.wire.lerobot import RemotePolicyConfig

STATE: Final = "observation.state"
IMAGES: Final = "observation.images."


def differences(
    config: PipelineConfig, gateway: GatewayConfig, wanted: RemotePolicyConfig
) -> list[str]:
    """Each difference between what a client will send and asks for, and the run; a line each."""
    state = wanted.lerobot_features.get(STATE)
    motors = [] if state is None or state.names is None else list(state.names)
    cameras = {
        key.removeprefix(IMAGES): feature.shape
        for key, feature in wanted.lerobot_features.items()
        if key.startswith(IMAGES)
    }
    key_map, lines = KeyMap(config, gateway), []
    for key, stream, is_optional, shapes in key_map.forms():
        if shapes is None and key not in motors and not is_optional:
            lines.append(f"{key}: the robot has no such motor, stream {stream} wants it")
        elif shapes is not None and key not in cameras and not is_optional:
            lines.append(f"{key}: the robot has no such camera, stream {stream} wants it")
        elif shapes is not None and cameras.get(key, shapes[0]) not in shapes:
            want = " or ".join(str(list(shape)) for shape in shapes)
            lines.append(f"{key}: got frames {list(cameras[key])}, stream {stream} wants {want}")
    known = {key for key, *_ in key_map.forms()}
    extra = [one for one in [*motors, *cameras] if one not in known]
    lines += [f"{one[:64]!a}: the robot sends it, no stream wants it" for one in extra]
    horizon = config.actions.horizon
    if wanted.actions_per_chunk > horizon:
        lines.append(f"actions_per_chunk: got {wanted.actions_per_chunk}, want {horizon} at most")
    return lines


def describe(config: PipelineConfig, gateway: GatewayConfig) -> str:
    """As ``Wire``."""
    key_map, actions = KeyMap(config, gateway), config.actions
    lines = [f"lerobot on {listen_of(gateway)}", ""]
    lines += [f"  {key}: {wanted} -> {stream}" for key, stream, wanted in key_map.rows()]
    lines += [f"  actions: {', '.join(actions.names)}, {actions.dt_ms:g} ms apart", ""]
    host, port = address_of(gateway)
    fps = round(NS_PER_S / NS_PER_MS / actions.dt_ms)
    lines += [
        "python -m lerobot.async_inference.robot_client \\",
        f"  --server_address={bracketed(host)}:{port} --fps={fps} \\",
        f"  --actions_per_chunk={actions.horizon} --policy_type=act \\",
        "  --pretrained_name_or_path=none --robot.type=ROBOT --robot.port=PORT",
    ]
    return "\n".join(lines)


def address_of(gateway: GatewayConfig) -> tuple[str, int]:
    """Host and port that a gateway listens at."""
    address = listen_address(listen_of(gateway))
    assert address is not None, "checked with the configuration"
    return address
