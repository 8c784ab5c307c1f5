"""Tiny models of several architectures, and the outputs of Hugging Face transformers for them."""

from __future__ import annotations

import dataclasses
import json
import random
import warnings
import zlib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvcached.engines.sglang.hybrid.overrides import WINDOW_POOLS
from prism.engines.sglang.platform.supported_models import WINDOWS
from prism.messages.model_spec import ModelSpec
from prism.models import tiny
from prism.models.files import inspect_model
from prism.models.hugging_face import import_transformers
from prism.models.smollm2 import SmolLM2
from prism.models.store import Recipe, default_directory, prepare
from tests.families import TINY, YARN

# Mixture of experts, which SGLang's loaders fuse.
MOE = tiny.TinyModel(
    name="tiny-qwen3-moe",
    model_type="qwen3_moe",
    summary="Qwen3-MoE, random weights",
    context_length=512,
    settings={
        "vocab_size": 1408,
        "hidden_size": 192,
        "intermediate_size": 384,
        "moe_intermediate_size": 128,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    },
)
# Layers with a window of 32 tokens among full-attention layers; the embeddings are also the head.
GEMMA3 = tiny.TinyModel(
    name="tiny-gemma3",
    model_type="gemma3_text",
    summary="Gemma 3, random weights",
    context_length=512,
    settings={
        "vocab_size": 1152,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 48,
        "query_pre_attn_scalar": 48,
        "sliding_window": 32,
        "sliding_window_pattern": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    },
)
# The same with heads that vLLM's kernels compute.
GEMMA3_32 = dataclasses.replace(
    GEMMA3,
    name="tiny-gemma3-32",
    settings=GEMMA3.settings | {"head_dim": 32, "query_pre_attn_scalar": 32},
)
# Latent attention.
MLA = tiny.TinyModel(
    name="tiny-deepseek-v2",
    model_type="deepseek_v2",
    summary="DeepSeek-V2, random weights",
    context_length=512,
    settings={
        "vocab_size": 1152,
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 2,
        "moe_layer_freq": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "kv_lora_rank": 64,
        "q_lora_rank": None,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        **YARN,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    },
)


def family(
    name: str, kind: str, settings: dict[str, Any], context_length: int = 512
) -> tiny.TinyModel:
    """Returns a tiny model, which is made again when its settings change."""
    recipe = zlib.crc32(json.dumps(settings).encode())
    return tiny.TinyModel(name, kind, "", context_length, settings=settings, recipe=recipe)


# Models with states, and heads that vLLM's kernels compute: the gated delta rule, and Mamba 2.
_TWO: dict[str, Any] = {"num_key_value_heads": 2}
DELTA_NET = family("tiny-qwen3-next", "qwen3_next", TINY["qwen3_next"] | _TWO)
MAMBA = family(
    "tiny-granite-4",
    "granitemoehybrid",
    TINY["granitemoehybrid"] | _TWO | {"hidden_size": 192, "mamba_d_head": 64},
)
# Latents that vLLM's kernel computes.
MLA_512 = family(
    "tiny-deepseek-v2-512",
    "deepseek_v2",
    MLA.settings | {"kv_lora_rank": 512, "qk_rope_head_dim": 64},
)
# Five layers of six have a window of 32 tokens, as in Gemma 3.
LONG_GEMMA3 = family(
    "long-gemma3",
    "gemma3_text",
    TINY["gemma3_text"]
    | {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "max_position_embeddings": 2048,
    },
    context_length=2048,
)
# DeepSeek-V3 without YaRN, as Moonlight is.
PLAIN_MLA = family(
    "plain-deepseek-v3",
    "deepseek_v3",
    {key: value for key, value in TINY["deepseek_v3"].items() if key not in YARN},
)
FAMILIES = [family(f"family-{kind}", kind, settings) for kind, settings in TINY.items()]
# One that answers in sentences, and the same again under another name.
SMOLLM2, AGAIN = SmolLM2(), SmolLM2(name="smollm2-135m-again")
OTHERS = (
    *(MOE, GEMMA3, GEMMA3_32, LONG_GEMMA3, MLA, MLA_512),
    *(PLAIN_MLA, DELTA_NET, MAMBA, SMOLLM2, AGAIN),
)
RECIPES: dict[str, Recipe] = {
    model.name: model for model in (*tiny.TINY_MODELS, *FAMILIES, *OTHERS)
}
Kept = Callable[[Any], Any]
TIE = 1e-3  # of `largest_gap`: less is rounding
LLAMA, QWEN3, GPT2 = tiny.LLAMA.name, tiny.QWEN3.name, tiny.GPT2.name


