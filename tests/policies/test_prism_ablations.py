"""Prism's ablations leave out one scheduler each, and nothing else (§7.4)."""

from __future__ import annotations

from dataclasses import fields

import pytest

from prism.policies import registry
from prism.policies.admission import fcfs
from tests.policies.clusters import SETTINGS, active, gpu, model, summary, view


@pytest.mark.parametrize(
    ("name", "changed"), [("prism-fcfs", "order"), ("prism-free-memory", "plan")]
)
def test_nothing_else_changes(name: str, changed: str) -> None:
    whole, found = registry.get("prism"), registry.get(name)
    other = {f.name for f in fields(whole) if getattr(whole, f.name) != getattr(found, f.name)}
    assert other == {"name", changed}


def test_requests_start_in_order_of_arrival() -> None:
    assert registry.get("prism-fcfs").order is fcfs.order


def test_a_model_goes_where_most_memory_is_free_and_stays() -> None:
    """Checks that Prism avoids the device under pressure, and relieves it later."""
    prism, blind = registry.get("prism"), registry.get("prism-free-memory")
    gpus = [gpu("g0", 100), gpu("g1", 60)]
    busy = active("busy", "g0", weight=20, token_rate=90.0)
    absent = view([busy, model("new", wanted=True, token_rate=9.0)], gpus)
    assert [summary(a) for a in prism.plan(absent, SETTINGS)] == [("activate", "new", "g1")]
    assert [summary(a) for a in blind.plan(absent, SETTINGS)] == [("activate", "new", "g0")]
    busy = active("busy", "g0", token_rate=5.0, waiting=2)
    both = view([busy, active("new", "g0", token_rate=3.0)], [gpu("g0"), gpu("g1")])
    assert [summary(a) for a in prism.plan(both, SETTINGS)] == [("migrate", "new", "g0", "g1")]
    assert blind.plan(both, SETTINGS) == ()


def test_idle_models_still_leave_a_full_device() -> None:
    idle, busy = active("idle", "g0", idle_s=99.0), active("busy", "g0", token_rate=5.0, waiting=2)
    full = view([idle, busy], [gpu("g0", free_bytes=0)])
    for name in ("prism", "prism-free-memory"):
        actions = registry.get(name).plan(full, SETTINGS)
        assert [summary(a) for a in actions] == [("evict", "idle", "g0")]
