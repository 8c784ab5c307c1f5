"""Corrections of what SGLang reads of models' configs, which all its processes do."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from sglang.srt.arg_groups import model_override_base
from sglang.srt.arg_groups.model_overrides import gemma2_gemma3  # noqa: F401 (which registers)
from sglang.srt.configs import model_config
from sglang.srt.configs.nemotron_h import NemotronHConfig
from sglang.srt.utils.hf_transformers import config as parsing
from transformers import PreTrainedConfig

from kvcached.engines.sglang.hybrid.overrides import overrides

# Names of transformers 5 for kinds of layers, with SGLang's.
_RENAMED = {"linear_attention": "mamba", "full_attention": "attention"}
_config_of = model_config.get_config
_text_config_of = parsing.get_hf_text_config
_kinds_of_layers = NemotronHConfig._resolve_layers_block_type
_hybrid_layer_ids = model_config.get_hybrid_layer_ids


def install() -> None:
    """Replaces SGLang's functions, before a config is read. Idempotent."""
    NemotronHConfig._resolve_layers_block_type = staticmethod(kinds_of_layers)
    model_config.get_config = config_of
    model_config.get_hybrid_layer_ids = layers_with_kv
    parsing.get_hf_text_config = text_config_of
    # SGLang gives windows of Gemma 3 no pool, since its test of those of Gemma 2 fails.
    for name in ("Gemma3ForCausalLM", "Gemma3nForCausalLM"):
        model_override_base._MODEL_OVERRIDE_FNS.pop(name, None)


def config_of(
    model: str,
    *,
    revision: str | None = None,
    model_override_args: Mapping[str, Any],
    **kwargs: Any,
) -> Any:
    """Returns the config of a model with `overrides`, and with the keys of the user's
    `--json-model-override-args` before them."""
    keys: dict[str, Any] = {}
    with contextlib.suppress(OSError):  # of a file that SGLang reads otherwise, or not at all
        keys = PreTrainedConfig.get_config_dict(model, revision=revision)[0]
    changed = overrides(keys) | dict(model_override_args)
    return _config_of(model, revision=revision, model_override_args=changed, **kwargs)


def kinds_of_layers(*args: Any) -> list[str]:
    """Returns SGLang's names of the layers in a config.json of Nemotron-H, which transformers 5
    saves by its own names."""
    return [_RENAMED.get(kind, kind) for kind in _kinds_of_layers(*args)]


def text_config_of(config: Any) -> Any:
    """Returns a model's text config. SGLang gives Gemma 4 the heads of its layers by the names that
    it reads only as a part of a whole model, and fails for the language model alone."""
    if config.model_type == "gemma4_text" and not hasattr(config, "swa_head_dim"):
        parsing._apply_gemma4_attention_overrides(SimpleNamespace(text_config=config))
    return _text_config_of(config=config)


def layers_with_kv(architectures: Any, config: Any) -> tuple[Any, Any]:
    """Returns the layers with windows and with full attention, without those that read the K and V
    of others (Gemma 3n and 4)."""
    first_shared = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", 0) or 0)
    windows, full = (
        None if layers is None else [layer for layer in layers if layer < first_shared]
        for layers in _hybrid_layer_ids(architectures, config)
    )
    return windows, full
