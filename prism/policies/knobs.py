"""Parameters of single policies that their papers do not specify, in addition to `Settings`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from prism.policies import static
from prism.policies.baselines import adbs, aegaeon, doubling_budget, qlm, seallm
from prism.policies.baselines.adbs import AdbsSettings
from prism.policies.baselines.aegaeon import AegaeonSettings
from prism.policies.baselines.doubling_budget import DbSettings
from prism.policies.baselines.qlm import QlmSettings
from prism.policies.baselines.seallm import SeallmSettings
from prism.policies.policy import Policy, PolicyKnobs
from prism.policies.registry import with_knobs
from prism.policies.static import StaticSettings


@dataclass(frozen=True, slots=True)
class Knobs:
    """Parameters of each policy. The defaults are those of the shipped policies."""

    static: StaticSettings = field(default_factory=StaticSettings)
    qlm: QlmSettings = field(default_factory=QlmSettings)
    adbs: AdbsSettings = field(default_factory=AdbsSettings)
    seallm: SeallmSettings = field(default_factory=SeallmSettings)
    budgets: DbSettings = field(default_factory=DbSettings)
    aegaeon: AegaeonSettings = field(default_factory=AegaeonSettings)
    # Knobs of another package's policy.
    own: PolicyKnobs | None = None


SHIPPED = Knobs()
TUNED: dict[str, Callable[[Policy, Knobs], Policy]] = {
    "static": lambda p, k: replace(p, plan=partial(static.plan, chosen=k.static)),
    "qlm": lambda p, k: replace(p, assign=partial(qlm.assign, settings=k.qlm)),
    "qlm-first-idle": lambda p, k: replace(
        p, assign=partial(qlm.assign, settings=replace(k.qlm, first_idle=True))
    ),
    "aegaeon": lambda p, k: replace(p, turns=aegaeon.turns(k.aegaeon)),
    "muxserve": lambda p, k: replace(p, steps=adbs.control(k.adbs)),
    "seallm": lambda p, k: replace(
        p,
        search=partial(seallm.search, settings=k.seallm),
        steps=doubling_budget.control(k.budgets),
    ),
}


def tuned(policy: Policy, knobs: Knobs) -> Policy:
    """Returns the policy with `knobs` applied, or unchanged if they do not concern it."""
    if policy.make is not None:
        return with_knobs(policy, knobs.own)
    change = TUNED.get(policy.name)
    return policy if knobs == SHIPPED or change is None else change(policy, knobs)
