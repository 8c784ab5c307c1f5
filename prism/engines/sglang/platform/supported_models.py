"""Models that the installed SGLang supports.

The module reads SGLang's source files, since importing them takes seconds.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvcached import Heads
from kvcached.engines.sglang.hybrid.overrides import CLASSES, full_every, overrides
from kvcached.models import LayerShape, ModelShape, shape_of_config
from prism.engines.sglang.platform.weight_formats import wrong_format
from prism.models.files import BITSANDBYTES, checkpoint_of
from prism.models.kv_scheme import has_scales
from prism.models.text_part import has_parts, text_config
from prism.models.weight_names import class_sources, model_files, package_folder, words_of
from prism.models.weight_shapes import vision_differs, weights_differ

# Families whose answers are those of transformers, which tests/sglang/test_families.py shows.
SERVED = frozenset(
    {
        "arcee",
        "cohere",
        "cohere2",
        "deepseek_v2",
        "deepseek_v3",
        "dots1",
        "ernie4_5",
        "ernie4_5_moe",
        "exaone4",
        "falcon_h1",
        "gemma",
        "gemma2",
        "gemma3_text",
        "gemma3n_text",
        "gemma4_text",
        "glm4",
        "glm4_moe",
        "glm4_moe_lite",
        "gpt2",
        "gpt_bigcode",
        "gpt_neox",
        "gpt_oss",
        "gptj",
        "granite",
        "granitemoe",
        "granitemoehybrid",
        "hunyuan_v1_dense",
        "lfm2",
        "lfm2_moe",
        "llama",
        "llama4_text",
        "minicpm3",
        "minimax_m2",
        "ministral",
        "ministral3",
        "mistral",
        "mixtral",
        "nemotron_h",
        "olmo",
        "olmo2",
        "olmo3",
        "olmoe",
        "opt",
        "phi",
        "phi3",
        "phimoe",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_moe",
        "qwen3_next",
        "seed_oss",
        "smollm3",
        "stablelm",
        "starcoder2",
    }
)
_NO_CLASS = "SGLang does not have a class for it, and cannot run transformers' class"
# Families that are known, and why they are not served.
_REFUSED = {
    "bamba": _NO_CLASS,
    "bloom": _NO_CLASS,
    "deepseek_v32": "it keeps an index of keys next to KV, for sparse attention",
    "falcon": _NO_CLASS,
    "glm": _NO_CLASS,
    "nemotron": _NO_CLASS,
}
# Families of models that take images -> those of their language models, with answers that are
# those of transformers, which tests/sglang/test_images.py shows.
IMAGES = {
    "glm4v": frozenset({"glm4v_text"}),
    "internvl": frozenset({"llama", "qwen2", "qwen3"}),
    "llama4": frozenset({"llama4_text"}),
    "llava": frozenset({"llama", "mistral", "qwen2"}),
    "llava_next": frozenset({"llama", "mistral", "qwen2"}),
    "mistral3": frozenset({"ministral3", "mistral"}),
    "qwen2_5_vl": frozenset({"qwen2_5_vl", "qwen2_5_vl_text"}),
    "qwen2_vl": frozenset({"qwen2_vl", "qwen2_vl_text"}),
    "qwen3_5": frozenset({"qwen3_5_text"}),
    "qwen3_5_moe": frozenset({"qwen3_5_moe_text"}),
    "qwen3_vl": frozenset({"qwen3_vl_text"}),
    "qwen3_vl_moe": frozenset({"qwen3_vl_moe_text"}),
}
# Families among them whose vision tower is transformers', in the class of this name.
TOWERS = frozenset({"internvl", "llama4", "llava", "llava_next"})
TOWER_CLASS = "TowerModel"
# Families whose whole vision tower each of several ranks has. SGLang's compute an image on one.
IMAGE_RANKS = TOWERS | {"glm4v", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"}
# Keys of vision_config that SGLang reads and transformers 5 does not save.
_TOWER_KEYS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"in_chans": 3},
    "qwen3_5": {"deepstack_visual_indexes": []},
    "qwen3_5_moe": {"deepstack_visual_indexes": []},
}
# Families that take images and LoRA adapters. SGLang would change the vision tower of Mistral 3.
IMAGE_ADAPTERS = frozenset(
    {"internvl", "llava", "llava_next", "qwen2_5_vl", "qwen2_vl", "qwen3_vl"}
)
# Vectors of images that are kept on the device, for the next chunk of a prompt or the same image.
VECTORS_KEPT_MIB = 64
# Families whose windows SGLang computes, with kvcached's corrections: all but chunks of Llama 4,
# which it computes with some backends only.
WINDOWS = SERVED - {"llama4_text"}
# Weights that SGLang does not divide over ranks: norms, routers, down-projections to latents,
# positions, embeddings of Gemma 3 and 4, AltUp, and projections of inputs per layer.
WHOLE_WEIGHTS = (
    r"norm|\.ln_|\.(gate|router|shared_expert_gate|q_a_proj|kv_a_proj_with_mqa)\."
    r"|\.(wpe|embed_positions|project_in|project_out)\."
    r"|^gemma(3|3n|4)_text:.*embed_tokens|\.altup\.|\.per_layer_(input_gate|projection)\."
    r"|^gemma4_text:.*per_layer_model_projection"
)
# Families of which it cannot load the same KV head on several ranks.
DIVIDED_HEADS = frozenset(
    {"cohere", "ernie4_5", "ministral", "olmo2", "olmo3", "seed_oss", "smollm3"}
)
# Families for which SGLang does not accept its attention in plain torch by that name.
_NEED_TRITON = frozenset({"exaone4", "gemma4_text", "gpt_oss"})
# Families of which SGLang takes the query heads for the number of K and V heads.
_MULTI_HEAD = frozenset({"olmo", "olmoe", "phi"})
# Families of which SGLang does not read `head_dim`.
_SPLIT_HEADS = frozenset({"exaone4"})
# Methods of quantized weights, by the names that checkpoints and SGLang on a GPU have for them.
_QUANTIZATIONS = {
    "awq": "awq_marlin",
    BITSANDBYTES: "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "fp8": "fp8",
    "gguf": "gguf",
    "gptq": "gptq_marlin",
    "modelopt": "modelopt",
    "mxfp4": "mxfp4",
}
# Families for which SGLang computes SiLU, whatever `hidden_act` says.
_SILU = SERVED.union(*IMAGES.values()) - {
    "arcee",
    "falcon_h1",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gemma3n_text",
    "gemma4_text",
    "gpt2",
    "gpt_bigcode",
    "gpt_neox",
    "gptj",
    "opt",
    "phi",
    "starcoder2",
}
# Families of which SGLang computes SiLU in the vision tower.
_SILU_TOWERS = frozenset({"mistral3"})
# Settings of a family that SGLang ignores.
_IGNORED = {
    "olmoe": ("clip_qkv",),
    "phi": ("qk_layernorm",),
    "stablelm": ("qk_layernorm", "use_parallel_residual"),
}


def image_overrides(config: dict[str, Any]) -> dict[str, Any]:
    """Returns keys of the config.json of a model that takes images that SGLang must read otherwise
    than they are."""
    text = overrides(config.get("text_config") or {})
    changed: dict[str, Any] = {"text_config": text} if text else {}
    if config["model_type"] in TOWERS:
        changed["architectures"] = [TOWER_CLASS]
    own = config["vision_config"]
    lacking = {k: v for k, v in _TOWER_KEYS.get(config["model_type"], {}).items() if k not in own}
    return changed | ({"vision_config": lacking} if lacking else {})


def host_attention(config: dict[str, Any]) -> str:
    """Returns the name of the attention backend on a CPU."""
    return "triton" if config.get("model_type") in _NEED_TRITON else "torch_native"


def _answers_differ(config: dict[str, Any], families: frozenset[str] = SERVED) -> str:
    """Returns what prevents answers of a language model of these families from being those of
    transformers, "" if nothing is known to."""
    shape = shape_of_config(config)
    kind = shape.model_type
    if kind not in families:
        served = ", ".join(sorted(families))
        why = f" ({_REFUSED[kind]})" if kind in _REFUSED else ""
        return (
            f"has model_type {kind!r}, which SGLang engines do not serve{why}; they serve {served}"
        )
    if kind in _MULTI_HEAD and any(_is_grouped(layer) for layer in shape.layers):
        return f"has fewer K and V heads than query heads, which SGLang cannot load for {kind}"
    if kind.startswith("qwen") and len({bool(layer.mlp.experts) for layer in shape.layers}) > 1:
        return f"has experts in some layers only, which SGLang cannot load for {kind}"
    return _irregular(shape, config) or _ignored(kind, config)


def _irregular(shape: ModelShape, config: dict[str, Any]) -> str:
    """Returns what no released model of the family has and SGLang does not expect, "" if there is
    nothing."""
    kind = shape.model_type
    if kind == "gemma3n_text" and not _reads_the_last_two(shape):
        return "has shared layers after other than a sliding and a full one, which SGLang expects"
    if kind == "exaone4" and not full_every(config):
        return "has full attention in irregular layers, which SGLang does not compute for exaone4"
    if kind in _SPLIT_HEADS and any(_is_odd(layer, shape.hidden_size) for layer in shape.layers):
        return f"has head_dim other than hidden_size / heads, which SGLang cannot load for {kind}"
    return ""


def _ignored(kind: str, config: dict[str, Any]) -> str:
    """Returns a setting that SGLang does not compute, "" if there is none."""
    act = config.get("hidden_act") or "silu"
    if kind in _SILU and act not in ("silu", "swish"):
        return f"has hidden_act {act!r}, but SGLang computes silu for {kind}"
    ignored = [key for key in _IGNORED.get(kind, ()) if config.get(key)]
    return f"has {ignored[0]}, which SGLang ignores for {kind}" if ignored else ""


def _is_grouped(layer: LayerShape) -> bool:
    return isinstance(layer.kv, Heads) and layer.kv.num_kv_heads != layer.heads


def _reads_the_last_two(shape: ModelShape) -> bool:
    """Returns whether the last layers with their own KV have a window and full attention, in this
    order: those are the ones that SGLang's other layers of Gemma 3n read."""
    own = [bool(layer.window_tokens) for layer in shape.layers if layer.kv]
    return len(own) == len(shape.layers) or own[-2:] == [True, False]


