"""All studies by name, as studies.yaml has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import yaml

from lab.papers.findings import Findings
from lab.papers.lab import Lab
from prism.errors import ConfigError

Run = Callable[[Lab], Findings]


@dataclass(frozen=True)
class Study:
    """The texts are explained in studies.yaml."""

    name: str
    title: str
    source: str
    setup: str
    shortened: str
    differs: str
    run: Run


def _described() -> dict[str, Study]:
    data = yaml.safe_load(Path(__file__).with_name("studies.yaml").read_text(encoding="utf-8"))
    return {name: _study(name, data["texts"], **found) for name, found in data["studies"].items()}


def _study(name: str, texts: dict[str, str], run: str, **said: str) -> Study:
    module, function = run.split(".")
    made: Run = getattr(import_module(f"lab.papers.{module}"), function)
    return Study(name, run=made, **{key: text.format(**texts) for key, text in said.items()})


STUDIES = _described()


def get(name: str) -> Study:
    """Raises ConfigError that lists the names."""
    if name not in STUDIES:
        raise ConfigError(f"study {name!r}: known are all, {', '.join(STUDIES)}")
    return STUDIES[name]
