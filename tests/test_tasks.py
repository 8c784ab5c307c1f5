"""Tasks end, also those whose cancellation is lost once."""

from __future__ import annotations

import asyncio

import pytest

from prism import tasks


async def test_a_lost_cancellation_is_said_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancellations are lost by Python 3.11's `wait_for` if its future has ended and its task has
    not resumed yet."""
    monkeypatch.setattr(tasks, "_RETRY_S", 0.01)
    asked = asyncio.get_running_loop().create_future()
    lost = asyncio.Event()

    async def loop() -> None:
        try:
            await asked
        except asyncio.CancelledError:
            lost.set()
        await asyncio.Event().wait()

    async def fails() -> None:
        raise OSError

    both = [asyncio.create_task(loop()), asyncio.create_task(fails())]
    await asyncio.sleep(0)
    await tasks.cancel_all(both)
    assert lost.is_set()
    assert both[0].cancelled()
    assert isinstance(both[1].exception(), OSError)


async def test_of_none_it_waits_for_none() -> None:
    await tasks.cancel_all([])
