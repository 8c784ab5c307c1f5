"""Status that the scheduler publishes: placement, KVPR, rates, refusals, counters, readiness."""

from __future__ import annotations

from pathlib import Path

from prism import clock
from prism.cluster.state.agents import ABSENT_STATES, AgentBook
from prism.cluster.state.scheduler_state import SchedulerState
from prism.config.schema.cluster_config import ClusterConfig
from prism.messages.cluster import ClusterStatus
from prism.messages.troubles import read_troubles
from prism.policies.bins import current_bins
from prism.policies.data import ClusterView
from prism.policies.planning import evacuation
from prism.transport import malformed_total


def build_status(state: SchedulerState, view: ClusterView) -> ClusterStatus:
    """Returns the status for frontends and operators. Its placement is the route of requests."""
    bins = current_bins(view.models, view.gpus)
    return ClusterStatus(
        time_unix_s=clock.unix_s(),
        node=state.config.node,
        policy=state.policy.name,
        placement={name: devices[0] for name, devices in state.routes.placement.items()},
        copies={name: d for name, d in state.routes.placement.items() if len(d) > 1},
        agents=state.book.reports(),
        models=[model.name for model in state.config.models],
        kvpr={name: b.kvpr for name, b in bins.items() if state.book.report(name)},
        token_rates=_token_rates(view),
        unplaced=dict(state.routes.unplaced),
        actions_total=dict(state.actions.totals),
        ready=state.startup.is_ready(view.models, state.now_s()),
        refusals=state.activations.refusals | _refusals_of_removed(state),
        malformed_total=malformed_total(),
        degraded=degraded(state),
        decisions=state.actions.latest(),
        revision=state.served.revision,
        leaving=_leaving(state),
        drained={
            device: "; ".join(_remaining(state, view, device))
            for device in sorted(state.demands.drained)
        },
        overload=sorted(state.activations.overload),
        external=state.external or [],
    )


def _remaining(state: SchedulerState, view: ClusterView, device: str) -> list[str]:
    """Returns the models on or moving to a drained device, each with the reason."""
    if state.book.report(device) is None:
        return ["its agent does not report"]
    here = {m.model for m in state.actions.moves.values() if m.brings_up and device in m.devices}
    for report in state.book.reports():
        present = (m for m in report.models if m.state not in ABSENT_STATES)
        here |= {m.model for m in present if device in (report.device, *m.peers)}
    why = evacuation.remaining(view, device, moves=state.policy.drains)
    return [f"{name} {why.get(name, 'is being evicted')}" for name in sorted(here)]


def _leaving(state: SchedulerState) -> list[str]:
    """Returns the removed models that still have requests or are on a device."""
    staying = {model.name for model in state.served.staying()}
    return sorted(state.served.leaving | (state.book.models() - staying))


def _refusals_of_removed(state: SchedulerState) -> dict[str, str]:
    """Returns refusals for requests sent by frontends that did not know of a model's removal."""
    known = {model.name for model in state.config.models}
    why = "it was removed from the configuration"
    return dict.fromkeys(state.routes.unplaced.keys() - known, why)


def _token_rates(view: ClusterView) -> dict[str, float]:
    """Returns model -> token rate, summed over its copies."""
    rates: dict[str, float] = {}
    for model in view.models:
        if model.token_rate > 0:
            rates[model.name] = rates.get(model.name, 0.0) + model.token_rate
    return rates


def degraded(state: SchedulerState) -> dict[str, str]:
    """Returns part, device or model -> its problem.

    Devices and models are included only after the cluster has been ready once.
    """
    found = read_troubles(Path(state.config.run_dir))
    if state.startup.complete:
        silent = [d.name for d in state.config.devices if state.book.report(d.name) is None]
        found |= dict.fromkeys(silent, "its agent does not report; its models may go elsewhere")
        starting = state.book.not_started()
        found |= dict.fromkeys(starting, "its engines have not all started yet")
        found |= _too_few_copies(state.config, state.book)
        refused = state.activations
        found |= {m: f"requests are rejected: {refused.refusals[m]}" for m in refused.overload}
    found |= {s.url: f"{s.model}: {s.problem}" for s in state.external or [] if s.problem}
    return found


def _too_few_copies(config: ClusterConfig, book: AgentBook) -> dict[str, str]:
    """Returns the models with fewer active copies than `replicas.min`, with a message each."""
    found = {}
    for model in config.models:
        up, least = len(book.where(model.name, "active")), model.replicas_min
        if up < least and least > 1:
            found[model.name] = f"{up} of at least {least} copies (replicas.min) are up"
    return found
