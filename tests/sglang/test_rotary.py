"""LongRoPE: an answer does not depend on the requests next to it, nor on those before it."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from prism.messages.engine import Deactivate, Deactivated, Submit
from prism.messages.model_spec import ModelSpec
from prism.models import tiny
from prism.models.files import inspect_model
from prism.models.store import default_directory, prepare
from tests.engines.harness import DeviceUnderTest, request
from tests.families import VOCAB_SIZE
from tests.sglang.models import TIE, gap_of, network

pytestmark = pytest.mark.sglang

SHORT_FACTORS_UP_TO, CONTEXT, TOKENS = 64, 256, 12
MODEL = tiny.TinyModel(
    "tiny-phi3-longrope",
    "phi3",
    "",
    context_length=512,
    settings={
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "original_max_position_embeddings": SHORT_FACTORS_UP_TO,
        "rope_scaling": {
            "rope_type": "longrope",
            "short_factor": [1.0] * 16,
            "long_factor": [1.5] * 16,
        },
    },
)


@pytest.fixture(scope="module")
def path() -> Path:
    return prepare(MODEL, default_directory(), lambda _text: None)


def prompt(seed: int, tokens: int) -> list[int]:
    return random.Random(seed).choices(range(16, VOCAB_SIZE), k=tokens)


def ask(device: DeviceUnderTest, **prompts: list[int]) -> dict[str, list[int]]:
    """Returns the greedy tokens after prompts that are sent together."""
    asked = [request(name, "m", tokens, TOKENS) for name, tokens in prompts.items()]
    device.send(Submit(asked))
    streams = device.finish(*prompts)
    return {name: stream.token_ids for name, stream in zip(prompts, streams, strict=True)}


def serve(device: DeviceUnderTest, path: Path, context: int) -> None:
    shape = inspect_model(path, "m").shape("float32", context)
    device.activate(ModelSpec(name="m", path=str(path), slo_ttft_s=2.0, slo_tpot_s=0.2, **shape))


def stop(device: DeviceUnderTest) -> None:
    device.send(Deactivate())
    device.wait_for(Deactivated)


def test_short_answers_are_the_same_beside_a_long_one(device: DeviceUnderTest, path: Path) -> None:
    serve(device, path, CONTEXT)
    alone = {f"s{i}": ask(device, **{f"a{i}": prompt(i, 20)})[f"a{i}"] for i in range(6)}
    together = ask(device, long=prompt(99, 120), **{f"s{i}": prompt(i, 20) for i in range(6)})
    assert {name: tokens for name, tokens in together.items() if name != "long"} == alone
    stop(device)


def test_a_long_prompt_is_the_same_after_its_own_beginning(
    device: DeviceUnderTest, path: Path
) -> None:
    asked = prompt(7, 120)
    serve(device, path, CONTEXT)
    fresh = ask(device, fresh=asked)["fresh"]
    stop(device)
    serve(device, path, CONTEXT)
    ask(device, beginning=asked[:40])
    assert ask(device, whole=asked)["whole"] == fresh
    stop(device)


@pytest.mark.parametrize(
    ("context", "factors"), [(CONTEXT, "long_factor"), (SHORT_FACTORS_UP_TO, "short_factor")]
)
def test_the_served_context_chooses_the_factors(
    device: DeviceUnderTest, path: Path, tmp_path: Path, context: int, factors: str
) -> None:
    """Compares answers with transformers' by a copy of the model that has these factors alone."""
    copy = shutil.copytree(path, tmp_path / "m")
    config = json.loads((copy / "config.json").read_text())
    rope = config["rope_parameters"]
    rope["short_factor"] = rope["long_factor"] = rope[factors]
    (copy / "config.json").write_text(json.dumps(config))
    reference = network(copy)
    serve(device, path, context)
    # The answers to 60 tokens go past the last position of the short factors.
    lengths = [n for n in (20, 40, 60, 120) if n + TOKENS <= context]
    asked = {f"p{context}-{n}": prompt(n, n) for n in lengths}
    for name, tokens in ask(device, **asked).items():
        assert gap_of(reference, asked[name], tokens) < TIE
    stop(device)
