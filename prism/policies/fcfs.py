"""First come, first served: the admission order of every system that states no other."""

from __future__ import annotations

from collections.abc import Iterable

from prism.policies.data import AdmissionJob, AdmissionOrder


def order(jobs: Iterable[AdmissionJob], now_s: float, busy_s: float = 0.0) -> AdmissionOrder:
    """All of `jobs`, oldest first; deadlines play no part, so none is set back as late."""
    return AdmissionOrder(tuple(sorted(jobs, key=lambda job: (job.arrival_s, job.id))), ())
