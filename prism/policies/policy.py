"""What a cluster policy is, and what it can need from the engines that it runs on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from prism.policies import fcfs
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
from prism.policies.turns import TurnPolicy

ADMISSION_ORDER = "admission order"  # requests start in the order that the policy gives
ELASTIC_MEMORY = "elastic memory"  # KV pages are mapped while used and returned afterwards
KV_LIMIT = "KV limit"  # an engine's KV memory can be capped
STEP_CONTROL = "step control"  # the policy decides which model's step runs next
SM_SHARES = "SM shares"  # models get fractions of a device's compute
UNIFIED_KV = "unified KV blocks"  # models of a device share one pool of blocks
PLACEMENT_SEARCH = "placement search"  # profiles and recent requests feed a search for a placement
VIRTUAL_QUEUES = "virtual queues"  # requests are bound to devices before their model is there
TOKEN_TURNS = "token-level switching"  # weights and KV change places with the host between tokens

LIVE_ENGINES = frozenset({ADMISSION_ORDER, ELASTIC_MEMORY, KV_LIMIT})
"""What the engines of the live system offer."""
FEATURES = LIVE_ENGINES | {
    STEP_CONTROL,
    SM_SHARES,
    UNIFIED_KV,
    PLACEMENT_SEARCH,
    VIRTUAL_QUEUES,
    TOKEN_TURNS,
}
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
    # Models take turns on devices: no model has a place, and `plan` is not asked for any.
    turns: TurnPolicy | None = None
    # The pool that the models of a device share. None: each has blocks of its own.
    kv_blocks: KvBlocks | None = None
    # Its plan empties drained devices. False: idle models there are evicted beside it.
    drains: bool = False
    # An activation starts a new engine process instead of reusing one.
    restarts_engine: bool = False
    # Its plan reads `ModelView.startup_s`; without them all devices are alike to it.
    asks_startup: bool = False
    # Says without a view that the plan would be empty, if no model that is asked for is absent and
    # none has to leave (`policies/drain.py`).
    # None: it cannot tell.
    calm: Callable[[Iterable[DeviceLoad], Settings], bool] | None = None
    # Seconds until it may plan more on a view in which nothing but time changes; infinity: never.
    # None: no more than at any other moment.
    patience_s: Callable[[ClusterView, Settings], float] | None = None
    # Of another package's policy: the type of its knobs, and what makes it of them.
    knobs: type[PolicyKnobs] | None = None
    make: Callable[[Any], Policy] | None = None
