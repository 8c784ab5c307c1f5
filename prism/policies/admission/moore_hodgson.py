"""Moore-Hodgson order: the largest set of requests that meet their TTFT (Prism §6.3, Algorithm 2).

A device computes prefills one after another. A request is on time if all prefills up to and
including its own end by its deadline. Moore's algorithm minimises the number of late jobs on one
machine exactly.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from prism.policies.data import AdmissionOrder, EngineView, Waiting


def order(
    requests: Sequence[Waiting],
    engines: Mapping[str, EngineView],
    now_s: float,
    busy_s: float = 0.0,
) -> AdmissionOrder:
    """Splits `requests` into the largest on-time set, earliest deadline first, and the late ones.

    A request that would be late even alone is late at once. The rest of its model's activation is
    used for this check only, since an activation delays no other model. Late requests are ordered
    oldest first. Ties are ordered by deadline, arrival, id, so the order is deterministic.
    O(n log n).

    Args:
        busy_s: Time of prefill work in progress, before which no request can start.
    """
    by_deadline: list[tuple[float, float, str, float, Waiting]] = []
    late: list[Waiting] = []
    for request in requests:
        engine = engines[request.model]
        prefill_s = request.prompt_tokens / engine.prefill_tokens_per_s
        deadline_s = request.deadline_s
        if now_s + engine.ready_in_s + prefill_s <= deadline_s:
            by_deadline.append((deadline_s, request.arrival_s, request.id, prefill_s, request))
        else:
            late.append(request)
    by_deadline.sort()
    end_s = now_s + busy_s
    longest_first: list[tuple[float, int]] = []
    removed: set[int] = set()
    for index, (deadline_s, _, _, prefill_s, _) in enumerate(by_deadline):
        heapq.heappush(longest_first, (-prefill_s, index))
        end_s += prefill_s
        if end_s > deadline_s:
            negative_s, longest = heapq.heappop(longest_first)
            end_s += negative_s
            removed.add(longest)
    on_time = tuple(
        request for index, (*_, request) in enumerate(by_deadline) if index not in removed
    )
    late.extend(by_deadline[index][-1] for index in removed)
    return AdmissionOrder(on_time, tuple(sorted(late, key=lambda r: (r.arrival_s, r.id))))
