"""The tiny models: the same bytes every time, and usable by readers of model directories."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from prism.models.tiny import TINY_MODELS, TinyModel
from prism.models.tokenizer import write_tokenizer

TEXTS = ["Hello, world!", " two  spaces\n\ttab", "äöü 漢字 🙂 \x00", "def f(x): return x**2"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("models"))


def prepare(directory: Path) -> Path:
    """Prepares models in a separate process: torch and its warnings stay out of this one."""
    names = [m.name for m in TINY_MODELS]
    command = [sys.executable, "-m", "prism.cli.models", "prepare", *names, "--dir", str(directory)]
    done = subprocess.run(command, check=True, timeout=240, capture_output=True, text=True)
    assert done.stdout.split() == [str(directory / name) for name in names]
    return directory


def digests(directory: Path) -> dict[str, str]:
    files = sorted(p for p in directory.rglob("*") if p.is_file())
    return {
        str(p.relative_to(directory)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files
    }


def test_the_same_bytes_every_time(directory: Path, tmp_path: Path) -> None:
    assert digests(directory) == digests(prepare(tmp_path))


@pytest.fixture(scope="module")
def described(directory: Path) -> dict[str, dict[str, Any]]:
    paths = [str(directory / m.name) for m in TINY_MODELS]
    command = [sys.executable, "-m", "tests.models.reference", *paths]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    out = subprocess.run(command, check=True, timeout=240, capture_output=True, env=environment)
    return dict(zip((m.name for m in TINY_MODELS), json.loads(out.stdout), strict=True))


@pytest.mark.parametrize("model", TINY_MODELS, ids=lambda m: m.name)
def test_transformers_serves_it(model: TinyModel, described: dict[str, dict[str, Any]]) -> None:
    facts = described[model.name]
    assert facts["dtype"] == "torch.float32"
    assert 1e6 < facts["parameters"] < 11e6
    assert facts["vocabulary"] == facts["config_vocabulary"] == model.settings["vocab_size"]
    assert facts["eos"] == [2, 2]
    assert facts["prompt"] == (
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    # Output that repeats one token would hide most mistakes of an engine.
    assert len(set(facts["output_ids"])) > 5


def test_models_differ_in_every_way_that_memory_sees(directory: Path) -> None:
    configs = [json.loads((directory / m.name / "config.json").read_text()) for m in TINY_MODELS]
    assert len({c["architectures"][0] for c in configs}) == 3
    llama, qwen = configs[:2]
    for key in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"):
        assert llama[key] != qwen[key]


@pytest.mark.parametrize("model", TINY_MODELS, ids=lambda m: m.name)
def test_any_text_survives_the_tokenizer(model: TinyModel, directory: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / model.name / "tokenizer.json"))
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    words = tokenizer.encode("The harbour wakes before the town does.").ids
    assert len(words) < 20


def test_a_vocabulary_that_the_text_cannot_fill_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not 5000"):
        write_tokenizer(tmp_path, 5000, 128)
