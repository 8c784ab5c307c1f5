"""Registry of cluster policies by name.

The live system rejects a policy if its engines lack a needed feature (`missing`). The simulator's
engines have all features. Installed packages add policies (`added.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path

from prism.errors import ConfigError
from prism.policies import added, moore_hodgson, prism, static, target
from prism.policies.baselines import (
    adbs,
    aegaeon,
    alpaserve,
    dedicated,
    doubling_budget,
    mux_placement,
    qlm,
    seallm,
    serverlessllm,
    temporal,
)
from prism.policies.data import DeviceLoad, Settings
from prism.policies.kv_blocks import KvBlocks
from prism.policies.next_plan import next_plan_in_s
from prism.policies.policy import (
    ADMISSION_ORDER,
    ELASTIC_MEMORY,
    KV_LIMIT,
    LIVE_ENGINES,
    PLACEMENT_SEARCH,
    SM_SHARES,
    STEP_CONTROL,
    TOKEN_TURNS,
    UNIFIED_KV,
    VIRTUAL_QUEUES,
    Policy,
    PolicyKnobs,
)


def _always(loads: Iterable[DeviceLoad], settings: Settings) -> bool:
    """Returns True: the policy's plan never depends on load."""
    return True


_POLICIES = {
    policy.name: policy
    for policy in (
        Policy(
            "prism",
            prism.plan,
            frozenset({ADMISSION_ORDER, ELASTIC_MEMORY}),
            order=moore_hodgson.order,
            is_balanced=prism.is_balanced,
            next_plan_in_s=next_plan_in_s,
            drains=True,
        ),
        Policy(
            "static",
            static.plan,
            frozenset({ADMISSION_ORDER, KV_LIMIT}),
            evicts=False,
            is_balanced=_always,
        ),
        Policy(
            "muxserve++",  # Prism §7.2: MuxServe's placement, KV memory on demand, no eviction
            target.plan,
            frozenset({ADMISSION_ORDER, ELASTIC_MEMORY, PLACEMENT_SEARCH}),
            evicts=False,
            is_balanced=_always,
            search=mux_placement.search,
        ),
        Policy(
            "muxserve",
            target.plan,
            frozenset({ADMISSION_ORDER, STEP_CONTROL, SM_SHARES, UNIFIED_KV, PLACEMENT_SEARCH}),
            evicts=False,
            is_balanced=_always,
            search=mux_placement.search,
            steps=adbs.control(),
            kv_blocks=KvBlocks.HEADWISE,
        ),
        Policy(
            "dedicated",
            dedicated.plan,
            frozenset({ADMISSION_ORDER}),
            evicts=False,
            is_balanced=_always,
            search=dedicated.search,
        ),
        Policy(
            "alpaserve",
            target.plan,
            frozenset({ADMISSION_ORDER, STEP_CONTROL, UNIFIED_KV, PLACEMENT_SEARCH}),
            evicts=False,
            is_balanced=_always,
            search=alpaserve.search,
            steps=temporal.FCFS,
        ),
        Policy(
            "qlm",
            qlm.plan,
            frozenset({ADMISSION_ORDER, PLACEMENT_SEARCH, VIRTUAL_QUEUES}),
            search=qlm.search,
            assign=qlm.assign,
            restarts_engine=True,
        ),
        Policy(
            "qlm-aware",  # instances by QLM's own estimate instead of Prism §7.5's first idle one
            qlm.plan,
            frozenset({ADMISSION_ORDER, PLACEMENT_SEARCH, VIRTUAL_QUEUES}),
            search=qlm.search,
            assign=partial(qlm.assign, settings=qlm.QlmSettings(swap_aware=True)),
            restarts_engine=True,
        ),
        Policy(
            "seallm",
            target.plan,
            frozenset({ADMISSION_ORDER, STEP_CONTROL, UNIFIED_KV, PLACEMENT_SEARCH}),
            evicts=False,
            is_balanced=_always,
            search=seallm.search,
            next_interval=seallm.next_interval,
            steps=doubling_budget.control(),
            kv_blocks=KvBlocks.MERGED,
        ),
        Policy(
            "serverlessllm", serverlessllm.plan, frozenset({ADMISSION_ORDER}), asks_startup=True
        ),
        Policy(
            "aegaeon",
            aegaeon.plan,
            frozenset({TOKEN_TURNS}),
            is_balanced=_always,
            turns=aegaeon.turns(),
        ),
    )
}


def own_names() -> tuple[str, ...]:
    """Returns the names of Prism's own policies, sorted."""
    return tuple(sorted(_POLICIES))


def names() -> tuple[str, ...]:
    """Returns the names of all policies, sorted, including other packages'. Imports nothing."""
    return tuple(sorted({*_POLICIES, *added.names()}))


def refused() -> tuple[str, ...]:
    """Returns a message for each entry point that has the name of one of Prism's policies."""
    return added.refused(_POLICIES)


def get(name: str) -> Policy:
    """Returns a policy by name.

    Raises ConfigError with the known names, or with the package whose policy fails to load.
    """
    if name in _POLICIES:
        return _POLICIES[name]
    if name in added.names():
        return added.get(name)
    raise ConfigError(f"policy: {name!r} is not a policy; choose one of {', '.join(names())}")


def sources(name: str) -> tuple[Path, ...]:
    """Returns the files of another package's policy; empty for Prism's own.

    Raises ConfigError as `get` does.
    """
    get(name)
    return () if name in _POLICIES else added.sources(name)


def with_knobs(policy: Policy, knobs: PolicyKnobs | None) -> Policy:
    """Returns the policy with its knobs applied. Raises ConfigError if they are invalid."""
    if knobs is None or policy.make is None:
        return policy
    try:
        return policy.make(knobs)
    except ValueError as error:
        raise ConfigError(f"knobs.{policy.name}: {error}") from error


def missing(policy: Policy) -> tuple[str, ...]:
    """Returns the needed features that the live engines lack, sorted."""
    return tuple(sorted(policy.needs - LIVE_ENGINES))


def live(name: str) -> Policy:
    """Returns a policy for the live system. Raises ConfigError if its engines lack a feature."""
    policy = get(name)
    lacking = missing(policy)
    if lacking:
        raise ConfigError(
            f"policy: {name!r} needs {', '.join(lacking)}, which the engines of the live system "
            "lack; choose another one, or run it in the simulator"
        )
    return policy
