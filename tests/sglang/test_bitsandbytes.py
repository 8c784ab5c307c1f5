"""Weights of bitsandbytes: with their scales in pages, and copied from the store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from kvcached.engines.sglang.hybrid.overrides import WINDOW_POOLS
from prism.engines.sglang.platform.supported_models import WINDOWS
from prism.errors import ActivationError
from prism.messages.engine import ActivateEngine
from prism.messages.model_spec import ModelSpec
from prism.models import tiny
from prism.models.files import inspect_model
from prism.models.store import default_directory, prepare
from tests.families import TINY
from tests.sglang.models import family, network
from tests.sglang.test_quantized_weights import activate_twice, core  # noqa: F401

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("preloaded")]
TIE = 0.1  # of inputs in 16 or 8 bits, in which the method computes
# With rows of whole blocks, as all released models have.
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
KV, WHOLE = {"num_key_value_heads": 2}, {"sliding_window": None}
MODELS = {
    "llama": tiny.LLAMA,
    "mistral": family("mistral-128", "mistral", TINY["mistral"] | SIZES | KV | WHOLE),
    "gemma3_text": family("gemma3-128", "gemma3_text", TINY["gemma3_text"] | SIZES | KV),
    "qwen2": family("qwen2-128", "qwen2", TINY["qwen2"] | SIZES | KV),
    "qwen3": tiny.QWEN3,
}


@pytest.fixture
def make(
    preloaded: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[ModelSpec, Path]]:
    """Returns a function that quantises a model. It returns the model, and the path of one with the
    same weights in float32."""
    from sglang.srt.layers import quantization
    from sglang.srt.layers.quantization import bitsandbytes

    from tests.sglang import bitsandbytes_models

    bitsandbytes_models.install(monkeypatch)
    methods = quantization.CPU_QUANTIZATION_METHODS
    monkeypatch.setitem(methods, "bitsandbytes", bitsandbytes.BitsAndBytesConfig)
    # SGLang registers it for the device of its platform, and calls it so with CUDA's tensors.
    product = bitsandbytes.apply_bnb_4bit.__wrapped__
    monkeypatch.setattr(bitsandbytes, "apply_bnb_4bit", product)

    def made(kind: str, **options: Any) -> tuple[ModelSpec, Path]:
        source = prepare(MODELS[kind], default_directory(), lambda _text: None)
        path, plain = bitsandbytes_models.write(source, tmp_path, **options)
        shape = inspect_model(path, kind, WINDOW_POOLS, WINDOWS).shape("bfloat16", None)
        return ModelSpec(name=kind, path=str(path), slo_ttft_s=2, slo_tpot_s=1, **shape), plain

    return made


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {"double": True}),
        ("llama", {"double": False}),
        ("llama", {"double": True, "skipped": "model.layers.1.self_attn"}),
        ("qwen2", {"double": True}),
        ("qwen3", {"double": True}),
        ("mistral", {"double": True}),
        ("gemma3_text", {"double": True}),
        ("llama", {"bits": 8}),
        ("qwen3", {"bits": 8}),
    ],
)
def test_each_activation_answers_as_the_weights_in_float32(
    core: Any,  # noqa: F811
    make: Any,
    kind: str,
    options: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    spec, plain = make(kind, **options)
    activate_twice(core, spec, network(plain), TIE)
    assert not [each for each in caplog.records if each.name == "prism.engine"]


def test_scales_that_the_files_lack_are_named(core: Any, make: Any) -> None:  # noqa: F811
    spec, _ = make("llama")
    file = Path(spec.path) / "model.safetensors"
    tensors = load_file(file)
    kept = {name: each for name, each in tensors.items() if "1.mlp.down_proj.weight." not in name}
    save_file(kept, file, metadata={"format": "pt"})
    with pytest.raises(ActivationError, match="the files lack scales of a matrix"):
        core.activate(ActivateEngine(spec))
