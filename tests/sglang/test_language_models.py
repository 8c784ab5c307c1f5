"""Models of text and images: their language models answer as transformers' whole models do."""

from __future__ import annotations

import json
import shutil
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from kvcached.engines.sglang.hybrid.overrides import WINDOW_POOLS
from prism.engines.sglang.platform.supported_models import WINDOWS, refuses
from prism.messages.engine import Deactivate, Deactivated, Submit
from prism.messages.model_spec import ModelSpec
from prism.models.files import inspect_model
from prism.models.hugging_face import import_transformers
from tests.engines.harness import DeviceUnderTest, request
from tests.families import TINY, VOCAB_SIZE
from tests.sglang import models
from tests.sglang.models import TIE, gap_of

pytestmark = pytest.mark.sglang

TOKENS = 12
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
}
QWEN_VISION = {"hidden_size": 32, "intermediate_size": 64, "depth": 1, "num_heads": 2}
# model_type -> that of its language model, and the vision model's settings
WHOLE: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("gemma3_text", VISION | {"model_type": "siglip_vision_model"}),
    "gemma4": ("gemma4_text", VISION | {"model_type": "gemma4_vision", "head_dim": 16}),
    "llama4": (
        "llama4_text",
        VISION | {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
    ),
    "mistral3": ("ministral3", VISION | {"model_type": "pixtral", "head_dim": 16}),
    "qwen3_5": ("qwen3_5_text", QWEN_VISION | {"out_hidden_size": 96}),
}


@lru_cache
def whole(kind: str) -> Any:
    """Returns transformers' model of text and images, with random weights."""
    import torch

    transformers = import_transformers()
    text, vision = WHOLE[kind]
    torch.manual_seed(3)
    settings = {"model_type": text, **TINY[text], "eos_token_id": 2, "pad_token_id": 0}
    config = transformers.AutoConfig.for_model(kind, text_config=settings, vision_config=vision)
    made = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    return made


def write(kind: str, folder: Path) -> None:
    whole(kind).save_pretrained(folder)
    for file in models.path_of("family-llama").glob("tokenizer*"):
        shutil.copy(file, folder)


@pytest.mark.parametrize("kind", sorted(WHOLE))
def test_answers_are_those_of_the_whole_model(
    device: DeviceUnderTest, tmp_path: Path, kind: str
) -> None:
    write(kind, tmp_path)
    assert refuses(tmp_path) == ""
    shape = inspect_model(tmp_path, kind, WINDOW_POOLS, WINDOWS).shape("float32", None)
    spec = ModelSpec(name=kind, path=str(tmp_path), slo_ttft_s=2.0, slo_tpot_s=0.2, **shape)
    asked = {
        f"{kind}{n}": [(37 * i + n) % (VOCAB_SIZE - 16) + 16 for i in range(n)] for n in (7, 120)
    }
    done = device.activate(spec)
    assert done.static_bytes < spec.weight_bytes + (2 << 20)
    device.send(Submit([request(name, kind, prompt, TOKENS) for name, prompt in asked.items()]))
    for stream, prompt in zip(device.finish(*asked), asked.values(), strict=True):
        assert len(stream.token_ids) == TOKENS
        assert gap_of(whole(kind), prompt, stream.token_ids) < TIE
    device.send(Deactivate())
    device.wait_for(Deactivated)


def test_a_language_model_of_a_refused_family_is_refused(tmp_path: Path) -> None:
    write("gemma3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"] = TINY["nemotron"] | {"model_type": "nemotron"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "has model_type 'nemotron', which SGLang engines do not serve" in refuses(tmp_path)
