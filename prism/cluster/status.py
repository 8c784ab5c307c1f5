"""What the scheduler publishes: placement, pressure, rates, refusals, counters, readiness."""

from __future__ import annotations

import time

from prism.cluster.state import State
from prism.messages import ClusterStatus
from prism.policies import kvpr
from prism.policies.data import ClusterView


def build_status(state: State, view: ClusterView) -> ClusterStatus:
    """Times are wall-clock; placement is what requests are routed by."""
    bins = kvpr.current_bins(view.models, view.gpus)
    return ClusterStatus(
        time_unix_s=time.time(),
        policy=state.policy.name,
        placement=dict(state.placement),
        agents=state.book.reports(),
        kvpr={name: b.kvpr for name, b in bins.items() if b.gpu.alive},
        token_rates={m.name: m.token_rate for m in view.models if m.token_rate > 0},
        unplaced=dict(state.unplaced),
        actions_total=dict(state.actions_total),
        ready=is_ready(state, view),
        refusals=dict(state.refusals),
    )


def is_ready(state: State, view: ClusterView) -> bool:
    """Every device has an agent whose engines have been up, and the initial placement is over:
    each of its models was activated, refused or failed at least once."""
    if not state.started_all and state.planned_once:
        absent = {m.name for m in view.models if m.state in ("absent", "activating")}
        pending = state.wanted & absent - set(state.refusals)
        state.started_all = not any(state.bars.count(name) == 0 for name in pending)
    return state.started_all and state.book.all_started()
