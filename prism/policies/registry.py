"""Cluster policies by name, and what each needs from the engines it runs on.

The live system refuses a policy by name when its engines lack something (`missing`); the
simulator's engines have everything. Installed packages add policies (`added.py`).
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
from prism.policies.patience import patience_s
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
    """Nothing is moved for load."""
    return True


_POLICIES = {
    policy.name: policy
    for policy in (
        Policy(
            "prism",
            prism.plan,
            frozenset({ADMISSION_ORDER, ELASTIC_MEMORY}),
            order=moore_hodgson.order,
            calm=prism.calm,
            patience_s=patience_s,
            drains=True,
        ),
        Policy(
            "static",
            static.plan,
            frozenset({ADMISSION_ORDER, KV_LIMIT}),
            evicts=False,
            calm=_always,
        ),
        Policy(
            "muxserve++",  # Prism §7.2: MuxServe's placement, KV memory on demand, no eviction
            target.plan,
            frozenset({ADMISSION_ORDER, ELASTIC_MEMORY, PLACEMENT_SEARCH}),
            evicts=False,
            calm=_always,
            search=mux_placement.search,
        ),
        Policy(
            "muxserve",
            target.plan,
            frozenset({ADMISSION_ORDER, STEP_CONTROL, SM_SHARES, UNIFIED_KV, PLACEMENT_SEARCH}),
            evicts=False,
            calm=_always,
            search=mux_placement.search,
            steps=adbs.control(),
            kv_blocks=KvBlocks.HEADWISE,
        ),
        Policy(
            "dedicated",
            dedicated.plan,
            frozenset({ADMISSION_ORDER}),
            evicts=False,
            calm=_always,
            search=dedicated.search,
        ),
        Policy(
            "alpaserve",
            target.plan,
            frozenset({ADMISSION_ORDER, STEP_CONTROL, UNIFIED_KV, PLACEMENT_SEARCH}),
            evicts=False,
            calm=_always,
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
            "qlm-aware",  # QLM's own estimate chooses the instance, not Prism §7.5's first idle one
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
            calm=_always,
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
            calm=_always,
            turns=aegaeon.turns(),
        ),
    )
}


def own_names() -> tuple[str, ...]:
    """Prism's own policies, sorted."""
    return tuple(sorted(_POLICIES))


def names() -> tuple[str, ...]:
    """Every policy's name, sorted, those of installed packages too. Nothing is imported."""
    return tuple(sorted({*_POLICIES, *added.names()}))


def refused() -> tuple[str, ...]:
    """A line for each entry point of another package that takes the name of a policy of Prism's
    own."""
    return added.refused(_POLICIES)


def get(name: str) -> Policy:
    """Raises ConfigError that names the key `policy` and the names there are, or the package whose
    policy cannot be had."""
    if name in _POLICIES:
        return _POLICIES[name]
    if name in added.names():
        return added.get(name)
    raise ConfigError(f"policy: there is no {name!r}; choose one of {', '.join(names())}")


def sources(name: str) -> tuple[Path, ...]:
    """The files of another package that a policy comes from; none for Prism's own. Raises
    ConfigError as `get` does."""
    get(name)
    return () if name in _POLICIES else added.sources(name)


def with_knobs(policy: Policy, knobs: PolicyKnobs | None) -> Policy:
    """The policy tuned; itself without knobs. Raises ConfigError where it refuses them."""
    if knobs is None or policy.make is None:
        return policy
    try:
        return policy.make(knobs)
    except ValueError as error:
        raise ConfigError(f"knobs.{policy.name}: {error}") from error


def missing(policy: Policy) -> tuple[str, ...]:
    """What the policy needs and the live engines lack, sorted; empty when it can run."""
    return tuple(sorted(policy.needs - LIVE_ENGINES))


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
