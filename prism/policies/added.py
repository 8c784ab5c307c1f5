"""Policies of installed packages: entry points of the group `prism.policies`.

An entry point has the policy's name. Its object is a `Policy`, or a function that returns one and
whose only parameter is a `PolicyKnobs` subclass of the package. A package that is broken or reuses
a name disables its own policy only.
"""

from __future__ import annotations

import sys
import typing
from collections.abc import Container
from dataclasses import replace
from functools import cache
from importlib import metadata
from pathlib import Path

from prism.errors import ConfigError
from prism.policies.policy import FEATURES, Policy, PolicyKnobs

GROUP = "prism.policies"


@cache
def entry_points() -> tuple[metadata.EntryPoint, ...]:
    """Returns the entry points of all installed packages, cached. Imports nothing."""
    return tuple(metadata.entry_points(group=GROUP))


def names() -> tuple[str, ...]:
    """Returns the names of all entry points, sorted. Some may fail to load."""
    return tuple(sorted({point.name for point in entry_points()}))


def refused(own: Container[str]) -> tuple[str, ...]:
    """Returns a message for each entry point with the name of a policy of Prism (`own`)."""
    return tuple(
        f"{_where(point)}: ignored, since Prism has a policy of that name; rename the entry point"
        for point in entry_points()
        if point.name in own
    )


@cache
def get(name: str) -> Policy:
    """Loads a policy. REQUIRES: `name` is in `names()`.

    Raises ConfigError with the package and its fault.
    """
    point, *others = [point for point in entry_points() if point.name == name]
    if others:
        packages = ", ".join(_package(p) for p in (point, *others))
        raise ConfigError(f"policy: {name!r} is in several packages: {packages}; uninstall one")
    where = _where(point)
    try:
        found = point.load()
        policy = found if isinstance(found, Policy) else _made(found, where)
    except ConfigError:
        raise
    except Exception as error:
        # A package may raise anything while it is imported; the message adds its name.
        raise ConfigError(f"{where}: {type(error).__name__}: {error}") from error
    unknown = sorted(policy.needs - FEATURES)
    if unknown:
        raise ConfigError(f"{where}: needs {unknown[0]!r}; the features are {sorted(FEATURES)}")
    if policy.name != name:
        raise ConfigError(f"{where}: its Policy has the name {policy.name!r}; use the same name")
    return policy


def sources(name: str) -> tuple[Path, ...]:
    """Returns the files of the distribution that contains a policy.

    If they are unknown (editable installs), returns the Python files of the module's package or of
    the module's folder. REQUIRES: `get` has loaded the policy.
    """
    (point,) = (point for point in entry_points() if point.name == name)
    parts = point.module.split(".")
    modules = [".".join(parts[: i + 1]) for i in range(len(parts))]
    # A namespace package has no file; the modules in it have.
    path = next(Path(file) for name in modules if (file := sys.modules[name].__file__)).resolve()
    listed = _files(point.dist) if point.dist is not None else set()
    if path in listed:
        return tuple(sorted(listed))
    package = path.name == "__init__.py"
    return tuple(sorted(path.parent.rglob("*.py") if package else path.parent.glob("*.py")))


def _files(package: metadata.Distribution) -> set[Path]:
    """Returns the listed files that exist, without compiled ones."""
    found = (Path(str(file.locate())) for file in package.files or () if file.suffix != ".pyc")
    return {path.resolve() for path in found if path.is_file()}


def _made(make: object, where: str) -> Policy:
    """Calls a policy's factory with default knobs. Raises ConfigError."""
    hints = typing.get_type_hints(make) if callable(make) else {}
    hints.pop("return", None)
    kinds = [kind for kind in hints.values() if _is_knobs(kind)]
    if not callable(make) or len(hints) != 1 or not kinds:
        raise ConfigError(f"{where}: is neither a Policy nor a function of one PolicyKnobs")
    policy = make(kinds[0]())
    if not isinstance(policy, Policy):
        raise ConfigError(f"{where}: returns {type(policy).__name__}, not a Policy")
    return replace(policy, knobs=kinds[0], make=make)


def _is_knobs(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, PolicyKnobs)


def package(name: str) -> str:
    """Returns the name of the policy's package. REQUIRES: `name` is in `names()`."""
    return ", ".join(_package(point) for point in entry_points() if point.name == name)


def _package(point: metadata.EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.module


def _where(point: metadata.EntryPoint) -> str:
    return f"policy: {point.name!r} of the package {_package(point)} ({point.value})"
