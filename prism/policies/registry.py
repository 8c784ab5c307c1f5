"""Registry of cluster policies by name: entry points of the group `prism.policies`.

The name of an entry point is that of the policy. It refers to a `Policy`, or to a function that
returns one and whose only parameter is a `PolicyKnobs` of the package. A policy is imported when it
is asked for. Other packages add policies as Prism's own distribution does; one that fails to load,
or takes the name of another, affects only its own policy.
"""

from __future__ import annotations

import sys
import typing
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from importlib import metadata
from pathlib import Path

from prism.errors import ConfigError
from prism.policies.policy import FEATURES, Policy, PolicyKnobs

GROUP = "prism.policies"
SIMULATORS = "prism.simulators"
"""Group of the entry point of a simulator (`Simulator` in `prism/cluster/simulated_search.py`)."""
DISTRIBUTION = "prism-serving"


@cache
def entry_points() -> tuple[metadata.EntryPoint, ...]:
    """Returns the entry points of all installed packages, cached. Imports none of them.

    Raises ConfigError if Prism itself is not installed.
    """
    found = tuple(metadata.entry_points(group=GROUP))
    if not any(_is_own(point) for point in found):
        raise ConfigError(
            f"policy: {DISTRIBUTION} is not installed, or an older version; run scripts/install in "
            "a checkout, or pip install"
        )
    return found


def own_names() -> tuple[str, ...]:
    """Returns the names of Prism's own policies, sorted."""
    return tuple(sorted(point.name for point in entry_points() if _is_own(point)))


def names() -> tuple[str, ...]:
    """Returns the names of all policies, sorted. Some of other packages may fail to load."""
    return tuple(sorted({point.name for point in entry_points()}))


def refused() -> tuple[str, ...]:
    """Returns a message for each entry point that has the name of one of Prism's policies."""
    own = own_names()
    return tuple(
        f"{_where(point)}: ignored, since Prism has a policy of that name; rename the entry point"
        for point in entry_points()
        if point.name in own and not _is_own(point)
    )


@cache
def get(name: str) -> Policy:
    """Returns a policy by name.

    Raises ConfigError with the known names, or with the package whose policy fails to load.
    """
    point = _point(name)
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


def _point(name: str) -> metadata.EntryPoint:
    """Returns the entry point of a policy. Raises ConfigError unless there is exactly one."""
    found: Sequence[metadata.EntryPoint] = [each for each in entry_points() if each.name == name]
    if not found:
        raise ConfigError(f"policy: {name!r} is not a policy; choose one of {', '.join(names())}")
    found = [each for each in found if _is_own(each)] or found
    if len(found) > 1:
        packages = ", ".join(map(_package, found))
        raise ConfigError(f"policy: {name!r} is in several packages: {packages}; uninstall one")
    return found[0]


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
    """Returns the name of the package that a policy comes from. REQUIRES: it is in `names()`."""
    return ", ".join(_package(point) for point in entry_points() if point.name == name)


def _package(point: metadata.EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.module


def _is_own(point: metadata.EntryPoint) -> bool:
    return _package(point) == DISTRIBUTION


def _where(point: metadata.EntryPoint) -> str:
    return f"policy: {point.name!r} of the package {_package(point)} ({point.value})"


def sources(name: str) -> tuple[Path, ...]:
    """Returns the files of the distribution of another package's policy; empty for Prism's own.

    If they are unknown (editable installs), returns the Python files of the module's package or of
    the module's folder. Raises ConfigError as `get` does.
    """
    get(name)
    point = _point(name)
    if _is_own(point):
        return ()
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


def with_knobs(policy: Policy, knobs: PolicyKnobs | None) -> Policy:
    """Returns the policy with its knobs applied. Raises ConfigError if they are invalid."""
    if knobs is None or policy.make is None:
        return policy
    try:
        return policy.make(knobs)
    except ValueError as error:
        raise ConfigError(f"knobs.{policy.name}: {error}") from error


def simulator(policy: str) -> metadata.EntryPoint:
    """Returns the simulator for the placement search of a policy. Raises ConfigError without
    one."""
    for point in metadata.entry_points(group=SIMULATORS):
        return point
    raise ConfigError(
        f"policy: {policy!r} tries placements in a simulator, which is not installed; install the"
        " package prism-sim, or choose another policy"
    )
