"""Tiny models of text and images with random weights, complete with tokenizer and processor."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
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
}
_CLIP = _VISION | {"model_type": "clip_vision_model", "image_size": 56}
_SIGLIP = _VISION | {"model_type": "siglip_vision_model", "image_size": 56}
_PIXTRAL = _VISION | {"model_type": "pixtral", "head_dim": 16, "hidden_act": "silu"}
_QWEN: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "depth": 2,
    "num_heads": 2,
    "out_hidden_size": 96,
}
_QWEN3 = _QWEN | {"deepstack_visual_indexes": [0], "num_position_embeddings": 64}
_IDS = {
    "image_token_id": VOCAB_SIZE,
    "vision_start_token_id": VOCAB_SIZE + 1,
    "vision_end_token_id": VOCAB_SIZE + 2,
    "video_token_id": VOCAB_SIZE + 3,
}
_GLM_IDS = {
    "image_token_id": VOCAB_SIZE,
    "image_start_token_id": VOCAB_SIZE + 1,
    "image_end_token_id": VOCAB_SIZE + 2,
    "video_token_id": VOCAB_SIZE + 3,
    "video_start_token_id": VOCAB_SIZE + 4,
    "video_end_token_id": VOCAB_SIZE + 5,
}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
_INTERLEAVED = {"rope_parameters": _MROPE | {"mrope_interleaved": True}}
_HALF = {"partial_rotary_factor": 0.5}
_QWEN3_5 = _INTERLEAVED["rope_parameters"] | _HALF | {"mrope_section": [4, 2, 2]}
_TWO = {"num_key_value_heads": 2}  # which two ranks divide
_WIDE = TINY["qwen2"] | _TWO | {"hidden_size": 192, "rope_parameters": _MROPE}
_FULL = {"sliding_window": None}
_IMAGE = {"image_token_index": VOCAB_SIZE}
_MISTRAL3 = {"image_token_id": VOCAB_SIZE, "spatial_merge_size": 2, "vision_feature_layer": -1}
_GRIDS = {"image_grid_pinpoints": [[56, 112], [112, 56], [112, 112]]}
# model_type, with a suffix if there are several -> that of its language model, and settings of it,
# of the vision model, and of the whole
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "glm4v": (
        "glm4v_text",
        _WIDE | {"rope_parameters": _MROPE | _HALF | {"mrope_section": [2, 3, 3]}},
        _QWEN | {"image_size": 112, "out_hidden_size": 192},
        _GLM_IDS,
    ),
    "internvl": (
        "qwen2",
        TINY["qwen2"],
        _VISION | {"image_size": [56, 56], "patch_size": [14, 14], "attention_bias": True},
        {"image_token_id": VOCAB_SIZE},
    ),
    "internvl-qwen3": (
        "qwen3",
        TINY["qwen3"],
        _VISION
        | {
            "image_size": [56, 56],
            "patch_size": [14, 14],
            "use_qk_norm": True,
            "norm_type": "rms_norm",
        },
        {"image_token_id": VOCAB_SIZE},
    ),
    "llama4": (
        "llama4_text",
        TINY["llama4_text"],
        _VISION
        | {
            "image_size": 56,
            "intermediate_size": 128,
            "vision_output_dim": 64,
            "projector_input_dim": 64,
            "projector_output_dim": 64,
        },
        {
            "image_token_index": VOCAB_SIZE,
            "boi_token_index": VOCAB_SIZE + 1,
            "eoi_token_index": VOCAB_SIZE + 2,
        },
    ),
    "llava": ("llama", TINY["llama"] | _TWO, _CLIP, _IMAGE),
    "llava-pixtral": (
        "mistral",
        TINY["ministral3"] | _FULL,
        _PIXTRAL,
        _IMAGE | {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
    ),
    "llava-siglip": (
        "qwen2",
        TINY["qwen2"],
        _SIGLIP,
        _IMAGE | {"vision_feature_layer": [-2, -1], "vision_feature_select_strategy": "full"},
    ),
    "llava_next": ("mistral", TINY["ministral3"] | _FULL, _CLIP, _IMAGE | _GRIDS),
    "mistral3": ("ministral3", TINY["ministral3"], _PIXTRAL, _MISTRAL3),
    "mistral3-mistral": ("mistral", TINY["ministral3"] | _FULL, _PIXTRAL, _MISTRAL3),
    "qwen2_5_vl": (
        "qwen2_5_vl_text",
        _WIDE,
        _QWEN | {"fullatt_block_indexes": [1], "out_hidden_size": 192, "window_size": 56},
        _IDS,
    ),
    "qwen2_5_vl-flat": (  # with the language model's keys in the config.json itself
        "qwen2_5_vl_text",
        _WIDE,
        _QWEN | {"fullatt_block_indexes": [1], "out_hidden_size": 192, "window_size": 56},
        _IDS,
    ),
    "qwen2_vl": (
        "qwen2_vl_text",
        _WIDE,
        {"depth": 2, "embed_dim": 32, "hidden_size": 192, "mlp_ratio": 2, "num_heads": 2},
        _IDS,
    ),
    "qwen2_vl-flat": (
        "qwen2_vl_text",
        _WIDE,
        {"depth": 2, "embed_dim": 32, "hidden_size": 192, "mlp_ratio": 2, "num_heads": 2},
        _IDS,
    ),
    "qwen3_5": (
        "qwen3_5_text",
        TINY["qwen3_5_text"] | {"rope_parameters": _QWEN3_5},
        _QWEN | {"num_position_embeddings": 64},
        _IDS,
    ),
    "qwen3_5_moe": (
        "qwen3_5_moe_text",
        TINY["qwen3_5_moe_text"] | {"rope_parameters": _QWEN3_5},
        _QWEN | {"num_position_embeddings": 64},
        _IDS,
    ),
    "qwen3_vl": ("qwen3_vl_text", TINY["qwen3"] | _TWO | _INTERLEAVED, _QWEN3, _IDS),
    "qwen3_vl_moe": (
        "qwen3_vl_moe_text",
        TINY["qwen3_moe"] | _TWO | _INTERLEAVED,
        _QWEN3 | {"depth": 3, "deepstack_visual_indexes": [0, 1, 2]},
        _IDS,
    ),
}
_QWEN_TOKENS = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>")
_TILE = {"height": 56, "width": 56}
_PIXTRAL_IMAGES = {
    "image_processor_type": "PixtralImageProcessor",
    "size": {"longest_edge": 112},
    "patch_size": {"height": 14, "width": 14},
}
_CLIP_IMAGES = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 56}}
_CLIP_IMAGES |= {"crop_size": _TILE}


@dataclass(frozen=True)
class Look:
    """Tokens and processor of a family's images."""

    tokens: tuple[str, ...]  # first the placeholder, then others
    images: dict[str, Any]  # preprocessor_config.json
    processor: dict[str, Any]  # processor_config.json
    is_framed: bool = False  # by the second and third token, which the processor does not add
    named: dict[str, str] = field(default_factory=dict)  # tokens by names of the tokenizer


