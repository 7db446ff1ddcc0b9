"""A small π0 as LeRobot saves it, and what it makes of observations, in an environment of its own.

``lerobot_pi0.py FOLDER`` wants LeRobot of 0.6 with its extra ``pi``. It writes what LeRobot saves
of a π0 whose sizes are small and whose weights are ``drawn``, a tokenizer, and, as
``reference.safetensors``, observations and the actions that LeRobot and its processors make of each
row alone. ``shapes.json`` has names and shapes of its ``state_dict()``, ``names.json`` those of a
whole π0, made on the meta device.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lerobot.configs.types import FeatureType, NormalizationMode, PolicyFeature
from lerobot.policies.pi0 import modeling_pi0
from lerobot.policies.pi0.configuration_pi0 import PI0Config
from lerobot.policies.pi0.modeling_pi0 import PI0Policy
from lerobot.policies.pi0.processor_pi0 import make_pi0_pre_post_processors
from lerobot.policies.rtc.configuration_rtc import RTCConfig
from lerobot.processor import tokenizer_processor
from pi0_sizes import (
    CHUNK,
    DELAYS,
    MOST,
    PREFIX,
    RESOLUTION,
    SEED,
    STATE_DIM,
    TEXTS,
    TINY,
    drawn,
    shortened,
)
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

STATE, ACTION = "observation.state", "action"
CAMERAS = {"observation.images.front": (3, 20, 37), "observation.images.wrist": (3, 28, 28)}
ROWS = len(TEXTS)


def config_of(dtype: str) -> PI0Config:
    """Of two cameras, and one that no robot has."""
    inputs = {STATE: PolicyFeature(FeatureType.STATE, (STATE_DIM,))}
    inputs |= {key: PolicyFeature(FeatureType.VISUAL, shape) for key, shape in CAMERAS.items()}
    return PI0Config(
        input_features=inputs,
        output_features={ACTION: PolicyFeature(FeatureType.ACTION, (4,))},
        empty_cameras=1,
        chunk_size=CHUNK,
        n_action_steps=CHUNK - 2,
        num_inference_steps=5,
        max_state_dim=9,
        max_action_dim=7,
        tokenizer_max_length=MOST,
        image_resolution=(RESOLUTION, RESOLUTION),
        normalization_mapping={
            "VISUAL": NormalizationMode.IDENTITY,
            "STATE": NormalizationMode.MEAN_STD,
            "ACTION": NormalizationMode.QUANTILES,
        },
        dtype=dtype,
        device="cpu",
        push_to_hub=False,
    )


def small_sizes() -> None:
    """Has LeRobot build networks of ``TINY``."""

    def gemma(variant: str) -> Any:
        language = variant == "gemma_2b"
        return modeling_pi0.GemmaConfig(
            width=TINY["language"] if language else TINY["expert"],
            depth=TINY["layers"],
            mlp_dim=TINY["feed_forward"],
            num_heads=TINY["heads"],
            num_kv_heads=1,
            head_dim=TINY["head_width"],
        )

    class SmallVlm(modeling_pi0.PaliGemmaForConditionalGenerationWithPiGemma):
        def __init__(self, config: Any) -> None:
            config.text_config.vocab_size = TINY["vocabulary"]
            image = config.vision_config
            image.hidden_size, image.num_hidden_layers = TINY["image"], TINY["image_layers"]
            image.num_attention_heads = TINY["heads"]
            image.intermediate_size = TINY["feed_forward"]
            image.projection_dim = config.projection_dim = TINY["language"]
            super().__init__(config)

    class SmallExpert(modeling_pi0.PiGemmaForCausalLM):
        def __init__(self, config: Any) -> None:
            config.vocab_size = TINY["vocabulary"]
            super().__init__(config)

    modeling_pi0.get_gemma_config = gemma
    modeling_pi0.PaliGemmaForConditionalGenerationWithPiGemma = SmallVlm
    modeling_pi0.PiGemmaForCausalLM = SmallExpert


def tokenizer(folder: Path) -> None:
    """Writes a tokenizer of the kind of Gemma's, and has LeRobot use it: a token a letter."""
    letters = "▁\nabcdefghijklmnopqrstuvwxyz"
    known = {name: number for number, name in enumerate(("<pad>", "<eos>", "<bos>", "<unk>"))}
    known |= {letter: 4 + place for place, letter in enumerate(letters)}
    made = Tokenizer(models.BPE(vocab=known, merges=[], unk_token="<unk>"))
    made.normalizer = normalizers.Replace(" ", "▁")
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"(?!)"), "merged_with_previous")
    made.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", known["<bos>"])]
    )
    made.save(str(folder / "tokenizer.json"))
    fast = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<bos>")

    class Local:
        @staticmethod
        def from_pretrained(_: str) -> PreTrainedTokenizerFast:
            return fast

    tokenizer_processor.AutoTokenizer = Local


