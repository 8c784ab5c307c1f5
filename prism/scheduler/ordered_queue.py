"""Queue of one device, and the order of its requests, computed again when it may have changed."""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set

from prism.policies.admission.priority_classes import order_by_priority
from prism.policies.data import AdmissionOrder, EngineView, Order, Waiting
from prism.scheduler.order_by_model import OrderByModel
from prism.scheduler.step_budget import StepBudget

CHEAP_ORDER = 256
ORDER_S_PER_REQUEST = 1e-4


class OrderedQueue:
    """Waiting requests of one device. Not thread-safe.

    Args:
        order: the policy's order.
        max_age_s: maximum age of the order while no engine could take a request.
    """

    def __init__(self, order: Order, max_age_s: float) -> None:
        self.requests: dict[str, Waiting] = {}
        self.order = OrderByModel(AdmissionOrder((), ()), self.requests)
        self._policy_order = order
        self._max_age_s = max_age_s
        self._added: list[Waiting] = []  # since the last refresh
        self._left: set[str] = set()  # ids that left since the last order and may still be in it
        self._ordered_at_s = float("-inf")
        self._ordered_for: frozenset[str] = frozenset()  # models
        self._changed = False

    def add(self, request: Waiting) -> None:
        """Adds a request, or replaces the one with the same id."""
        if request.id not in self.requests:
            self._added.append(request)
        self.requests[request.id] = request
        self._changed = True
        if request.id in self._left:  # added again: a new order, so that it is not there twice
            self._ordered_at_s = float("-inf")

    def remove(self, request_ids: Collection[str]) -> None:
        """Removes requests. Ignores unknown ids."""
        self._left.update(request_ids)
        for request_id in request_ids:
            self.requests.pop(request_id, None)
            self._changed = True
        if not self.requests:
            self.order.clear()
            self._added.clear()
            self._left.clear()

    def refresh(self, now_s: float, views: Sequence[EngineView], budget: StepBudget) -> None:
        """Updates the order. Requests of models without an engine are between the
        on-time and the late ones of their priority.

        Args:
            budget: the unused budget of this step.
        """
        for request in self._added:
            self.order.add(request.id, request.model, request.priority)
        self._added.clear()
        engines = {view.model: view for view in views}
        if not self._is_order_due(now_s, engines.keys(), budget):
            return
        served = [r for r in self.requests.values() if r.model in engines]
        busy_s = sum(view.pending_prefill_s for view in views)
        order = order_by_priority(self._policy_order, served, engines, now_s, busy_s)
        self.order = OrderByModel(order, self.requests)
        for request in self.requests.values():
            if request.model not in engines:
                self.order.add(request.id, request.model, request.priority)
        self._left.clear()
        self._ordered_at_s, self._ordered_for, self._changed = now_s, frozenset(engines), False

    def _is_order_due(self, now_s: float, present: Set[str], budget: StepBudget) -> bool:
        """Returns whether the order must be computed again.

        A request that starts does so by an order of the present moment: whether a request is late
        must not depend on the time of the previous step.
        """
        age_s = now_s - self._ordered_at_s
        if age_s < max(0, len(self.requests) - CHEAP_ORDER) * ORDER_S_PER_REQUEST:
            return False
        if age_s >= self._max_age_s:
            return True
        changed = age_s > 0 or self._changed or present != self._ordered_for
        ordered = self.order.models()
        return changed and any(model in ordered and budget.is_open(model) for model in budget)
