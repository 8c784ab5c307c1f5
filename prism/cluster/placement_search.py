"""Placement search of the policy, by what the cluster has measured: `SchedulerState.target`."""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import replace

from prism.cluster.simulated_search import SearchInput
from prism.cluster.simulated_search import search as simulated_search
from prism.cluster.state.scheduler_state import SchedulerState
from prism.cluster.view import build_view
from prism.errors import PlacementSearchError
from prism.policies import profiles
from prism.policies.data import ClusterView
from prism.policies.placement import REQUESTS_MIN, Placement

log = logging.getLogger("prism.cluster")

RETRY_S = 5.0
"""Pause after a failed search. It doubles with each failure, up to RETRY_MAX_S."""
RETRY_MAX_S = 300.0
INTERVAL_MIN = 0.1
"""Least interval between searches, as a part of the configured one."""


class PlacementSearch:
    """Searches at the start, when models or devices change, and after each search interval.

    A search takes seconds with many models, so it runs in a thread, or in a process if it
    simulates. Until the first has ended, nothing is planned. REQUIRES: the policy has a search.
    """

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._searched_s = -math.inf
        # Models with their degrees, and live devices, of the last search.
        self._inputs: object = None
        self._interval = SearchInterval(state)

    async def run(self) -> None:
        """Searches until cancelled. After a failed search the placement stays as it is."""
        pause_s = RETRY_S
        while True:
            before = self._inputs
            try:
                if self._state.book.all_heard(self._state.now_s()):
                    await self.step()
                    pause_s = RETRY_S
                await asyncio.sleep(self._state.config.report_interval_s)
            except (PlacementSearchError, OSError) as error:
                log.error("%s; the next search is in %.0f s", error, pause_s)
                self._inputs = before
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, RETRY_MAX_S)

    async def step(self) -> None:
        """Searches if a search is due."""
        state, now_s, inputs = self._state, self._state.now_s(), self._inputs_now()
        changed, due = inputs != self._inputs, now_s - self._searched_s >= self._interval.seconds
        if not changed and not due:
            return
        self._inputs, self._searched_s = inputs, now_s
        if not changed and not self._interval.ended():
            return
        view = build_view(state, now_s)
        resumed = self._resumed(view)
        # A placement of other models or devices is not kept.
        found = resumed or await self._find(replace(view, target=None) if changed else view)
        if state.target is None or found.units != state.target.units:
            log.info("new placement after %.1f s: %s", state.now_s() - now_s, text(found))
        state.target = found
        self._interval.begins(None if resumed else found.score)
        state.changes.notify()

    async def _find(self, view: ClusterView) -> Placement:
        policy = self._state.policy
        assert policy.search is not None
        if policy.simulates:
            return await simulated_search(SearchInput(self._state.config, view))
        return await asyncio.to_thread(policy.search, profiles.problem(view))

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
        # A policy that binds requests has instances, and the models on them change.
        is_found = self._state.target is not None or self._state.policy.binds_requests
        return None if is_found or missing else present


class SearchInterval:
    """Time from one search to the next: that of the configuration, which a policy with
    `next_interval` adapts (SeaLLM §4.3)."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._adapted_s = self._given_s = self._configured_s()
        # Score of the last search; None: the placement was not searched.
        self._estimated: float | None = None

    @property
    def seconds(self) -> float:
        """The present interval; infinity if intervals are off."""
        configured_s = self._configured_s()
        if configured_s != self._given_s:  # a reload has changed it
            self._adapted_s = self._given_s = configured_s
        return self._adapted_s

    def begins(self, estimated: float | None) -> None:
        """Begins an interval. estimated: Attainment by the search before it, if known."""
        self._estimated = estimated
        self._state.attainment.reset()

    def ended(self) -> bool:
        """Adapts the next interval to the estimate's error. Returns False if the traffic since the
        last search is too little for another one."""
        follow, seen = self._state.policy.next_interval, self._state.attainment
        if follow is None:
            return True
        if seen.ended < REQUESTS_MIN:
            seen.reset()
            return False
        if self._estimated is not None:
            before_s = self._adapted_s
            least_s = INTERVAL_MIN * self._given_s
            self._adapted_s = max(least_s, follow(before_s, seen.attainment, self._estimated))
            log.info(
                "attainment of %.3f, estimated %.3f: the search interval of %.0f s becomes %.0f s",
                seen.attainment,
                self._estimated,
                before_s,
                self._adapted_s,
            )
        return True

    def _configured_s(self) -> float:
        interval_s = self._state.config.scheduler.search_interval_s
        return math.inf if interval_s is None else float(interval_s)


def text(placement: Placement) -> str:
    """Returns the units with their models, for logs."""
    units = (
        f"{' + '.join(unit.devices)}: {', '.join(hosted.model for hosted in unit.models) or '-'}"
        for unit in placement.units
    )
    return "; ".join(units)
