"""Vision towers that are read from a config.json, against transformers' models."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvcached.errors import InvalidArgumentError
from kvcached.models import shape_of_config, vision_of_config
from tests.vision_models import KINDS, whole

pytestmark = pytest.mark.slow


def config_of(kind: str) -> dict[str, Any]:
    return dict(json.loads(whole(kind).config.to_json_string()))


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_those_of_transformers(kind: str) -> None:
    config = config_of(kind)
    shape = vision_of_config(config)
    assert shape is not None
    every = {name: p.numel() for name, p in whole(kind).named_parameters()}
    text = {name for name in every if "language_model" in name or name.startswith("lm_head")}
    assert shape.parameters == sum(n for name, n in every.items() if name not in text)
    assert shape_of_config(config).parameters == sum(every[name] for name in text)


def test_a_key_that_is_wrong_is_named() -> None:
    config = config_of("qwen3_vl")
    assert vision_of_config(config | {"model_type": "llama"}) is None
    vision = config["vision_config"]
    for name, value in (("hidden_size", None), ("depth", 0), ("patch_size", "x")):
        with pytest.raises(InvalidArgumentError, match=name):
            vision_of_config(config | {"vision_config": vision | {name: value}})
    with pytest.raises(InvalidArgumentError, match="vision_config"):
        vision_of_config(config | {"vision_config": 3})
    with pytest.raises(InvalidArgumentError, match="vision_feature_layer -2"):
        vision_of_config(config_of("mistral3") | {"vision_feature_layer": -2})
