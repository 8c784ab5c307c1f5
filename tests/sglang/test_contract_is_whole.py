"""Completeness of the contract: it names everything that the adapter uses of SGLang. Runs without
SGLang."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvcached.engines.sglang
import prism.engines.sglang
from prism.engines import model_core
from tests.sglang.test_contract import SEAMS

FOLDERS = [
    Path(package.__file__ or "").parent
    for package in (kvcached.engines.sglang, prism.engines.sglang)
]
PINNED = {(module, path.split(".")[0]) for module, _, path in (s.partition(":") for s in SEAMS)}
WORDS = {word for seam in SEAMS for word in seam.partition(":")[2].split(".")}
OF_OS = {"_exit"}
OF_TORCH = {"_C", "_cuda_clearCublasWorkspaces"}  # without a public name; gpu-check runs it


def short(module: str) -> str:
    """Returns the name as the contract writes it: relative to sglang.srt."""
    return module.removeprefix("sglang.srt").removeprefix(".")


def imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang"):
            for each in node.names:
                yield short(node.module or ""), each.name
        elif isinstance(node, ast.Import):
            for each in node.names:
                assert not each.name.startswith("sglang"), f"import {each.name}: take its names"


def is_pinned(module: str, name: str) -> bool:
    """Is true for a pinned name of a module, and for a module with pinned names."""
    below = f"{module}.{name}".removeprefix(".")
    return (module, name) in PINNED or any(below == pinned for pinned, _ in PINNED)


def made_in(tree: ast.AST) -> set[str]:
    """Returns the functions, classes and attributes that a file defines."""
    made = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    stored = (n for n in ast.walk(tree) if isinstance(n, ast.Attribute))
    return made | {n.attr for n in stored if isinstance(n.ctx, ast.Store)}


def private_names(tree: ast.AST) -> Iterator[str]:
    """Yields the private attributes that the file reads and does not define."""
    made = made_in(tree) | {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    attributes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    for node in attributes:
        is_private = node.attr.startswith("_") and not node.attr.startswith("__")
        if is_private and isinstance(node.ctx, ast.Load):
            yield from {node.attr} - made


# Names that SglangCore inherits.
OF_BASE = made_in(ast.parse(Path(model_core.__file__).read_text()))
FILES = sorted(path for folder in FOLDERS for path in folder.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_name_that_is_imported_is_pinned(path: Path) -> None:
    missing = [name for name in imported(ast.parse(path.read_text())) if not is_pinned(*name)]
    assert not missing


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_private_name_that_is_read_is_pinned(path: Path) -> None:
    missing = set(private_names(ast.parse(path.read_text()))) - WORDS - OF_OS - OF_TORCH - OF_BASE
    assert not missing


def test_the_search_finds_something() -> None:
    trees = [ast.parse(path.read_text()) for path in FILES]
    assert sum(len(list(imported(tree))) for tree in trees) > 30
    assert sum(len(list(private_names(tree))) for tree in trees) >= 5
    odd = ast.parse("from sglang.srt.managers import odd\nodd._inner\n")
    assert [n for n in imported(odd) if not is_pinned(*n)] == [("managers", "odd")]
    assert set(private_names(odd)) == {"_inner"}
