"""A first YAML for this machine: its GPUs or memory, and the models that it has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

import psutil

from kvcached import GpuFacts, KvcachedError
from kvcached.errors import HiddenDeviceError, NoDriverError, UnknownDeviceError
from prism.config.checks.capacities import FREE_SHARE, facts_of
from prism.config.resolve import load
from prism.config.schema.units import format_size
from prism.errors import ConfigError
from prism.models.hub.hub_model import split_name
from prism.models.hub.snapshots import names_in_cache
from prism.models.store import default_directory

_HOST_SHARE = 0.5
_ENGINES_MAX = 4
_HEAD = """\
# Configuration of prism-serve, written by `prism-serve init` for this machine.
#   prism-serve check {file}              what fits where; starts nothing
#   prism-serve --config {file}           serves until Ctrl-C
# docs/configuration.md lists every key.
"""
_TAIL = """\
# policy: prism            # static: fixed shares, nothing is evicted
# frontend: {port: 8000}   # other machines reach host: 0.0.0.0, which needs access.keys
"""


@dataclass(frozen=True, slots=True)
class Left:
    """Model that cannot be served here."""

    path: str
    reason: str


def gpus() -> dict[str, GpuFacts]:
    """Returns the GPUs of this machine, without those that are split into MIG instances. Raises
    ConfigError for a driver that does not work."""
    found: dict[str, GpuFacts] = {}
    for number in count():
        try:
            facts = facts_of(f"cuda:{number}")
        except (NoDriverError, UnknownDeviceError, HiddenDeviceError):
            break
        except KvcachedError as error:
            raise ConfigError(f"cuda:{number}: {error}") from error
        if not facts.mig:
            found[f"cuda:{number}"] = facts
    return found


def models_here(folder: Path) -> list[str]:
    """Returns paths of folders with models, in .cache/models or else where `prism-models prepare`
    makes them, and the names of models in the hub's cache."""
    places = (folder / ".cache" / "models", default_directory())
    found = (sorted(path.parent for path in place.glob("*/config.json")) for place in places)
    folders = next(filter(None, found), [])
    return [*(shown(path, folder) for path in folders), *names_in_cache()]


def shown(path: Path, folder: Path) -> str:
    """Returns a path as a YAML in `folder` has it: relative if it is below."""
    whole = path.absolute()
    below = whole.is_relative_to(folder)
    return str(whole.relative_to(folder) if below else whole)


def new_config(file: Path, paths: Sequence[str], *, required: bool) -> tuple[str, list[Left]]:
    """Returns the text of a YAML with the models that can be served here, and the other models.
    Raises ConfigError if there are none.

    Args:
        paths: Folders, GGUF files, and names in a hub. Those of a hub must be in its cache.
        required: Whether a model that cannot be served is an error.
    """
    found = gpus()
    left = [] if required else _left_out(file, found, paths)
    unserved = {each.path for each in left}
    served = [path for path in paths if path not in unserved]
    if not served:
        raise ConfigError(
            f"no model was found that can be served here{_reasons(left)}; download one with"
            " prism-models pull ORG/NAME, or name one with --model"
        )
    text = _text(file, found, served)
    _check(file, text)
    return text + _TAIL, left


def _left_out(file: Path, found: dict[str, GpuFacts], paths: Sequence[str]) -> list[Left]:
    """Returns the models that cannot be served, each with the reason."""
    if paths and _problem(file, found, paths) is None:
        return []
    reasons = ((path, _problem(file, found, [path])) for path in paths)
    return [Left(path, reason) for path, reason in reasons if reason is not None]


def _problem(file: Path, found: dict[str, GpuFacts], paths: Sequence[str]) -> str | None:
    try:
        _check(file, _text(file, found, paths))
    except ConfigError as error:
        return str(error)
    return None


def _reasons(left: Iterable[Left]) -> str:
    return "".join(f" ({each.path}: {each.reason})" for each in left)


def _check(file: Path, text: str) -> None:
    """Raises ConfigError if prism-serve would refuse the YAML."""
    draft = file.with_name(f".{file.name}.draft")
    try:
        draft.write_text(text)
        load(draft)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written: {error.strerror}") from error
    except ConfigError as error:
        raise ConfigError(str(error).removeprefix(f"{draft}: ")) from error
    finally:
        draft.unlink(missing_ok=True)


def _text(file: Path, found: dict[str, GpuFacts], paths: Sequence[str]) -> str:
    lines = ["devices:", *_devices(found, len(paths)), "models:"]
    quote = partial(json.dumps, ensure_ascii=False)
    given = zip(map(quote, _names(paths)), map(quote, paths), strict=True)
    lines += [f"  - {{name: {name}, path: {path}}}" for name, path in given]
    return _HEAD.format(file=file) + "\n".join(lines) + "\n"


def _devices(found: dict[str, GpuFacts], models: int) -> list[str]:
    engines = min(_ENGINES_MAX, max(2, models))
    if not found:
        capacity = int(_HOST_SHARE * psutil.virtual_memory().available) >> 20
        return [
            "  # No NVIDIA GPU was found. Models are served from half of the free memory.",
            f'  - {{name: "host:0", capacity: {capacity}MiB, page: 64KiB, engines: {engines}}}',
        ]
    return [
        f"  # capacity: {FREE_SHARE:.0%} of what is free at the start, unless it is given.",
        *(
            f'  - {{name: "{name}", engines: {engines}}}   # {facts.name},'
            f" {format_size(facts.free_bytes)} of {format_size(facts.total_bytes)} are free"
            for name, facts in found.items()
        ),
    ]


def _names(paths: Sequence[str]) -> list[str]:
    """Returns a name for each model: the last part of its path, and a number if others have it."""
    names: list[str] = []
    for path in paths:
        hub = split_name(path)
        last = Path(hub.repo if hub is not None and not Path(path).exists() else path).name
        name = re.sub(r"[^a-z0-9._-]+", "-", last.removesuffix(".gguf").lower()).strip("-.")
        name = name or "model"
        found = (name, *(f"{name}-{number}" for number in range(2, len(paths) + 2)))
        names.append(next(each for each in found if each not in names))
    return names
