"""Keeps a cluster's processes running, and ends them in order."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from prism.errors import ConfigError, PrismError
from prism.queueing.server import BundledRedis
from prism.serve.processes.children import EXIT_CONFIG, Child, RestartBackoff
from prism.serve.processes.redis_part import RedisPart

_TAIL_LINES = 15
_START_TRIES = 6
# Deaths with less than a minute between them that are reported while the part runs.
_DEATHS_REPORTED = 3
# If checks are further apart, this process was suspended, and most likely the others too.
_INTERVAL_MAX_S = 1.0
_FIRST_BEAT_S = 300.0  # the first heartbeat comes after the imports


class ClusterFailedError(PrismError):
    """A process keeps dying. The message has the end of its log."""


class Part(Protocol):
    """A process that is kept running."""

    name: str

    def start(self) -> None: ...
    def exit_code(self) -> int | None: ...
    def beats(self) -> int: ...
    def end_at_once(self) -> None: ...
    def tail(self, lines: int) -> list[str]: ...


@dataclass(slots=True)
class Watched:
    """State of one part. Times are monotonic."""

    part: Part
    backoff: RestartBackoff = field(default_factory=RestartBackoff)
    due_s: float | None = None  # time of the restart after an end
    why: str = ""  # cause of the last end
    hung: str = ""  # reason of a kill, until the process has ended
    _beats: int = 0
    _checked_s: float = float("inf")
    _silent_s: float = 0.0

    def silent_s(self, now_s: float) -> float:
        """Returns the time without an answer, counting only while this process ran."""
        beats, passed_s = self.part.beats(), max(0.0, now_s - self._checked_s)
        self._checked_s = now_s
        changed = beats != self._beats
        self._silent_s = 0.0 if changed else self._silent_s + min(passed_s, _INTERVAL_MAX_S)
        self._beats = beats
        return self._silent_s

    @property
    def has_answered(self) -> bool:
        """True if the process answered since its start."""
        return self._beats > 0

    def answered_s(self, now_s: float) -> float:
        """Returns the time of the last answer, as of the last check."""
        return now_s - self._silent_s

    def reset(self) -> None:
        """Resets the state after a start."""
        self.due_s, self.hung, self._beats = None, "", 0
        self._checked_s, self._silent_s = float("inf"), 0.0

    def trouble(self, now_s: float) -> str:
        """Returns the problem of the part, or an empty string."""
        deaths = self.backoff.deaths
        if self.due_s is not None:
            return f"ended ({self.why}); restarting"
        if self.hung:
            return f"{self.hung}; killed, but has not ended yet"
        if deaths >= _DEATHS_REPORTED and self.backoff.is_recent(self.answered_s(now_s)):
            return f"ended {deaths} times in a row (last: {self.why})"
        return ""


class Supervisor:
    """Supervisor of processes, which restarts a part that ends or does not answer for `hang_s`.

    Delays of restarts grow. Until `settled` is set, a part that keeps ending fails the start, since
    it most likely never worked. Afterwards only `stop` ends the cluster.

    Args:
        groups: Children in the order of their start. They are ended in reverse order.
        redis: The bundled server, if it is used.
        say: Prints a line.
        hang_s: Time without an answer after which a part is killed.
        on_end: Called with the name of a part that has ended.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Child]],
        redis: BundledRedis | None,
        say: Callable[[str], None],
        hang_s: float = float("inf"),
        on_end: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._groups = groups
        self._on_end = on_end
        self._say = say
        self._hang_s = hang_s
        self._redis = RedisPart(redis, say) if redis is not None else None
        parts: list[Part] = [self._redis] if self._redis is not None else []
        parts += [child for group in groups for child in group]
        self._watched = [Watched(part) for part in parts]
        self.settled = False
        self.troubles: dict[str, str] = {}  # part -> problem, as of the last `watch`

    def start(self) -> None:
        """Starts all parts except Redis, which runs. Raises OSError."""
        for group in self._groups:
            for child in group:
                child.start()

    def watch(self, now_s: float) -> None:
        """Restarts parts that have ended or hang. Call it a few times a second. Never blocks.

        Until `settled`: raises ConfigError if a child reports that the configuration is wrong, and
        ClusterFailedError if a part keeps ending.
        """
        for each in self._watched:
            if each.due_s is not None:
                if now_s >= each.due_s:
                    self._restart(each, now_s)
            elif (code := each.part.exit_code()) is not None:
                why = each.hung or _exit_text(code)
                self._ended(each, why, now_s, wrong_input=code == EXIT_CONFIG)
            else:
                self._end_if_hung(each, now_s)
        found = {each.part.name: each.trouble(now_s) for each in self._watched}
        if self._redis is not None:
            found["redis"] = found["redis"] or self._redis.trouble()
        self.troubles = {name: trouble for name, trouble in found.items() if trouble}

    def stop(self, wants_immediate_stop: Callable[[], bool]) -> None:
        """Ends every child: SIGTERM, its drain time, SIGKILL. Without the drain time once
        `wants_immediate_stop` returns True. Redis keeps running."""
        if self._redis is not None:
            self._redis.close()
        for group in reversed(self._groups):
            alive = [child for child in group if child.running()]
            for child in alive:
                child.send(signal.SIGTERM)
            for child in alive:
                self._await_end(child, wants_immediate_stop)
            for child in group:
                child.kill()

    def _await_end(self, child: Child, wants_immediate_stop: Callable[[], bool]) -> None:
        until_s = time.monotonic() + child.spec.drain_s
        while not child.wait(min(until_s, time.monotonic() + 0.1)):
            if wants_immediate_stop() or time.monotonic() >= until_s:
                self._say(f"{child.spec.name} did not end in time and was killed")
                return

    def _restart(self, each: Watched, now_s: float) -> None:
        try:
            each.part.start()
        except OSError as error:  # a lack of memory, processes or files may be temporary
            self._ended(each, f"cannot be started: {error}", now_s)
        else:
            each.reset()

    def _ended(self, each: Watched, why: str, now_s: float, *, wrong_input: bool = False) -> None:
        name, each.why = each.part.name, why
        self._on_end(name)
        delay_s = each.backoff.died(now_s, each.answered_s(now_s))
        if each.part is self._redis and self._redis.cannot_load:
            delay_s = 0.0  # the next start is without the data
        each.due_s = now_s + delay_s
        if not self.settled:
            self._raise_if_start_fails(each, wrong_input=wrong_input)
        again = f"{name} ended ({why}); restarting in {delay_s:g} s"
        last = "".join(each.part.tail(1)) if wrong_input else ""
        self._say(f"{again}: {last.removeprefix('error: ')}" if last else again)

    def _raise_if_start_fails(self, each: Watched, *, wrong_input: bool) -> None:
        if wrong_input:
            last = "".join(each.part.tail(1)) or f"{each.part.name} ended without a message"
            raise ConfigError(last.removeprefix("error: "))
        if each.backoff.deaths >= _START_TRIES:
            tail = "\n  ".join(each.part.tail(_TAIL_LINES))
            raise ClusterFailedError(
                f"{each.part.name} keeps ending ({each.why}); its log ends:\n  {tail}"
            )

    def _end_if_hung(self, each: Watched, now_s: float) -> None:
        silent_s = each.silent_s(now_s)
        bound_s = self._hang_s if each.has_answered else max(self._hang_s, _FIRST_BEAT_S)
        if silent_s > bound_s and not each.hung:
            each.hung = f"did not answer for {silent_s:.0f} s"
            self._say(f"{each.part.name} {each.hung} and was killed")
            each.part.end_at_once()


def _exit_text(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
