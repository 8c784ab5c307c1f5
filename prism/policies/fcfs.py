"""First come, first served: the admission order of every system that states no other."""

from __future__ import annotations

from collections.abc import Iterable

from prism.policies.data import Job, Order


def order(jobs: Iterable[Job], now_s: float, busy_s: float = 0.0) -> Order:
    """All of `jobs`, oldest first; deadlines play no part, so none is set back as late."""
    return Order(tuple(sorted(jobs, key=lambda job: (job.arrival_s, job.id))), ())
