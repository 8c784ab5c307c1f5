"""Placement search of the policy, by what the cluster has measured: `SchedulerState.target`."""

from __future__ import annotations

import asyncio
import logging
import math

from prism.cluster.state.scheduler_state import SchedulerState
from prism.cluster.view import build_view
from prism.policies import profiles
from prism.policies.data import ClusterView
from prism.policies.placement import Placement, Search

log = logging.getLogger("prism.cluster")


class PlacementSearch:
    """Searches at the start, when models or devices change, and after each search interval.

    A search runs in a thread, since it takes seconds with many models. Until the first has ended,
    nothing is planned. REQUIRES: the policy has a search.
    """

    def __init__(self, state: SchedulerState, search: Search) -> None:
        self._state = state
        self._search = search
        self._searched_s = -math.inf
        # Models with their degrees, and live devices, of the last search.
        self._inputs: object = None

    async def run(self) -> None:
        """Searches until cancelled."""
        while True:
            if self._state.book.all_heard(self._state.now_s()):
                await self.step()
            await asyncio.sleep(self._state.config.report_interval_s)

    async def step(self) -> None:
        """Searches if a search is due."""
        state, now_s = self._state, self._state.now_s()
        interval_s, inputs = state.config.scheduler.search_interval_s, self._inputs_now()
        due = interval_s is not None and now_s - self._searched_s >= interval_s
        if inputs == self._inputs and not due:
            return
        self._inputs, self._searched_s = inputs, now_s
        view = build_view(state, now_s)
        found = self._resumed(view)
        if found is None:
            found = await asyncio.to_thread(self._search, profiles.problem(view))
        if state.target is None or found.units != state.target.units:
            log.info("new placement after %.1f s: %s", state.now_s() - now_s, text(found))
        state.target = found
        state.changes.notify()

    def _inputs_now(self) -> object:
        state = self._state
        models = {(model.name, model.possible_degrees) for model in state.config.models}
        devices = {
            device.name
            for device in state.config.devices
            if device.name not in state.demands.drained and state.book.report(device.name)
        }
        return models, devices

    def _resumed(self, view: ClusterView) -> Placement | None:
        """Returns the placement that an earlier scheduler has left, if all models have a place: the
        traffic by which it was found is not known any more."""
        present = profiles.present(view)
        missing = any(not present.homes(model.name) for model in view.models)
        return None if self._state.target is not None or missing else present


def text(placement: Placement) -> str:
    """Returns the units with their models, for logs."""
    units = (
        f"{' + '.join(unit.devices)}: {', '.join(hosted.model for hosted in unit.models) or '-'}"
        for unit in placement.units
    )
    return "; ".join(units)
