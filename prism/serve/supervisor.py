"""Keeps a cluster's processes running, and ends them in order."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence

from prism.errors import ConfigError, PrismError
from prism.queueing.server import BundledRedis
from prism.serve.children import EXIT_CONFIG, Child, RestartBudget

_TAIL_LINES = 15


class ClusterFailedError(PrismError):
    """A process keeps dying; the message holds the end of its log."""


class Supervisor:
    """`groups` start in this order and are ended in the reverse one; `say` prints a line.

    A child that dies is started again after a growing delay, a bounded number of times.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Child]],
        redis: BundledRedis | None,
        say: Callable[[str], None],
    ) -> None:
        self._groups = groups
        self._redis = redis
        self._say = say
        self._budgets = {child.spec.name: RestartBudget() for child in self._children()}
        self._redis_budget = RestartBudget()
        self._due_s: dict[str, float] = {}

    def start(self) -> None:
        for child in self._children():
            child.start()

    def watch(self, now_s: float) -> None:
        """Start again what has died; call a few times a second.

        Raises ConfigError when a child says that the configuration is wrong, and
        ClusterFailedError when one keeps dying.
        """
        if self._redis is not None and not self._redis.running:
            self._restart_redis(self._redis, now_s)
        for child in self._children():
            code = child.exit_code()
            if code is None:
                continue
            due_s = self._due_s.get(child.spec.name)
            if due_s is None:
                self._due_s[child.spec.name] = now_s + self._delay_s(child, code, now_s)
            elif now_s >= due_s:
                del self._due_s[child.spec.name]
                child.start()

    def stop(self, hurry: Callable[[], bool]) -> None:
        """End every child, bounded: SIGTERM, its drain time, SIGKILL. `hurry` true: at once."""
        for group in reversed(self._groups):
            alive = [child for child in group if child.running()]
            for child in alive:
                child.send(signal.SIGTERM)
            for child in alive:
                self._await_end(child, hurry)
            for child in group:
                child.kill()

    def _await_end(self, child: Child, hurry: Callable[[], bool]) -> None:
        until_s = time.monotonic() + child.spec.drain_s
        while not child.wait(min(until_s, time.monotonic() + 0.1)):
            if hurry() or time.monotonic() >= until_s:
                self._say(f"{child.spec.name} did not end in time and was killed")
                return

    def _delay_s(self, child: Child, code: int, now_s: float) -> float:
        if code == EXIT_CONFIG:
            raise ConfigError(child.last_line().removeprefix("error: "))
        delay_s = self._budgets[child.spec.name].delay_s(now_s)
        if delay_s is None:
            tail = "\n  ".join(child.tail(_TAIL_LINES))
            raise ClusterFailedError(
                f"{child.spec.name} keeps ending ({_how(code)}); its log ends:\n  {tail}"
            )
        self._say(f"{child.spec.name} ended ({_how(code)}); starting it again in {delay_s:g} s")
        return delay_s

    def _restart_redis(self, redis: BundledRedis, now_s: float) -> None:
        if self._redis_budget.delay_s(now_s) is None:
            raise ClusterFailedError("the bundled Redis server keeps ending")
        self._say("the bundled Redis server ended; starting it again")
        redis.kill()
        redis.start()

    def _children(self) -> list[Child]:
        return [child for group in self._groups for child in group]


def _how(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
