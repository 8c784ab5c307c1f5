"""Weights in GGUF: answers of transformers' own reader, in pages, and copied from the store."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prism.engines.sglang.platform.supported_models import refuses
from prism.messages.engine import ActivateEngine
from prism.messages.model_spec import ModelSpec
from prism.models import smollm2, tiny
from prism.models.files import inspect_model
from prism.models.gguf.gguf_folder import folder_of_gguf
from prism.models.hugging_face import import_transformers
from prism.models.store import default_directory, prepare
from tests.engines.harness import request
from tests.families import TINY
from tests.models.test_smollm2 import needs_package
from tests.sglang.conftest import run
from tests.sglang.models import family, network
from tests.sglang.test_quantized_weights import activate_twice, core  # noqa: F401

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("preloaded")]
# Qwen3 without the size of its heads in the header, which transformers then takes for 128.
QWEN3 = dataclasses.replace(
    tiny.QWEN3, name="tiny-qwen3-128", settings=tiny.QWEN3.settings | {"head_dim": 128}
)
MODELS = {
    "llama": tiny.LLAMA,
    "qwen2": family("family-qwen2", "qwen2", TINY["qwen2"]),
    "qwen3": QWEN3,
}
CASES = [("llama", "Q4_0"), ("llama", "Q4_K"), ("llama", "BF16"), ("qwen2", "Q4_0")]
CASES += [("qwen3", "Q4_0"), ("qwen3", "F16")]


def written(kind: str, types: str, file: Path, **more: Any) -> Path:
    from tests.sglang import gguf_models

    source = prepare(MODELS[kind], default_directory(), lambda _text: None)
    return gguf_models.write_gguf(source, file, getattr(gguf_models, types), **more)


@pytest.fixture
def make(
    preloaded: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, str], tuple[ModelSpec, Path]]:
    """Returns a function that writes a model. It returns the model, and the path of the file."""
    from sglang.srt.layers import quantization
    from sglang.srt.layers.quantization import gguf

    from tests.sglang.gguf_models import KERNELS

    for name, kernel in KERNELS.items():
        monkeypatch.setattr(gguf, name, kernel, raising=False)
    monkeypatch.setitem(quantization.CPU_QUANTIZATION_METHODS, "gguf", gguf.GGUFConfig)
    monkeypatch.setenv("PRISM_HOME", str(tmp_path / "home"))

    def made(kind: str, types: str) -> tuple[ModelSpec, Path]:
        monkeypatch.delenv("PRISM_HOME")
        file = written(kind, types, tmp_path / f"{kind}-{types}.gguf")
        monkeypatch.setenv("PRISM_HOME", str(tmp_path / "home"))
        folder = folder_of_gguf(file, kind)
        shape = inspect_model(folder, kind).shape("float32", None)
        assert not refuses(folder)
        return ModelSpec(name=kind, path=str(folder), slo_ttft_s=2, slo_tpot_s=1, **shape), file

    return made


def test_prefetched_tensors_are_those_of_the_file(
    core: Any,  # noqa: F811
    make: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from prism.engines.sglang import gguf_loading

    spec, _ = make("llama", "Q4_K")
    core.activate(ActivateEngine(spec))
    expected = core._active.memory.weights.pages.checksum()
    core.deactivate()
    store = core._access.store
    assert store.discard(core._access.key_of(spec))
    store.prefetch(spec.path).wait()
    monkeypatch.setattr(gguf_loading, "_from_file", None)
    core.activate(ActivateEngine(spec))
    assert core._active.memory.weights.pages.checksum() == expected
    core.deactivate()


@pytest.mark.parametrize(("kind", "types"), CASES)
def test_each_activation_answers_as_transformers(
    core: Any,  # noqa: F811
    make: Any,
    kind: str,
    types: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    spec, file = make(kind, types)
    activate_twice(core, spec, network(file.parent, gguf_file=file.name))
    assert not caplog.text


@needs_package
def test_a_file_of_llama_cpp_answers_in_sentences(core: Any, make: Any) -> None:  # noqa: F811
    """Serves a file that llama.cpp's converter wrote, with the tokenizer in its header."""
    folder = folder_of_gguf(smollm2.find_gguf(), "smollm2")
    assert not refuses(folder)
    shape = inspect_model(folder, "smollm2").shape("float32", 128)
    spec = ModelSpec(name="smollm2", path=str(folder), slo_ttft_s=2, slo_tpot_s=1, **shape)
    tokenizer = import_transformers().AutoTokenizer.from_pretrained(folder)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True)["input_ids"]
    core.activate(ActivateEngine(spec))
    chunks, failures = run(core, [request("r", "smollm2", prompt, 8)])
    assert not failures
    tokens = [token for chunk in chunks["r"] for token in chunk.token_ids]
    assert tokenizer.decode(tokens) == "The capital of France is Paris.<|im_end|>"
    core.deactivate()


def test_stock_servers_read_llama_in_the_order_of_the_file(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks the config that SGLang's loader builds the model of."""
    from sglang.srt.utils.hf_transformers.config import get_config

    from kvcached.engines.sglang.hybrid import corrections

    built = []
    monkeypatch.setattr(
        corrections, "_load_gguf", lambda _, model_config, **_more: built.append(model_config)
    )
    for kind in ("llama", "qwen2"):
        _, file = make(kind, "Q4_0")
        config = SimpleNamespace(hf_config=get_config(str(file), trust_remote_code=False))
        corrections.load_gguf(None, model_config=config, device_config=None)
    styles = [getattr(each.hf_config, "rope_is_neox_style", True) for each in built]
    assert styles == [False, True]
