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
from prism.models import tiny
from prism.models.store import default_directory, prepare
from tests.engines.harness import DeviceUnderTest, request
from tests.families import TINY
from tests.sglang.conftest import config_of
from tests.sglang.models import TIE, gap_of, network
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
    stock = structs.replace(spec_of(kind, path), adapter="vllm", block_tokens=traits().block_tokens)
    config = structs.replace(device.config, models=[stock])
    spec = with_layout(stock, config, config.engine.kv_layout)
    asked = {f"{kind}/{name}": prompt for name, prompt in prompts(spec).items()}
    reference = network(path)
    device.fork(kind)
    device.activate(spec, kind)
    orders = [request(name, kind, prompt, TOKENS) for name, prompt in asked.items()]
    device.send(Submit(orders), kind)
    for stream, prompt in zip(device.finish(*asked), asked.values(), strict=True):
        assert len(stream.token_ids) == TOKENS
        assert gap_of(reference, prompt, stream.token_ids) < TIE
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
