"""Requests that are on an engine, from submission to their last chunk."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

from prism.messages import Request


@dataclass(slots=True)
class Running:
    """need_tokens: KV that it was admitted for. `prefilled`: its first token came; `shown`: so
    did a status after it, and what the request holds shows in the engine's figures. `silent`:
    nobody wants its output any more."""

    request: Request
    engine_id: str
    need_tokens: int
    prefilled: bool = False
    shown: bool = False
    silent: bool = False


@dataclass(frozen=True, slots=True)
class Load:
    """An engine's requests; pending_need_tokens: of those whose memory its status does not show
    yet; pending_prompt_tokens: of those whose first token has not come."""

    running: int = 0
    pending_need_tokens: int = 0
    pending_prompt_tokens: int = 0


class RunningBook:
    """By request id. At most one attempt of a request runs at a time. `empty`: nothing runs."""

    def __init__(self) -> None:
        self._by_id: dict[str, Running] = {}
        self.empty = asyncio.Event()
        self.empty.set()

    def add(self, run: Running) -> None:
        self._by_id[run.request.id] = run
        self.empty.clear()

    def get(self, request_id: str) -> Running | None:
        return self._by_id.get(request_id)

    def pop(self, request_id: str) -> Running | None:
        run = self._by_id.pop(request_id, None)
        if not self._by_id:
            self.empty.set()
        return run

    def on_engine(self, engine_id: str) -> list[Running]:
        return [run for run in self if run.engine_id == engine_id]

    def status_came(self, engine_id: str) -> None:
        """Its figures are newer than the tokens that came before them."""
        for run in self.on_engine(engine_id):
            run.shown = run.prefilled

    def loads(self) -> dict[str, Load]:
        """Engine id -> its load; an engine without requests is not in it."""
        loads: dict[str, Load] = {}
        for run in self:
            load = loads.get(run.engine_id, Load())
            need_tokens = 0 if run.shown else run.need_tokens
            prompt_tokens = 0 if run.prefilled else run.request.prefill_tokens
            loads[run.engine_id] = Load(
                load.running + 1,
                load.pending_need_tokens + need_tokens,
                load.pending_prompt_tokens + prompt_tokens,
            )
        return loads

    def frontends(self) -> set[str]:
        return {run.request.frontend_id for run in self}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def __iter__(self) -> Iterator[Running]:
        return iter(list(self._by_id.values()))

    def __len__(self) -> int:
        return len(self._by_id)
