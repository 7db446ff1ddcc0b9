"""Requests and answers of GR00T's clients, both generations: the forms, without a socket.

Until N1.5 an observation is flat (``state.single_arm``, ``[T, D]``) and its answer a map; since
N1.6 it is nested and batched, below a key of its own, and the answer has a second map. A map of
keys is written as N1.5 has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from ppstream.config.gateway_rules import PROMPT, key_entries, listen_address, listen_of
from ppstream.config.schema import GatewayConfig, PipelineConfig
from ppstream.core.errors import SpecError
from ppstream.gateway.key_map import Array, KeyMap, source_of
from ppstream.wire.endpoints import bracketed
from ppstream.wire.groot import modality_config

NEWER: Final = "observation"  # the key below which N1.6 puts it
MODALITIES: Final = {"video": 3, "state": 1}  # dimensions of one step, before [B, T]
LANGUAGE: Final = "language"
ANNOTATION: Final = "annotation."  # begins a key of language, as datasets name it
ACTION: Final = "action."
TEXTS_SHOWN: Final = 8
IPV4_ALONE: Final = (
    "# this client cannot reach an IPv6 address: listen on an IPv4 one for it"  # no zmq.IPV6
)


class ModalityRequest(NamedTuple):
    """An observation of one step, with the flat keys of N1.5, and the form of its answer."""

    observation: Mapping[str, Any]
    is_newer: bool  # N1.6 and later: actions [B, H, D] and a map of more
    is_batched: bool
    is_flat: bool  # action.NAME
    texts: tuple[str, ...]  # keys of language

    @classmethod
    def of(cls, data: Any) -> ModalityRequest:
        """Read the data of ``get_action``.

        Raises:
            SpecError: they are no map, or of several robots.
        """
        is_newer = isinstance(data, Mapping) and NEWER in data
        found = data[NEWER] if is_newer else data
        if not isinstance(found, Mapping):
            raise SpecError(f"data: got {type(found).__name__}, want the map of an observation")
        is_flat = not any(isinstance(one, Mapping) for one in found.values())
        flat = found if is_flat else _flattened(found)
        if not all(isinstance(key, str) for key in flat):
            raise SpecError("data: got keys that are no text, want state.NAME and video.NAME")
        is_batched = any(_spare(key, one) == 2 for key, one in flat.items())
        steps = {key: _one_step(key, value) for key, value in flat.items()}
        language = found.get(LANGUAGE)
        texts: tuple[str, ...] = () if language is None else (LANGUAGE,)
        texts = tuple(language) if isinstance(language, Mapping) else texts
        texts += tuple(key for key in flat if key.startswith(ANNOTATION) and key not in texts)
        return cls(steps, is_newer, is_newer or is_batched, is_flat, texts)

    def check_prompt(self, key: str | None) -> None:
        """Raises SpecError: it has texts, and none at ``key``, where the prompt is looked for."""
        if key is not None and self.texts and key not in self.observation:
            got = ", ".join(repr(text[:64]) for text in self.texts[:TEXTS_SHOWN])
            raise SpecError(f"{key}: it is missing, want the prompt there; got language at {got}")

    def parts(self, actions: Array, keys: Mapping[str, tuple[int, int]]) -> dict[str, Array]:
        """Actions ``[H, D]`` by the keys of the answer."""
        prefix = ACTION if self.is_flat else ""
        actions = actions[None] if self.is_batched else actions
        return {prefix + key: actions[..., first:end] for key, (first, end) in keys.items()}


def _flattened(nested: Mapping[str, Any]) -> dict[str, Any]:
    """Raises SpecError: a key has two values, of which only one would count."""
    found: dict[str, Any] = {}
    for modality, values in nested.items():
        below = values if isinstance(values, Mapping) else {modality: values}
        is_whole = below is not values or modality == LANGUAGE
        for key, value in below.items():
            name = key if is_whole else f"{modality}.{key}"
            if name in found:
                raise SpecError(f"{name}: it is there twice, flat and nested")
            found[name] = value
    return found


def _modality(key: str) -> str:
    return key.partition(".")[0]


def _spare(key: str, value: Any) -> int:
    """Dimensions before those of one step: 1 is T, 2 are B and T."""
    dimensions = MODALITIES.get(_modality(key))
    if dimensions is None or not isinstance(value, np.ndarray):
        return 0
    return value.ndim - dimensions


def _one_step(key: str, value: Any) -> Any:
    """The newest step of the only robot.

    Raises:
        SpecError: there are several robots, or no step.
    """
    if isinstance(value, list):  # texts [B] or [B][T]
        while isinstance(value, list) and len(value) == 1:
            value = value[0]
        return value
    if (spare := _spare(key, value)) == 2:
        if len(value) != 1:
            raise SpecError(
                f"{key}: got {value.dtype} {list(value.shape)}, want B = 1: one robot a connection"
            )
        value = value[0]
    if spare in (1, 2):
        if not len(value):
            raise SpecError(f"{key}: got {value.dtype} {list(value.shape)}, want a step at least")
        value = value[-1]
    return value


def prompt_key(gateway: GatewayConfig) -> str | None:
    """Key of the prompt; None: robots send none."""
    entry = key_entries(gateway).get(PROMPT)
    return None if entry is None else entry.name


def modalities(config: PipelineConfig, gateway: GatewayConfig) -> dict[str, Any]:
    """The answer to ``get_modality_config``: what the map asks for, and the parts of the action."""
    is_old = gateway.generation == "n1.5"
    entries = key_entries(gateway)
    keys = [entries[stream.name].name for stream in config.streams]
    found = {
        modality: [key for key in keys if _modality(key) == modality] for modality in MODALITIES
    }
    found["action"] = [ACTION + key for key in gateway.action_keys]
    if not is_old:
        found = {
            modality: [key.partition(".")[2] for key in keys] for modality, keys in found.items()
        }
    if PROMPT in entries:
        found[LANGUAGE] = [entries[PROMPT].name]
    steps = {"action": config.actions.horizon}
    return {
        modality: modality_config(range(steps.get(modality, 1)), keys, as_text=is_old)
        for modality, keys in found.items()
        if keys
    }


def describe(config: PipelineConfig, gateway: GatewayConfig) -> str:
    """As ``Wire``."""
    key_map, actions = KeyMap(config, gateway), config.actions
    lines = [f"GR00T on {listen_of(gateway)}, answer = {gateway.answer}", ""]
    lines += [f"  {key}: {wanted} -> {stream}" for key, stream, wanted in key_map.rows()]
    for key, (first, end) in gateway.action_keys.items():
        shape = f"float32 [{actions.horizon}, {end - first}]"
        lines.append(f"  {ACTION}{key}: {shape} = {', '.join(actions.names[first:end])}")
    host, port = listen_address(listen_of(gateway)) or ("127.0.0.1", 5555)
    lines += [
        f"  actions are {actions.dt_ms:g} ms apart",
        "",
        "import numpy as np",
        "from gr00t.policy.server_client import PolicyClient",
        "",
        *([IPV4_ALONE] if ":" in host else []),
        f'client = PolicyClient("{bracketed(host)}", {port})',
        "observation = " + source_of(_example(config, gateway)),
        "actions, info = client.get_action(observation)",
    ]
    return "\n".join(lines)


def _example(config: PipelineConfig, gateway: GatewayConfig) -> dict[str, Any]:
    """An observation of one step that fits, as N1.6 nests it."""
    entries, found = key_entries(gateway), dict[str, Any]()
    given = KeyMap(config, gateway).example()
    for modality in MODALITIES:
        for key, value in given.get(modality, {}).items():
            kind = value.dtype if modality == "video" else np.float32
            found.setdefault(modality, {})[key] = value[None, None].astype(kind)
    if PROMPT in entries:
        found[LANGUAGE] = {entries[PROMPT].name: [["pick up the cup"]]}
    return found
