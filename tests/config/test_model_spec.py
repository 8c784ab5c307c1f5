"""Geometry and sizes from a model's own files, per architecture."""

from __future__ import annotations

import json
from collections.abc import Container
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from safetensors.numpy import save_file

from kvcached import MLALayout
from prism.config.checks.memory_needs import grouped, layout_of, pools_of
from prism.errors import ConfigError
from prism.messages.model_spec import ModelSpec
from prism.models.files import ModelFiles, inspect_model
from tests.frontend.tiny_model import VOCAB_SIZE, make_model

BASE_PARAMETERS = VOCAB_SIZE * 32 + 32


LFM2 = {"model_type": "lfm2", "full_attn_idxs": [1]}
TYPES = ["sliding_attention", "full_attention"]


def geometry(files: ModelFiles) -> tuple[int, int, int, int]:
    return files.num_layers, files.pools.num_kv_heads, files.pools.head_dim, files.context_length


def model(directory: Path, **config: Any) -> Path:
    """Writes a model directory with exactly this config.json."""
    make_model(directory)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
GPT2 = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}
GEMMA = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
    },
}
QWEN = {
    **LLAMA,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_key_value_heads": 2,
    "head_dim": 24,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 512,
}
MLA = {
    "model_type": "minicpm3",
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
GEOMETRIES = [
    (LLAMA, (3, 4, 16, 2048)),
    ({**LLAMA, "num_key_value_heads": 1, "max_position_embeddings": 99}, (3, 1, 16, 99)),
    (QWEN, (3, 2, 24, 512)),
    (GPT2, (12, 12, 64, 1024)),
    ({**GPT2, "n_layer": 2, "n_head": 4, "n_embd": 40, "n_positions": 128}, (2, 4, 10, 128)),
    (GEMMA, (34, 4, 256, 131072)),
]


@pytest.mark.parametrize(("config", "expected"), GEOMETRIES)
def test_geometry(tmp_path: Path, config: dict[str, Any], expected: tuple[int, ...]) -> None:
    assert geometry(inspect_model(model(tmp_path / "m", **config), "key")) == expected


def test_sizes_follow_the_serving_dtype(tmp_path: Path) -> None:
    files = inspect_model(model(tmp_path / "m", **QWEN, tie_word_embeddings=True), "key")
    assert files.shape("float32", None)["token_bytes"] == 2 * 3 * 2 * 24 * 4
    assert files.weight_bytes("float32") == 2 * files.weight_bytes("bfloat16")


@pytest.mark.parametrize(
    ("tied", "parameters"),
    [(True, BASE_PARAMETERS), (False, BASE_PARAMETERS + VOCAB_SIZE * 32)],
)
def test_a_tied_head_is_not_counted_twice(tmp_path: Path, tied: bool, parameters: int) -> None:
    files = inspect_model(make_model(tmp_path / "m", tie_word_embeddings=tied), "key")
    assert files.parameters == parameters


def test_buffers_are_not_weights(tmp_path: Path) -> None:
    directory = make_model(tmp_path / "m")
    extra = {
        "h.0.attn.bias": np.zeros((1, 1, 128, 128), np.uint8),
        "gpt_neox.layers.0.attention.masked_bias": np.zeros((1, 1), np.uint8),
        "h.0.attn.c_attn.bias": np.zeros(96, np.float32),
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(8, np.float32),
    }
    save_file(extra, str(directory / "more.safetensors"))
    assert inspect_model(directory, "key").parameters == BASE_PARAMETERS + 96


def test_sharded_weights_are_read_through_their_index(tmp_path: Path) -> None:
    directory = make_model(tmp_path / "m")
    save_file({"x": np.zeros(10, np.float32)}, str(directory / "unlisted.safetensors"))
    index = {"weight_map": {"model.norm.weight": "model.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert inspect_model(directory, "key").parameters == BASE_PARAMETERS


@pytest.mark.parametrize("name", ["consolidated.safetensors", "adapter_model.safetensors"])
def test_copies_and_adapters_are_not_weights(tmp_path: Path, name: str) -> None:
    directory = make_model(tmp_path / "m")
    save_file({"x": np.zeros(10, np.float32)}, str(directory / name))
    assert inspect_model(directory, "key").parameters == BASE_PARAMETERS


def test_a_latent_is_one_head_for_all(tmp_path: Path) -> None:
    """Counts the copies of up-projections that engines keep: 4 heads of 8 + 8 by a rank of 16.
    They are weights."""
    files = inspect_model(make_model(tmp_path / "m", **MLA), "key")
    pools = files.pools
    assert (pools.num_kv_heads, pools.head_dim, pools.latent_rope_dim) == (1, 16 + 8, 8)
    assert files.token_bytes("bfloat16") == 2 * (16 + 8) * 2
    assert files.derived_bytes("bfloat16") == 2 * 16 * 4 * (8 + 8) * 2
    assert files.weight_bytes("bfloat16") == files.parameters * 2 + files.derived_bytes("bfloat16")
    spec = ModelSpec(name="m", path="", slo_ttft_s=1, slo_tpot_s=1, **files.shape("bfloat16", None))
    assert layout_of(spec) == MLALayout(2, 16, 8)


def test_a_window_that_engines_ignore_bounds_the_context(tmp_path: Path) -> None:
    mixed = make_model(tmp_path / "n", model_type="gemma2", head_dim=8, sliding_window=40)
    assert inspect_model(mixed, "key").context_length == 256
    assert inspect_model(mixed, "key", windows={"gemma2"}).context_length == 256
    assert inspect_model(mixed, "key", windows={"gemma3_text"}).context_length == 40


SHARED = {
    "model_type": "gemma3n_text",
    "num_kv_shared_layers": 1,
    "layer_types": ["full_attention"] * 2,
}


def test_layers_that_read_the_kv_of_others_keep_none(tmp_path: Path) -> None:
    spec = spec_of(make_model(tmp_path / "m", **SHARED))
    assert (spec.num_layers, spec.kv_layers) == (2, 1)
    assert layout_of(spec).num_layers == 1


def spec_of(directory: Path, window_pools: Container[str] = ()) -> ModelSpec:
    shape = inspect_model(directory, "key", window_pools).shape("float32", None)
    return ModelSpec(name="m", path="", slo_ttft_s=1, slo_tpot_s=1, **shape)


def test_windows_have_a_pool_where_engines_split_them(tmp_path: Path) -> None:
    config = {
        "model_type": "gemma3_text",
        "head_dim": 8,
        "sliding_window": 40,
        "layer_types": TYPES,
    }
    directory = make_model(tmp_path / "m", **config)
    whole, split = spec_of(directory), spec_of(directory, {"gemma3_text"})
    assert (whole.is_plain, split.is_plain) == (True, False)
    assert whole.token_bytes == 2 * split.token_bytes
    for chunk_tokens, kept_tokens in ((32, 40 + 40), (60, 40 + 60)):
        full, window = pools_of(split, chunk_tokens)
        assert (full.tokens, window.tokens) == (256, kept_tokens + 2 * split.block_tokens)
    assert full.layout == window.layout
    assert [pool.name for pool in pools_of(whole, 32)] == ["full"]


def test_windows_are_groups_where_they_share_blocks(tmp_path: Path) -> None:
    """Counts a window of 40 tokens, 60 of a step and a block, in whole blocks of 16 tokens."""
    window = {"head_dim": 8, "sliding_window": 40, "layer_types": [*TYPES[:1] * 5, *TYPES[1:]]}
    sizes = {"model_type": "gemma3_text", "num_hidden_layers": 6}
    split = spec_of(make_model(tmp_path / "m", **sizes, **window), {"gemma3_text"})
    spec = grouped(split, min)
    assert (spec.kv_layers, spec.window_groups) == (1, 5)
    [pool] = pools_of(spec, chunk_tokens=60)
    assert (pool.tokens, pool.layout) == (256 + 5 * 128, layout_of(split))


def test_states_are_groups_where_they_share_blocks(tmp_path: Path) -> None:
    """Counts a state of 64 numbers in each of two layers, more than a layer's KV of a block."""
    kinds = {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3}
    split = spec_of(make_model(tmp_path / "m", **LFM2 | kinds))
    assert split.state_bytes == 2 * 64 * 4
    spec = grouped(structs.replace(split, block_tokens=1), min)
    assert (spec.kv_layers, spec.state_groups) == (1, 2)
    blocks = 64 * 4 / split.token_bytes
    assert spec.block_tokens == ceil(blocks)
    [pool] = pools_of(spec, chunk_tokens=60)
    assert pool.tokens == 256 + 2 * spec.block_tokens


def test_a_state_is_counted_per_sequence(tmp_path: Path) -> None:
    """Counts a convolution of three inputs, of which two are kept."""
    spec = spec_of(make_model(tmp_path / "m", **LFM2))
    assert (spec.kv_layers, spec.num_layers) == (1, 2)
    full, state = pools_of(spec, chunk_tokens=32)
    assert (state.name, state.tokens, state.layout.block_tokens) == ("state", 1, 1)
    assert spec.state_bytes == 2 * 32 * 4 <= state.layout.token_bytes
    assert full.layout == layout_of(spec)


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({}, "float32"),
        ({"torch_dtype": None}, "float32"),
        ({"torch_dtype": "auto"}, "float32"),
        ({"torch_dtype": "float64"}, "float32"),
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "float16", "torch_dtype": None}, "float16"),
    ],
)
def test_a_config_may_leave_its_dtype_open(
    tmp_path: Path, config: dict[str, Any], dtype: str
) -> None:
    null = dict.fromkeys(("head_dim", "num_key_value_heads", "tie_word_embeddings", "text_config"))
    found = inspect_model(model(tmp_path / "m", **LLAMA, **null, **config), "key")
    assert (found.stored_dtype, geometry(found)) == (dtype, (3, 4, 16, 2048))
    nested = {**GEMMA, "text_config": {**GEMMA["text_config"], **config}}
    assert inspect_model(model(tmp_path / "n", **nested), "key").stored_dtype == dtype


