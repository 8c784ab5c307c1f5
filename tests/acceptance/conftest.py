"""Models that the acceptance tests serve; made once in the checkout's cache."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.acceptance.harness import MODELS

TINY = ("tiny-llama", "tiny-qwen3")
DEMO = (*TINY, "tiny-gpt2", "smollm2-135m")


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker("slow")


def prepare(*names: str) -> None:
    command = [str(Path(sys.executable).parent / "prism-models"), "prepare", *names]
    subprocess.run([*command, "--dir", str(MODELS)], check=True, timeout=300)


@pytest.fixture(scope="session")
def tiny_models() -> tuple[str, str]:
    prepare(*TINY)
    return TINY


@pytest.fixture(scope="session")
def demo_models() -> tuple[str, ...]:
    prepare(*DEMO)
    return DEMO
