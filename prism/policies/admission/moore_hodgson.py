"""Moore-Hodgson order: the largest set of requests that meet their TTFT (Prism §6.3, Algorithm 2).

A device computes prefills one after another. A request is on time if all prefills up to and
including its own end by its deadline. Moore's algorithm minimises the number of late jobs on one
machine exactly.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from prism.policies.data import AdmissionJob, AdmissionOrder


def order(jobs: Iterable[AdmissionJob], now_s: float, busy_s: float = 0.0) -> AdmissionOrder:
    """Splits `jobs` into the largest on-time set, earliest deadline first, and the late ones.

    A job that would be late even alone is late at once. Its `ready_in_s` is used for this check
    only, since an activation delays no other model. Late jobs are ordered oldest first. Ties are
    ordered by deadline, arrival, id, so the order is deterministic. O(n log n).

    Args:
        busy_s: Time of prefill work in progress, before which no job can start.
    """
    alone: list[AdmissionJob] = []
    late: list[AdmissionJob] = []
    for job in jobs:
        in_time = now_s + job.ready_in_s + job.prefill_s <= job.deadline_s
        (alone if in_time else late).append(job)
    by_deadline = sorted(alone, key=lambda job: (job.deadline_s, job.arrival_s, job.id))
    end_s = now_s + busy_s
    longest_first: list[tuple[float, int]] = []
    removed: set[int] = set()
    for index, job in enumerate(by_deadline):
        heapq.heappush(longest_first, (-job.prefill_s, index))
        end_s += job.prefill_s
        if end_s > job.deadline_s:
            negative_s, longest = heapq.heappop(longest_first)
            end_s += negative_s
            removed.add(longest)
    on_time = tuple(job for index, job in enumerate(by_deadline) if index not in removed)
    late.extend(by_deadline[index] for index in removed)
    return AdmissionOrder(on_time, tuple(sorted(late, key=lambda job: (job.arrival_s, job.id))))
