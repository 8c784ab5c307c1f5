"""All studies by name, from studies.yaml."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import msgspec
import yaml

from lab.papers.study.findings import Findings
from lab.papers.study.lab import Lab
from prism.errors import ConfigError

Run = Callable[[Lab], Findings]


class StudyTexts(msgspec.Struct, frozen=True):
    """Texts of an entry of studies.yaml, which explains the fields."""

    name: str
    title: str
    source: str
    setup: str
    shortened: str
    differs: str


class Study(StudyTexts, frozen=True):
    """Entry of studies.yaml."""

    run: Run


def _read_studies() -> dict[str, Study]:
    data = yaml.safe_load(Path(__file__).with_name("studies.yaml").read_text(encoding="utf-8"))
    return {name: _study(name, data["texts"], **found) for name, found in data["studies"].items()}


def _study(name: str, texts: dict[str, str], run: str, **entry: str) -> Study:
    module, function = run.rsplit(".", 1)
    made: Run = getattr(import_module(f"lab.papers.{module}"), function)
    return Study(name, run=made, **{key: text.format(**texts) for key, text in entry.items()})


STUDIES = _read_studies()


def get(name: str) -> Study:
    """Returns the study. Raises ConfigError that lists the names."""
    if name not in STUDIES:
        raise ConfigError(f"study {name!r} is not one of all, {', '.join(STUDIES)}")
    return STUDIES[name]
