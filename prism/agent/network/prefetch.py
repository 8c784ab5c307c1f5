"""Prefetch of models into the machine's weight store, from disk or from another machine's store.

The scheduler orders it for models that it expects to activate soon.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import Event

from kvcached import KvcachedError, Prefetch, WeightKey, WeightStore
from prism.engines.weights.peer_weights import PeerWeights
from prism.messages.agent import ActionResult, PrefetchModel
from prism.messages.model_spec import ModelSpec

log = logging.getLogger(__name__)

WAITING_MAX = 256
STOP_S = 5.0


@dataclass(slots=True)
class _Hint:
    spec: ModelSpec
    actions: list[int]


class Prefetcher:
    """Prefetches one model at a time, in the order of the hints. Every hint is answered.

    Agents of one machine share its store: a model that another agent reads is waited for and not
    read again. Step-driven: `tick` never waits.

    Args:
        store: the machine's weight store.
        weight_key: returns the key under which this machine's engines store a model (see
            `prism.engines.core`). A model whose key for rank 0 is stored is not read.
        answer: receives the answers.
        peers: weight stores of other machines.
    """

    def __init__(
        self,
        store: WeightStore | None,
        weight_key: Callable[..., WeightKey],
        answer: Callable[[ActionResult], None],
        peers: PeerWeights | None = None,
    ) -> None:
        self._store = store
        self._weight_key = weight_key
        self._answer = answer
        self._peers = peers
        self._waiting: deque[_Hint] = deque()
        self._current: tuple[_Hint, Prefetch] | None = None

    def hint(self, order: PrefetchModel) -> None:
        """Queues a model. One that is queued already keeps its place."""
        if self._store is None:
            self._refuse(order, "the machine does not have a weight store; set engine.weight_store")
            return
        known = [*self._waiting, *([self._current[0]] if self._current else [])]
        for hint in known:
            if hint.spec == order.model:
                hint.actions.append(order.action_id)
                return
        if len(known) >= WAITING_MAX:
            self._refuse(order, f"{len(known)} models are queued already")
            return
        self._waiting.append(_Hint(order.model, [order.action_id]))
        self.tick()

    def tick(self) -> None:
        """Answers a finished prefetch and starts the next one."""
        if self._current is not None and self._current[1].done:
            self._settle(*self._current)
            self._current = None
        if self._current is None and self._waiting:
            self._begin(self._waiting.popleft())

    def stop(self) -> None:
        """Cancels all prefetches without an answer."""
        self._waiting.clear()
        if self._current is not None:
            (hint, prefetch), self._current = self._current, None
            prefetch.cancel()
            try:
                prefetch.wait(STOP_S)
            except (KvcachedError, OSError) as error:
                log.debug("prefetch of %s: %s", hint.spec.name, error)

    def _begin(self, hint: _Hint) -> None:
        assert self._store is not None
        spec, peers = hint.spec, self._peers

        def first(cancel: Event) -> None:
            if peers is not None:
                peers.fetch(spec, lambda content: self._keys(content, spec), cancel)

        prefetch = self._store.prefetch(
            spec.path, unless=lambda content: self._keys(content, spec)[0], first=first
        )
        self._current = (hint, prefetch)

    def _keys(self, content: str, spec: ModelSpec) -> list[WeightKey]:
        """Returns the keys of all ranks."""
        ranks = range(spec.tp)
        return [self._weight_key(content, spec, rank=rank, ranks=spec.tp) for rank in ranks]

    def _settle(self, hint: _Hint, prefetch: Prefetch) -> None:
        name, problem = hint.spec.name, ""
        try:
            prefetch.wait(0)
        except (KvcachedError, OSError) as error:
            problem = f"{name} was not prefetched: {error}"
            log.warning("%s", problem)
        for action_id in hint.actions:
            done = f"{name} is in the weight store"
            self._answer(ActionResult(action_id, not problem, problem or done))

    def _refuse(self, order: PrefetchModel, why: str) -> None:
        self._answer(ActionResult(order.action_id, False, f"{order.model.name}: {why}"))
