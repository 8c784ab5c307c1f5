"""Shapes that are read from a config.json, against transformers' models of each family."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassError

from kvcached.errors import InvalidArgumentError
from kvcached.layouts.attention import Latent
from kvcached.models import shape_of_config
from kvcached.models.families import FAMILIES
from prism.models.hugging_face import import_transformers
from tests.families import TINY

# torch deprecates a decorator that GPT-BigCode uses.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*torch.jit.script")]

transformers = import_transformers()

import torch  # noqa: E402

TOKENS = 7  # fewer than any window
# Families without a class in transformers: their models come with code.
FOREIGN = {"deci", "kimi_k2", "nemotron-nas"}


@lru_cache
def made(kind: str) -> tuple[dict[str, Any], Any]:
    """Returns the saved config.json of a tiny model, and the model."""
    config = transformers.AutoConfig.for_model(kind, **TINY[kind], pad_token_id=0)
    torch.manual_seed(1)
    network = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    return json.loads(config.to_json_string()), network


def test_every_family_has_a_model_here() -> None:
    assert set(TINY) | FOREIGN == set(FAMILIES)


@pytest.mark.parametrize("kind", TINY)
def test_parameters_are_those_of_transformers(kind: str) -> None:
    config, network = made(kind)
    expected = sum(tensor.numel() for tensor in network.parameters())
    assert shape_of_config(config).parameters == expected


@pytest.mark.parametrize("kind", TINY)
def test_a_config_may_omit_what_is_the_default(kind: str) -> None:
    defaults = transformers.AutoConfig.for_model(kind).to_dict()
    for name, value in FAMILIES[kind].defaults.items():
        assert value is None or defaults.get(name, value) in (value, None), name


@pytest.mark.parametrize("kind", TINY)
def test_a_key_that_is_left_out_is_named_or_has_its_default(kind: str) -> None:
    for name in TINY[kind]:
        left = {key: value for key, value in TINY[kind].items() if key != name}
        try:
            shape = shape_of_config({"model_type": kind, **left})
        except InvalidArgumentError:
            continue
        try:
            config = transformers.AutoConfig.for_model(kind, **left, pad_token_id=0)
            with torch.device("meta"):
                network = transformers.AutoModelForCausalLM.from_config(config)
        except (TypeError, ValueError, StrictDataclassError):
            continue  # transformers cannot do without it
        expected = sum(tensor.numel() for tensor in network.parameters())
        assert (shape.parameters, shape.tied) == (expected, config.tie_word_embeddings), name


@pytest.mark.parametrize("kind", sorted(set(TINY) - {"deepseek_v32"}))
def test_a_token_keeps_what_transformers_caches(kind: str) -> None:
    """Counts latent attention by its latent, which transformers expands."""
    config, network = made(kind)
    shape = shape_of_config(config)
    with torch.inference_mode():
        cache = network(torch.arange(3, 3 + TOKENS)[None], use_cache=True).past_key_values
    kept, state = numbers(cache)
    if any(isinstance(layer.kv, Latent) for layer in shape.layers):
        rank, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
        assert shape.kv_token_bytes(1) == len(shape.layers) * (rank + rope)
    else:
        assert shape.kv_token_bytes(1) * TOKENS == kept
    recurrent = sum(layer.state.recurrent for layer in shape.layers if layer.state)
    assert recurrent == state


def numbers(cache: Any) -> tuple[int, int]:
    """Returns the numbers of K and V in a cache, and those of recurrent states."""
    kept = state = 0
    for layer in cache.layers:
        for name in ("keys", "values"):
            tensor = getattr(layer, name, None)
            kept += 0 if tensor is None else tensor.numel()
        recurrent = getattr(layer, "recurrent_states", None)
        found = recurrent.values() if isinstance(recurrent, Mapping) else [recurrent]
        state += sum(tensor.numel() for tensor in found if tensor is not None)
    return kept, state
