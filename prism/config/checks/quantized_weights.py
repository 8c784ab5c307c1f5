"""Check of quantised weights: whether an adapter's engines load them."""

from __future__ import annotations

from pathlib import Path

from prism.config.checks.memory_needs import EngineTraits
from prism.errors import ConfigError
from prism.models.files import BITSANDBYTES
from prism.models.gguf.gguf_weights import GGUF


def check_quantization(
    method: str, path: Path, key: str, traits: EngineTraits, *, on_gpus: bool
) -> None:
    """Raises ConfigError if engines cannot load weights of this method. Kernels for them need a
    GPU, so that all devices must be GPUs."""
    if on_gpus and method in traits.quantized:
        return
    known = ", ".join(sorted(traits.quantized))
    if method in traits.quantized:
        why = "whose kernels need GPUs: give GPUs as devices"
    elif known:
        why = f"which its engines do not load: give weights of one of {known}"
    else:
        why = "which its engines do not load: give it another adapter"
    raise ConfigError(f"{key}: {path} has weights quantized by {method}, {why}, or other weights")


def check_options(method: str, key: str, dtype: str, *, tp: int, adapters: bool) -> None:
    """Raises ConfigError for options that weights in blocks do not have. Several devices and LoRA
    adapters cannot divide or change their rows, and bitsandbytes computes in 16 bits."""
    if method not in (GGUF, BITSANDBYTES):
        return
    if tp > 1 or adapters:
        name = "tp" if tp > 1 else "lora"
        raise ConfigError(
            f"{key}.{name}: is not supported for weights of {method}; remove it, or give other"
            " weights"
        )
    if method == BITSANDBYTES and dtype == "float32":
        raise ConfigError(f"{key}.dtype: {method} does not compute in float32; choose bfloat16")
