"""models[].kv_cache_dtype: its values, quantized KV in checkpoints, and engines that read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

from prism.config.checks.kv_cache import check_attention, kv_cache_dtype
from prism.config.checks.memory_needs import EngineTraits
from prism.config.resolve import load
from prism.config.schema.cluster_config import ClusterConfig
from prism.engines.sglang.adapter import traits
from prism.engines.sglang.platform.supported_models import (
    SERVED,
    causal_class,
    loads_kv_scales,
    refuses,
)
from prism.errors import ConfigError
from prism.models.files import ModelFiles, inspect_model
from prism.models.kv_scheme import FP8, kv_scheme_of
from tests.config.test_model_spec import MLA
from tests.frontend.tiny_model import make_model, make_whole_model

STATIC: dict[str, Any] = {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": False}
SCALES = ("model.layers.0.self_attn.k_scale", "model.layers.0.self_attn.v_scale")


@pytest.mark.parametrize(
    ("method", "described", "names", "scheme"),
    [
        ("", {}, (), ""),
        ("fp8", {}, (), ""),
        ("fp8", {}, SCALES, FP8),
        ("fp8", {}, ("model.layers.0.self_attn.k_proj.k_scale",), FP8),
        ("fp8", {}, ("model.layers.0.self_attn.k_proj.weight_scale",), ""),
        ("fp8", {"kv_cache_quant_algo": "FP8"}, (), FP8),
        ("compressed-tensors", {"kv_cache_scheme": None}, (), ""),
        ("compressed-tensors", {"kv_cache_scheme": STATIC}, SCALES, FP8),
        ("modelopt", {"kv_cache_quant_algo": "FP8"}, SCALES, FP8),
        ("modelopt", {"kv_cache_quant_algo": None}, (), ""),
        ("modelopt", {"kv_cache_scheme": STATIC}, SCALES, FP8),
        # What SGLang ignores, or computes otherwise.
        ("", {}, SCALES, "scales of K and V without a scheme"),
        ("awq", {}, SCALES, "scales of K and V without a scheme"),
        ("modelopt", {"kv_cache_quant_algo": "NVFP4"}, (), 'kv_cache_quant_algo "NVFP4"'),
        ("fp8", {"kv_cache_scheme": "static"}, SCALES, 'kv_cache_scheme "static"'),
        (
            "compressed-tensors",
            {"kv_cache_scheme": STATIC | {"type": "int"}},
            SCALES,
            'kv_cache_scheme {"type": "int"',
        ),
        (
            "compressed-tensors",
            {"kv_cache_scheme": STATIC | {"dynamic": True}},
            (),
            'kv_cache_scheme {"type": "float"',
        ),
        (
            "compressed-tensors",
            {"kv_cache_scheme": STATIC | {"strategy": "attn_head"}},
            SCALES,
            'kv_cache_scheme {"type": "float"',
        ),
    ],
)
def test_the_scheme_of_a_checkpoint(
    method: str, described: dict[str, Any], names: tuple[str, ...], scheme: str
) -> None:
    found = kv_scheme_of(method, described, names)
    assert found.startswith(scheme)
    assert bool(found) == bool(scheme)


def files_of(folder: Path, scheme: Any = None, **config: Any) -> ModelFiles:
    if scheme is not None:
        method = {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}
        config["quantization_config"] = method
    return inspect_model(make_model(folder / "m", **config), "key")


def resolved(files: ModelFiles, wanted: str, dtype: str = "bfloat16") -> str:
    return kv_cache_dtype(wanted, dtype, files, "models[0]", traits())


def test_auto_is_the_models_or_that_of_its_scales(tmp_path: Path) -> None:
    plain, scaled = files_of(tmp_path / "a"), files_of(tmp_path / "b", STATIC)
    assert resolved(plain, "auto") == resolved(plain, "bf16") == "bfloat16"
    assert resolved(plain, "bf16", "float32") == "bfloat16"
    assert resolved(plain, "fp8_e5m2") == "float8_e5m2"
    assert resolved(scaled, "auto") == resolved(scaled, "fp8_e4m3") == "float8_e4m3fn"
    shapes = [plain.shape("bfloat16", None, kv) for kv in (None, "float8_e4m3fn")]
    assert shapes[0]["token_bytes"] == 2 * shapes[1]["token_bytes"]
    assert shapes[0]["weight_bytes"] == shapes[1]["weight_bytes"]
    assert [shape["kv_dtype"] for shape in shapes] == ["bfloat16", "float8_e4m3fn"]


def test_a_file_of_modelopt_describes_the_kv(tmp_path: Path) -> None:
    path = make_model(tmp_path / "m")
    save_file({name: np.ones(1, np.float32) for name in SCALES}, str(path / "s.safetensors"))
    section = '{"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}'
    (path / "hf_quant_config.json").write_text(section)
    assert inspect_model(path, "key").kv_scheme == FP8
    (path / "hf_quant_config.json").write_text("[]")
    assert inspect_model(path, "key").kv_scheme == "scales of K and V without a scheme"


@pytest.mark.parametrize(
    ("scheme", "config", "wanted", "message"),
    [
        (STATIC, {}, "bf16", "models[0].kv_cache_dtype: bf16 cannot be combined with files whose"),
        (STATIC, {}, "fp8_e5m2", "KV is fp8_e4m3 with scales; leave the key out"),
        (STATIC | {"num_bits": 4}, {}, "auto", "models[0].path: its files have kv_cache_scheme {"),
        (STATIC, MLA, "auto", "models[0].path: its files have scales of an FP8 latent, which"),
    ],
)
def test_other_kv_than_the_files_is_refused(
    tmp_path: Path, scheme: dict[str, Any], config: dict[str, Any], wanted: str, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(files_of(tmp_path, scheme, **config), wanted)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("kv_dtype", "backend", "latent", "able"),
    [
        ("float8_e4m3fn", "fa4", False, "fa3 or flashinfer or triton or trtllm_mha"),
        ("float8_e4m3fn", "torch_native", False, "fa3 or flashinfer or triton or trtllm_mha"),
        ("float8_e5m2", "fa3", False, "flashinfer or triton"),
        ("float8_e4m3fn", "flashinfer", True, "triton"),
    ],
)
def test_attention_that_does_not_read_it_is_refused(
    kv_dtype: str, backend: str, latent: bool, able: str
) -> None:
    for allowed in (None, "triton"):
        check_attention(kv_dtype, allowed, "models[0]", traits(), latent=latent)
    with pytest.raises(ConfigError) as caught:
        check_attention(kv_dtype, backend, "models[0]", traits(), latent=latent)
    assert str(caught.value).endswith(f"; set it to {able}, or leave it out")
    assert f"engine.attention_backend {backend} does not read" in str(caught.value)


def loaded(folder: Path, adapter: str, kv_cache_dtype: str) -> ClusterConfig:
    make_whole_model(folder / "m")
    data = {
        "devices": [{"name": "host:0", "capacity": "1GiB", "page": "64KiB"}],
        "models": [{"name": "m", "path": "m", "kv_cache_dtype": kv_cache_dtype}],
        "engine": {"adapter": adapter, "static": "1MiB"},
    }
    path = folder / "prism.yaml"
    path.write_text(yaml.safe_dump(data))
    return load(path)


@pytest.mark.parametrize("value", ["nvfp4", "mxfp8", "fp8", "int8"])
def test_other_values_are_refused_with_the_known_ones(tmp_path: Path, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, "fake", value)
    known = "choose one of auto, bf16, fp8_e4m3, fp8_e5m2"
    expected = f": models[0].kv_cache_dtype: unknown value {value!r}; {known}"
    assert str(caught.value).endswith(expected)


def test_adapters_that_do_not_serve_it_refuse_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, "fake", "fp8_e4m3")
    expected = ": models[0].kv_cache_dtype: its engines do not serve fp8_e4m3; choose one of auto"
    assert str(caught.value).endswith(expected)
    plain = EngineTraits()
    assert kv_cache_dtype("auto", "float16", files_of(tmp_path / "f"), "m", plain) == "float16"


@pytest.mark.sglang
def test_the_yaml_halves_the_kv_of_a_token(tmp_path: Path) -> None:
    [plain] = loaded(tmp_path / "a", "sglang", "bf16").models
    [small] = loaded(tmp_path / "b", "sglang", "fp8_e4m3").models
    assert (plain.dtype, plain.kv_dtype, small.kv_dtype) == (
        "float32",
        "bfloat16",
        "float8_e4m3fn",
    )
    assert plain.token_bytes == 2 * small.token_bytes


@pytest.mark.sglang
@pytest.mark.parametrize(
    ("kind", "architecture", "says"),
    [
        ("llama", "LlamaForCausalLM", ""),
        ("mistral", "MistralForCausalLM", ""),
        ("qwen2", "Qwen2ForCausalLM", "has scales of K and V, which SGLang ignores for Qwen2For"),
    ],
)
def test_families_of_which_sglang_ignores_scales_are_refused(
    tmp_path: Path, kind: str, architecture: str, says: str
) -> None:
    method = {"quant_method": "compressed-tensors", "kv_cache_scheme": STATIC}
    config = {"model_type": kind, "architectures": [architecture], "quantization_config": method}
    path = make_model(tmp_path / "m", **config)
    assert refuses(path) == ""
    save_file({name: np.ones(1, np.float32) for name in SCALES}, str(path / "s.safetensors"))
    assert says in refuses(path)
    assert bool(refuses(path)) == bool(says)


@pytest.mark.sglang
def test_the_page_of_supported_models_names_the_families_with_scales() -> None:
    page = Path(__file__).parents[2] / "docs" / "supported-models.md"
    names = [f"`{kind}`" for kind in sorted(SERVED) if loads_kv_scales(causal_class(kind))]
    assert f"It loads them for {', '.join(names)}." in " ".join(page.read_text().split())
