"""The double of torch's CUDA front is as strict as CUDA: one test for each rule."""

from __future__ import annotations

import ast
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CRASHES = {
    "the_cpu_reads_no_device_memory": -signal.SIGSEGV,
    "a_hole_of_kv_space_cannot_be_touched": -signal.SIGSEGV,
    "a_replay_needs_its_memory": -signal.SIGSEGV,
}


def rules(module: str) -> list[str]:
    """Names of the functions that `rule` marks, found without importing torch."""
    tree = ast.parse((HERE / f"{module}.py").read_text())
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    return [node.name for node in functions if node.decorator_list]


@pytest.mark.parametrize("rule", rules("rules_memory"))
def test_memory(holds: Callable[..., None], rule: str) -> None:
    holds("tests.torchcuda.rules_memory", rule, CRASHES.get(rule, 0))


@pytest.mark.parametrize("rule", rules("rules_front"))
def test_front(holds: Callable[..., None], rule: str) -> None:
    holds("tests.torchcuda.rules_front", rule, CRASHES.get(rule, 0))
