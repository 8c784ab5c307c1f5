"""Check of the KV cache's type: whether the checkpoint and the adapter's engines allow it."""

from __future__ import annotations

from prism.config.checks.memory_needs import EngineTraits
from prism.errors import ConfigError
from prism.models.files import ModelFiles
from prism.models.kv_scheme import FP8

AUTO = "auto"
# Values of `kv_cache_dtype`, by SGLang's names, and the dtypes of kvcached's layouts.
KV_CACHE_DTYPES = {"bf16": "bfloat16", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
KV_NAMES = {dtype: name for name, dtype in KV_CACHE_DTYPES.items()}
_OF_SCALES = "fp8_e4m3"


def kv_cache_dtype(
    wanted: str, dtype: str, files: ModelFiles, key: str, traits: EngineTraits
) -> str:
    """Returns the dtype of a model's KV cache. AUTO is that of the checkpoint's scheme, or else the
    model's. Raises ConfigError for one that engines do not compute, or that differs from the
    scheme."""
    if files.kv_scheme not in ("", FP8) or (files.kv_scheme and files.pools.latent_rope_dim):
        kept = files.kv_scheme if files.kv_scheme != FP8 else "scales of an FP8 latent"
        raise ConfigError(
            f"{key}.path: its files have {kept}, which engines do not compute; give other files"
        )
    if files.kv_scheme and wanted not in (AUTO, _OF_SCALES):
        raise ConfigError(
            f"{key}.kv_cache_dtype: {wanted} cannot be combined with files whose KV is {_OF_SCALES}"
            " with scales; leave the key out"
        )
    name = _OF_SCALES if files.kv_scheme else wanted
    found = KV_CACHE_DTYPES.get(name, dtype)
    is_latent = files.pools.latent_rope_dim is not None
    others = traits.kv_dtypes if traits.latent_attention or not is_latent else ()
    if found != dtype and name not in others:
        known = ", ".join((AUTO, *others))
        raise ConfigError(
            f"{key}.kv_cache_dtype: its engines do not serve {name}; choose one of {known}"
        )
    return found


def check_attention(
    kv_dtype: str, backend: str | None, key: str, traits: EngineTraits, *, latent: bool
) -> None:
    """Raises ConfigError if an attention backend on GPUs does not read KV of this dtype. REQUIRES:
    the dtype is not the model's."""
    name = KV_NAMES[kv_dtype]
    able = traits.latent_attention if latent else traits.kv_dtypes[name]
    if backend is not None and backend not in able:
        raise ConfigError(
            f"{key}.kv_cache_dtype: engine.attention_backend {backend} does not read {name} KV; set"
            f" it to {' or '.join(sorted(able))}, or leave it out"
        )
