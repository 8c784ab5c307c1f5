"""Work for a client is cancelled when the client disconnects, and for no other reason."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from starlette.types import Message

from prism.frontend.requests.replies import finished_before_disconnect


class Client:
    """Client that has sent its body."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()

    async def receive(self) -> Message:
        await self.gone.wait()
        return {"type": "http.disconnect"}


async def _served(client: Client, work: Coroutine[Any, Any, None]) -> bool:
    """Returns whether the work was done. A late cancellation would raise in the sleep."""
    done = await finished_before_disconnect(client.receive, work)
    await asyncio.sleep(0.01)
    return done


async def test_work_is_done() -> None:
    assert await _served(Client(), asyncio.sleep(0.01))


async def test_a_client_that_goes_ends_it() -> None:
    client = Client()
    serving = asyncio.create_task(_served(client, asyncio.sleep(60)))
    await asyncio.sleep(0.01)
    client.gone.set()
    assert not await serving
    assert serving.cancelling() == 0


@pytest.mark.parametrize("turns", range(5))
async def test_a_client_that_goes_as_the_work_ends_cancels_nothing_later(turns: int) -> None:
    client, end = Client(), asyncio.Event()

    async def work() -> None:
        await end.wait()

    serving = asyncio.create_task(_served(client, work()))
    await asyncio.sleep(0.01)
    client.gone.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    end.set()
    await serving
    assert serving.cancelling() == 0


@pytest.mark.parametrize("goes", [False, True])
async def test_a_cancellation_by_others_stays_one(goes: bool) -> None:
    client = Client()
    serving = asyncio.create_task(_served(client, asyncio.sleep(60)))
    await asyncio.sleep(0.01)
    if goes:
        client.gone.set()
        await asyncio.sleep(0)
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving


async def test_an_error_of_the_work_is_its_own() -> None:
    async def work() -> None:
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        await _served(Client(), work())
