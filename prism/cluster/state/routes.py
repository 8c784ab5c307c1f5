"""Routes of requests, as last read from Redis."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from prism.cluster.state.actions import Move
from prism.cluster.state.agents import AgentBook
from prism.queueing.request_queue import RequestQueue


@dataclass(slots=True)
class Routes:
    """Routes of requests, as last read from Redis."""

    book: AgentBook
    moves: Mapping[str, Move]
    placement: dict[str, tuple[str, ...]] = field(default_factory=dict)  # model -> its devices
    unplaced: dict[str, int] = field(default_factory=dict)  # model -> number of unplaced requests
    # Model -> devices of copies that their agent restarts while other copies serve.
    reviving: dict[str, frozenset[str]] = field(default_factory=dict)

    async def read(
        self, queue: RequestQueue, unplaced: Callable[[], Awaitable[dict[str, int]]]
    ) -> None:
        """Reads the routes. Raises QueueUnavailableError.

        Args:
            unplaced: Reads the numbers of unplaced requests.
        """
        self.placement = await queue.placement()
        self.unplaced = await unplaced()

    def changed(self, model: str, devices: tuple[str, ...], moved: int) -> None:
        """Records a changed route, to which `moved` waiting requests moved."""
        self.unplaced.pop(model, None)
        if devices:
            self.placement[model] = devices
        else:
            self.placement.pop(model, None)
        if moved and not devices:
            self.unplaced[model] = moved
        move, active = self.moves.get(model), self.book.where(model, "active")
        known = self.reviving.get(model, frozenset()).intersection(active)
        coming = known.union(self.book.where(model, "activating"))
        self.reviving[model] = coming.difference(devices, move.routes if move else ())
