"""Each family of models that the vLLM adapter serves: its answers are those of transformers."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from prism.config.checks.adapters import with_layout
from prism.engines.vllm import traits
from prism.engines.vllm.capabilities import HEAD_DIMS, SERVED, refuses
from prism.messages.engine import Submit
from prism.messages.model_spec import ModelSpec
from prism.models import tiny
from prism.models.files import inspect_model
from prism.models.store import default_directory, prepare
from tests.engines.harness import DeviceUnderTest, request
from tests.families import TINY
from tests.sglang.conftest import config_of
from tests.sglang.models import TIE, gap_of, network, towards_zero
from tests.sglang.test_families import TOKENS, prompts, spec_of, write_config
from tests.vllm.environment import variables, vllm_python

# torch deprecates a decorator that GPT-BigCode uses.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script")

HEADS = 6  # of each tiny model


def settings_of(kind: str) -> dict[str, Any]:
    """Returns the settings of a tiny model without windows, with heads that vLLM's kernels
    compute."""
    settings, dim = dict(TINY[kind]), min(HEAD_DIMS)
    if "sliding_window" in settings:
        settings["sliding_window"] = None
    if "head_dim" in settings:
        return settings | {"head_dim": dim}
    width = "n_embd" if "n_embd" in settings else "hidden_size"
    return settings | {width: dim * HEADS}


def path_of(kind: str) -> Path:
    """Returns the folder of the tiny model of a family."""
    settings = settings_of(kind)
    model = tiny.TinyModel(f"wide-{kind}", kind, "", context_length=512, settings=settings)
    return prepare(model, default_directory(), lambda _text: None)


@pytest.fixture(scope="module")
def device() -> Iterator[DeviceUnderTest]:
    with tempfile.TemporaryDirectory(prefix="prism-") as directory:
        config = config_of(Path(directory), 256 << 20)
        engine = structs.replace(config.engine, adapter="vllm", python={"vllm": str(vllm_python())})
        made = DeviceUnderTest("vllm", structs.replace(config, engine=engine), variables())
        yield made
        made.close()


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", SERVED)
def test_answers_are_those_of_transformers(device: DeviceUnderTest, kind: str) -> None:
    path = path_of(kind)
    assert refuses(path) == ""
    serve(device, spec_of(kind, path), path)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("kind", ["llama", "glm4"])
def test_answers_with_fp8_kv_are_those_of_rounded_kv(
    device: DeviceUnderTest, kind: str, dtype: str
) -> None:
    """Compares with KV rounded towards zero, as vLLM's kernel for CPUs does it. The engine compares
    the size of its blocks with the model's specification."""
    path = path_of(kind)
    shape = inspect_model(path, kind).shape("float32", None, dtype)
    stock = structs.replace(spec_of(kind, path), **shape)
    assert 4 * stock.token_bytes == spec_of(kind, path).token_bytes
    serve(device, stock, path)


def serve(device: DeviceUnderTest, stock: ModelSpec, path: Path) -> None:
    """Serves a model in a separate engine, and checks its answers."""
    kind = stock.name
    stock = structs.replace(stock, adapter="vllm", block_tokens=traits().block_tokens)
    config = structs.replace(device.config, models=[stock])
    spec = with_layout(stock, config, config.engine.kv_layout)
    asked = {f"{kind} {spec.kv_dtype}/{name}": prompt for name, prompt in prompts(spec).items()}
    reference, kept = network(path), spec.other_kv_dtype and towards_zero(spec.other_kv_dtype)
    device.fork(kind)
    device.activate(spec, kind)
    orders = [request(name, kind, prompt, TOKENS) for name, prompt in asked.items()]
    device.send(Submit(orders), kind)
    for stream, prompt in zip(device.finish(*asked), asked.values(), strict=True):
        assert len(stream.token_ids) == TOKENS
        assert gap_of(reference, prompt, stream.token_ids, kept or None) < TIE
    device.end(kind)


@pytest.mark.parametrize("kind", sorted(set(TINY) - set(SERVED)))
def test_the_others_are_refused_before_a_cluster_starts(tmp_path: Path, kind: str) -> None:
    write_config(tmp_path, kind)
    assert "vllm engines" in refuses(tmp_path)


def test_heads_that_its_kernels_lack_are_refused(tmp_path: Path) -> None:
    write_config(tmp_path, "llama")
    assert "has heads of dimension 16, but vLLM's CPU kernels compute only 32, 64" in refuses(
        tmp_path
    )
