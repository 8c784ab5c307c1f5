"""Reads the output of engines no faster than it is written to the clients."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from prism.messages.requests import EngineOutput, ToFrontend
from prism.transport import Channel

# Number of chunks after which to check whether the loop keeps up with the engines' steps.
_MANY_CHUNKS = 100
_LATE_IN_A_ROW = 3  # a single late step is made up for without a pause
_TURNS_TO_WRITE = 2  # turns of the event loop: streams make events, then the loop writes them
_PAUSE_MAX_S = 0.02


async def receive(inbox: Channel[ToFrontend], deliver: Callable[[ToFrontend], None]) -> None:
    """Delivers the messages of `inbox` until cancelled. Pauses if several checks in a row find that
    engines made two steps during one write."""
    waiting: list[ToFrontend] = []
    chunks = 0  # delivered, and not yet written to clients
    late = 0  # checks in a row in which the loop was late
    while True:
        messages = waiting or [(await inbox.receive())[1]]
        messages = [*messages, *inbox.arrived()]
        for message in messages:
            deliver(message)
        waiting = []
        chunks += sum(len(each.chunks) for each in messages if isinstance(each, EngineOutput))
        if chunks < _MANY_CHUNKS:
            continue
        chunks, began_s = 0, time.monotonic()
        for _ in range(_TURNS_TO_WRITE):
            await asyncio.sleep(0)
        waiting = inbox.arrived()
        late = late + 1 if _span_two_steps(waiting) else 0
        if late >= _LATE_IN_A_ROW:
            await _pause(time.monotonic() - began_s)


def _span_two_steps(waiting: Sequence[ToFrontend]) -> bool:
    """Returns whether a request has chunks in two messages: two steps came during one write."""
    seen: set[str] = set()
    for message in waiting:
        if isinstance(message, EngineOutput):
            ids = {chunk.request_id for chunk in message.chunks}
            if not seen.isdisjoint(ids):
                return True
            seen |= ids
    return False


async def _pause(wrote_s: float) -> None:
    """Yields the loop to other work for as long as the writing took. Tokens of the steps that
    arrive meanwhile share one event and one write."""
    await asyncio.sleep(min(wrote_s, _PAUSE_MAX_S))
