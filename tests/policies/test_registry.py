"""Policies by name."""

from __future__ import annotations

import pytest

from prism.errors import ConfigError
from prism.policies import prism, registry
from prism.policies.admission import fcfs, moore_hodgson


def test_names_and_lookup() -> None:
    assert {"prism", "static"} <= set(registry.names())
    assert registry.get("prism").plan is prism.plan


def test_an_unknown_name_lists_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"policy: 'fifo' is not a policy.*prism-fcfs, .*, qlm"):
        registry.get("fifo")


def test_only_prism_orders_by_deadline() -> None:
    assert registry.get("prism").order is moore_hodgson.order
    assert registry.get("static").order is fcfs.order


def test_muxserve_pp_shares_memory_and_never_evicts() -> None:
    policy = registry.get("muxserve++")
    assert (policy.evicts, policy.kv_blocks) == (False, None)


@pytest.mark.parametrize("policy", ["alpaserve", "seallm"])
def test_a_missing_simulator_is_named(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    assert registry.get(policy).simulates
    assert registry.simulator(policy).name == "prism-sim"
    monkeypatch.setattr(registry, "SIMULATORS", "prism.none")
    with pytest.raises(ConfigError, match=f"'{policy}' tries .* install the package prism-sim"):
        registry.simulator(policy)