def _is_odd(layer: LayerShape, hidden: int) -> bool:
    return isinstance(layer.kv, Heads) and layer.kv.head_dim * layer.heads != hidden


def refuses(model: Path, embeds: bool = False, images: bool = False) -> str:
    """Returns the reason why SGLang cannot serve the checkpoint in this folder, with or without
    images, "" if none is known."""
    if find_spec("sglang") is None or find_spec("transformers") is None:
        return ""
    whole = json.loads((model / "config.json").read_text())
    return _refuses_images(model, whole) if images else _refuses_text(model, whole, embeds)


def _refuses_text(model: Path, whole: dict[str, Any], embeds: bool) -> str:
    """Returns the reason why SGLang cannot serve the language model of a checkpoint, "" if none is
    known."""
    config, in_part = text_config(whole), has_parts(whole)
    if in_part:
        config["architectures"] = [causal_class(str(config.get("model_type")))]
    if why := _unknown(config):
        return f"{model}/config.json {why}"
    if why := _answers_differ(config):
        return f"{model}/config.json {why}; give another model"
    kind, architecture = config["model_type"], config["architectures"][0]
    known = _text_models(kind)
    if known and architecture not in (*known, CLASSES.get(kind)):
        return (
            f"{model}/config.json names {architecture}, which is not an architecture of model_type"
            f" {kind!r}; correct one of them"
        )
    loader = CLASSES.get(kind, architecture)
    if embeds and not _can_embed(loader):
        return (
            f"{model}/config.json names {architecture}, for which SGLang makes no embeddings; give"
            " another model or set embeddings: false"
        )
    words = words_of(model_files(_own_models(), kind, loader))
    differs = wrong_format(model, config, kind) or _scales_lost(model, architecture)
    differs = differs or weights_differ(model, config, words, in_part=in_part)
    return f"{model} {differs}" if differs else ""


