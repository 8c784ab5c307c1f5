"""Tokens that end an answer: which of a model's files names them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prism.models.special_tokens import end_ids
from tests.frontend.tiny_model import make_model, tokenizer


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": 3}, {}, (3,)),
        ({"eos_token_id": 3}, {"eos_token_id": [4, 5]}, (4, 5)),
        ({"eos_token_id": 3}, {"eos_token_id": None}, (3,)),
        ({"eos_token_id": 3, "text_config": {"hidden_size": 8}}, {}, (3,)),
        ({"eos_token_id": 3, "text_config": {"eos_token_id": 6}}, {}, (6,)),
        ({}, {}, ()),
    ],
)
def test_the_first_file_that_names_an_end_decides(
    tmp_path: Path, config: dict[str, Any], generation: dict[str, Any], expected: tuple[int, ...]
) -> None:
    make_model(tmp_path, eos_token_id=None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    (tmp_path / "tokenizer_config.json").unlink()
    assert end_ids(tmp_path, tokenizer()) == (expected, expected)


def test_special_tokens_map_stands_in_for_the_tokenizers_settings(tmp_path: Path) -> None:
    make_model(tmp_path, eos_token_id=7)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    special = {"eos_token": {"content": settings.pop("eos_token")}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": None}))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(special))
    assert end_ids(tmp_path, tokenizer()) == ((7,), (7, 0))
