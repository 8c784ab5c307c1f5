"""Periodic search for a new placement while the cluster runs (SeaLLM §4.3).

After each interval the search gets the requests of that interval. The policy's `next_interval`
lengthens the interval if the last estimate held, else shortens it (equation 8). The metric is the
attainment of the end-to-end SLO.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from prism.policies.placement import REQUESTS_MIN, Placement, better
from prism.policies.policy import Policy
from prism_sim.core.profile import ModelLoad, loads
from prism_sim.core.records import NEVER, Records
from prism_sim.core.setup import ClusterSetup
from prism_sim.core.workload import Workload, window
from prism_sim.placement.search import problem

Simulation = Callable[[Placement, Workload], Records]


class Replacement:
    """Search for new placements. REQUIRES: the policy has `search` and `next_interval`."""

    def __init__(
        self, policy: Policy, setup: ClusterSetup, records: Records, base: Sequence[ModelLoad]
    ) -> None:
        assert policy.search is not None
        assert policy.next_interval is not None
        self._policy = policy
        self._find, self._follow = policy.search, policy.next_interval
        self._setup = setup
        self._records = records
        self._base = base
        # Time to the next search.
        self.interval_s = setup.search_interval_s
        self._since = 0

    def update(
        self, now_s: float, until: int, target: Placement, simulate: Simulation
    ) -> Placement:
        """Returns the placement for the next interval.

        A new placement replaces `target` only if it does better (`placement.better`) on the
        requests of the last interval, which end before index `until`.
        """
        first, self._since = self._since, until
        if until - first < REQUESTS_MIN:
            return target
        real = attainment(self._records, first, until, now_s)
        self.interval_s = self._follow(self.interval_s, real, target.score)
        recent = window(self._records.work, first, until)
        given = problem(self._setup, self._policy, self._loads(recent), simulate, recent)
        return better(given, target, self._find(given))

    def _loads(self, recent: Workload) -> list[ModelLoad]:
        """Returns loads with the rates of the interval, and lengths and times of the profile."""
        rates = loads(self._setup, recent, max(recent.end_s, 1.0))
        return [
            replace(base, requests=new.requests, rate_rps=new.rate_rps)
            for base, new in zip(self._base, rates, strict=True)
        ]


def attainment(records: Records, first: int, until: int, now_s: float) -> float:
    """Returns the part of the requests [first, until) that met the end-to-end SLO, among those for
    which this is known now. Returns 1 if there are none."""
    work, met, known = records.work, 0, 0
    for i in range(first, until):
        due_s = work.arrival_s[i] + work.slo_e2e_s[i]
        if records.end_s[i] != NEVER:
            known += 1
            met += records.end_s[i] <= due_s and i not in records.errors
        elif due_s < now_s:
            known += 1
    return met / known if known else 1.0
