"""Cluster policies by name, and what each needs from the engines it runs on.

The live system refuses a policy by name when its engines lack something (`missing`); the
simulator's engines have everything.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from prism.errors import ConfigError
from prism.policies import prism, static
from prism.policies.data import Action, ClusterView, Settings

ADMISSION_ORDER = "admission order"  # requests start in the order that the policy gives
ELASTIC_MEMORY = "elastic memory"  # KV pages are mapped while used and returned afterwards
KV_LIMIT = "KV limit"  # an engine's KV memory can be capped
STEP_CONTROL = "step control"  # the policy decides which model's step runs next
SM_SHARES = "SM shares"  # models get fractions of a device's compute

ALL_NEEDS = frozenset({ADMISSION_ORDER, ELASTIC_MEMORY, KV_LIMIT, STEP_CONTROL, SM_SHARES})
LIVE_ENGINES = frozenset({ADMISSION_ORDER, ELASTIC_MEMORY, KV_LIMIT})
"""What the engines of the live system offer."""


@dataclass(frozen=True, slots=True)
class Policy:
    """`plan` is pure: one view in, the actions to start now out. A policy that never `evicts`
    keeps every model resident."""

    name: str
    plan: Callable[[ClusterView, Settings], tuple[Action, ...]]
    needs: frozenset[str]
    evicts: bool = True


_POLICIES = {
    policy.name: policy
    for policy in (
        Policy("prism", prism.plan, frozenset({ADMISSION_ORDER, ELASTIC_MEMORY})),
        Policy("static", static.plan, frozenset({ADMISSION_ORDER, KV_LIMIT}), evicts=False),
    )
}


def names() -> tuple[str, ...]:
    """Every policy's name, sorted."""
    return tuple(sorted(_POLICIES))


def get(name: str) -> Policy:
    """Raises ConfigError that names the key `policy` and the names there are."""
    if name not in _POLICIES:
        raise ConfigError(f"policy: there is no {name!r}; choose one of {', '.join(names())}")
    return _POLICIES[name]


def missing(policy: Policy, offered: Collection[str] = LIVE_ENGINES) -> tuple[str, ...]:
    """What the policy needs and the engines lack, sorted; empty when it can run."""
    return tuple(sorted(policy.needs.difference(offered)))


def live(name: str) -> Policy:
    """The policy, if the live system can run it; raises ConfigError that says what it lacks."""
    policy = get(name)
    lacking = missing(policy)
    if lacking:
        raise ConfigError(
            f"policy: {name!r} needs {', '.join(lacking)}, which the engines of the live system "
            "lack; choose another one, or run it in the simulator"
        )
    return policy