def names() -> dict[str, list[int]]:
    """Shapes of a whole π0, by name."""
    with torch.device("meta"):
        whole = modeling_pi0.PI0Pytorch(
            PI0Config(device="cpu", output_features={}, input_features={})
        )
    return {f"model.{name}": list(one.shape) for name, one in whole.state_dict().items()}


def write(path: Path, shapes: Mapping[str, list[int]]) -> None:
    path.write_text(json.dumps(shortened(shapes), indent=0) + "\n")


def loaded(folder: Path, config: PI0Config) -> PI0Policy:
    policy = PI0Policy(config).eval()
    shapes = {name: list(one.shape) for name, one in policy.state_dict().items()}
    write(folder / "shapes.json", shapes)
    policy.load_state_dict(drawn(shapes))
    policy.save_pretrained(folder)
    return policy


def calls(
    policy: PI0Policy, before: Any, behind: Any, seen: Mapping[str, torch.Tensor], **more: Any
) -> torch.Tensor:
    """Actions of each row, called alone; ``more`` has a list for each argument."""
    made = []
    for row, text in enumerate(TEXTS):
        one = {key: tensor[row] for key, tensor in seen.items()} | {"task": text}
        torch.manual_seed(SEED)
        given = {name: values[row] for name, values in more.items()}
        made.append(behind(policy.predict_action_chunk(before(one), **given)))
    return torch.cat(made)


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "names.json", names())
    small_sizes()
    tokenizer(folder)
    generator = torch.Generator().manual_seed(SEED)

    def random(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator)

    stats = {
        STATE: {"mean": random(STATE_DIM), "std": random(STATE_DIM) + 0.2},
        ACTION: {"q01": random(4) - 2, "q99": random(4) + 1},
    }
    seen = {STATE: random(ROWS, STATE_DIM) * 2 - 1}
    seen |= {key: random(ROWS, *shape) for key, shape in CAMERAS.items()}
    prefix = random(ROWS, PREFIX, 4) * 2 - 1
    half = (stats[ACTION]["q99"] - stats[ACTION]["q01"]) / 2
    left = (prefix - stats[ACTION]["q01"]) / half - 1
    known = {**seen, "executed_prefix": prefix}
    for dtype in ("bfloat16", "float32"):
        config = config_of(dtype)
        policy = loaded(folder, config)
        before, behind = make_pi0_pre_post_processors(config, stats)
        known[f"{ACTION}.{dtype}"] = calls(policy, before, behind, seen)
    before.save_pretrained(folder)
    behind.save_pretrained(folder)
    for schedule in ("LINEAR", "EXP"):
        policy.config.rtc_config = RTCConfig(
            enabled=True, prefix_attention_schedule=schedule, execution_horizon=PREFIX
        )
        policy.init_rtc_processor()
        more = {"inference_delay": DELAYS, "prev_chunk_left_over": list(left)}
        name = f"{ACTION}.{schedule.lower()}"
        known[name] = calls(policy, before, behind, seen, **more)
    save_file(
        {key: one.contiguous() for key, one in known.items()}, folder / "reference.safetensors"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