def _refuses_images(model: Path, config: dict[str, Any]) -> str:
    """Returns the reason why SGLang cannot serve a model with its vision tower, "" if none is
    known."""
    if why := _unknown(config):
        return f"{model}/config.json {why}"
    kind = config["model_type"]
    if why := _answers_differ(text_config(config), IMAGES[kind]):
        return f"{model}/config.json {why}; give another model"
    act = config["vision_config"].get("hidden_act", "gelu")  # transformers' default
    if kind in _SILU_TOWERS and act != "silu":
        return (
            f"{model}/config.json has hidden_act {act!r} in vision_config, but SGLang computes silu"
            f" for {kind}; give another model, or set images: false"
        )
    if why := wrong_format(model, config, kind):
        return f"{model} {why}"
    if why := _positions_lost(config):
        return f"{model}/config.json {why}; correct the file, or set images: false"
    differs = weights_differ(model, text_config(config), in_part=True)
    differs = differs or vision_differs(model, config, plain=kind in TOWERS)
    return f"{model} {differs}" if differs else ""


def _positions_lost(config: dict[str, Any]) -> str:
    """Returns what SGLang lacks to place an image's vectors as transformers does, "" if it lacks
    nothing."""
    kind, text = config["model_type"], text_config(config)
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if kind.startswith(("glm4v", "qwen")) and "mrope_section" not in rope:
        return "lacks mrope_section in rope_parameters, from which SGLang takes positions of images"
    inner = config["vision_config"].get("deepstack_visual_indexes") or ()
    if kind == "qwen3_vl_moe" and len(inner) != 3:
        return f"has {len(inner)} deepstack_visual_indexes, but SGLang adds 3 layers for {kind}"
    return ""