def _qwen_look(name: str, patch: int = 14) -> Look:
    images = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": {"shortest_edge": 4 * patch * patch, "longest_edge": 64 * patch * patch},
        "patch_size": patch,
        "merge_size": 2,
        "temporal_patch_size": 2,
    }
    return Look(_QWEN_TOKENS, images, {"processor_class": name}, is_framed=True)


def _llava_look(images: dict[str, Any], name: str = "LlavaProcessor", **settings: Any) -> Look:
    common = {"processor_class": name, "patch_size": 14}
    return Look(("<image>",), images, common | settings)


_MISTRAL_LOOK = Look(
    ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    _PIXTRAL_IMAGES,
    {"processor_class": "PixtralProcessor", "patch_size": 14, "spatial_merge_size": 2},
)
_CLIP_STRATEGY = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
_SIGLIP_IMAGES = {"image_processor_type": "SiglipImageProcessor", "size": _TILE}
_NEXT_IMAGES = _CLIP_IMAGES | _GRIDS | {"image_processor_type": "LlavaNextImageProcessor"}
_LOOKS = {
    "glm4v": Look(
        (
            "<|image|>",
            "<|begin_of_image|>",
            "<|end_of_image|>",
            "<|video|>",
            "<|begin_of_video|>",
            "<|end_of_video|>",
        ),
        {
            "image_processor_type": "Glm4vImageProcessor",
            "size": {"shortest_edge": 4 * 14 * 14, "longest_edge": 2 * 64 * 14 * 14},
            "patch_size": 14,
            "merge_size": 2,
            "temporal_patch_size": 2,
        },
        {"processor_class": "Glm4vProcessor"},
        is_framed=True,
    ),
    "internvl": Look(
        ("<IMG_CONTEXT>", "<img>", "</img>", "<video>"),
        {"image_processor_type": "GotOcr2ImageProcessor", "size": _TILE, "max_patches": 3},
        {"processor_class": "InternVLProcessor", "image_seq_length": 4},
        named={
            "context_image_token": "<IMG_CONTEXT>",
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "video_token": "<video>",
        },
    ),
    "llama4": Look(
        (
            "<|patch|>",
            "<|image_start|>",
            "<|image_end|>",
            "<|image|>",
            "<|tile_x_separator|>",
            "<|tile_y_separator|>",
        ),
        {"image_processor_type": "Llama4ImageProcessor", "size": _TILE, "max_patches": 4},
        {"processor_class": "Llama4Processor", "patch_size": 14},
    ),
    "llava": _llava_look(_CLIP_IMAGES, **_CLIP_STRATEGY),
    "llava-pixtral": Look(
        ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        _PIXTRAL_IMAGES,
        {"processor_class": "PixtralProcessor", "patch_size": 14, "spatial_merge_size": 1},
    ),
    "llava-siglip": _llava_look(_SIGLIP_IMAGES, vision_feature_select_strategy="full"),
    "llava_next": _llava_look(_NEXT_IMAGES, "LlavaNextProcessor", **_CLIP_STRATEGY),
    "mistral3": _MISTRAL_LOOK,
    "qwen2_5_vl": _qwen_look("Qwen2_5_VLProcessor"),
    "qwen2_vl": _qwen_look("Qwen2VLProcessor"),
    "qwen3_5": _qwen_look("Qwen3VLProcessor", 16),
    "qwen3_5_moe": _qwen_look("Qwen3VLProcessor", 16),
    "qwen3_vl": _qwen_look("Qwen3VLProcessor", 16),
    "qwen3_vl_moe": _qwen_look("Qwen3VLProcessor", 16),
}
_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}{{ '@IMAGE@' }}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def family(kind: str) -> str:
    return kind.partition("-")[0]


