"""Quantized KV that a checkpoint describes: its scheme, and scales in its tensors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

FP8 = "fp8"
_SCALES = (".k_scale", ".v_scale", ".kv_scale")


def has_scales(names: Iterable[str]) -> bool:
    """Returns whether tensors of these names include scales of K or V."""
    return any(name.endswith(_SCALES) for name in names)


def kv_scheme_of(method: str, described: Mapping[str, Any], names: Iterable[str]) -> str:
    """Returns FP8 if SGLang computes the scheme of K and V in e4m3 with a scale for each tensor, ""
    for plain KV, or else what describes another scheme.

    Args:
        method: Method of the quantized weights, "" for others.
        described: Its `quantization_config`, or the section of a hf_quant_config.json.
        names: Tensors of the checkpoint.
    """
    scheme, algorithm = described.get("kv_cache_scheme"), described.get("kv_cache_quant_algo")
    scaled = has_scales(names)
    is_fp8 = {
        FP8: _is_fp8(algorithm) or (scaled and scheme is None),
        "compressed-tensors": _is_static(scheme),
        "modelopt": _is_fp8(algorithm) or _is_float8(scheme),
    }
    if is_fp8.get(method):
        return FP8
    if scheme is not None:
        return f"kv_cache_scheme {json.dumps(scheme):.80}"
    if algorithm is not None:
        return f"kv_cache_quant_algo {json.dumps(algorithm):.80}"
    return "scales of K and V without a scheme" if scaled else ""


def _is_fp8(algorithm: Any) -> bool:
    return isinstance(algorithm, str) and algorithm.upper() == "FP8"


def _is_float8(scheme: Any) -> bool:
    kind = (scheme.get("type"), scheme.get("num_bits")) if isinstance(scheme, Mapping) else ()
    return kind == ("float", 8)


def _is_static(scheme: Any) -> bool:
    """Returns whether a scheme of compressed-tensors has one scale for a tensor, known before."""
    return (
        _is_float8(scheme)
        and scheme.get("strategy") == "tensor"
        and bool(scheme.get("symmetric", True))
        and not scheme.get("dynamic", False)
    )
