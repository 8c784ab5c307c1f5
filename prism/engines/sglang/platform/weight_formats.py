"""Formats of weights for which SGLang has separate loaders: GGUF, and that of bitsandbytes."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from prism.models.files import BITSANDBYTES, checkpoint_of, quantized_by
from prism.models.gguf.gguf_weights import has_gguf, wrong_tensor

# Families whose weights SGLang reads from GGUF as transformers does, which
# tests/sglang/test_gguf.py shows. It takes norms of Gemma for other values, does not know names of
# further families, and does not load fused projections and experts. Each with the tensors that it
# has besides Llama's, without which SGLang ignores them.
_GGUF = {"llama": "", "qwen2": r"attn_[qkv]\.bias", "qwen3": r"attn_[qk]_norm\.weight"}
_BESIDES = re.compile(r"blk\.\d+\.(.+\.bias|attn_[qk]_norm\.weight)")
# Types of ggml for which it has kernels.
_GGML_TYPES = frozenset(
    {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"}
    | {"IQ1_M", "IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS", "IQ4_NL"}
)
# Families whose weights it reads in bitsandbytes' format, which
# tests/sglang/test_bitsandbytes.py shows.
_BITSANDBYTES = frozenset({"gemma3_text", "llama", "mistral", "qwen2", "qwen3"})
_MATRIX = re.compile(r"(.+\.)(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)\.weight")
_FUSED = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj") | dict.fromkeys(
    ("gate_proj", "up_proj"), "gate_up_proj"
)


def wrong_format(model: Path, config: dict[str, Any], kind: str) -> str:
    """Returns the reason why SGLang cannot load a folder's weights in these formats, "" for other
    weights and if none is known."""
    if has_gguf(model):
        return _wrong_gguf(model, kind)
    if quantized_by(config, model) == BITSANDBYTES:
        return _wrong_bitsandbytes(model, config["quantization_config"], kind)
    return ""


def syncs(config: dict[str, Any]) -> bool:
    """Returns whether kernels of a model wait for the GPU, so that a graph cannot have them: those
    of bitsandbytes in eight bits count outliers."""
    described = config.get("quantization_config") or {}
    return described.get("quant_method") == BITSANDBYTES and bool(described.get("load_in_8bit"))


def _wrong_gguf(model: Path, kind: str) -> str:
    if kind not in _GGUF:
        served = ", ".join(sorted(_GGUF))
        return f"is in GGUF, which SGLang reads for {served}, not for {kind}; give *.safetensors"
    checkpoint = checkpoint_of(model)
    for name in checkpoint.tensors:
        if (match := _BESIDES.fullmatch(name)) and not re.fullmatch(_GGUF[kind], match[1]):
            return f"has {name}, which SGLang does not load for {kind}; give *.safetensors"
    return wrong_tensor(checkpoint, _GGML_TYPES)


def _wrong_bitsandbytes(model: Path, described: dict[str, Any], kind: str) -> str:
    if find_spec("bitsandbytes") is None:
        return "needs the package bitsandbytes; run pip install 'bitsandbytes>=0.46.1'"
    if kind not in _BITSANDBYTES:
        served = ", ".join(sorted(_BITSANDBYTES))
        return f"is quantized by bitsandbytes, which is served for {served}; give other weights"
    storage = described.get("bnb_4bit_quant_storage", "uint8")
    if storage != "uint8":
        return f"has bnb_4bit_quant_storage {storage!r}, but SGLang reads uint8; give other weights"
    return _wrong_matrix(model, described.get("llm_int8_skip_modules") or [])


def _wrong_matrix(model: Path, skipped: list[str]) -> str:
    """Returns a matrix that is quantized although SGLang skips the module that it is fused into, or
    the contrary, "" if there is none."""
    names = checkpoint_of(model).tensors.keys()
    for name in names:
        if (match := _MATRIX.fullmatch(name)) is None:
            continue
        parts = f"{match[1]}{_FUSED.get(match[2], match[2])}".split(".")
        places = {".".join(parts[: end + 1]) for end in range(len(parts))}
        is_quantized = f"{name}.absmax" in names or f"{match[1]}{match[2]}.SCB" in names
        if is_quantized != places.union(parts).isdisjoint(skipped):
            kept = "quantized" if is_quantized else "not quantized"
            return (
                f"has {name} {kept}, but SGLang expects the contrary by llm_int8_skip_modules in"
                " config.json; give other weights"
            )
    return ""
