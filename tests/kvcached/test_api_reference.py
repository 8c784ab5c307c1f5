"""The site has every public name of kvcached, and each has a docstring."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import kvcached
from scripts.docs_hooks import API


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
    shown = {f"kvcached.{module}" for _, modules in API.values() for module in modules}
    homes = {value.__module__ for value in public().values()} - {"kvcached._core"}
    # A page of a package shows its modules' public names, which the package imports.
    lacking = {home for home in homes if home not in shown and home.rpartition(".")[0] not in shown}
    assert lacking == set()
