"""The policy of docs/adding-a-policy.md plans, and a simulated cluster runs on it."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from prism.policies import registry
from prism.policies.data import Activate, Evict, Refuse
from prism.policies.registry import Policy
from prism.sim.scenario import load
from prism.sim.world import World
from tests.policies.clusters import SETTINGS, active, gpu, model, view

ROOT = Path(__file__).parent.parent.parent
EXAMPLE = ROOT / "prism" / "sim" / "examples" / "eight-models.yaml"


@pytest.fixture
def policy(monkeypatch: pytest.MonkeyPatch) -> Policy:
    """As the page registers it."""
    page = (ROOT / "docs" / "adding-a-policy.md").read_text()
    module_code, registered = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    roomiest = ModuleType("roomiest")
    exec(compile(module_code, "docs/adding-a-policy.md", "exec"), vars(roomiest))
    made: Any = eval(registered, vars(registry) | {"roomiest": roomiest})
    monkeypatch.setitem(registry._POLICIES, made.name, made)
    return registry.live(made.name)


def test_it_goes_where_most_is_free(policy: Policy) -> None:
    gpus = [gpu("a", 100), gpu("b", 200)]
    (action,) = policy.plan(view([model("m", waiting=1)], gpus), SETTINGS)
    assert isinstance(action, Activate)
    assert action.device == "b"


def test_the_longest_idle_model_makes_room(policy: Policy) -> None:
    idle = [active("x", "a", idle_s=20.0), active("y", "a", idle_s=30.0)]
    full = gpu("a", 100, free_bytes=0)
    (action,) = policy.plan(view([*idle, model("m", waiting=1)], [full]), SETTINGS)
    assert isinstance(action, Evict)
    assert action.model == "y"


def test_it_refuses_what_fits_nowhere(policy: Policy) -> None:
    (action,) = policy.plan(view([model("m", waiting=1, weight=300)], [gpu("a")]), SETTINGS)
    assert isinstance(action, Refuse)


def test_a_simulated_cluster_serves_with_it(policy: Policy) -> None:
    scenario = load(EXAMPLE, {"policy": policy.name, "generate.seconds": 60})
    records = World(scenario.setup, scenario.work).run()
    assert records.ended == len(scenario.work)
    assert not records.errors
    assert records.counts["activate"] >= len(scenario.setup.models)
