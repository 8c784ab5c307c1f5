"""Request priorities: classes of the admission order, each in the policy's own order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prism.policies.data import AdmissionOrder, EngineView, Order, Waiting


def order_by_priority(
    order: Order,
    requests: Sequence[Waiting],
    engines: Mapping[str, EngineView],
    now_s: float,
    busy_s: float = 0.0,
) -> AdmissionOrder:
    """Applies `order` to each priority class, highest first, and concatenates the results.

    Late requests of all classes are ordered oldest first. A class starts after the prefills of all
    higher classes, so that it never delays them. With a single priority the result is `order`'s.
    """
    priorities = {request.priority for request in requests}
    if len(priorities) < 2:
        return order(requests, engines, now_s, busy_s)
    on_time: list[Waiting] = []
    late: list[Waiting] = []
    for priority in sorted(priorities, reverse=True):
        same = [request for request in requests if request.priority == priority]
        found = order(same, engines, now_s, busy_s)
        on_time += found.on_time
        late += found.late
        busy_s += sum(r.prompt_tokens / engines[r.model].prefill_tokens_per_s for r in same)
    return AdmissionOrder(tuple(on_time), tuple(sorted(late, key=lambda r: (r.arrival_s, r.id))))
