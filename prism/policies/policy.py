"""Cluster policies, and the features that they can need from engines."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from prism.policies.admission import fcfs
from prism.policies.data import (
    Action,
    ClusterView,
    DeviceLoad,
    Order,
    Settings,
)
from prism.policies.multiplexing.kv_blocks import KvBlocks
from prism.policies.multiplexing.steps import StepControl
from prism.policies.multiplexing.turns import TurnPolicy
from prism.policies.placement import Search
from prism.policies.queues import Assign

ADMISSION_ORDER = "admission order"  # requests start in the order that the policy gives
ELASTIC_MEMORY = "elastic memory"  # KV pages are mapped on use and returned afterwards
KV_LIMIT = "KV limit"  # an engine's KV memory can be capped
STEP_CONTROL = "step control"  # the policy decides which model's step runs next
SM_SHARES = "SM shares"  # each model gets a fraction of a device's compute
UNIFIED_KV = "unified KV blocks"  # models of a device share one pool of blocks
PLACEMENT_SEARCH = "placement search"  # a search uses profiles and recent requests
VIRTUAL_QUEUES = "virtual queues"  # requests are assigned to devices before their model is there
TOKEN_TURNS = "token-level switching"  # weights and KV are swapped with host memory between tokens

FEATURES = frozenset(
    {
        ADMISSION_ORDER,
        ELASTIC_MEMORY,
        KV_LIMIT,
        PLACEMENT_SEARCH,
        STEP_CONTROL,
        SM_SHARES,
        UNIFIED_KV,
        VIRTUAL_QUEUES,
        TOKEN_TURNS,
    }
)
"""Features of the engines, live and simulated."""


class PolicyKnobs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base class of the parameters of another package's policy.

    The YAML has its fields under `knobs: {NAME: ...}`. Each field needs a default. `__post_init__`
    raises ValueError for an invalid value.
    """


@dataclass(frozen=True, slots=True)
class Policy:
    """Cluster policy. Every member is a pure function on frozen data, or plain data."""

    name: str
    # Returns the actions to start now.
    plan: Callable[[ClusterView, Settings], tuple[Action, ...]]
    # Required features of the engines.
    needs: frozenset[str]
    # False: every model stays resident.
    evicts: bool = True
    # Orders a device's waiting requests for admission.
    order: Order = fcfs.order
    # Finds `ClusterView.target` before the first plan, and again after each search interval; in the
    # simulator only if `next_interval` is set.
    search: Search | None = None
    # True if `search` needs `Problem.simulate`, for which the live system needs a simulator
    # (`registry.simulator`).
    simulates: bool = False
    # (last interval, real, estimated performance) -> the next interval in seconds. Performance is
    # the attainment of the end-to-end SLO.
    next_interval: Callable[[float, float, float], float] | None = None
    # Controls each step of co-located engines. None: engines run concurrently, and each may use
    # the whole device (Prism §7.1, MPS at 100 %).
    steps: StepControl | None = None
    # Assigns waiting requests to devices. None: a request goes to its model's device.
    assign: Assign | None = None
    # Switches models on devices between tokens. The units of `search`, which is required, are then
    # the instances, at least two of a degree. `plan` follows `ClusterView.turns`; the simulator
    # does not call it.
    turns: TurnPolicy | None = None
    # Kind of KV block pool that the models of a device share. None: each has its own blocks.
    kv_blocks: KvBlocks | None = None
    # True if `plan` empties drained devices. False: idle models there are evicted in addition.
    drains: bool = False
    # True if an activation starts a new engine process instead of reusing one.
    restarts_engine: bool = False
    # True if `plan` reads `ModelView.startup_s`.
    asks_startup: bool = False
    # True if `plan` reads `ModelView.expected`.
    asks_expected: bool = False
    # Returns True if device loads alone show that the plan is empty, unless a requested model is
    # absent or a model must leave its device (`policies/planning/evacuation.py`). None: the plan is
    # always made.
    is_balanced: Callable[[Iterable[DeviceLoad], Settings], bool] | None = None
    # Returns the seconds until the plan may change if only time passes; infinity: never. None: a
    # new plan is not needed when only time passes.
    next_plan_in_s: Callable[[ClusterView, Settings], float] | None = None
    # For another package's policy: the type of its knobs, and the factory that takes them.
    knobs: type[PolicyKnobs] | None = None
    make: Callable[[Any], Policy] | None = None

    @property
    def binds_requests(self) -> bool:
        """True if requests wait in the unplaced queue until they start on a device, and a model is
        on as many devices as have its requests."""
        return self.assign is not None or self.turns is not None

    @property
    def never_moves(self) -> bool:
        """True if a model stays where it was placed first."""
        return not self.evicts and self.search is None


def always_balanced(loads: Iterable[DeviceLoad], settings: Settings) -> bool:
    """Returns True: the policy's plan never depends on load."""
    return True
