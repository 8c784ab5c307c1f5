"""Cluster policies by name, and what each needs from the engines it runs on.

The live system refuses a policy by name when its engines lack something (`missing`); the
simulator's engines have everything. Installed packages add policies (`added.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from prism.errors import ConfigError
from prism.policies import fcfs, moore_hodgson, prism, static, target
from prism.policies.baselines import (
    adbs,
    alpaserve,
    dedicated,
    doubling_budget,
    mux_placement,
    qlm,
    seallm,
    serverlessllm,
    temporal,
)
from prism.policies.data import (
    Action,
    AdmissionJob,
    AdmissionOrder,
    ClusterView,
    DeviceLoad,
    Settings,
)
from prism.policies.kv_blocks import KvBlocks
from prism.policies.placement import Search
from prism.policies.queues import Assign
from prism.policies.steps import StepControl

ADMISSION_ORDER = "admission order"  # requests start in the order that the policy gives
ELASTIC_MEMORY = "elastic memory"  # KV pages are mapped while used and returned afterwards
KV_LIMIT = "KV limit"  # an engine's KV memory can be capped
STEP_CONTROL = "step control"  # the policy decides which model's step runs next
SM_SHARES = "SM shares"  # models get fractions of a device's compute
UNIFIED_KV = "unified KV blocks"  # models of a device share one pool of blocks
PLACEMENT_SEARCH = "placement search"  # profiles and recent requests feed a search for a placement
VIRTUAL_QUEUES = "virtual queues"  # requests are bound to devices before their model is there

LIVE_ENGINES = frozenset({ADMISSION_ORDER, ELASTIC_MEMORY, KV_LIMIT})
"""What the engines of the live system offer."""
FEATURES = LIVE_ENGINES | {STEP_CONTROL, SM_SHARES, UNIFIED_KV, PLACEMENT_SEARCH, VIRTUAL_QUEUES}
"""What the simulator's engines offer."""


class PolicyKnobs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of what a policy of another package can be tuned with. The YAML has its fields under
    `knobs: {NAME: ...}`; each has a default. `__post_init__` raises ValueError for a bad value."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A cluster policy. Every member is pure: frozen data in, actions and orders out."""

    name: str
    # The actions to start now.
    plan: Callable[[ClusterView, Settings], tuple[Action, ...]]
    needs: frozenset[str]
    # False: every model stays resident.
    evicts: bool = True
    # A device's waiting requests, for admission.
    order: Callable[[Iterable[AdmissionJob], float, float], AdmissionOrder] = fcfs.order
    # Finds `ClusterView.target` before anything starts, and again after each replacement interval
    # if there is a next_interval.
    search: Search | None = None
    # (last interval, real, estimated performance) -> the next interval in seconds.
    next_interval: Callable[[float, float, float], float] | None = None
    # Decides over each step of co-located engines. None: they compute side by side, each free to
    # take the whole device (Prism §7.1, MPS at 100 %).
    steps: StepControl | None = None
    # Binds waiting requests to devices instead of to their model's device.
    assign: Assign | None = None
    # The pool that the models of a device share. None: each has blocks of its own.
    kv_blocks: KvBlocks | None = None
    # An activation starts a new engine process instead of reusing one.
    restarts_engine: bool = False
    # Its plan reads `ModelView.startup_s`; without them all devices are alike to it.
    asks_startup: bool = False
    # Says without a view that the plan would be empty, if no model that is asked for is absent.
    # None: it cannot tell.
    calm: Callable[[Iterable[DeviceLoad], Settings], bool] | None = None
    # Of another package's policy: the type of its knobs, and what makes it of them.
    knobs: type[PolicyKnobs] | None = None
    make: Callable[[Any], Policy] | None = None


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
    )
}


def own_names() -> tuple[str, ...]:
    """Prism's own policies, sorted."""
    return tuple(sorted(_POLICIES))


def names() -> tuple[str, ...]:
    """Every policy's name, sorted, those of installed packages too. Nothing is imported."""
    from prism.policies import added

    return tuple(sorted({*_POLICIES, *added.names()}))


def get(name: str) -> Policy:
    """Raises ConfigError that names the key `policy` and the names there are, or the package whose
    policy cannot be had."""
    if name in _POLICIES:
        return _POLICIES[name]
    from prism.policies import added

    if name in added.names():
        return added.get(name)
    raise ConfigError(f"policy: there is no {name!r}; choose one of {', '.join(names())}")


def sources(name: str) -> tuple[Path, ...]:
    """The files of another package that a policy comes from; none for Prism's own. Raises
    ConfigError as `get` does."""
    from prism.policies import added

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
