"""Placements that are searched anew while the cluster runs (SeaLLM §4.3).

After each interval the search sees the requests of that interval. The next interval is longer where
the last estimate held, else shorter, as the policy's `next_interval` says (equation 8); the metric
is the attainment of the end-to-end SLO.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from prism.policies.placement import Placement
from prism.policies.policy import Policy
from prism_sim.core.profile import ModelLoad, loads
from prism_sim.core.records import NEVER, Records
from prism_sim.core.setup import ClusterSetup
from prism_sim.core.workload import Workload, window
from prism_sim.placement.search import outcome, sample_of, search

Play = Callable[[Placement, Workload], Records]
REQUESTS_MIN = 20
"""Fewer in an interval say too little to move models for."""


class Replacement:
    """`interval_s` until the next look. REQUIRES: the policy has a search and a next_interval."""

    def __init__(
        self, policy: Policy, setup: ClusterSetup, records: Records, base: Sequence[ModelLoad]
    ) -> None:
        assert policy.search is not None
        assert policy.next_interval is not None
        self._find, self._follow = policy.search, policy.next_interval
        self._setup = setup
        self._records = records
        self._base = base
        self.interval_s = setup.replacement_interval_s
        self._since = 0

    def look(self, now_s: float, until: int, target: Placement, play: Play) -> Placement:
        """The placement from now on: the new one if it does better than `target` on the requests
        of the last interval, those up to index `until`; moving is not free."""
        first, self._since = self._since, until
        if until - first < REQUESTS_MIN:
            return target
        real = attainment(self._records, first, until, now_s)
        self.interval_s = self._follow(self.interval_s, real, target.score)
        recent = window(self._records.work, first, until)
        seen = self._loads(recent)
        found = search(self._find, self._setup, seen, play, recent)
        sample = sample_of(recent, self._setup.search_requests)
        kept, moved = (outcome(play(p, sample), seen) for p in (target, found))
        if (moved.attainment, -moved.mean_normalized_latency) <= (
            kept.attainment,
            -kept.mean_normalized_latency,
        ):
            return replace(target, score=kept.attainment)
        return found

    def _loads(self, recent: Workload) -> list[ModelLoad]:
        """Rates of the interval; lengths and times from the profile, which is of the services."""
        rates = loads(self._setup, recent, max(recent.end_s, 1.0))
        return [
            replace(base, requests=new.requests, rate_rps=new.rate_rps)
            for base, new in zip(self._base, rates, strict=True)
        ]


def attainment(records: Records, first: int, until: int, now_s: float) -> float:
    """Of the requests [first, until): the part that met the end-to-end SLO, among those of which
    this is known now; 1 without any."""
    work, met, known = records.work, 0, 0
    for i in range(first, until):
        due_s = work.arrival_s[i] + work.slo_e2e_s[i]
        if records.end_s[i] != NEVER:
            known += 1
            met += records.end_s[i] <= due_s and i not in records.errors
        elif due_s < now_s:
            known += 1
    return met / known if known else 1.0
