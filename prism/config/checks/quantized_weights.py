"""Check of quantised weights: whether an adapter's engines load them."""

from __future__ import annotations

from pathlib import Path

from prism.config.checks.memory_needs import EngineTraits
from prism.errors import ConfigError
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


def check_alone(method: str, key: str, *, tp: int, adapters: bool) -> None:
    """Raises ConfigError for weights in GGUF on several devices or with LoRA adapters, which cannot
    divide or change rows of blocks."""
    if method == GGUF and (tp > 1 or adapters):
        name = "tp" if tp > 1 else "lora"
        raise ConfigError(
            f"{key}.{name}: is not supported for weights in GGUF; remove it, or give *.safetensors"
        )
