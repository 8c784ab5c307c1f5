"""Policies that installed packages add: entry points of the group `prism.policies`.

An entry point's name is the policy's. It leads to a `Policy`, or to a function that makes one: its
only parameter's type is a `PolicyKnobs` of the package. A package that is broken, or takes a name
that is taken, keeps its own policy from being chosen, and nothing else.
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
    """Of all installed packages, looked for once. Nothing is imported."""
    return tuple(metadata.entry_points(group=GROUP))


def names() -> tuple[str, ...]:
    """Of all of them, sorted; some may not be had."""
    return tuple(sorted({point.name for point in entry_points()}))


def refused(own: Container[str]) -> tuple[str, ...]:
    """A line for each entry point that takes the name of one of Prism's own policies, `own`."""
    return tuple(
        f"{_where(point)}: Prism has a policy of that name, which counts; rename the entry point"
        for point in entry_points()
        if point.name in own
    )


@cache
def get(name: str) -> Policy:
    """REQUIRES: `name` is in `names()`. Raises ConfigError that names the package and its fault."""
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
        # whatever a package raises while it is imported: here it gets its package's name
        raise ConfigError(f"{where}: {type(error).__name__}: {error}") from error
    unknown = sorted(policy.needs - FEATURES)
    if unknown:
        raise ConfigError(f"{where}: needs {unknown[0]!r}, which is none of {sorted(FEATURES)}")
    if policy.name != name:
        raise ConfigError(f"{where}: its Policy is called {policy.name!r}; give both one name")
    return policy


def sources(name: str) -> tuple[Path, ...]:
    """The files of the distribution that a policy comes from. Where they are not known, as those of
    one that is installed to be edited: the Python files of its module's package, or beside its
    module. REQUIRES: `get` has given it."""
    (point,) = (point for point in entry_points() if point.name == name)
    parts = point.module.split(".")
    modules = [".".join(parts[: i + 1]) for i in range(len(parts))]
    # A namespace package has no file; what lies in it has.
    path = next(Path(file) for name in modules if (file := sys.modules[name].__file__)).resolve()
    listed = _files(point.dist) if point.dist is not None else set()
    if path in listed:
        return tuple(sorted(listed))
    package = path.name == "__init__.py"
    return tuple(sorted(path.parent.rglob("*.py") if package else path.parent.glob("*.py")))


def _files(package: metadata.Distribution) -> set[Path]:
    """What it has listed and is there, without what Python compiles of it."""
    found = (Path(str(file.locate())) for file in package.files or () if file.suffix != ".pyc")
    return {path.resolve() for path in found if path.is_file()}


def _made(make: object, where: str) -> Policy:
    """With the knobs' defaults. Raises ConfigError."""
    hints = typing.get_type_hints(make) if callable(make) else {}
    hints.pop("return", None)
    kinds = [kind for kind in hints.values() if _is_knobs(kind)]
    if not callable(make) or len(hints) != 1 or not kinds:
        raise ConfigError(f"{where}: is no Policy and no function of one PolicyKnobs")
    policy = make(kinds[0]())
    if not isinstance(policy, Policy):
        raise ConfigError(f"{where}: gives {type(policy).__name__}, not a Policy")
    return replace(policy, knobs=kinds[0], make=make)


def _is_knobs(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, PolicyKnobs)


def package(name: str) -> str:
    """Whose policy it is, for people. REQUIRES: `name` is in `names()`."""
    return ", ".join(_package(point) for point in entry_points() if point.name == name)


def _package(point: metadata.EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.module


def _where(point: metadata.EntryPoint) -> str:
    return f"policy: {point.name!r} of the package {_package(point)} ({point.value})"
