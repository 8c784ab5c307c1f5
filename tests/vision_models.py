"""Tiny models of text and images with random weights, complete with tokenizer and processor."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from prism.models.hugging_face import import_transformers
from tests.families import TINY, VOCAB_SIZE
from tests.sglang import models

_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 112,
    "patch_size": 14,
    "hidden_act": "silu",
}
_QWEN: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "depth": 2,
    "num_heads": 2,
    "out_hidden_size": 96,
}
_IDS = {
    "image_token_id": VOCAB_SIZE,
    "vision_start_token_id": VOCAB_SIZE + 1,
    "vision_end_token_id": VOCAB_SIZE + 2,
    "video_token_id": VOCAB_SIZE + 3,
}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
_QWEN_TOKENS = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>")
# model_type, with a suffix if there are several -> that of its language model, and settings of it,
# of the vision model, and of the whole
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "mistral3": (
        "ministral3",
        TINY["ministral3"],
        _VISION | {"model_type": "pixtral", "head_dim": 16},
        {"image_token_id": VOCAB_SIZE, "spatial_merge_size": 2, "vision_feature_layer": -1},
    ),
    "mistral3-mistral": (
        "mistral",
        TINY["ministral3"] | {"sliding_window": None},
        _VISION | {"model_type": "pixtral", "head_dim": 16},
        {"image_token_id": VOCAB_SIZE, "spatial_merge_size": 2, "vision_feature_layer": -1},
    ),
    "qwen2_5_vl": (
        "qwen2_5_vl_text",
        TINY["qwen2"] | {"hidden_size": 192, "rope_parameters": _MROPE},
        _QWEN | {"fullatt_block_indexes": [1], "out_hidden_size": 192, "window_size": 56},
        _IDS,
    ),
    "qwen2_5_vl-flat": (  # with the language model's keys in the config.json itself
        "qwen2_5_vl_text",
        TINY["qwen2"] | {"hidden_size": 192, "rope_parameters": _MROPE},
        _QWEN | {"fullatt_block_indexes": [1], "out_hidden_size": 192, "window_size": 56},
        _IDS,
    ),
    "qwen3_vl": (
        "qwen3_vl_text",
        TINY["qwen3"] | {"rope_parameters": _MROPE | {"mrope_interleaved": True}},
        _QWEN | {"deepstack_visual_indexes": [0], "num_position_embeddings": 64},
        _IDS,
    ),
}
_PIXTRAL_TOKENS = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}{{ '@IMAGE@' }}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def family(kind: str) -> str:
    return kind.partition("-")[0]


def placeholder(kind: str) -> str:
    """Returns the text of an image in a prompt."""
    if family(kind) == "mistral3":
        return _PIXTRAL_TOKENS[0]
    return f"{_QWEN_TOKENS[1]}{_QWEN_TOKENS[0]}{_QWEN_TOKENS[2]}"


def around(kind: str) -> tuple[list[int], list[int]]:
    """Returns the tokens before and after the tokens of an image."""
    return ([], []) if family(kind) == "mistral3" else ([VOCAB_SIZE + 1], [VOCAB_SIZE + 2])


@lru_cache
def whole(kind: str) -> Any:
    """Returns transformers' model of text and images."""
    import torch

    transformers = import_transformers()
    text_type, text, vision, settings = KINDS[kind]
    torch.manual_seed(5)
    rows = VOCAB_SIZE + 8
    text = {"model_type": text_type, **text, "vocab_size": rows, "eos_token_id": 2}
    text |= {"pad_token_id": 0, "tie_word_embeddings": False}
    config = transformers.AutoConfig.for_model(
        family(kind), text_config=text, vision_config=vision, tie_word_embeddings=False, **settings
    )
    made = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    return made


def write(kind: str, folder: Path) -> Path:
    """Saves the model with its tokenizer, chat template and processor. Returns the folder."""
    transformers = import_transformers()
    whole(kind).save_pretrained(folder)
    if kind.endswith("-flat"):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config.pop("text_config") | config))
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(models.path_of("family-llama"))
    names = _PIXTRAL_TOKENS if family(kind) == "mistral3" else _QWEN_TOKENS
    tokenizer.add_special_tokens({"additional_special_tokens": list(names)})
    assert tokenizer.convert_tokens_to_ids(names[0]) == VOCAB_SIZE
    template = _TEMPLATE.replace("@IMAGE@", placeholder(kind))
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    if family(kind) == "mistral3":
        settings = {
            "image_processor_type": "PixtralImageProcessor",
            "processor_class": "PixtralProcessor",
            "size": {"longest_edge": 112},
            "patch_size": {"height": 14, "width": 14},
        }
        own = {"processor_class": "PixtralProcessor", "patch_size": 14, "spatial_merge_size": 2}
        (folder / "processor_config.json").write_text(json.dumps(own))
    else:
        patch = whole(kind).config.vision_config.patch_size
        name = "Qwen3VLProcessor" if kind == "qwen3_vl" else "Qwen2_5_VLProcessor"
        settings = {
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": name,
            "size": {"shortest_edge": 4 * patch * patch, "longest_edge": 64 * patch * patch},
            "patch_size": patch,
            "merge_size": 2,
            "temporal_patch_size": 2,
        }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def logprobs(
    kind: str,
    folder: Path,
    output: Sequence[int],
    files: Sequence[bytes],
    *,
    text: str = "",
    ids: Sequence[int] = (),
) -> tuple[list[int], list[float], list[float]]:
    """Returns what transformers computes for a prompt: its ids, the log probabilities of the output
    after it, and those of the likeliest tokens there. The prompt is `text` with placeholders, or
    `ids` with all tokens of the images."""
    import torch
    from PIL import Image

    processor = import_transformers().AutoProcessor.from_pretrained(folder)
    pictures = [Image.open(io.BytesIO(file)).convert("RGB") for file in files]
    made = processor(
        text=[text or processor.image_token * len(files) or "x"],
        images=pictures or None,
        add_special_tokens=False,
        return_tensors="pt",
    )
    prompt = list(ids) or made["input_ids"][0].tolist()
    every = torch.tensor([[*prompt, *output]])
    names = ("pixel_values", "image_sizes", "image_grid_thw")
    inputs = {name: made[name] for name in names if name in made}
    if "image_grid_thw" in inputs:
        inputs["mm_token_type_ids"] = (every == VOCAB_SIZE).long()
    with torch.no_grad():
        logits = whole(kind)(input_ids=every, **inputs).logits[0]
    rows = logits[len(prompt) - 1 : -1].log_softmax(dim=1)
    chosen = rows.gather(1, torch.tensor(output)[:, None])[:, 0]
    return prompt, chosen.tolist(), rows.max(dim=1).values.tolist()


def png(seed: int, size: tuple[int, int] = (90, 60), kind: str = "PNG") -> bytes:
    """Returns a picture of random blocks as a file."""
    from PIL import Image

    rng = random.Random(seed)
    small = Image.new("RGB", (6, 4))
    small.putdata([tuple(rng.randrange(256) for _ in range(3)) for _ in range(24)])
    file = io.BytesIO()
    small.resize(size, Image.Resampling.NEAREST).save(file, kind)
    return file.getvalue()
