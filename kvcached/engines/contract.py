"""Contracts: the parts of an engine that an adapter relies on, checked on untested versions.

An incompatible version is refused at the start, with the differences, instead of failing while it
serves.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True, eq=False)
class Contract:
    """Parts of an engine that an adapter relies on. Paths look like "package.module:Class.name"."""

    engine: str
    versions: tuple[str, ...]
    """Versions that the adapter was tested with."""
    calls: Mapping[str, tuple[str, ...]]
    """Callables that the adapter calls or replaces.

    The values are the parameters that it passes by name or reads.
    """
    attributes: tuple[str, ...] = ()
    """Attributes that must exist."""
    fields: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Required fields, by dataclass."""
    behaviours: tuple[Callable[[], list[str]], ...] = ()
    """Checks that return differences from the tested versions."""

    def check(self, version: str, warn: Callable[[str], object]) -> None:
        """Warns about a version that was not tested, and verifies it.

        A local build suffix does not make another version. Raises RuntimeError as `verify` does.
        """
        if version.partition("+")[0] in self.versions:
            return
        tested = " and ".join(self.versions)
        warn(
            f"kvcached was tested with {self.engine} {tested}, not with {version}: checking the "
            "parts that it relies on"
        )
        self.verify()

    def verify(self) -> None:
        """Raises RuntimeError with all missing parts if the engine does not fulfil the contract."""
        lacks = [path for path in self.attributes if _find(path) is None]
        for path, parameters in self.calls.items():
            known = _parameters(_find(path))
            lacks += [f"{path}({name})" for name in parameters if name not in known]
        for path, names in self.fields.items():
            found = _find(path)
            known = set() if found is None else {each.name for each in fields(found)}
            lacks += [f"{path}.{name}" for name in names if name not in known]
        for differs in self.behaviours:
            lacks += differs()
        if lacks:
            raise RuntimeError(
                f"this version of {self.engine} does not have what kvcached relies on "
                f"({', '.join(lacks)}): install {' or '.join(self.versions)}, which was tested, or "
                "run without kvcached"
            )


def _find(path: str) -> Any:
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        return None


def _parameters(found: Any) -> set[str]:
    if found is None:
        return set()
    function = inspect.unwrap(getattr(found, "__func__", found))
    return set(inspect.signature(function).parameters)
