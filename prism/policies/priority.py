"""Priorities of requests: classes of the admission order, each in the policy's own order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prism.policies.data import AdmissionJob, AdmissionOrder

Order = Callable[[Sequence[AdmissionJob], float, float], AdmissionOrder]


def order_by_priority(
    order: Order, jobs: Sequence[AdmissionJob], now_s: float, busy_s: float = 0.0
) -> AdmissionOrder:
    """`order` of each class of `jobs`, the highest priority first; those on time and those late
    each in one tuple, the late ones oldest first.

    A class finds the device busy with all classes above it: what it has on time takes nothing from
    them. Where all have one priority this is `order` itself.
    """
    priorities = {job.priority for job in jobs}
    if len(priorities) < 2:
        return order(jobs, now_s, busy_s)
    on_time: list[AdmissionJob] = []
    late: list[AdmissionJob] = []
    for priority in sorted(priorities, reverse=True):
        same = [job for job in jobs if job.priority == priority]
        found = order(same, now_s, busy_s)
        on_time += found.on_time
        late += found.late
        busy_s += sum(job.prefill_s for job in same)
    return AdmissionOrder(tuple(on_time), tuple(sorted(late, key=lambda j: (j.arrival_s, j.id))))
