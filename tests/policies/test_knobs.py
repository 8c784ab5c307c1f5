"""Knobs of single policies reach the part that they are of, and the shipped ones change nothing."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from lab.papers.ablations import variants as ablations
from prism.policies import registry
from prism.policies.baselines.adbs import AdbsSettings
from prism.policies.baselines.aegaeon import AegaeonSettings
from prism.policies.baselines.doubling_budget import DbSettings
from prism.policies.baselines.qlm import QlmSettings
from prism.policies.baselines.seallm import SeallmSettings
from prism.policies.knobs import SHIPPED, Knobs, tuned
from prism.policies.multiplexing.steps import DeviceStepView, EngineStepView, StepRequest
from prism.policies.static import StaticSettings

CHANGED = {
    "aegaeon": ({"turns"}, Knobs(aegaeon=AegaeonSettings(prefill_part=0.5))),
    "static": ({"plan"}, Knobs(static=StaticSettings("tokens"))),
    "qlm": ({"assign"}, Knobs(qlm=QlmSettings(group_requests_max=2))),
    "qlm-first-idle": ({"assign"}, Knobs(qlm=QlmSettings(group_requests_max=2))),
    "muxserve": ({"steps"}, Knobs(adbs=AdbsSettings(prefill_sm_min=0.8))),
    "seallm": (
        {"search", "steps"},
        Knobs(seallm=SeallmSettings(services_max=3), budgets=DbSettings(starvation_factor=2.0)),
    ),
}


@pytest.mark.parametrize("name", registry.names())
def test_shipped_knobs_are_the_policy_itself(name: str) -> None:
    assert tuned(registry.get(name), SHIPPED) is registry.get(name)


@pytest.mark.parametrize("name", registry.names())
def test_only_the_part_that_they_are_of_changes(name: str) -> None:
    named, knobs = CHANGED.get(name, (set(), Knobs(qlm=QlmSettings(group_requests_max=2))))
    whole, found = registry.get(name), tuned(registry.get(name), knobs)
    other = {f.name for f in fields(whole) if getattr(whole, f.name) != getattr(found, f.name)}
    assert other == named


def test_a_variant_keeps_the_other_knobs() -> None:
    """Checks fixed shares: a prefill takes its minimum, and decodes keep their shares."""
    decoding = replace(
        EngineStepView("a", decode=(StepRequest("d", 0.0, 1, 1),)), decode_sm_share=0.1
    )
    waiting = EngineStepView("b", prefill=(StepRequest("p", 0.0, 1, 1),))
    view = DeviceStepView(0.0, (decoding, waiting), 1000)
    knobs = Knobs(adbs=AdbsSettings(prefill_sm_min=0.6))
    shares = {}
    for variant in ("", "fixed-sm"):
        steps = ablations.get("muxserve", variant, knobs).steps
        assert steps is not None
        choice, _ = steps.choose(view, steps.start(view))
        shares[variant] = {job.model: round(job.sm_share, 6) for job in choice.jobs}
    assert shares[""] == shares["fixed-sm"] == {"b": 0.9, "a": 0.1}
    busy = replace(view, engines=(replace(decoding, decode_sm_share=0.7), waiting), sm_free=0.5)
    for variant in ("", "fixed-sm"):
        steps = ablations.get("muxserve", variant, knobs).steps
        assert steps is not None
        # the prefill waits for 0.6 of the compute; with the shipped 0.5 it would start
        assert not steps.choose(busy, steps.start(busy))[0].jobs
