"""Layouts from models' config.json, and `kvctl layout`."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvcached import Heads, HybridLayout, Layout, MixedLayout, MLALayout
from kvcached.errors import InvalidArgumentError
from kvcached.layouts.base import DTYPE_BYTES
from kvcached.models import layout_of_config, shape_of_config
from kvcached.tools.commands import app

PAGE = 2 << 20
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
GEMMA3 = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "sliding_window": 1024,
    },
}
GEMMA = GEMMA3["text_config"]
DEEPSEEK_V3 = {
    **LLAMA,
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
}
LFM2 = {**LLAMA, "model_type": "lfm2", "full_attn_idxs": [3]}
DEEPSEEK_V32 = {
    **DEEPSEEK_V3,
    "model_type": "deepseek_v32",
    "index_topk": 2048,
    "index_n_heads": 64,
    "index_head_dim": 128,
}


def test_heads() -> None:
    assert layout_of_config(LLAMA) == Layout(32, 8, 128)
    assert layout_of_config({**LLAMA, "head_dim": 64}) == Layout(32, 8, 64)
    mha = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert layout_of_config(mha) == Layout(32, 32, 128)
    mqa = {**LLAMA, "num_key_value_heads": 1}
    assert layout_of_config(mqa) == Layout(32, 1, 128)
    gpt2 = {"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768}
    gpt2 |= {"torch_dtype": "float32"}
    assert layout_of_config(gpt2, block_tokens=1) == Layout(
        12, 12, 64, dtype="float32", block_tokens=1
    )
    by_layer = {**LLAMA, "model_type": "deci", "num_hidden_layers": 3}
    by_layer |= {"num_key_value_heads_per_layer": [4, 2, 1]}
    expected = MixedLayout((Heads(4, 128), Heads(2, 128), Heads(1, 128)))
    assert layout_of_config(by_layer) == expected


def test_a_multimodal_model_may_be_tied_at_the_top() -> None:
    nested = {"text_config": LLAMA, "tie_word_embeddings": True}
    assert (shape_of_config(nested).tied, shape_of_config({"text_config": LLAMA}).tied) == (1, 0)


def test_a_latent_and_another_dtype() -> None:
    assert layout_of_config(DEEPSEEK_V3) == MLALayout(61, 512, 64)
    eighth = layout_of_config(DEEPSEEK_V3, dtype="float8_e4m3fn")
    assert eighth.token_bytes == 61 * 576


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3fn"])
def test_an_index_has_the_same_bytes_in_any_dtype(dtype: str) -> None:
    """Counts 128 numbers of FP8 and a scale in float32, as SGLang keeps them."""
    layout, latent = (layout_of_config(each, dtype) for each in (DEEPSEEK_V32, DEEPSEEK_V3))
    assert isinstance(layout, MLALayout)
    assert layout.index_bytes == 132
    assert layout.token_bytes == latent.token_bytes + 61 * 132
    assert layout.token_bytes == shape_of_config(DEEPSEEK_V32).kv_token_bytes(DTYPE_BYTES[dtype])
    assert [part.name for part in layout.parts[:3]] == ["latent", "index", "latent"]


def test_ranks_divide_heads_and_have_the_same_latent() -> None:
    assert layout_of_config(LLAMA, ranks=4) == Layout(32, 2, 128)
    assert layout_of_config(LLAMA, ranks=16) == Layout(32, 1, 128)
    assert layout_of_config(DEEPSEEK_V3, ranks=8) == layout_of_config(DEEPSEEK_V3)
    with pytest.raises(InvalidArgumentError, match="8 KV heads cannot be shared by 3 ranks"):
        layout_of_config(LLAMA, ranks=3)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"sliding_window_pattern": 6},
        {"layer_types": [("sliding" if (i + 1) % 6 else "full") + "_attention" for i in range(62)]},
    ],
)
def test_windows_of_gemma(changed: dict[str, Any]) -> None:
    layout = layout_of_config({"text_config": {**GEMMA3["text_config"], **changed}})
    assert isinstance(layout, HybridLayout)
    full, window = layout.groups
    assert full.layers == tuple(range(5, 62, 6))
    assert (window.window_tokens, len(window.layers)) == (1024, 52)
    assert layout.token_bytes == 62 * 2 * 16 * 128 * 2
    # 128 Ki tokens: 10 GiB of full attention, and a window that no longer grows.
    need = layout.need_bytes(128 << 10, PAGE)
    assert need == 257 * full.layout.quantum_bytes(PAGE) + 3 * window.layout.quantum_bytes(PAGE)
    assert need < 0.2 * Layout(62, 16, 128).need_bytes(128 << 10, PAGE)


def test_windows_of_others() -> None:
    mistral = layout_of_config({**LLAMA, "model_type": "mistral", "sliding_window": 4096})
    assert [(g.name, g.window_tokens, len(g.layers)) for g in mistral.groups] == [
        ("window", 4096, 32)
    ]
    qwen = {**LLAMA, "model_type": "qwen2", "sliding_window": 4096, "max_window_layers": 28}
    assert layout_of_config(qwen) == Layout(32, 8, 128)
    used = layout_of_config({**qwen, "use_sliding_window": True})
    assert used.group("window").layers == (28, 29, 30, 31)
    gemma2 = layout_of_config({**LLAMA, "model_type": "gemma2", "sliding_window": 4096})
    assert gemma2.group("full").layers == tuple(range(1, 32, 2))


PUBLISHED: dict[str, tuple[dict[str, Any], float]] = {
    "MiniCPM3-4B, without v_head_dim": (
        {
            "model_type": "minicpm3",
            "hidden_size": 2560,
            "intermediate_size": 6400,
            "num_attention_heads": 40,
            "num_key_value_heads": 40,
            "num_hidden_layers": 62,
            "kv_lora_rank": 256,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "vocab_size": 73448,
            "max_position_embeddings": 32768,
        },
        4.07,
    ),
    "Qwen3-Coder-30B, with a shared expert of size 0": (
        {
            "model_type": "qwen3_moe",
            "hidden_size": 2048,
            "intermediate_size": 5472,
            "moe_intermediate_size": 768,
            "shared_expert_intermediate_size": 0,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "num_hidden_layers": 48,
            "head_dim": 128,
            "vocab_size": 151936,
            "max_position_embeddings": 262144,
        },
        30.53,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_have_their_makers_parameters(name: str) -> None:
    config, billions = PUBLISHED[name]
    assert shape_of_config(config).parameters / 1e9 == pytest.approx(billions, abs=0.01)


def test_llama_4_has_chunks_where_it_has_rotary_positions() -> None:
    scout = {**LLAMA, "model_type": "llama4_text", "num_local_experts": 16}
    scout |= {"intermediate_size_mlp": 16384, "no_rope_layers": []}
    windows = [layer.window_tokens for layer in shape_of_config(scout).layers]
    assert windows == [8192, 8192, 8192, None] * 8


def test_a_pattern_may_be_letters() -> None:
    exaone = {**LLAMA, "model_type": "exaone4", "sliding_window_pattern": "LLLG"}
    layout = layout_of_config(exaone)
    assert isinstance(layout, HybridLayout)
    assert layout.group("full").layers == tuple(range(3, 32, 4))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({}, "model_type"),
        (
            {**LLAMA, "model_type": "lama"},
            'has model_type "lama", a family whose sizes are not known',
        ),
        ({**LLAMA, "num_hidden_layers": "many"}, "num_hidden_layers"),
        ({**DEEPSEEK_V3, "qk_rope_head_dim": None}, "qk_rope_head_dim"),
        ({**GEMMA, "sliding_window": "wide"}, "sliding_window"),
        ({**GEMMA, "layer_types": ["full_attention"] * 3}, "layer_types"),
        ({**GEMMA, "layer_types": ["linear_attention"] * 62}, "linear_attention"),
        ({**LLAMA, "layer_types": ["sliding_attention"] * 32}, "layer_types"),
        ({**LLAMA, "hidden_size": None}, "hidden_size"),
        ({**LLAMA, "kv_lora_rank": 512}, "has kv_lora_rank 512, which changes no llama model"),
        ({**LLAMA, "model_type": "mamba2"}, "mamba2"),
        (LFM2 | {"block_ffn_dim_multiplier": float("nan")}, "a positive number"),
        ({**LLAMA, "model_type": "nemotron-nas", "block_configs": [{}]}, "1 block_configs for 32"),
        ({**GEMMA, "model_type": "gemma3n_text", "num_kv_shared_layers": 99}, "shared_layers 99"),
        ({**GEMMA, "model_type": "gemma3n_text", "intermediate_size": [-5] * 62}, "at least 0"),
    ],
)
def test_what_is_missing_is_named(config: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgumentError, match=says):
        layout_of_config(config)


def kvctl_layout(path: Path, config: object, *arguments: str) -> Any:
    (path / "config.json").write_text(json.dumps(config))
    command = ["layout", str(path), "--device-size", "80GiB", *arguments]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.output) if "--json" in arguments else done.output


def test_kvctl_compares_arrangements(tmp_path: Path) -> None:
    few = kvctl_layout(tmp_path, LLAMA, "--models", "8", "--json")
    assert [row["arrangement"] for row in few if row["taken"]] == ["per_layer"]
    many = kvctl_layout(tmp_path, LLAMA, "--models", "24", "--json")
    (taken,) = [row for row in many if row["taken"]]
    assert (taken["arrangement"], taken["quantum_bytes"]) == ("block_interleaved", PAGE)
    assert taken["request_bytes"] == 257 * PAGE
    assert many[0]["quanta_share"] == pytest.approx(24 * 128 / 80 / 1024)
    groups = kvctl_layout(tmp_path, GEMMA3, "--json", "--dtype", "float8_e5m2")
    assert [row["group"] for row in groups] == ["full"] * 3 + ["window"] * 3
    assert groups[0]["token_bytes"] == 10 * 2 * 16 * 128


def test_kvctl_layout_for_people(tmp_path: Path) -> None:
    said = kvctl_layout(tmp_path, DEEPSEEK_V3, "--models", "8").splitlines()
    assert len(said) == 5
    (taken,) = [line for line in said if line.startswith("->")]
    assert "block_interleaved" in taken
    assert "0.5%" in taken
    assert "138 MiB" in taken
    assert said[-1].startswith("all layers: block_interleaved: a quantum of")


def test_kvctl_layout_refuses_what_is_no_config(tmp_path: Path) -> None:
    for text in ("{", "[]"):
        (tmp_path / "config.json").write_text(text)
        command = ["layout", str(tmp_path), "--device-size", "80GiB"]
        with pytest.raises(InvalidArgumentError, match=r"pass a config\.json"):
            CliRunner().invoke(app, command, catch_exceptions=False)


def test_a_damaged_config_is_refused_by_name_or_means_something() -> None:
    """Covers any value under any key that is read."""
    sliding = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
    keys = ("dtype", "torch_dtype", "v_head_dim", "num_key_value_heads_per_layer", "layer_types")
    keys += ("sliding_window_pattern", "qk_rope_head_dim", "text_config", "model_type")
    values = (None, True, -1, 0, 1.5, 2**70, 10**5000, "", "x", [], ["x"], [1], {}, {"x": 1})
    for config in (LLAMA, LLAMA | sliding, GEMMA3["text_config"], DEEPSEEK_V3):
        assert isinstance(config, dict)
        for key in {*config, *keys}:
            for value in values:
                with contextlib.suppress(InvalidArgumentError):
                    layout_of_config({**config, key: value})
