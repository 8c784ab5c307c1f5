"""Prism's policy, but it gives up the models that a file names, one in a line.

The code of a package that tests install (`tests.policies.installed.write_package`).
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from prism.policies import prism
from prism.policies.data import Action, ClusterView, Evict, Refuse, Settings

FILE = "PRISM_TEST_GIVEN_UP"
REASON = (
    "overload: 1.5 requests/s for 2.0 MiB are worth less than those of the models that are served"
)


def given_up() -> set[str]:
    path = Path(os.environ.get(FILE, os.devnull))
    return set(path.read_text().split()) if path.exists() else set()


def plan(view: ClusterView, settings: Settings) -> tuple[Action, ...]:
    """Evicts the models whatever requests they have, and refuses them from then on."""
    names = given_up()
    there = [m for m in view.models if m.name in names and m.device and m.state == "active"]
    leaving = [Evict(m.name, m.device, REASON) for m in there if m.device]
    refused = [m.name for m in view.models if m.name in names and m.state in ("absent", "draining")]
    absent = [m.name for m in view.models if m.name in names and m.state == "absent"]
    others = tuple(m for m in view.models if m.name not in absent)
    planned = [
        action
        for action in prism.plan(replace(view, models=others), settings)
        if action.model not in names
    ]
    return (*leaving, *planned, *(Refuse(name, REASON, overload=True) for name in refused))


POLICY = replace(prism.POLICY, name="giving-up", plan=plan)
