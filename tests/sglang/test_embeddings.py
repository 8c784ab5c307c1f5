"""Embedding models: the vector of an input is the state of its last token in transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from prism.config.checks.embedding_models import embedding_of
from prism.engines.sglang import refuses, weight_key
from prism.messages.engine import ActivateEngine
from prism.messages.model_spec import EmbeddingSpec, ModelSpec
from prism.messages.requests import Chunk, Request
from prism.models.files import inspect_model
from tests.engines.harness import request
from tests.sglang.conftest import run
from tests.sglang.models import GPT2, LLAMA, QWEN3, network, path_of, prompts, spec_of

pytestmark = pytest.mark.sglang


def embedding_spec(model: str) -> ModelSpec:
    spec = spec_of(model)
    size = json.loads((path_of(model) / "config.json").read_text())["hidden_size"]
    return msgspec.structs.replace(spec, embedding=EmbeddingSpec(size))


def asked(name: str, model: str, prompt: list[int]) -> Request:
    return request(name, model, prompt, max_tokens=1)


def vector(chunks: list[Chunk]) -> NDArray[np.float32]:
    """Returns the embedding of a whole answer."""
    [chunk] = chunks
    assert (chunk.token_ids, chunk.finish_reason) == ([], "stop")
    return np.frombuffer(chunk.embedding, "<f4")


def state(network: Any, prompt: list[int]) -> NDArray[np.float32]:
    """Returns the last token's hidden state after the final norm, normalised to length 1."""
    import torch

    with torch.inference_mode():
        last = network.model(torch.tensor([prompt])).last_hidden_state[0, -1].numpy()
    length = np.linalg.norm(last)
    found: NDArray[np.float32] = last / length
    return found


@pytest.mark.parametrize("model", [LLAMA, QWEN3])
def test_vectors_are_those_of_transformers(idle: Any, model: str) -> None:
    """Prompts of several chunks and of one token; again, out of the prefix cache."""
    idle.activate(ActivateEngine(embedding_spec(model)))
    asks = [*prompts(model, 4, (20, 200)), [17]]
    expected = [state(network(path_of(model)), prompt) for prompt in asks]
    for cached in (False, True):
        chunks, failures = run(idle, [asked(f"{i}", model, p) for i, p in enumerate(asks)])
        assert failures == []
        for i, wanted in enumerate(expected):
            found = vector(chunks[str(i)])
            assert float(np.linalg.norm(found)) == pytest.approx(1)
            assert float(found @ wanted) > 0.999
            long = len(asks[i]) > 16
            assert (chunks[str(i)][0].cached_tokens > 0) == (cached and long)


def as_sentence_transformers_has_it(model: str, folder: Path) -> Path:
    """Makes a checkpoint of the network alone: without a head, and names without a prefix."""
    from safetensors.numpy import load_file, save_file

    path = folder / model
    shutil.copytree(path_of(model), path)
    tensors = load_file(path / "model.safetensors")
    inner = {n.removeprefix("model."): t for n, t in tensors.items() if n != "lm_head.weight"}
    save_file(inner, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    modules = [{"path": "", "type": "sentence_transformers.models.Transformer"}]
    modules += [{"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir()
    pooling = {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return path


def test_a_checkpoint_without_a_head_is_served(idle: Any, tmp_path: Path) -> None:
    """Checkpoints of Qwen3-Embedding are stored this way."""
    path = as_sentence_transformers_has_it(QWEN3, tmp_path)
    files = inspect_model(path, "path")
    spec = msgspec.structs.replace(
        spec_of(QWEN3),
        path=str(path),
        embedding=embedding_of(path, None, "embeddings"),
        weight_bytes=files.weight_bytes("float32"),
    )
    assert spec.embedding is not None
    idle.activate(ActivateEngine(spec))
    [prompt] = prompts(QWEN3, 1, (50, 60))
    chunks, failures = run(idle, [asked("a", QWEN3, prompt)])
    assert failures == []
    assert float(vector(chunks["a"]) @ state(network(path_of(QWEN3)), prompt)) > 0.999


def test_cancelled_half_way_and_moved_half_way(idle: Any) -> None:
    idle.activate(ActivateEngine(embedding_spec(LLAMA)))
    long, short = prompts(LLAMA, 1, (200, 200))[0], prompts(LLAMA, 1, (30, 30), seed=2)[0]
    idle.submit([asked("gone", LLAMA, long), asked("moved", LLAMA, [*long[::-1]])])
    assert idle.step().chunks == []
    idle.cancel(["gone"])
    [moved] = idle.export()
    chunks, failures = run(idle, [moved, asked("other", LLAMA, short)])
    assert failures == []
    assert [chunk.finish_reason for chunk in chunks["gone"]] == ["cancelled"]
    for name, prompt in (("moved", long[::-1]), ("other", short)):
        wanted = state(network(path_of(LLAMA)), prompt)
        assert float(vector(chunks[name]) @ wanted) > 0.999


def test_what_can_never_be_is_refused(idle: Any) -> None:
    spec = embedding_spec(LLAMA)
    idle.activate(ActivateEngine(spec))
    _, [failure] = run(idle, [asked("long", LLAMA, [5] * spec.context_length)])
    assert failure.code == "context_length_exceeded"
    assert "makes no embeddings" in refuses(path_of(GPT2), embeds=True)
    assert refuses(path_of(LLAMA), embeds=True) == refuses(path_of(GPT2)) == ""


def test_the_weight_store_keeps_both_uses_apart() -> None:
    """Copies of the two uses are checked by different answers."""
    assert weight_key("x", embedding_spec(LLAMA)) != weight_key("x", spec_of(LLAMA))
