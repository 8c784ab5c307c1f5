"""The site has every public name of kvcached, and each has a docstring."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kvcached

HOOKS = Path(__file__).parent.parent.parent / "scripts" / "docs_hooks.py"
ALIASES = {"ShrinkPolicy"}  # of types, without a docstring


def public() -> dict[str, Any]:
    """Returns the public classes and functions by name."""
    named = {name: getattr(kvcached, name) for name in kvcached.__all__}
    return {n: v for n, v in named.items() if inspect.isclass(v) or inspect.isfunction(v)}


def members(owner: type) -> Iterator[tuple[str, Any]]:
    """Yields the public methods and properties of a class."""
    for name, value in vars(owner).items():
        shown = callable(value) or isinstance(value, property | classmethod | staticmethod)
        if name[0] != "_" and shown and not inspect.ismemberdescriptor(value):
            yield f"{owner.__name__}.{name}", value


def test_every_public_name_has_a_docstring() -> None:
    found = public()
    assert len(found) > 40
    inside = [
        pair for value in found.values() if isinstance(value, type) for pair in members(value)
    ]
    bare = [name for name, value in [*found.items(), *inside] if not inspect.getdoc(value)]
    assert bare == []


def test_every_public_name_is_on_a_page() -> None:
    text = HOOKS.read_text()
    shown = set(re.findall(r'"([a-z_.]+)"', text[text.index("API = {") : text.index("DOCUMENTS")]))
    weights = {f"weights.{name}" for name in shown}
    homes = {
        name: value.__module__.removeprefix("kvcached.").removeprefix("_core")
        for name, value in public().items()
        if name not in ALIASES
    }
    lacking = {
        name: home
        for name, home in homes.items()
        if home and home not in shown | weights and home.split(".")[0] not in {"layouts"}
    }
    assert lacking == {}
