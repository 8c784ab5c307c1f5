"""Orders to activate and evict that come faster than they can be answered."""

from __future__ import annotations

import asyncio
import random

from prism.messages.agent import ActionResult, ActivateModel, EvictModel
from tests.agent.harness import World

DEADLINE_S = 300.0  # on a loaded machine
REFUSALS = ("is being evicted", "is being activated", "no engine is free")


async def hammer(
    this: World, orders: int, rng: random.Random, pause_s: float
) -> list[ActionResult]:
    """Sends orders before the earlier ones are answered; returns their results.

    Each order must be answered within DEADLINE_S.
    """
    names = [model.name for model in this.config.models]

    async def one() -> ActionResult:
        await asyncio.sleep(rng.random() * pause_s * orders)
        name = rng.choice(names)
        activates = rng.random() < 0.5
        order = ActivateModel(0, this.config.model(name)) if activates else EvictModel(0, name)
        return await this.scheduler.ask(order, DEADLINE_S)

    return list(await asyncio.gather(*(one() for _ in range(orders))))


def check_answers(this: World, results: list[ActionResult], orders: int) -> None:
    """Asserts that none is lost, none is refused except for REFUSALS, and no engine restarted."""
    assert len(results) == orders
    refused = [r.message for r in results if not r.ok]
    assert all(any(reason in message for reason in REFUSALS) for message in refused), refused
    assert sum(r.ok for r in results) > orders / 4
    assert this.scheduler.report.engine_restarts_total == 0
