"""Request priorities: classes of the admission order, each in the policy's own order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prism.policies.data import AdmissionJob, AdmissionOrder

Order = Callable[[Sequence[AdmissionJob], float, float], AdmissionOrder]


def order_by_priority(
    order: Order, jobs: Sequence[AdmissionJob], now_s: float, busy_s: float = 0.0
) -> AdmissionOrder:
    """Applies `order` to each priority class, highest first, and concatenates the results.

    Late jobs of all classes are ordered oldest first. A class starts after the prefills of all
    higher classes, so that it never delays them. With a single priority the result is `order`'s.
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
