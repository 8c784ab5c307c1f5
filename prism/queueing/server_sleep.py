"""Sleep of external servers in Redis, exclusive with requests that frontends send to them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from prism.queueing.stream_entries import text


@dataclass(frozen=True)
class SleepLook:
    """State of all servers by their URLs."""

    is_lost: bool  # Redis lost data since the last look
    asleep: dict[str, str]  # sleeps of servers that are not awake
    entered: dict[str, int]  # requests that live frontends have entered
    idle_s: dict[str, float]  # since a request entered or left; not of servers without one


class ServerSleep:
    """Part of the request queue, with its errors. Every call may be repeated.

    A sleep is a text that only schedulers read. It exists from before the server is put to sleep
    until after it was woken.
    """

    def __init__(self, run: Callable[..., Awaitable[Any]]) -> None:
        self._run = run

    # --- frontends --------------------------------------------------------------------------

    async def enter(self, url: str, frontend_id: str, number: int) -> str:
        """Records a request. Returns the server's sleep; empty: the request may be sent now, and
        the server does not fall asleep before `leave` or the end of the frontend's heartbeat."""
        return text(await self._run("enter_server", url, f"{frontend_id}|{number}"))

    async def leave(self, url: str, frontend_id: str, number: int) -> None:
        await self._run("leave_server", url, f"{frontend_id}|{number}")

    # --- the scheduler ----------------------------------------------------------------------

    async def look(
        self, owner: str, urls: Sequence[str], *, takes_over: bool = False
    ) -> SleepLook | None:
        """Returns the state of all servers. None: another scheduler took over since.

        Args:
            owner: unique to this scheduler, without "|".
        """
        found = await self._run("look_asleep", owner, int(takes_over), *urls)
        if found[0] == b"replaced":
            return None
        _, flat, counts = found
        texts = [text(value) for value in flat]
        asleep = dict(zip(texts[::2], texts[1::2], strict=True))
        entered = dict(zip(urls, counts[::2], strict=True))
        used = zip(urls, counts[1::2], strict=True)
        idle_s = {url: ms / 1000 for url, ms in used if ms >= 0}
        return SleepLook(found[0] == b"lost", asleep, entered, idle_s)

    async def claim(self, owner: str, url: str, sleep: str) -> bool:
        """Marks a server as asleep, unless a live frontend has entered a request. Returns whether
        it did."""
        return bool(await self._run("claim_sleep", owner, url, sleep))

    async def write(self, owner: str, url: str, sleep: str) -> bool:
        """Changes a server's sleep; empty: it is awake. Returns False if another scheduler took
        over since, which then knows better."""
        return bool(await self._run("write_asleep", owner, url, sleep))
