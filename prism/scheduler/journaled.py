"""A local scheduler that keeps a journal of its queue and of what it dispatches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from prism.journal import Left, Queued, Sink, Stepped
from prism.policies.data import Job, Order
from prism.ports import EnginePort, EngineView
from prism.scheduler.local import Limits, LocalScheduler, Waiting


class JournaledScheduler(LocalScheduler):
    """Decides exactly as its base does. now_s: dates what happens between steps."""

    def __init__(
        self,
        engines: EnginePort,
        limits: Limits,
        order: Callable[[Iterable[Job], float, float], Order],
        journal: Sink,
        now_s: Callable[[], float],
    ) -> None:
        self._seen = _SeenEngines(engines)
        super().__init__(self._seen, limits, order)
        self._journal = journal
        self._now_s = now_s
        self._stepping = False

    def add(self, request: Waiting) -> None:
        super().add(request)
        self._journal.add(
            Queued(
                time_s=self._now_s(),
                id=request.id,
                model=request.model,
                prompt_tokens=request.prompt_tokens,
                max_tokens=request.max_tokens,
                arrival_s=request.arrival_s,
                deadline_s=request.deadline_s,
            )
        )

    def remove(self, request_ids: Collection[str]) -> None:
        known = tuple(i for i in request_ids if i in self._waiting)
        super().remove(request_ids)
        if known and not self._stepping:
            self._journal.add(Left(time_s=self._now_s(), ids=known))

    def step(self, now_s: float) -> list[str]:
        waits = bool(self._waiting)
        self._stepping = True
        try:
            ids = super().step(now_s)
        finally:
            self._stepping = False
        if ids or (waits and self._journal.inputs):
            views = tuple(self._seen.last) if self._journal.inputs else None
            blocked = {model: verdict.value for model, verdict in self.blocked.items()}
            self._journal.add(Stepped(time_s=now_s, ids=tuple(ids), blocked=blocked, views=views))
        return ids


class _SeenEngines:
    """Remembers what was seen last."""

    def __init__(self, engines: EnginePort) -> None:
        self._engines = engines
        self.last: Sequence[EngineView] = ()

    def views(self) -> Sequence[EngineView]:
        self.last = self._engines.views()
        return self.last

    def dispatch(self, model: str, request_ids: Sequence[str]) -> None:
        self._engines.dispatch(model, request_ids)

    def ask_memory(self, model: str, tokens: int) -> None:
        self._engines.ask_memory(model, tokens)