@lru_cache
def path_of(name: str) -> Path:
    return prepare(RECIPES[name], default_directory(), lambda _text: None)


def spec_of(name: str, context_length: int | None = None) -> ModelSpec:
    files = inspect_model(path_of(name), name, WINDOW_POOLS, WINDOWS)
    shape = files.shape("float32", context_length)
    return ModelSpec(name=name, path=str(path_of(name)), slo_ttft_s=2.0, slo_tpot_s=0.2, **shape)


def prompts(name: str, count: int, lengths: tuple[int, int], seed: int = 1) -> list[list[int]]:
    """Returns random token ids of the model's vocabulary, without its special tokens."""
    rng = random.Random(f"{name}/{seed}")
    top = json.loads((path_of(name) / "config.json").read_bytes())["vocab_size"]
    return [[rng.randrange(16, top) for _ in range(rng.randint(*lengths))] for _ in range(count)]


@lru_cache(maxsize=1)
def _network(name: str) -> Any:
    return network(path_of(name))


def network(path: Path, **options: Any) -> Any:
    """Returns transformers' model of the files in `path`, read with its `options`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own, of its imports
        import torch

        torch.set_num_threads(1)
        auto = import_transformers().AutoModelForCausalLM
        return auto.from_pretrained(path, dtype=torch.float32, **options).eval()


def greedy(name: str, prompt: list[int], tokens: int) -> list[int]:
    """Returns `tokens` greedy tokens after `prompt`, end-of-sequence tokens included."""
    import torch

    network, output = _network(name), list[int]()
    ids, cache = torch.tensor([prompt]), None
    with torch.inference_mode():
        while len(output) < tokens:
            result = network(ids, past_key_values=cache, use_cache=True)
            output.append(int(result.logits[0, -1].argmax()))
            ids, cache = torch.tensor([[output[-1]]]), result.past_key_values
    return output


def largest_gap(name: str, prompt: list[int], output: list[int]) -> float:
    """Returns the largest difference between a largest logit and an output token's logit.

    Each token is judged given the tokens before it. 0 for an exact greedy output. Over hundreds of
    tokens two logits sometimes tie up to rounding, which depends on the batch. A wrong KV page
    shows as a gap of the logits' spread.
    """
    return gap_of(_network(name), prompt, output)


def gap_of(network: Any, prompt: list[int], output: list[int], kept: Kept | None = None) -> float:
    """Returns the largest gap (see `largest_gap`) by transformers' model `network`. `kept` returns
    what a cache keeps of K or V (None: all)."""
    import torch

    ids = torch.tensor([prompt + output[:-1]])
    cache = cache_of(network.config, kept) if kept else None
    with torch.inference_mode():
        logits = network(ids, past_key_values=cache).logits[0, len(prompt) - 1 :]
        chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
        return float((logits.max(dim=1).values - chosen).max())


def cache_of(config: Any, kept: Kept) -> Any:
    """Returns a cache of transformers that keeps `kept` of K and V, or of latents."""
    stock: Any = import_transformers().DynamicCache

    class RoundingCache(stock):  # type: ignore[misc]
        def update(self, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
            return super().update(kept(k), kept(v), *args, **kwargs)

    return RoundingCache(config=config)


def nearest(dtype: str) -> Kept:
    """Returns a function that rounds to numbers of `dtype`."""
    import torch

    return lambda states: states.to(getattr(torch, dtype)).to(states.dtype)


def towards_zero(dtype: str) -> Kept:
    """Returns a function that rounds to numbers of `dtype` (FP8) without increasing any."""
    import torch

    def kept(states: Any) -> Any:
        small = states.to(getattr(torch, dtype))
        over = small.to(states.dtype).abs() > states.abs()
        codes = small.view(torch.uint8) - over.to(torch.uint8)
        return codes.view(small.dtype).to(states.dtype)

    return kept
