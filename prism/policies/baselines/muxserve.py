"""MuxServe, and MuxServe++, the Prism paper's variant of it."""

from __future__ import annotations

from prism.policies.baselines import adbs, mux_placement
from prism.policies.multiplexing.kv_blocks import KvBlocks
from prism.policies.planning import target
from prism.policies.policy import (
    ADMISSION_ORDER,
    ELASTIC_MEMORY,
    PLACEMENT_SEARCH,
    SM_SHARES,
    STEP_CONTROL,
    UNIFIED_KV,
    Policy,
    always_balanced,
)

MUXSERVE = Policy(
    "muxserve",
    target.plan,
    frozenset({ADMISSION_ORDER, STEP_CONTROL, SM_SHARES, UNIFIED_KV, PLACEMENT_SEARCH}),
    evicts=False,
    is_balanced=always_balanced,
    search=mux_placement.search,
    steps=adbs.control(),
    kv_blocks=KvBlocks.HEADWISE,
)
# Prism §7.2: MuxServe's placement, KV memory on demand, no eviction.
ELASTIC = Policy(
    "muxserve++",
    target.plan,
    frozenset({ADMISSION_ORDER, ELASTIC_MEMORY, PLACEMENT_SEARCH}),
    evicts=False,
    is_balanced=always_balanced,
    search=mux_placement.search,
)
