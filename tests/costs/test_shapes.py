"""Shapes against the parameter counts that the models' makers publish."""

from __future__ import annotations

import pytest

from prism.costs.catalog import cost_model
from prism.costs.gpus import gpu_spec
from prism.costs.shapes import MODELS, model_shape
from prism.errors import ConfigError

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
    assert {name: shape.parameters / 1e9 for name, shape in MODELS.items()} == pytest.approx(
        PUBLISHED_BILLIONS, rel=0.006
    )


def test_bytes_of_a_part() -> None:
    shape = model_shape("Llama-3.1-8B")
    assert shape.kv_token_bytes() == 131072
    assert shape.kv_token_bytes(4) == 32768
    assert shape.kv_token_bytes(16) == 16384  # one head at least
    assert shape.weight_bytes(2) * 2 == pytest.approx(shape.weight_bytes(), abs=2)


def test_names_are_found_with_and_without_their_maker() -> None:
    assert model_shape("llama-3.1-8b-instruct") is MODELS["meta-llama/Llama-3.1-8B"]
    assert model_shape("meta-llama/Llama-3.3-70B") is MODELS["meta-llama/Llama-3.3-70B-Instruct"]


def test_8_bit_weights_are_half_as_large_and_kv_stays() -> None:
    shape = model_shape("Qwen/Qwen3-32B-FP8")
    assert shape.name == "Qwen/Qwen3-32B-FP8"
    assert shape.weight_bytes() == model_shape("Qwen3-32B").weight_bytes() / 2
    assert shape.kv_token_bytes() == model_shape("Qwen3-32B").kv_token_bytes()
    assert model_shape("nvidia/Llama-3.1-8B-Instruct-FP8").parameters == pytest.approx(8.03e9, 0.01)


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
