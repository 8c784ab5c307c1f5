"""All studies by name."""

from __future__ import annotations

from prism.errors import ConfigError
from prism.studies import (
    muxserve,
    muxserve_parts,
    prism_calibration,
    prism_dedicated,
    prism_large,
    prism_local,
    prism_overall,
    prism_pair,
    prism_parts,
    prism_table1,
    seallm,
    seallm_parts,
    seallm_sweeps,
)
from prism.studies.study import Study

PAPERS = (
    prism_dedicated,
    prism_calibration,
    prism_table1,
    prism_overall,
    prism_large,
    prism_pair,
    prism_local,
    prism_parts,
    muxserve,
    muxserve_parts,
    seallm,
    seallm_sweeps,
    seallm_parts,
)
STUDIES: dict[str, Study] = {study.name: study for part in PAPERS for study in part.STUDIES}


def get(name: str) -> Study:
    """Raises ConfigError that lists the names."""
    if name not in STUDIES:
        raise ConfigError(f"study {name!r}: known are all, {', '.join(STUDIES)}")
    return STUDIES[name]
