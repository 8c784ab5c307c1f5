"""Moves of running requests from a copy of a model to the others, with their KV."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from prism.policies.kv_network import sends_kv
from prism_sim.cluster.activation import handover_s
from prism_sim.cluster.copies import SimModel
from prism_sim.cluster.device import Resident
from prism_sim.core.kernel import Kernel
from prism_sim.core.records import Records
from prism_sim.core.request import SimRequest
from prism_sim.core.setup import ActivationSettings
from prism_sim.core.workload import NO_SLO


class Handover:
    """Moves the running requests of one copy after their present step.

    Args:
        route: Routes the unplaced requests of a model.
        ended: Called with the source when its requests have left it.
    """

    def __init__(
        self,
        kernel: Kernel,
        settings: ActivationSettings,
        records: Records,
        route: Callable[[SimModel], None],
        ended: Callable[[SimModel, Resident], None],
    ) -> None:
        self._kernel = kernel
        self._settings = settings
        self._records = records
        self._route = route
        self._ended = ended

    def start(self, model: SimModel, source: Resident, target: Resident | None) -> None:
        """Moves the running requests of the source to the target, or divides them among the other
        copies."""
        if source.engine is not None and source.running:
            source.engine.stop(partial(self._copy_kv, model, source, target))

    def _copy_kv(self, model: SimModel, source: Resident, target: Resident | None) -> None:
        """Copies the KV of the source's requests, which pause meanwhile, over the source's link.

        The copy takes as long as if all requests went to one copy. KV for another node is sent to
        one copy, or dropped, as windows and states always are.
        """
        assert source.engine is not None
        receiver = target or _nearest(model, source)
        if receiver is None or not source.model.need.is_plain:
            self._hand_over(model, source, target, "")
            return
        node, same_node = _node(receiver), _node(receiver) == _node(source)
        if not same_node and not kv_is_sent(source, self._settings):
            self._hand_over(model, source, target, "")
            return
        here, there = ([d.setup for d in r.devices] for r in (source, receiver))
        copy_s = handover_s(source.engine.kv.used_bytes, here, there, self._settings)
        new_home = target if same_node else receiver
        self._kernel.after(copy_s, self._hand_over, model, source, new_home, node)

    def _hand_over(
        self, model: SimModel, source: Resident, target: Resident | None, kv_node: str
    ) -> None:
        """Moves the source's requests to the target, or to the other active copies if the target is
        not active any more.

        Requests for a copy on `kv_node` keep their KV, the others are recomputed. Without an active
        copy they wait for one.
        """
        assert source.engine is not None
        requests = source.engine.release()
        self._records.count("moved", len(requests))
        active = model.active
        receivers = [r for r in active if r is target] or active
        if not receivers:
            for request in requests:
                request.forget_kv()
                slo_s = self._records.work.slo_tpot_s[request.index]
                slo_s = model.setup.slo_tpot_s if slo_s == NO_SLO else slo_s
                request.requeue(self._kernel.time_s, slo_s)
                model.unplaced[request.index] = request
            self._route(model)
        else:
            for receiver, share in _divided(requests, receivers):
                for request in () if _node(receiver) == kv_node else share:
                    request.forget_kv()
                receiver.home.receive(receiver, share)
        self._ended(model, source)


def kv_is_sent(source: Resident, settings: ActivationSettings) -> bool:
    """Returns whether the source's KV is sent to another node, by the rule of the live agent. The
    KV of several ranks cannot be sent."""
    speed = source.home.speed_tokens_per_s(source.model)
    sent = sends_kv(source.model.token_bytes, speed, settings.network_bytes_s)
    return source.tp == 1 and sent


def _node(resident: Resident) -> str:
    return resident.home.setup.node


def _nearest(model: SimModel, source: Resident) -> Resident | None:
    """Returns the first active copy on the source's node, or else the first active copy."""
    return min(model.active, key=lambda r: _node(r) != _node(source), default=None)


def _divided(
    requests: Sequence[SimRequest], copies: Sequence[Resident]
) -> list[tuple[Resident, list[SimRequest]]]:
    """Assigns each request to the copy with the fewest requests, as the live queues do."""
    counts = [copy.open_requests for copy in copies]
    shares: list[list[SimRequest]] = [[] for _ in copies]
    for request in requests:
        least = counts.index(min(counts))
        counts[least] += 1
        shares[least].append(request)
    return [(copy, share) for copy, share in zip(copies, shares, strict=True) if share]