def look(kind: str) -> Look:
    return _LOOKS.get(kind) or _LOOKS[family(kind)]


def placeholder(kind: str) -> str:
    """Returns the text of an image in a prompt."""
    if kind == "llama4":
        return "<|image|>"
    token, *others = look(kind).tokens
    return f"{others[0]}{token}{others[1]}" if look(kind).is_framed else token


def around(kind: str) -> tuple[list[int], list[int]]:
    """Returns the tokens before and after the tokens of an image."""
    return ([VOCAB_SIZE + 1], [VOCAB_SIZE + 2]) if look(kind).is_framed else ([], [])


@lru_cache
def whole(kind: str) -> Any:
    """Returns transformers' model of text and images."""
    import torch

    transformers = import_transformers()
    text_type, text, vision, settings = KINDS[kind]
    torch.manual_seed(5)
    rows = VOCAB_SIZE + 128  # SGLang pads a rank's part to a multiple of 64
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
    seen = look(kind)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(
        models.path_of("family-llama"), extra_special_tokens=seen.named
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(seen.tokens)})
    assert tokenizer.convert_tokens_to_ids(seen.tokens[0]) == VOCAB_SIZE
    tokenizer.chat_template = _TEMPLATE.replace("@IMAGE@", placeholder(kind))
    tokenizer.save_pretrained(folder)
    name = {"processor_class": seen.processor["processor_class"]}
    (folder / "preprocessor_config.json").write_text(json.dumps(seen.images | name))
    (folder / "processor_config.json").write_text(json.dumps(seen.processor))
    return folder


def logprobs(
    kind: str,
    folder: Path,
    output: Sequence[int],
    files: Sequence[bytes],
    *,
    text: str = "",
    ids: Sequence[int] = (),
    model: Any = None,
) -> tuple[list[int], list[float], list[float]]:
    """Returns what transformers computes for a prompt: its ids, the log probabilities of the output
    after it, and those of the likeliest tokens there. The prompt is `text` with placeholders, or
    `ids` with all tokens of the images. `model`: another one than the family's."""
    import torch
    from PIL import Image

    processor = import_transformers().AutoProcessor.from_pretrained(folder)
    pictures = [Image.open(io.BytesIO(file)).convert("RGB") for file in files]
    made = processor(
        text=[text or processor.image_token * len(files) or "x"],
        images=pictures or None,
        add_special_tokens=False,
        return_mm_token_type_ids=False,
        return_tensors="pt",
    )
    prompt = list(ids) or made["input_ids"][0].tolist()
    every = torch.tensor([[*prompt, *output]])
    names = ("pixel_values", "image_sizes", "image_grid_thw")
    inputs = {name: made[name] for name in names if name in made}
    if files:
        inputs["pixel_values"] = inputs["pixel_values"].float()
    if "image_grid_thw" in inputs:
        inputs["mm_token_type_ids"] = (every == VOCAB_SIZE).long()
    with torch.no_grad():
        logits = (model or whole(kind))(input_ids=every, **inputs).logits[0]
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
