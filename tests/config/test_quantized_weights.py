"""Quantised weights: their method, their size, and the engines that load them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from prism.config.checks.memory_needs import EngineTraits
from prism.config.checks.quantized_weights import check_options, check_quantization
from prism.engines.sglang.platform.supported_models import quantizations, refuses
from prism.engines.sglang.platform.weight_formats import syncs
from prism.errors import ConfigError
from prism.models.files import inspect_model
from tests.frontend.tiny_model import make_model, make_whole_model

SGLANG = EngineTraits(quantized=frozenset({"awq", "fp8"}))
FP8 = {"quantization_config": {"quant_method": "fp8"}}


@pytest.mark.parametrize(
    ("config", "method"),
    [
        (FP8, "fp8"),
        ({"audio_config": FP8}, "fp8"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"quantization_config": None}, ""),
        ({}, ""),
    ],
)
def test_the_method_of_a_config(tmp_path: Path, config: dict[str, Any], method: str) -> None:
    assert inspect_model(make_model(tmp_path / "m", **config), "key").quantization == method


def test_modelopt_has_a_file(tmp_path: Path) -> None:
    path = make_model(tmp_path / "m")
    (path / "hf_quant_config.json").write_text("{}")
    assert inspect_model(path, "key").quantization == "modelopt"


def test_stored_bytes_are_what_an_engine_holds(tmp_path: Path) -> None:
    """Loads tensors of half precision in the engine's dtype, and all others as they are."""
    path = make_model(tmp_path / "m", **FP8)
    before = inspect_model(path, "key")
    more = {"a": np.zeros(100, np.int32), "b": np.zeros(50, np.uint8), "c": np.zeros(8, np.float16)}
    save_file(more, str(path / "more.safetensors"))
    files = inspect_model(path, "key")
    assert files.weight_bytes("float32") == before.weight_bytes("float32") + 400 + 50 + 32
    assert files.weight_bytes("float16") == before.weight_bytes("float16") + 400 + 50 + 16


@pytest.mark.parametrize(
    ("method", "traits", "on_gpus", "message"),
    [
        ("fp8", SGLANG, False, "quantized by fp8, whose kernels need GPUs: give GPUs as devices,"),
        ("gguf", SGLANG, True, "which its engines do not load: give weights of one of awq, fp8,"),
        ("fp8", EngineTraits(), True, "which its engines do not load: give it another adapter,"),
    ],
)
def test_weights_that_engines_cannot_load_are_refused(
    method: str, traits: EngineTraits, on_gpus: bool, message: str
) -> None:
    check_quantization("fp8", Path("m"), "models[0].path", SGLANG, on_gpus=True)
    with pytest.raises(ConfigError) as caught:
        check_quantization(method, Path("m"), "models[0].path", traits, on_gpus=on_gpus)
    assert str(caught.value).startswith("models[0].path: m has weights quantized by ")
    assert message in str(caught.value)


@pytest.mark.sglang
def test_sglang_has_the_methods() -> None:
    plain = {"awq", "compressed-tensors", "fp8", "gptq", "modelopt", "mxfp4"}
    assert quantizations() == plain | {"bitsandbytes", "gguf"}


@pytest.mark.parametrize(
    ("method", "dtype", "options", "message"),
    [
        ("gguf", "bfloat16", {"tp": 2}, "k.tp: is not supported for weights of gguf; remove it,"),
        ("bitsandbytes", "float16", {"adapters": True}, "k.lora: is not supported for weights of"),
        ("bitsandbytes", "float32", {}, "k.dtype: bitsandbytes does not compute in float32;"),
    ],
)
def test_options_of_blocks(method: str, dtype: str, options: dict[str, Any], message: str) -> None:
    check_options("fp8", "k", "float32", tp=2, adapters=True)
    check_options(method, "k", "bfloat16", tp=1, adapters=False)
    with pytest.raises(ConfigError) as caught:
        check_options(method, "k", dtype, **{"tp": 1, "adapters": False, **options})
    assert str(caught.value).startswith(message)


@pytest.mark.sglang
def test_weights_of_bitsandbytes_that_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def why(**described: Any) -> str:
        section = {"quant_method": "bitsandbytes", **described}
        return refuses(make_whole_model(tmp_path / "m", quantization_config=section))

    assert "needs the package bitsandbytes; run pip install" in why()
    (tmp_path / "bitsandbytes.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert "_proj.weight not quantized, but SGLang expects the contrary by llm_int8_s" in why()
    assert why(llm_int8_skip_modules=["model.layers.0", "mlp", "self_attn"]) == ""
    assert "has bnb_4bit_quant_storage 'bfloat16', but SGLang reads uint8" in (
        why(bnb_4bit_quant_storage="bfloat16")
    )
    section = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    assert syncs({"quantization_config": section})
    assert not syncs({"quantization_config": {**section, "load_in_8bit": False}})
    gemma = {"model_type": "gemma", "architectures": ["GemmaForCausalLM"], "head_dim": 8}
    made = make_model(tmp_path / "g", **gemma, quantization_config=section)
    assert "which is served for gemma3_text, llama, mistral, qwen2, qwen3;" in refuses(made)
