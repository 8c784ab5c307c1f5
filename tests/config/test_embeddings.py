"""Embedding models by their files and by the YAML, and the one-line error of each mistake."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prism.config.resolve import load
from prism.engines import vllm
from prism.errors import ConfigError
from prism.messages.model_spec import EmbeddingSpec
from tests.config.test_load import GOOD, written
from tests.frontend.tiny_model import make_model, make_whole_model

LAST = {"word_embedding_dimension": 32, "pooling_mode_lasttoken": True, "pooling_mode_cls": False}


def make_embedding_model(path: Path, pooling: object = LAST, *more: str, **config: Any) -> Path:
    """Writes a model in the layout of sentence-transformers."""
    make_model(path, **config)
    kinds = ["Transformer", "Pooling", *(more or ("Normalize",))]
    modules = [
        {"idx": i, "path": f"{i}_{kind}", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir(exist_ok=True)
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_embedding_model(tmp_path / "a")
    make_model(tmp_path / "models" / "b")
    return tmp_path


def loaded(folder: Path, **of_a: Any) -> list[EmbeddingSpec | None]:
    data = copy.deepcopy(GOOD)
    data["models"][0] |= of_a
    return [model.embedding for model in load(written(folder, data)).models]


def test_the_files_decide_or_the_yaml(folder: Path) -> None:
    assert loaded(folder) == [EmbeddingSpec(32), None]
    assert loaded(folder, embeddings=False) == [None, None]
    (folder / "a" / "modules.json").unlink()
    assert loaded(folder) == [None, None]
    assert loaded(folder, embeddings=True) == [EmbeddingSpec(32), None]


@pytest.mark.parametrize(
    ("config", "allowed", "refused"),
    [
        ({}, {32}, {1, 16, 33}),
        ({"is_matryoshka": True}, {1, 16, 32}, {33}),
        ({"is_matryoshka": True, "matryoshka_dimensions": [8, 16]}, {8, 16, 32}, {1, 33}),
    ],
)
def test_shorter_vectors_where_the_model_was_trained_for_them(
    folder: Path, config: dict[str, Any], allowed: set[int], refused: set[int]
) -> None:
    make_embedding_model(folder / "a", {"pooling_mode": "lasttoken"}, **config)
    found = loaded(folder)[0]
    assert found is not None
    assert {n for n in allowed | refused if found.may_have(n)} == allowed


Edit = Callable[[Path], object]
MISTAKES: dict[str, tuple[Edit, dict[str, Any], str]] = {
    "pooling": (
        lambda a: make_embedding_model(a, {"pooling_mode_mean_tokens": True}),
        {},
        "pools mean_tokens, and engines pool the last token; give another model, or write false",
    ),
    "two poolings": (
        lambda a: make_embedding_model(a, LAST | {"pooling_mode_cls": True}),
        {},
        "pools lasttoken, cls",
    ),
    "module": (
        lambda a: make_embedding_model(a, LAST, "Dense"),
        {"embeddings": True},
        "has a module 'Dense', which engines do not compute",
    ),
    "no JSON": (lambda a: (a / "modules.json").write_text("{"), {}, "cannot read"),
    "shape": (lambda a: (a / "modules.json").write_text("[1]"), {}, "not what sentence-transform"),
    "pooling's shape": (
        lambda a: make_embedding_model(a, []),
        {},
        "not what sentence-transformers",
    ),
    "tp": (lambda _: None, {"tp": 2}, "an embedding model must be on one device; use tp 1"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named(folder: Path, mistake: str) -> None:
    edit, of_a, says = MISTAKES[mistake]
    edit(folder / "a")
    with pytest.raises(ConfigError, match=r"models\[0\]\.") as raised:
        loaded(folder, **of_a)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_only_engines_that_make_vectors_serve_such_models(tmp_path: Path) -> None:
    assert "make no embeddings of" in vllm.refuses(tmp_path, embeds=True)
    assert vllm.refuses(make_whole_model(tmp_path / "m", hidden_size=128)) == ""