DECI = {"model_type": "deci", "num_key_value_heads_per_layer": [2, 1]}


def remove(name: str) -> Any:
    return lambda directory: (directory / name).unlink()


def write(name: str, text: str) -> Any:
    return lambda directory: (directory / name).write_text(text)


def configure(**config: Any) -> Any:
    return lambda directory: make_model(directory, **config)


BROKEN = [
    (remove("tokenizer.json"), "does not have tokenizer.json; save the fast tokenizer there"),
    (remove("model.safetensors"), "does not have *.safetensors; save the weights in that format"),
    (write("config.json", "{"), "cannot read {directory}/config.json: Expecting"),
    (write("config.json", "[]"), "config.json is not a JSON object; repair the file"),
    (write("model.safetensors", "x"), "{directory}/model.safetensors is damaged or not complete: "),
    (
        write("model.safetensors.index.json", "{}"),
        "index.json is damaged ('weight_map'); download it again",
    ),
    (configure(architectures=["BertModel"]), "'BertModel', which does not generate text"),
    (configure(architectures=None), "names architecture 'none', which does not generate text"),
    (configure(num_hidden_layers=None), "config.json lacks num_hidden_layers; complete the file"),
    (configure(num_attention_heads=0), "config.json has num_attention_heads 0, which is not"),
    (configure(num_key_value_heads=-1), "config.json has num_key_value_heads -1, which is not"),
    (configure(head_dim="x"), 'config.json has head_dim "x", which is not a whole number'),
    (configure(dtype="float31"), 'config.json has dtype "float31", which is not one of float32'),
    (configure(tie_word_embeddings="x"), 'has tie_word_embeddings "x", which is not true or'),
    (configure(hidden_size=1), "config.json has hidden_size 1 for "),
    (configure(architectures=5), "config.json has architectures 5, which is not a list"),
    (configure(text_config=[1]), "config.json has text_config [1], which is not an object"),
    (
        configure(kv_lora_rank=512),
        "has kv_lora_rank 512, which changes no llama model; remove the key, or",
    ),
    (configure(**DECI), "has layers with different numbers of K and V heads"),
    (
        configure(model_type="bert"),
        'config.json has model_type "bert", a family whose sizes are not known',
    ),
]


@pytest.mark.parametrize(("damage", "message"), BROKEN)
def test_broken_files_are_named(tmp_path: Path, damage: Any, message: str) -> None:
    directory = make_model(tmp_path / "m")
    damage(directory)
    with pytest.raises(ConfigError) as caught:
        inspect_model(directory, "models[0].path")
    assert str(caught.value).startswith("models[0].path: ")
    assert message.format(directory=directory) in str(caught.value)
    assert "\n" not in str(caught.value)
