"""All studies by name."""

from __future__ import annotations

from prism.errors import ConfigError
from prism.studies import prism_overall
from prism.studies.study import Study

STUDIES: dict[str, Study] = {study.name: study for study in prism_overall.STUDIES}


def get(name: str) -> Study:
    """Raises ConfigError that lists the names."""
    if name not in STUDIES:
        raise ConfigError(f"study {name!r}: known are all, {', '.join(STUDIES)}")
    return STUDIES[name]
