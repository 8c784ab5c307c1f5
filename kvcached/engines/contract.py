"""What an adapter relies on in its engine, looked at where its version is not one that was tested.

A version that differs shall be refused at the start, with what differs, and not fail while it
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
    """Paths are written as "package.module:Class.name"."""

    engine: str
    versions: tuple[str, ...]
    """Those that the adapter was tested with."""
    calls: Mapping[str, tuple[str, ...]]
    """Callables that are called or replaced, with the parameters that are passed to them by name
    or that the adapter looks at."""
    attributes: tuple[str, ...] = ()
    """They need only be there."""
    fields: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Of dataclasses."""
    behaviours: tuple[Callable[[], list[str]], ...] = ()
    """Each says what is otherwise than in the versions that were tested."""

    def check(self, version: str, warn: Callable[[str], object]) -> None:
        """Warns of a version that was not tested, and raises RuntimeError, which names each part
        that it lacks. A build's own suffix is no other version."""
        if version.partition("+")[0] in self.versions:
            return
        tested = " and ".join(self.versions)
        warn(
            f"kvcached was tested with {self.engine} {tested}, not with {version}: checking what "
            "it relies on"
        )
        self.verify()

    def verify(self) -> None:
        """Raises RuntimeError, which names each part that this engine lacks."""
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
                f"this version of {self.engine} lacks what kvcached relies on "
                f"({', '.join(lacks)}): install {' or '.join(self.versions)}, which was tested, or "
                "leave kvcached out"
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