def _unknown(config: dict[str, Any]) -> str:
    """Returns what the installed packages do not know, and the remedy, "" if they know all."""
    kind, architecture = str(config.get("model_type")), str(config["architectures"][0])
    named = rf"""["']{re.escape(kind)}["']"""
    as_key, as_field = rf"""{named}\s*[:,]\s*["']\w+Config""", rf"model_type(: str)? = {named}"
    if not _found(f"{as_key}|{as_field}", _configurations()):
        return (
            f"has model_type {kind!r}, which the installed SGLang and transformers do not know;"
            " correct it or upgrade them"
        )
    if not _found(rf"""(\bclass |["']){re.escape(architecture)}\b""", _models()):
        return (
            f"names {architecture}, which the installed SGLang cannot serve; give another model or"
            " upgrade it"
        )
    return ""


def quantizations() -> frozenset[str]:
    """Returns the methods of quantized weights that the installed SGLang has and its ordinary
    loaders read."""
    if find_spec("sglang") is None:
        return frozenset()
    known = package_folder("sglang") / "srt" / "layers" / "quantization" / "__init__.py"
    text = known.read_text() if known.exists() else ""
    return frozenset(name for name, key in _QUANTIZATIONS.items() if f'"{key}": ' in text)


def causal_class(kind: str) -> str:
    """Returns the class of a family's language models, as transformers names it, "" if there is
    none."""
    return next(iter(_text_models(kind)), "")


def parser_names() -> dict[str, list[str]]:
    """Returns the valid values of a model's parser keys in the YAML, without keys whose values are
    not known."""
    if find_spec("sglang") is None:
        return {}
    folder = package_folder("sglang") / "srt"
    files = {
        "tool_parser": folder / "function_call" / "parser_names.py",
        "reasoning_parser": folder / "parser" / "reasoning_parser_names.py",
    }
    return {key: _names_in(file) for key, file in files.items() if file.exists()}


def _names_in(file: Path) -> list[str]:
    """Returns the names in a module that only assigns lists of names."""
    assigned = (each for each in ast.parse(file.read_text()).body if isinstance(each, ast.Assign))
    return sorted(name for each in assigned for name in ast.literal_eval(each.value))


def _scales_lost(model: Path, architecture: str) -> str:
    """Returns that SGLang would ignore scales of K and V, "" if it does not."""
    if not has_scales(checkpoint_of(model).tensors) or loads_kv_scales(architecture):
        return ""
    return f"has scales of K and V, which SGLang ignores for {architecture}; give another model"


def loads_kv_scales(architecture: str) -> bool:
    """Returns whether the module of the class that loads the weights knows scales of K and V."""
    classes = class_sources(_own_models(), architecture)
    loaders = (text for _, text, body in classes if "def load_weights" in body)
    return "maybe_remap_kv_scale_name" in next(loaders, "")


def _can_embed(architecture: str) -> bool:
    """Returns whether the model class, or a base class, can return an embedding of the last token.
    Classes that only transformers implements always can."""
    classes = class_sources(_own_models(), architecture)
    if any("get_embedding" in body for _, _, body in classes):
        return True
    named = re.compile(rf"""(\bclass |["']){re.escape(architecture)}\b""")
    return not any(named.search(file.read_text(errors="replace")) for file in _own_models())


def _configurations() -> Iterator[Path]:
    auto = package_folder("transformers") / "models" / "auto"
    yield from (auto / "auto_mappings.py", auto / "configuration_auto.py")
    yield from (package_folder("sglang") / "srt" / "configs").glob("*.py")


def _models() -> Iterator[Path]:
    """Yields the files that name models: SGLang's own, and transformers' list, since SGLang also
    serves these."""
    yield from _own_models()
    yield package_folder("transformers") / "models" / "auto" / "modeling_auto.py"


def _text_models(kind: str) -> list[str]:
    """Returns the architectures of a family that transformers lists as causal language models."""
    auto = package_folder("transformers") / "models" / "auto" / "modeling_auto.py"
    listed = re.search(
        r"^MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = .*?^\)", auto.read_text(), re.M | re.S
    )
    named = rf"""["']{re.escape(kind)}["'],\s*["'](\w+)["']"""
    return re.findall(named, listed[0]) if listed else []


def _own_models() -> Iterator[Path]:
    yield from (package_folder("sglang") / "srt" / "models").glob("*.py")


def _found(pattern: str, files: Iterator[Path]) -> bool:
    wanted = re.compile(pattern)
    return any(wanted.search(file.read_text(errors="replace")) for file in files if file.exists())
