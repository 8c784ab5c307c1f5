"""First come, first served: the default admission order."""

from __future__ import annotations

from collections.abc import Iterable

from prism.policies.data import AdmissionJob, AdmissionOrder


def order(jobs: Iterable[AdmissionJob], now_s: float, busy_s: float = 0.0) -> AdmissionOrder:
    """Returns all jobs, oldest first. Deadlines are ignored, so no job is late."""
    return AdmissionOrder(tuple(sorted(jobs, key=lambda job: (job.arrival_s, job.id))), ())
