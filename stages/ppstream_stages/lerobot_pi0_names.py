"""The table of names: which weights of a LeRobot folder the parts of π0 are loaded with.

A weight of ours is one of theirs or, for what is computed at once, several of theirs, one after the
other. LeRobot leaves out ``model.`` in some folders, and stores one of two names of the words.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

BOTH: Final = "model.paligemma_with_expert."
VISION: Final = f"{BOTH}paligemma.model.vision_tower.vision_model."
LANGUAGE: Final = f"{BOTH}paligemma.model.language_model."
EXPERT: Final = f"{BOTH}gemma_expert.model."
WORDS: Final = f"{LANGUAGE}embed_tokens.weight"
TIED_WORDS: Final = f"{BOTH}paligemma.lm_head.weight"
#: Read by nobody who acts: the heads that write text, and the norm before one.
UNUSED: Final = (f"{BOTH}gemma_expert.lm_head.weight", f"{LANGUAGE}norm.weight")

NAMES: Final = {
    "prefix.patches": f"{VISION}embeddings.patch_embedding",
    "prefix.place": f"{VISION}embeddings.position_embedding.weight",
    "prefix.norm": f"{VISION}post_layernorm",
    "prefix.project": f"{BOTH}paligemma.model.multi_modal_projector.linear",
    "prefix.words": WORDS,
    "expert.state": "model.state_proj",
    "expert.action_in": "model.action_in_proj",
    "expert.mix": "model.action_time_mlp_in",
    "expert.blend": "model.action_time_mlp_out",
    "expert.action_out": "model.action_out_proj",
    "expert.norm": f"{EXPERT}norm",
}
IMAGE_LAYER: Final = {
    "norm_attention": ("layer_norm1",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "join": ("self_attn.out_proj",),
    "norm_feed": ("layer_norm2",),
    "widen": ("mlp.fc1",),
    "narrow": ("mlp.fc2",),
}
DECODER_LAYER: Final = {
    "norm_attention": ("input_layernorm",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "join": ("self_attn.o_proj",),
    "norm_feed": ("post_attention_layernorm",),
    "widen": ("mlp.gate_proj", "mlp.up_proj"),
    "narrow": ("mlp.down_proj",),
}
LAYERS: Final = {
    "prefix.image_layers": (f"{VISION}encoder.layers", IMAGE_LAYER),
    "prefix.language_layers": (f"{LANGUAGE}layers", DECODER_LAYER),
    "expert.layers": (f"{EXPERT}layers", DECODER_LAYER),
}


def names_of(weight: str) -> tuple[str, ...]:
    """Names of a weight of ours in LeRobot's ``state_dict()``."""
    if weight in NAMES:
        return (NAMES[weight],)
    module, _, kind = weight.rpartition(".")
    if module in NAMES:
        return (f"{NAMES[module]}.{kind}",)
    group, depth, piece = module.rsplit(".", 2)
    theirs, pieces = LAYERS[group]
    return tuple(f"{theirs}.{depth}.{one}.{kind}" for one in pieces[piece])


def sources_of(
    weights: Iterable[str], file: Iterable[str]
) -> tuple[Mapping[str, tuple[str, ...]], tuple[str, ...]]:
    """Names in a file of each of ``weights``, and those in it that nobody reads.

    Args:
        weights: ours.
        file: all names in it. One that it lacks is named as LeRobot's ``state_dict()`` names it.
    """
    known = {_full(name): name for name in file}
    words = known.get(WORDS) or known.get(TIED_WORDS) or WORDS
    known[WORDS] = words
    unused = [known[name] for name in (*UNUSED, TIED_WORDS) if known.get(name, words) != words]
    sources = {one: tuple(known.get(name, name) for name in names_of(one)) for one in weights}
    return sources, tuple(unused)


def _full(name: str) -> str:
    """A name in a file as ``state_dict()`` has it."""
    full = name if name.startswith("model.") else f"model.{name}"
    return full.replace("model.time_mlp_", "model.action_time_mlp_")
