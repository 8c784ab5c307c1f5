"""Shapes against the parameter counts that the models' makers publish."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prism.errors import ConfigError
from prism_sim.costs.catalog import cost_model, cost_table, model_shape
from prism_sim.costs.checkpoint import read_shape
from prism_sim.costs.gpus import gpu_spec
from prism_sim.costs.roofline import roofline
from prism_sim.costs.shapes import CONFIGS, shape_named
from prism_sim.costs.table import TableCost

PUBLISHED_BILLIONS = {
    "meta-llama/Llama-3.2-1B": 1.24,
    "meta-llama/Llama-3.2-3B": 3.21,
    "meta-llama/Llama-3.1-8B": 8.03,
    "meta-llama/Llama-3.1-70B": 70.6,
    "meta-llama/Llama-3.3-70B-Instruct": 70.6,
    "meta-llama/Llama-2-7B": 6.74,
    "meta-llama/Llama-2-13B": 13.0,
    "meta-llama/Llama-2-70B": 69.0,
    "huggyllama/llama-7b": 6.74,
    "huggyllama/llama-13b": 13.0,
    "huggyllama/llama-30b": 32.5,
    "huggyllama/llama-65b": 65.3,
    "facebook/opt-6.7b": 6.66,
    "Qwen/Qwen3-0.6B": 0.596,
    "Qwen/Qwen3-1.7B": 1.72,
    "Qwen/Qwen3-4B": 4.02,
    "Qwen/Qwen3-8B": 8.19,
    "Qwen/Qwen3-14B": 14.8,
    "Qwen/Qwen3-32B": 32.8,
    "Qwen/Qwen2.5-1.5B": 1.54,
    "Qwen/Qwen2.5-7B": 7.62,
    "Qwen/Qwen2.5-14B": 14.8,
    "Qwen/Qwen2.5-32B": 32.8,
    "mistralai/Mistral-7B-v0.1": 7.24,
}


def test_every_shape_has_its_makers_parameter_count() -> None:
    assert {name: shape_named(name).parameters / 1e9 for name in CONFIGS} == pytest.approx(
        PUBLISHED_BILLIONS, rel=0.006
    )


def test_bytes_of_a_part() -> None:
    shape = model_shape("Llama-3.1-8B")
    assert shape.kv_token_bytes() == 131072
    assert shape.kv_token_bytes(4) == 32768
    assert shape.kv_token_bytes(16) == 16384  # one head at least
    assert shape.weight_bytes(2) * 2 == pytest.approx(shape.weight_bytes(), abs=2)


def test_names_are_found_with_and_without_their_maker() -> None:
    assert model_shape("llama-3.1-8b-instruct") is shape_named("meta-llama/Llama-3.1-8B")
    assert model_shape("meta-llama/Llama-3.3-70B") is shape_named(
        "meta-llama/Llama-3.3-70B-Instruct"
    )


def test_8_bit_weights_are_half_as_large_and_kv_stays() -> None:
    shape = model_shape("Qwen/Qwen3-32B-FP8")
    assert shape.name == "Qwen/Qwen3-32B-FP8"
    assert shape.weight_bytes() == model_shape("Qwen3-32B").weight_bytes() / 2
    assert shape.kv_token_bytes() == model_shape("Qwen3-32B").kv_token_bytes()
    assert model_shape("nvidia/Llama-3.1-8B-Instruct-FP8").parameters == pytest.approx(8.03e9, 0.01)


def test_fp8_kv_is_half_as_large_and_costs_half_the_reads() -> None:
    """Keeps the type of activations and states, which move between ranks and stay on them."""
    for name in ("Llama-3.1-8B", "Qwen3-32B-FP8"):
        shape, fp8 = model_shape(name), model_shape(name, "fp8_e5m2")
        assert 2 * fp8.kv_token_bytes() == shape.kv_token_bytes()
        assert fp8.weight_bytes() == shape.weight_bytes()
        own, halved = (roofline(gpu_spec("h100"), each, 2) for each in (shape, fp8))
        assert halved.dense_s == own.dense_s
        kept = [
            TableCost(each).decode_s(8, 80_000) - TableCost(each).decode_s(8, 0)
            for each in (own, halved)
        ]
        assert kept[1] == pytest.approx(kept[0] / 2)


def config(folder: Path, **fields: object) -> Path:
    base = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(base | fields))
    return folder


def test_a_folders_shape_is_that_of_its_config(tmp_path: Path) -> None:
    found = model_shape(str(config(tmp_path)))
    assert found.name == tmp_path.name
    assert found.geometry == model_shape("Llama-3.1-8B").geometry
    # the same geometry is served by the same measured table
    assert cost_table("h100", str(tmp_path)) is cost_table("h100", "Llama-3.1-8B")


def test_older_architectures_and_32_bit_weights(tmp_path: Path) -> None:
    gpt2 = {"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024}
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads")
    blank = dict.fromkeys((*names, "intermediate_size"))
    config(tmp_path, **blank, **gpt2, vocab_size=50257, torch_dtype="float32")
    found = read_shape(tmp_path)
    assert found.parameters == pytest.approx(124e6, rel=0.01)
    assert found.weight_bytes() == 4 * found.parameters
    assert found.kv_token_bytes() == 2 * 12 * 768 * 4


def test_what_is_null_or_left_open_has_its_default(tmp_path: Path) -> None:
    whole = read_shape(config(tmp_path))
    null = {"head_dim": None, "tie_word_embeddings": None, "quantization_config": None}
    for dtype in ({"torch_dtype": "auto"}, {"torch_dtype": None}, {"dtype": "bfloat16"}):
        assert read_shape(config(tmp_path, **null, **dtype)) == whole
    assert read_shape(config(tmp_path, num_key_value_heads=None)).kv_heads == 32


LFM2 = {"model_type": "lfm2", "layer_types": ["conv"] * 32, "max_position_embeddings": 99}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"num_local_experts": 8}, "has num_local_experts 8, which changes no llama model"),
        ({"intermediate_size": None}, "lacks intermediate_size; complete the file"),
        (
            LFM2,
            "lfm2 does not have a layer that keeps KV of all tokens, which the simulator does not",
        ),
        ({"hidden_size": "large"}, "hidden_size"),
        ({"hidden_size": 3}, "config.json has hidden_size 3 for 32 heads"),
        ({"intermediate_size": "16384"}, r'config.json has intermediate_size "16384", which is'),
        ({"num_key_value_heads": -1}, "has num_key_value_heads -1, which is not a whole number"),
        ({"head_dim": "x"}, 'has head_dim "x"'),
        ({"torch_dtype": "float31"}, 'has torch_dtype "float31", which is not one of float32'),
        ({"tie_word_embeddings": "x"}, 'has tie_word_embeddings "x", which is not true or false'),
        ({"quantization_config": "fp8"}, 'has quantization_config "fp8", which is not an object'),
        ({"text_config": 1}, "has text_config 1, which is not an object"),
    ],
)
def test_configs_without_a_shape_are_named(
    tmp_path: Path, fields: dict[str, object], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        read_shape(config(tmp_path, **fields))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: model_shape("gpt-5"), "model 'gpt-5': known models"),
        (lambda: gpu_spec("tpu"), "gpu 'tpu': known types"),
        (lambda: cost_model("h100", "Llama-3.1-8B", 3), "tp 3"),
    ],
)
def test_unknown_names_list_what_is_known(call: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        call()  # type: ignore[operator]
